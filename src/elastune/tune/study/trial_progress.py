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
from elastune.tune.study.throughput import ThroughputTable

# [hold] Which trials wait, because they would take longest: pure.
#
# Of trials of equal worth the short ones should come first (weight over length: Smith, "Various optimizers for
# single-stage production", Naval Research Logistics Quarterly 1956): a study's early results are those of its short
# trials, and what the longest hold until their first rung the others could have had. After its first epoch a trial's
# length is known well enough; one among the longest ``share`` gives its workers back until some are idle.

FEWEST = 5  # trials must be known, or nobody can say which is long
LONG = 1.5  # times the median: where all take about as long, nobody gains by another's waiting
SHORT_S = 20.0  # of training: who waits starts its processes again, which takes a second or so


@dataclass(frozen=True)
class Length:
    """Worker-seconds of a trial's whole training, on few workers; ``at_least``: they are not known, but no less."""

    trial: int
    seconds: float
    at_least: bool = False


def is_held(trial: int, lengths: Sequence[Length], share: float) -> bool:
    """Whether ``trial`` is among the longest ``share`` of the trials whose place is known.

    A trial whose length is only known to be at least so long counts where that is longer than ``trial``, since trials
    that began together come to their first epoch's end in the order of their lengths, the longest last.

    Args:
        trial: the one that is asked about; its own length must be known, or the answer is no.
        lengths: of all trials of the study, ended ones included.
        share: from 0 (nobody waits) to 1.

    Returns:
        True where fewer than ``share`` of those trials are longer, it is longer than most by ``LONG``, and it takes
        ``SHORT_S`` at least.
    """
    own = next((one.seconds for one in lengths if one.trial == trial and not one.at_least), None)
    if own is None or own < SHORT_S:
        return False
    longer = sum(one.seconds > own for one in lengths if one.trial != trial)
    placed = [one.seconds for one in lengths if not one.at_least or one.seconds > own]
    is_long = len(placed) >= FEWEST and own >= LONG * median(placed)
    return is_long and longer < int(share * len(placed) + 1e-9)


# [courses] How far and how fast a study's trials have come: measured between changes of their workers, from what was told.
#
# What tells it is a ``Broker``, call by call, or a study's journal, record by record (``hear``): then a study that
# resumes knows what its first controller knew, and what rests on this decides alike in real and in simulated studies.

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


class TrialProgress:
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
            case TrialStarted(trial=trial, execution=execution, parent=parent):
                workers = int(execution.get("workers", 1)) // self._replica
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
            case TrialProgressed(trial=trial, step=step) if trial in self._runs:
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


# [holding] The trials of a study that are held back, as its journal tells: who is to wait, who does, and until when.


class HeldTrials:
    """Holds back the longest ``share`` of trials, by ``courses``, each after its first epoch and once only.

    A trial that is held goes on as soon as workers are idle, and in turn with others once it has waited as long as it
    would train on one worker, or ``patience_s`` if that is longer.
    """

    def __init__(self, courses: TrialProgress, share: float, patience_s: float) -> None:
        self._trial_progress = courses
        self._share = share
        self._patience_s = patience_s
        self._since_s: dict[int, float] = {}
        self._judged: set[int] = set()

    def hear(self, entry: Entry) -> None:
        """Something has happened, now or before."""
        self._trial_progress.hear(entry)
        match entry.record:
            case TrialPaused(trial=trial, held=True):
                self.holds(trial, entry.at)
            case TrialStarted(trial=trial) | TrialResumed(trial=trial) | TrialFinished(trial=trial):
                self.released(trial)

    def holds(self, trial: int, now_s: float) -> None:
        """A trial waits from now on."""
        self._since_s[trial] = now_s

    def released(self, trial: int) -> None:
        """A trial no longer waits."""
        self._since_s.pop(trial, None)

    def why(self, trial: int, report: Reported, now_s: float) -> str:
        """Why a trial that has just reported is to be held back; empty: it is not."""
        if self._share <= 0 or trial in self._judged or not 1 <= report.epoch < report.epochs:
            return ""
        self._judged.add(trial)
        if not is_held(trial, self._trial_progress.lengths(report.epochs, now_s), self._share):
            return ""
        return f"held back after epoch {report.epoch}: among the longest {self._share:.0%}"

    def since_s(self, trial: int) -> float | None:
        """Since when it is held; None: it is not."""
        return self._since_s.get(trial)

    def waits(self, trial: int, now_s: float) -> bool:
        """Whether it is held, and must leave workers to all others still."""
        since_s = self._since_s.get(trial)
        return since_s is not None and now_s - since_s <= max(self._patience_s, self._length_s(trial))

    @property
    def waiting(self) -> list[int]:
        """Those that are held, the shortest first."""
        return sorted(self._since_s, key=lambda trial: (self._length_s(trial), trial))

    def _length_s(self, trial: int) -> float:
        return self._trial_progress.length_s(trial) or 0.0
