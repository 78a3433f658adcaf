"""How far and how fast the trials of a study are, and which of the longest ones wait.

Speeds are measured between changes of a trial's workers. They come from a ``Broker`` call by call, or from the journal
record by record: then a resumed study knows what its first controller knew.
Of trials of equal worth the short ones should come first (weight over length: Smith, "Various optimizers for
single-stage production", Naval Research Logistics Quarterly 1956). After its first epoch the length of a trial is known
well enough. A trial among the longest ``share`` then returns its workers and waits until some are idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from elastune.core.journal.records import (
    Entry,
    Reported,
    TrialAdopted,
    TrialFinished,
    TrialPaused,
    TrialProgressed,
    TrialReallocated,
    TrialRegrouped,
    TrialReported,
    TrialResumed,
    TrialStarted,
)
from elastune.tuning.study.throughput import ThroughputTable

FEWEST = 5  # trials whose lengths must be known before one counts as long
LONG = 1.5  # times the median: if all trials are about as long, no trial gains if another one waits
SHORT_S = 20.0  # shorter trainings never wait, since a resumed trial starts its processes again (about a second)
LOOKS = 8  # measurements of a trial after its workers changed; then its reports give its speed


@dataclass(frozen=True)
class Length:
    """Worker-seconds of a trial's whole training, on few workers; ``at_least``: only a lower bound is known."""

    trial: int
    seconds: float
    at_least: bool = False


def is_held(trial: int, lengths: Sequence[Length], share: float) -> bool:
    """Return whether ``trial`` is among the longest ``share`` of the trials.

    A trial with only a lower bound counts if the bound is longer than ``trial``. Trials that began together end their
    first epochs in the order of their lengths, so the longest are still in it.

    Args:
        trial: A trial. If its own length is unknown, the result is False.
        lengths: The lengths of all trials of the study, including ended ones.
        share: From 0 (no trial waits) to 1.

    Returns:
        True if fewer than ``share`` of these trials are longer, its length is at least ``LONG`` times the median, and
        it takes at least ``SHORT_S``.
    """
    length_s = next((each.seconds for each in lengths if each.trial == trial and not each.at_least), None)
    if length_s is None or length_s < SHORT_S:
        return False
    longer = sum(each.seconds > length_s for each in lengths if each.trial != trial)
    placed = [each.seconds for each in lengths if not each.at_least or each.seconds > length_s]
    is_long = len(placed) >= FEWEST and length_s >= LONG * median(placed)
    return is_long and longer < int(share * len(placed) + 1e-9)


# --- progress and speed of trials ---


@dataclass(frozen=True)
class Progress:
    """How far a trial is: ``epoch`` of ``epochs``, each of ``steps`` steps."""

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
    """A trial that runs since ``start_s`` on ``workers``, and should have ``wish``.

    Since the last change of its workers: its ``last`` report, its newest measurement ``seen`` (step, second), and the
    number of measurements ``looks``. ``untouched``: it has had the same workers from its first step on.
    """

    workers: int
    wish: int
    start_s: float
    untouched: bool = False
    last: Reported | None = None
    seen: tuple[int, float] | None = None
    looks: int = 0

    def change(self) -> None:
        """Forget all measurements: its workers change."""
        self.untouched, self.last, self.seen, self.looks = False, None, None, 0


class TrialProgress:
    """Progress and speed of all trials of a study, measured between changes of their workers.

    A ``Broker`` calls the methods one by one, or ``observe`` takes all events from the study's journal.

    Args:
        table: The speeds of trials.
        replica: Workers of one replica, which count as one.
        looks: Measurements of a trial after its workers changed.
    """

    def __init__(self, table: ThroughputTable | None = None, *, replica: int = 1, looks: int = LOOKS) -> None:
        self.speeds = table or ThroughputTable()
        self.progress: dict[int, Progress] = {}
        self.pauses_s: deque[float] = deque(maxlen=32)
        self._rough_s: dict[
            int, float
        ] = {}  # worker-seconds of an epoch, as if the trial had always had the same workers
        self._runs: dict[int, _Run] = {}
        self._replica = replica
        self._looks = looks

    # -- events --

    def began(self, trial: int, workers: int, now_s: float, *, first: bool = False) -> None:
        """Record that a trial began (``first``: without a parent), or resumed."""
        self._runs[trial] = _Run(workers, workers, now_s, untouched=first)

    def reallocated(self, trial: int, workers: int) -> None:
        """Record that a running trial was asked to take ``workers`` workers."""
        if run := self._runs.get(trial):
            run.wish = workers
            run.change()

    def regrouped(self, trial: int, workers: int, pause_s: float) -> None:
        """Record that a trial goes on with other workers after a pause."""
        self.pauses_s.append(max(pause_s, 0.0))
        if run := self._runs.get(trial):
            run.workers = workers
            run.change()

    def gone(self, trial: int) -> None:
        """Record that a trial paused or ended."""
        self._runs.pop(trial, None)

    def reported(self, trial: int, report: Reported, workers: int) -> None:
        """Record a report: the progress of the trial and, without measurements by ``stepped``, its speed."""
        if report.epoch > 0 and report.step > 0:
            self.progress[trial] = Progress(report.epoch, max(report.epochs, report.epoch), report.step / report.epoch)
            if report.samples:
                self.speeds.has_batch(trial, report.samples / report.step)
            self._rough_s[trial] = report.seconds / report.epoch * max(workers, 1)
        run = self._runs.get(trial)
        if run is None or workers != run.wish:
            return
        before = run.last
        measured = run.seen is not None and run.looks < self._looks
        if not measured and before and report.step > before.step and report.seconds > before.seconds:
            self.speeds.add(trial, workers, report.step - before.step, report.seconds - before.seconds)
        elif before is None and run.untouched and not run.looks and report.step > 0 and report.seconds > 0:
            self.speeds.add(trial, workers, report.step, report.seconds)
        run.last, run.workers = report, workers

    def stepped(self, trial: int, step: int, workers: int, now_s: float) -> None:
        """Record the completed steps of a trial. Two measurements give its speed."""
        run = self._runs.get(trial)
        if run is None or workers != run.wish or step == 0:
            return
        if run.seen is not None and step > run.seen[0] and now_s > run.seen[1]:
            self.speeds.add(trial, workers, step - run.seen[0], now_s - run.seen[1])
            run.looks += 1
        run.seen, run.workers = (step, now_s), workers

    def observe(self, entry: Entry) -> None:
        """Record an entry of the study's journal."""
        match entry.record:
            case TrialStarted(trial=trial, execution=execution, parent=parent):
                workers = int(execution.get("workers", 1)) // self._replica
                self.began(trial, workers, entry.at, first=parent is None)
            case TrialResumed(trial=trial, workers=workers):
                self.began(trial, workers // self._replica, entry.at)
            case TrialAdopted(trial=trial, adopted=adopted):
                self.began(trial, len(adopted.workers) // self._replica, entry.at)
            case TrialReallocated(trial=trial, after=after):
                self.reallocated(trial, after // self._replica)
            case TrialRegrouped(trial=trial, change=change):
                self.regrouped(trial, len(change.members) // self._replica, change.pause_s)
            case TrialReported(trial=trial, report=report) if trial in self._runs:
                self.reported(trial, report, self._runs[trial].workers)
            case TrialProgressed(trial=trial, step=step) if trial in self._runs:
                self.stepped(trial, step, self._runs[trial].workers, entry.at)
            case TrialPaused(trial=trial) | TrialFinished(trial=trial):
                self.gone(trial)

    # -- results --

    @property
    def unmeasured(self) -> list[int]:
        """The trials that need a measurement, since their workers changed not long ago."""
        return [trial for trial, run in self._runs.items() if run.looks < self._looks]

    def looked_s(self, trial: int) -> float | None:
        """Return when a trial was last measured on its present workers; None: not yet."""
        run = self._runs.get(trial)
        return None if run is None or run.seen is None else run.seen[1]

    def length_s(self, trial: int) -> float | None:
        """Return the worker-seconds of a whole training; None before the end of its first epoch.

        They count on the fewest workers that the trial ran on, by its measured speed. Without a measured speed they are
        computed as if the trial had always had the same workers.
        """
        progress = self.progress.get(trial)
        if progress is None:
            return None
        if self.speeds.measured(trial):
            return progress.whole / self.speeds.per_worker(trial)
        return progress.epochs * self._rough_s[trial]

    def lengths(self, epochs: int, now_s: float) -> Sequence[Length]:
        """Return the lengths of all trials; for trials in their first epoch, lower bounds if they train ``epochs``."""
        lengths_s = ((trial, self.length_s(trial)) for trial in self.progress)
        lengths = [Length(trial, length_s) for trial, length_s in lengths_s if length_s is not None]
        for trial, run in self._runs.items():
            if trial not in self.progress:
                lengths.append(Length(trial, (now_s - run.start_s) * epochs * run.workers, at_least=True))
        return lengths


# --- trials that are held back ---


class HeldTrials:
    """Holds back the longest ``share`` of trials by ``courses``, each after its first epoch and only once.

    A trial that is held goes on as soon as workers are idle. Once it has waited as long as it would train on one
    worker, or ``patience_s`` if that is longer, it takes its turn with the others.
    """

    def __init__(self, courses: TrialProgress, share: float, patience_s: float) -> None:
        self._trial_progress = courses
        self._share = share
        self._patience_s = patience_s
        self._since_s: dict[int, float] = {}
        self._judged: set[int] = set()

    def observe(self, entry: Entry) -> None:
        """Record a new or replayed entry of the journal."""
        self._trial_progress.observe(entry)
        match entry.record:
            case TrialPaused(trial=trial, held=True):
                self.holds(trial, entry.at)
            case TrialStarted(trial=trial) | TrialResumed(trial=trial) | TrialFinished(trial=trial):
                self.released(trial)

    def holds(self, trial: int, now_s: float) -> None:
        """Record that a trial waits from now on."""
        self._since_s[trial] = now_s

    def released(self, trial: int) -> None:
        """Record that a trial no longer waits."""
        self._since_s.pop(trial, None)

    def why(self, trial: int, report: Reported, now_s: float) -> str:
        """Return the reason to hold back a trial that has just reported; "": it goes on."""
        if self._share <= 0 or trial in self._judged or not 1 <= report.epoch < report.epochs:
            return ""
        self._judged.add(trial)
        if not is_held(trial, self._trial_progress.lengths(report.epochs, now_s), self._share):
            return ""
        return f"held back after epoch {report.epoch}: among the longest {self._share:.0%}"

    def since_s(self, trial: int) -> float | None:
        """Return when a trial began to wait; None: it does not."""
        return self._since_s.get(trial)

    def waits(self, trial: int, now_s: float) -> bool:
        """Return whether a trial is held and must still leave workers to all others."""
        since_s = self._since_s.get(trial)
        return since_s is not None and now_s - since_s <= max(self._patience_s, self._length_s(trial))

    @property
    def waiting(self) -> list[int]:
        """The trials that are held, the shortest first."""
        return sorted(self._since_s, key=lambda trial: (self._length_s(trial), trial))

    def _length_s(self, trial: int) -> float:
        return self._trial_progress.length_s(trial) or 0.0
