"""How far and how fast a study's trials have come: measured between changes of their workers, from what was told.

What tells it is a ``Broker``, call by call, or a study's journal, record by record (``hear``): then a study that
resumes knows what its first controller knew, and what rests on this decides alike in real and in simulated studies.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from elastune.journal.entry import Entry
from elastune.journal.records import (
    Reported,
    TrialAdopted,
    TrialFinished,
    TrialPaused,
    TrialReallocated,
    TrialRegrouped,
    TrialReported,
    TrialResumed,
    TrialSeen,
    TrialStarted,
)
from elastune.study.allocation.hold import Length
from elastune.study.allocation.throughput import ThroughputTable

LOOKS = 8  # at a trial, after its workers have changed; then its reports tell its speed


@dataclass(frozen=True)
class Progress:
    """Epochs done and planned, and steps of an epoch."""

    epoch: int
    epochs: int
    steps: float

    @property
    def whole(self) -> float:
        return self.epochs * self.steps

    @property
    def remaining(self) -> float:
        return max(self.epochs - self.epoch, 1) * self.steps


@dataclass
class _Run:
    """A trial that runs since ``begun_s``, on ``workers``, and is to have ``wish``.

    Since its workers changed: its ``last`` report, (step, second) when it was ``seen`` last, and the ``looks`` at it.
    ``untouched``: it has had the same workers from its very first step.
    """

    workers: int
    wish: int
    begun_s: float
    untouched: bool = False
    last: Reported | None = None
    seen: tuple[int, float] | None = None
    looks: int = 0

    def change(self) -> None:
        """Nothing is known on these workers yet."""
        self.untouched, self.last, self.seen, self.looks = False, None, None, 0


class Courses:
    """See the module. ``replica``: workers that carry one replica together, and count as one. ``looks``: at a trial."""

    def __init__(self, table: ThroughputTable | None = None, *, replica: int = 1, looks: int = LOOKS) -> None:
        self.speeds = table or ThroughputTable()
        self.progress: dict[int, Progress] = {}
        self.pauses_s: deque[float] = deque(maxlen=32)
        self._rough_s: dict[int, float] = {}  # worker-seconds of an epoch, had it had the same workers all the time
        self._runs: dict[int, _Run] = {}
        self._replica = replica
        self._looks = looks

    # -- what happens

    def began(self, trial: int, workers: int, now_s: float, *, first: bool = False) -> None:
        """A trial began (``first``: from nothing), or goes on."""
        self._runs[trial] = _Run(workers, workers, now_s, untouched=first)

    def told(self, trial: int, workers: int) -> None:
        """A running trial was told to take so many workers."""
        if run := self._runs.get(trial):
            run.wish = workers
            run.change()

    def regrouped(self, trial: int, workers: int, pause_s: float) -> None:
        """A trial goes on with other workers after a pause."""
        self.pauses_s.append(max(pause_s, 0.0))
        if run := self._runs.get(trial):
            run.workers = workers
            run.change()

    def gone(self, trial: int) -> None:
        """A trial paused, or is over."""
        self._runs.pop(trial, None)

    def reported(self, trial: int, report: Reported, workers: int) -> None:
        """How far it is; how fast it goes, if it was not looked at since a change."""
        if report.epoch > 0 and report.step > 0:
            self.progress[trial] = Progress(report.epoch, max(report.epochs, report.epoch), report.step / report.epoch)
            if report.samples:
                self.speeds.has_batch(trial, report.samples / report.step)
            self._rough_s[trial] = report.seconds / report.epoch * max(workers, 1)
        run = self._runs.get(trial)
        if run is None or workers != run.wish:
            return
        before = run.last
        looked = run.seen is not None and run.looks < self._looks
        if not looked and before and report.step > before.step and report.seconds > before.seconds:
            self.speeds.add(trial, workers, report.step - before.step, report.seconds - before.seconds)
        elif before is None and run.untouched and not run.looks and report.step > 0 and report.seconds > 0:
            self.speeds.add(trial, workers, report.step, report.seconds)
        run.last, run.workers = report, workers

    def stepped(self, trial: int, step: int, workers: int, now_s: float) -> None:
        """The steps it has completed. Two looks tell its speed."""
        run = self._runs.get(trial)
        if run is None or workers != run.wish or step == 0:
            return
        if run.seen is not None and step > run.seen[0] and now_s > run.seen[1]:
            self.speeds.add(trial, workers, step - run.seen[0], now_s - run.seen[1])
            run.looks += 1
        run.seen, run.workers = (step, now_s), workers

    def hear(self, entry: Entry) -> None:
        """The same from a study's journal."""
        match entry.record:
            case TrialStarted(trial=trial, means=means, parent=parent):
                workers = int(means.get("workers", 1)) // self._replica
                self.began(trial, workers, entry.at, first=parent is None)
            case TrialResumed(trial=trial, workers=workers):
                self.began(trial, workers // self._replica, entry.at)
            case TrialAdopted(trial=trial, found=found):
                self.began(trial, len(found.workers) // self._replica, entry.at)
            case TrialReallocated(trial=trial, after=after):
                self.told(trial, after // self._replica)
            case TrialRegrouped(trial=trial, change=change):
                self.regrouped(trial, len(change.members) // self._replica, change.pause_s)
            case TrialReported(trial=trial, report=report) if trial in self._runs:
                self.reported(trial, report, self._runs[trial].workers)
            case TrialSeen(trial=trial, step=step) if trial in self._runs:
                self.stepped(trial, step, self._runs[trial].workers, entry.at)
            case TrialPaused(trial=trial) | TrialFinished(trial=trial):
                self.gone(trial)

    # -- what is known

    @property
    def unmeasured(self) -> list[int]:
        """The trials at which it is worth looking: their workers have changed not long ago."""
        return [trial for trial, run in self._runs.items() if run.looks < self._looks]

    def looked_s(self, trial: int) -> float | None:
        """When it was looked at last, on the workers that it has; None: not yet."""
        run = self._runs.get(trial)
        return None if run is None or run.seen is None else run.seen[1]

    def length_s(self, trial: int) -> float | None:
        """Worker-seconds of all its training on the fewest workers that it ran on; None before its first epoch's end.

        By its speed as it was measured or, before that, as if it had had the same workers all the time.
        """
        done = self.progress.get(trial)
        if done is None:
            return None
        if self.speeds.measured(trial):
            return done.whole / self.speeds.per_worker(trial)
        return done.epochs * self._rough_s[trial]

    def lengths(self, epochs: int, now_s: float) -> Sequence[Length]:
        """How long all trials take; of those in their first epoch still: how long at least, were ``epochs`` planned."""
        known = ((trial, self.length_s(trial)) for trial in self.progress)
        found = [Length(trial, length_s) for trial, length_s in known if length_s is not None]
        for trial, run in self._runs.items():
            if trial not in self.progress:
                found.append(Length(trial, (now_s - run.begun_s) * epochs * run.workers, at_least=True))
        return found
