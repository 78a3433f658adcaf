"""Whether a program comes to the same on any number of workers: short runs of it are compared, and told apart."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from elastune.cluster.local import LocalCluster
from elastune.core.run import Config, Means, Program, RunSpec
from elastune.job.run import JobFailed, run_job
from elastune.journal.records import Record, Reported
from elastune.train.program.suspects import of_workers, unseeded
from elastune.train.program.writes import FOLDER, written_by_several

SLOTS, WORKERS = 4, 2
PAGE = "docs/programs.md#what-elastune-check-finds"


@dataclass(frozen=True)
class NotPortable:
    """One thing that keeps a program from coming to the same everywhere.

    Attributes:
        kind: "fails", "fails on two workers", "random", "workers", "metric" or "files".
        lines: Of the program: where it is, or may be.
        said: What was seen.
        fix: What to change.
    """

    kind: str
    lines: tuple[int, ...]
    said: str
    fix: str

    def told(self, name: str) -> str:
        """In one line; ``name``: the file's."""
        at = f"{name}:{','.join(map(str, self.lines))}: " if self.lines else f"{name}: "
        return f"{at}{self.said}. {self.fix}. See {PAGE}"


@dataclass(frozen=True)
class ShortRun:
    """What a short run came to: its weights' hash, its steps, and what it reported, one after another."""

    sha256: str
    steps: int = 0
    reports: tuple[dict[str, float], ...] = ()


@dataclass(frozen=True)
class Checked:
    """What came of ``check_program``: the steps that were compared, the weights' hash, and what was found."""

    steps: int
    sha256: str
    found: tuple[NotPortable, ...]


def check_program(program: Program, config: Config, *, steps: int = 2, seed: int = 0) -> Checked:
    """Run ``steps`` steps of ``program`` twice on one worker and once on two, in ``exact`` mode, and compare.

    Args:
        config: Over the program's own.

    Returns:
        What was found; nothing, where all is alike.

    Raises:
        UserError: For what can be known before a worker starts.

    Example:
        >>> for each in check_program(Program(Path("train.py")), {"lr": 0.1}).found:
        ...     print(each.told("train.py"))
    """
    with LocalCluster(capacity=WORKERS) as cluster, tempfile.TemporaryDirectory(prefix="elastune-check-") as place:
        folder = Path(place)

        def run(workers: int, name: str) -> ShortRun:
            means = Means(workers=workers, num_slots=SLOTS)
            spec = RunSpec(program, folder / name, config, seed=seed, means=means, max_steps=steps)
            heard: list[Record] = []
            done = run_job(spec, cluster=cluster, observe=heard.append)
            reports = tuple(record.metrics for record in heard if isinstance(record, Reported))
            return ShortRun(done.sha256, done.steps, reports)

        try:
            one, again = run(1, "one"), run(1, "again")
        except JobFailed as error:
            fix = "Mend that first: 'elastune run' shows its log"
            return Checked(0, "", (NotPortable("fails", (), f"it does not train: {error.failure.detail}", fix),))
        told = folder / "written"
        told.mkdir()
        two: ShortRun | str
        with _told_in(told):
            try:
                two = run(WORKERS, "two")
            except JobFailed as error:
                two = error.failure.detail
        files = {path: line for path, line in written_by_several(told).items() if not path.startswith(f"{folder}/")}
        return Checked(one.steps, one.sha256, tuple(judge(program.path.read_text(), one, again, two, files)))


def judge(
    text: str, one: ShortRun, again: ShortRun, two: ShortRun | str, files: dict[str, int]
) -> Iterator[NotPortable]:
    """What a program of ``text`` has shown: on one worker, once more, on two (or why it failed), and what all wrote."""
    same_bits = one.sha256 == again.sha256
    if not same_bits:
        said = "two equal runs end with different weights: something random has no seed"
        fix = "Draw from the generators of torch, numpy and Python, which the run seeds, or seed yours by session.seed"
        yield NotPortable("random", tuple(unseeded(text)), said, fix)
    if isinstance(two, str):
        fix = "Let all workers call the same lines of session; what depends on the rank belongs under session.leader"
        yield NotPortable("fails on two workers", (), f"it trains on one worker and not on two: {two}", fix)
        two = one
    elif same_bits and two.sha256 != one.sha256:
        said = "two workers end with other weights than one: who a worker is, or how many there are, decides something"
        fix = "Let data, model and rates depend on neither session.rank nor session.size"
        yield NotPortable("workers", tuple(of_workers(text)), said, fix)
    told: set[str] = set()
    for first, second, other in zip(one.reports, again.reports, two.reports, strict=False):
        for name in sorted(first.keys() - told):
            if first[name] == second.get(name) and first[name] != other.get(name):
                told.add(name)
                said = f"the metric {name!r} is {first[name]:g} on one worker, {other.get(name)} on two"
                fix = "Add it up over workers by session.sum or session.mean, and report that"
                yield NotPortable("metric", (), said, fix)
    for path, line in sorted(files.items()):
        fix = "Write it under 'if session.leader:', or give each worker a name of its own"
        yield NotPortable("files", (line,), f"all workers write {path}", fix)


@contextmanager
def _told_in(folder: Path) -> Iterator[None]:
    """Workers that start meanwhile tell in ``folder`` what they write."""
    os.environ[FOLDER] = str(folder)
    try:
        yield
    finally:
        del os.environ[FOLDER]
