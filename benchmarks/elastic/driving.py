"""A run of local workers that a benchmark drives by hand: its handle, its records, its ticks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from benchmarks.common.pauses import Tick, Ticks, reached
from benchmarks.programs.workload import OWNER

from elastune.core.journal.files import JournalWriter
from elastune.core.journal.records import Record, RunFailed, RunFinished, RunStarted
from elastune.core.run import RunSpec
from elastune.runtime.clusters.base import ElasticHandle
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.run import JobSupervisor, journal_in

T = TypeVar("T")
START_S = 180.0  # on a busy machine, workers take long to begin
LOOK_S = 0.05  # how often the ticks are read: seldom, since the workers need the cores


class Stalled(Exception):
    """What had to happen did not within its limit, or the run ended before."""


class Run:
    """``spec`` on ``cluster``; its program notes its steps in ``ticks``. Everything heard goes into the journal."""

    def __init__(self, handle: ElasticHandle, ticks: Path, journal: JournalWriter) -> None:
        self.handle = handle
        self.ticks = Ticks(ticks)
        self.records: list[Record] = []
        self._watch = JobSupervisor(handle)
        self._journal = journal

    @property
    def outcome(self) -> RunFinished | RunFailed | None:
        return self._watch.outcome

    @property
    def step(self) -> int:
        newest = self.ticks.newest()
        return newest.step if newest else 0

    def look(self) -> None:
        """Hear the workers, read their ticks."""
        ended = self.outcome is not None
        for record in self._watch.pump():
            self._keep(record)
        if self.outcome is not None and not ended:
            self._keep(self.outcome)
        self.ticks.refresh()

    def until(self, condition: Callable[[], T | None], what: str, limit_s: float = 60.0) -> T:
        """``condition()`` once it is not None. Raises ``Stalled`` once nothing has moved for ``limit_s``."""
        step = self.step
        deadline = time.monotonic() + (limit_s if step else max(limit_s, START_S))
        while True:
            self.look()
            if self.step != step:
                deadline, step = time.monotonic() + limit_s, self.step
            if (result := condition()) is not None:
                return result
            if self.outcome is not None:
                raise Stalled(f"the run ended while waiting for {what}: {self.outcome}")
            if time.monotonic() > deadline:
                raise Stalled(f"{what} did not come, and no step within {limit_s:g} s")
            time.sleep(LOOK_S)

    def until_world(self, world: int, since: float, steps: int) -> float:
        """When a worker was ``steps`` steps beyond its first one after ``since`` with ``world`` workers."""
        return self.until_tick(lambda tick: tick.world == world, since, steps, f"{steps} steps of {world} workers")

    def until_tick(self, condition: Callable[[Tick], bool], since: float, steps: int, what: str) -> float:
        return self.until(lambda: reached(self.ticks, since, condition, steps), what)

    def until_steps(self, steps: int) -> None:
        target = self.step + steps
        self.until(lambda: True if self.step >= target else None, f"step {target}")

    def stop(self) -> RunFinished:
        """Ask for the end, and wait for it. Raises ``Stalled`` if the run failed."""
        self.handle.stop()
        return self.finish(60.0)

    def finish(self, limit_s: float) -> RunFinished:
        deadline = time.monotonic() + limit_s
        while self.outcome is None and time.monotonic() < deadline:
            self.look()
            time.sleep(LOOK_S)
        if not isinstance(self.outcome, RunFinished):
            raise Stalled(f"the run did not finish: {self.outcome}")
        return self.outcome

    def note(self, record: Record) -> None:
        """Put a record of the benchmark's own into the journal."""
        self._keep(record)

    def _keep(self, record: Record) -> None:
        self.records.append(record)
        self._journal.write(record)


@contextmanager
def running(cluster: LocalCluster, spec: RunSpec, ticks: Path) -> Iterator[Run]:
    """A run that does not outlive the ``with`` block."""
    os.environ[OWNER] = str(os.getpid())
    with journal_in(spec.out, spec.resume) as journal:
        journal.write(
            RunStarted(
                program=str(spec.program.path),
                config=dict(spec.config),
                seed=spec.seed,
                execution=asdict(spec.execution),
                context={},
                epochs=spec.epochs,
                resumed_step=None,
            )
        )
        run = Run(cluster.start(spec), ticks, journal)
        try:
            yield run
        finally:
            if run.outcome is None:
                run.handle.kill()
                deadline = time.monotonic() + 10
                while run.outcome is None and time.monotonic() < deadline:
                    run.look()
                    time.sleep(LOOK_S)
