"""``elastune check``: whether a program gives the same result on any number of workers, and the cost of ``exact`` mode.

Short runs of the program are compared. The cost is the time of steps in ``exact`` mode beside those of a plain loop
with one pass for each batch. For each program without problems there is an empty file in
``XDG_CACHE_HOME/elastune/checked`` (``~/.cache/elastune/checked``), named by the digest of the program. Only file
names are read, so several writers cannot disturb each other. An edited program has another digest.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from elastune.core.errors import UserError
from elastune.core.journal.records import Record, Reported, RunFinished
from elastune.core.run import Config, ExecutionSettings, Mode, Program, RunSpec
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import JobFailed, run_job
from elastune.train.program.load import FOLDER, written_by_several
from elastune.train.program.source import of_workers, program_digest, unseeded

MOST = 1000
"""The most programs that are remembered. With one more, the older half is forgotten."""


def checked_folder() -> Path:
    """Return the folder of the files. Raises ``OSError`` if this user has no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elastune" / "checked"
    except RuntimeError as error:
        raise OSError(f"{error}; set XDG_CACHE_HOME") from None


def note_check(program: Program, *, passed: bool) -> None:
    """Remember the result of a check of ``program``.

    Args:
        program: The program.
        passed: Whether the check found no problem; if not, an earlier success is forgotten.

    Raises:
        OSError: If nothing can be written. The check is valid nevertheless.
    """
    folder = checked_folder()
    mark = folder / program_digest(program)
    if not passed:
        mark.unlink(missing_ok=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    mark.touch()
    _forget_oldest(folder)


def is_checked(program: Program) -> bool:
    """Return whether a check of ``program``, as its file is now, found no problem; False if that is unknown.

    Example:
        >>> is_checked(Program(Path("train.py")))
        False
    """
    try:
        return (checked_folder() / program_digest(program)).is_file()
    except (OSError, ValueError, SyntaxError, RecursionError):  # the run of the file will report the error
        return False


def _forget_oldest(folder: Path) -> None:
    names = os.listdir(folder)
    if len(names) <= MOST:
        return
    aged = []
    for path in (folder / name for name in names):
        try:
            aged.append((path.lstat().st_mtime, path))
        except FileNotFoundError:  # another check has forgotten it
            continue
    for _, path in sorted(aged)[: len(aged) // 2]:
        if not path.is_dir():
            path.unlink(missing_ok=True)


# --- the cost of ``exact`` mode ---

SLOTS = 4
MODES: tuple[Mode, Mode] = ("exact", "fast")
ROUNDS = 2  # of both modes in turn, so that other work of the machine affects both
APART = 1e-3  # a larger relative difference of metrics is more than rounding


@dataclass(frozen=True)
class ExactCost:
    """The time of a step in ``exact`` mode and in a plain loop, both measured on one worker of this machine.

    Attributes:
        steps: The number of steps of each.
        exact_s: The median seconds of a step that runs each of ``SLOTS`` slots by itself.
        plain_s: The median seconds of a step with one pass for the batch.
        apart: The metrics that differ by more than rounding: by name, in exact mode and in one pass.
    """

    steps: int
    exact_s: float
    plain_s: float
    apart: dict[str, tuple[float, float]]

    def as_lines(self) -> list[str]:
        """The result for people, line by line."""
        times = f"{self.exact_s * 1e3:.3g} ms a step in {SLOTS} slots, {self.plain_s * 1e3:.3g} ms in one pass"
        lines = [f"exact mode: {times} (x{self.exact_s / self.plain_s:.2f}; medians of {self.steps} steps, one worker)"]
        for name, (exact, plain) in sorted(self.apart.items()):
            why = "batches are normalised, or compared within, a slot at a time"
            lines.append(
                f"{name}: {exact:.6g} in exact mode, {plain:.6g} in one pass: {why}, or dropout draws otherwise"
            )
        return lines


def exact_cost(program: Program, config: Config, *, steps: int, seed: int = 0) -> ExactCost:
    """Train ``steps`` steps of ``program`` in each mode, in turn, and compare the times of steps.

    Args:
        program: The program.
        config: Settings in place of the program's.
        steps: The number of steps.
        seed: The seed of the runs.

    Returns:
        The times, and the metrics that differ.

    Raises:
        UserError: If the steps are too few to time.
        JobFailed: If the program does not train.

    Example:
        >>> exact_cost(Program(Path("train.py")), {}, steps=50).as_lines()
    """
    runs: dict[Mode, list[RunFinished]] = {mode: [] for mode in MODES}
    with LocalCluster(capacity=1) as cluster, tempfile.TemporaryDirectory(prefix="elastune-check-") as place:
        for nth in range(ROUNDS):
            for mode in MODES:
                execution, out = ExecutionSettings(mode=mode, num_slots=SLOTS), Path(place) / f"{mode}{nth}"
                spec = RunSpec(program, out, config, seed=seed, execution=execution, max_steps=steps)
                runs[mode].append(run_job(spec, cluster=cluster))
    times = {mode: [run.step_s for run in done if run.step_s is not None] for mode, done in runs.items()}
    exact, plain = runs["exact"][0], runs["fast"][0]
    if not all(times.values()):
        raise UserError("a few steps are needed to time them", f"{exact.steps}", "such as --time 20, and more epochs")
    apart = {
        name: (value, plain.metrics[name])
        for name, value in exact.metrics.items()
        if name in plain.metrics and abs(value - plain.metrics[name]) > APART * max(abs(value), APART)
    }
    return ExactCost(exact.steps, min(times["exact"]), min(times["fast"]), apart)


# --- equal results on any number of workers ---

CHECK_SLOTS, WORKERS = 4, 2
PAGE = "docs/programs.md#what-elastune-check-finds"


@dataclass(frozen=True)
class PortabilityProblem:
    """A reason why a program does not give the same result on any number of workers.

    Attributes:
        kind: "fails", "fails on two workers", "random", "workers", "metric" or "files".
        lines: The lines of the program that cause it, or may cause it.
        finding: What the check has observed.
        fix: What to change.
    """

    kind: str
    lines: tuple[int, ...]
    finding: str
    fix: str

    def as_line(self, name: str) -> str:
        """The problem in one line. ``name``: the name of the program's file."""
        at = f"{name}:{','.join(map(str, self.lines))}: " if self.lines else f"{name}: "
        return f"{at}{self.finding}. {self.fix}. See {PAGE}"


@dataclass(frozen=True)
class ShortRun:
    """The result of a short run: the hash of its weights, its steps, and its reports in order."""

    sha256: str
    steps: int = 0
    reports: tuple[dict[str, float], ...] = ()


@dataclass(frozen=True)
class Checked:
    """The result of ``check_program``: the number of compared steps, the hash of the weights, and all problems."""

    steps: int
    sha256: str
    problems: tuple[PortabilityProblem, ...]


def check_program(program: Program, config: Config, *, steps: int = 2, seed: int = 0) -> Checked:
    """Run ``steps`` steps of ``program`` twice on one worker and once on two, in ``exact`` mode, and compare.

    Args:
        program: The program.
        config: Settings in place of the program's.
        steps: The number of steps.
        seed: The seed of the runs.

    Returns:
        The result; without problems if the runs are equal.

    Raises:
        UserError: For errors that can be seen before a worker starts.

    Example:
        >>> for problem in check_program(Program(Path("train.py")), {"lr": 0.1}).problems:
        ...     print(problem.as_line("train.py"))
    """
    with LocalCluster(capacity=WORKERS) as cluster, tempfile.TemporaryDirectory(prefix="elastune-check-") as place:
        folder = Path(place)

        def run(workers: int, name: str) -> ShortRun:
            execution = ExecutionSettings(workers=workers, num_slots=CHECK_SLOTS)
            spec = RunSpec(program, folder / name, config, seed=seed, execution=execution, max_steps=steps)
            records: list[Record] = []
            done = run_job(spec, cluster=cluster, observe=records.append)
            reports = tuple(record.metrics for record in records if isinstance(record, Reported))
            return ShortRun(done.sha256, done.steps, reports)

        try:
            one, again = run(1, "one"), run(1, "again")
        except JobFailed as error:
            fix = "Mend that first: 'elastune run' shows its log"
            return Checked(0, "", (PortabilityProblem("fails", (), f"it does not train: {error.failure.detail}", fix),))
        written = folder / "written"
        written.mkdir()
        two: ShortRun | str
        with _written_files_in(written):
            try:
                two = run(WORKERS, "two")
            except JobFailed as error:
                two = error.failure.detail
        files = {path: line for path, line in written_by_several(written).items() if not path.startswith(f"{folder}/")}
        return Checked(one.steps, one.sha256, tuple(judge(program.path.read_text(), one, again, two, files)))


def judge(
    text: str, one: ShortRun, again: ShortRun, two: ShortRun | str, files: dict[str, int]
) -> Iterator[PortabilityProblem]:
    """Yield the problems of a program.

    Args:
        text: The program.
        one: Its run on one worker.
        again: The same run once more.
        two: Its run on two workers, or why that failed.
        files: The files that both workers have written, each with the line of the program.
    """
    same_bits = one.sha256 == again.sha256
    if not same_bits:
        finding = "two equal runs end with different weights: something random has no seed"
        fix = "Draw from the generators of torch, numpy and Python, which the run seeds, or seed yours by session.seed"
        yield PortabilityProblem("random", tuple(unseeded(text)), finding, fix)
    if isinstance(two, str):
        fix = "Let all workers call the same lines of session; what depends on the rank belongs under session.leader"
        yield PortabilityProblem("fails on two workers", (), f"it trains on one worker and not on two: {two}", fix)
        two = one
    elif same_bits and two.sha256 != one.sha256:
        finding = (
            "two workers end with other weights than one: who a worker is, or how many there are, decides something"
        )
        fix = "Let data, model and rates depend on neither session.rank nor session.size"
        yield PortabilityProblem("workers", tuple(of_workers(text)), finding, fix)
    reported: set[str] = set()
    for first, second, other in zip(one.reports, again.reports, two.reports, strict=False):
        for name in sorted(first.keys() - reported):
            if first[name] == second.get(name) and first[name] != other.get(name):
                reported.add(name)
                finding = f"the metric {name!r} is {first[name]:g} on one worker, {other.get(name)} on two"
                fix = "Add it up over workers by session.sum or session.mean, and report that"
                yield PortabilityProblem("metric", (), finding, fix)
    for path, line in sorted(files.items()):
        fix = "Write it under 'if session.leader:', or give each worker a name of its own"
        yield PortabilityProblem("files", (line,), f"all workers write {path}", fix)


@contextmanager
def _written_files_in(folder: Path) -> Iterator[None]:
    """Let workers that start inside the block note in ``folder`` which files they write."""
    os.environ[FOLDER] = str(folder)
    try:
        yield
    finally:
        del os.environ[FOLDER]
