"""``elastune check``: does a program train as its plain loop, on any number of workers; the cost of ``exact`` mode.

Short runs of the program are recorded step by step (``train.proof``) and compared. The cost is the time of steps in
``exact`` mode beside those of a plain loop with one pass a batch.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastune.core.errors import UserError
from elastune.core.journal.records import Record, Reported, RunFinished
from elastune.core.run import Config, ExecutionSettings, Mode, Program, RunSpec
from elastune.runtime.clusters.base import Cluster
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import JobFailed, run_job
from elastune.train.program.load import FOLDER, written_by_several
from elastune.train.proof.findings import ShortRun, TrainingProblem, judge
from elastune.train.proof.recorder import VARIABLE, Recording
from elastune.train.proof.records import read_run

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


# --- short runs that must do the same ---

CHECK_SLOTS, WORKERS = 4, 2
EPOCH_STEPS = 2  # of each epoch in a check, so that ends of epochs are checked too
STEPS = 6


@dataclass(frozen=True)
class Checked:
    """What came of ``check_program``.

    Attributes:
        steps: The steps that were compared.
        sha256: The weights' hash after them.
        problems: What makes the program train otherwise somewhere.
        notes: Differences that are no mistakes, such as statistics of BatchNorm.
    """

    steps: int
    sha256: str
    problems: tuple[TrainingProblem, ...]
    notes: tuple[TrainingProblem, ...] = field(default=())


def check_program(
    program: Program, config: Config, *, steps: int = STEPS, seed: int = 0, slots: int = CHECK_SLOTS
) -> Checked:
    """Train the first steps of ``program`` in several ways, in ``exact`` mode, and compare them step by step.

    The ways: one pass a batch; ``slots`` passes, in two processes that have imported the program apart; two workers;
    cut after the first step and after the first epoch, and resumed in other processes. Epochs have
    ``EPOCH_STEPS`` steps, or a third of ``steps``.

    Args:
        program: The program.
        config: Settings over the program's own.
        steps: How many steps are compared at most.
        seed: The seed of the runs.
        slots: The slots of each batch.

    Returns:
        What was found; nothing, where all is alike.

    Raises:
        UserError: For what can be known before a worker starts.

    Example:
        >>> for each in check_program(Program(Path("train.py")), {"lr": 0.1}).problems:
        ...     print(each.as_line("train.py"))
    """
    with (
        LocalCluster(capacity=WORKERS) as cluster,
        LocalCluster(capacity=1) as fresh,  # a server of its own, since Python draws another hash seed there
        tempfile.TemporaryDirectory(prefix="elastune-check-") as place,
    ):
        runs = ShortRunsOfProgram(program, config, Path(place), cluster, fresh, steps, seed, slots)
        both = list(judge(program.path.read_text(), runs))
        one = runs.slots
    problems = tuple(each for each in both if not each.note)
    notes = tuple(each for each in both if each.note)
    return Checked(one.steps, one.sha256, problems, notes) if isinstance(one, ShortRun) else Checked(0, "", problems)


class ShortRunsOfProgram:
    """The short runs of a check, each made when it is asked for, and once."""

    def __init__(
        self,
        program: Program,
        config: Config,
        folder: Path,
        cluster: Cluster,
        fresh: Cluster,
        steps: int,
        seed: int,
        num_slots: int,
    ) -> None:
        self.num_slots = num_slots
        self._program = program
        self._config = config
        self._folder = folder
        self._cluster, self._fresh = cluster, fresh
        self._steps = steps
        self._epoch_steps = max(EPOCH_STEPS, steps // 3)
        self._seed = seed
        self._made: dict[str, ShortRun | str] = {}

    @property
    def slots(self) -> ShortRun | str:
        """The run in slots, on one worker; a text: why it failed."""
        return self._once("slots", lambda: self._run("slots", apart=1))

    @property
    def whole(self) -> ShortRun | str:
        """In one pass a batch."""
        return self._once("whole", lambda: self._run("whole", num_slots=1, apart=1))

    @property
    def again(self) -> ShortRun | str:
        """In slots, by a process that has imported the program apart."""
        return self._once("again", lambda: self._run("again", cluster=self._fresh))

    @property
    def workers(self) -> ShortRun | str:
        """On two workers."""
        return self._once("workers", self._on_two_workers)

    @property
    def files(self) -> dict[str, int]:
        """The files that both workers have written, with the program's lines."""
        written = written_by_several(self._folder / "written")
        return {path: line for path, line in written.items() if not path.startswith(f"{self._folder}/")}

    @property
    def resumed(self) -> ShortRun | str:
        """Cut after the first step and after the first epoch, and resumed in other processes."""
        return self._once("resumed", self._cut_and_resumed)

    def quiet(self, *, whole: bool, salt: int = 0) -> ShortRun | str:
        """The first step without dropout, noise and statistics of batches; in one pass where ``whole``."""
        name, num_slots = f"quiet{whole}{salt}", 1 if whole else self.num_slots
        options: dict[str, Any] = {"num_slots": num_slots, "apart": 1, "quiet": True, "salt": salt, "steps": 1}
        return self._once(name, lambda: self._run(name, **options))

    def _once(self, name: str, make: Callable[[], ShortRun | str]) -> ShortRun | str:
        if name not in self._made:
            try:
                self._made[name] = make()
            except JobFailed as error:
                self._made[name] = error.failure.detail
        return self._made[name]

    def _on_two_workers(self) -> ShortRun:
        written = self._folder / "written"
        written.mkdir()
        with environment(FOLDER, str(written)):
            return self._run("workers", workers=WORKERS)

    def _cut_and_resumed(self) -> ShortRun:
        whole = self.slots
        assert isinstance(whole, ShortRun)
        parts = [self._run("cut", steps=1)]
        if whole.record.epochs > 1:
            parts.append(self._run("cut", resume=True, until_epoch=1, cluster=self._fresh))
        if whole.steps > sum(len(part.record.steps) for part in parts):
            last = self._cluster if len(parts) > 1 else self._fresh
            parts.append(self._run("cut", resume=True, cluster=last))
        record = parts[0].record
        for part in parts[1:]:
            record = record.joined(part.record)
        return ShortRun(parts[-1].sha256, parts[-1].steps, record)

    def _run(
        self,
        name: str,
        *,
        workers: int = 1,
        num_slots: int | None = None,
        steps: int | None = None,
        cluster: Cluster | None = None,
        apart: int = 0,
        quiet: bool = False,
        salt: int = 0,
        resume: bool = False,
        until_epoch: int | None = None,
    ) -> ShortRun:
        place = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._folder))
        recording = Recording(str(place), self._epoch_steps, apart, quiet, salt)
        execution = ExecutionSettings(workers=workers, num_slots=num_slots or self.num_slots)
        spec = RunSpec(
            self._program,
            self._folder / name,
            self._config,
            seed=self._seed,
            execution=execution,
            max_steps=self._steps if steps is None else steps,
            until_epoch=until_epoch,
            resume=resume,
        )
        records: list[Record] = []
        with environment(VARIABLE, recording.encode()):
            done = run_job(spec, cluster=cluster or self._cluster, observe=records.append)
        reports = [(record.step, record.metrics) for record in records if isinstance(record, Reported)]
        return ShortRun(done.sha256, done.steps, read_run(place, reports))


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Workers that start meanwhile have ``value`` in their environment."""
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
