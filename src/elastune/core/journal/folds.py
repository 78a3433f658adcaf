"""What the entries of a journal come to: the state of each trial of a study, and the money and time that were spent.

Everything here is computed from entries alone, so running loops, reports and resumed studies agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from elastune.core.cost import Paid, Prices, bill
from elastune.core.errors import UserError
from elastune.core.formatting import duration, number
from elastune.core.journal.files import read
from elastune.core.journal.records import (
    AFTERWARDS,
    Adopted,
    ArtifactKept,
    ArtifactRemoved,
    ChangesAccepted,
    Entry,
    HostsHeld,
    PredictionsAdded,
    Reported,
    RunFailed,
    RunFinished,
    RunStarted,
    StartedFrom,
    StudyFinished,
    StudyStarted,
    TrialAdopted,
    TrialFinished,
    TrialPaused,
    TrialReallocated,
    TrialRegrouped,
    TrialReported,
    TrialResumed,
    TrialStarted,
    TrialStartedFrom,
)

# The state of each trial of a study: the one fold of its journal, entry by entry.
#
# Running loops, loaded studies, reports, progress lines and simulations are all views of it.

State = Literal["running", "paused", "over"]
Change = (
    TrialReported
    | TrialPaused
    | TrialResumed
    | TrialAdopted
    | TrialStartedFrom
    | TrialReallocated
    | TrialRegrouped
    | TrialFinished
)
TrialRecord = TrialStarted | Change


@dataclass(frozen=True)
class AllocationSpan:
    """From ``begin_s`` to ``end_s`` of the study's time, ``trial`` had ``workers`` workers.

    Attributes:
        began_as: "started", "resumed", "adopted" (by another controller), or "regrouped" (its workers changed while it
            ran).
        ended: "complete", "infeasible", "rejected", "paused", "regrouped", "lost" (its controller ended first), or
            "running" where the journal has no more.
        reason: Why it ended so, or why other workers were wanted; "" where no record says it.
        pause_s: How long training stood still while these workers formed groups.
    """

    trial: int
    begin_s: float
    end_s: float
    workers: int
    began_as: str
    ended: str
    reason: str = ""
    pause_s: float = 0.0

    @property
    def worker_seconds(self) -> float:
        return self.workers * (self.end_s - self.begin_s)


@dataclass(frozen=True)
class TrialSummary:
    """One trial, as far as the journal records it. A trial that was started again forgets what it had done before.

    Attributes:
        started_at: The time of its start, in seconds since the epoch.
        last_start_at: The time when it was started or resumed last, in seconds since the epoch.
        last_at: The time of its newest record, in seconds since the epoch.
        last_s: The study's own time at its newest record.
        workers: The workers that it has, or had last.
        epoch: The epochs that it has completed, of ``epochs``.
        metrics: All metrics that it reported after ``epoch``.
        until_epoch: The epoch at which it pauses.
        average: The mean number of its workers over its running time, by its last report.
        seconds: The seconds that it ran before the present start; ``worker_seconds`` likewise.
        cost: What was paid for all of it, by its newest record; None without prices.
        reports: Each report with the workers that the trial had then.
        initial_weights: The models that it began with.
    """

    started: TrialStarted
    started_at: float
    last_start_at: float
    last_at: float
    last_s: float
    workers: int
    state: State = "running"
    epoch: int = 0
    epochs: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    until_epoch: int | None = None
    average: float | None = None
    seconds: float = 0.0
    worker_seconds: float = 0.0
    cost: float | None = None
    reports: tuple[tuple[Reported, int], ...] = ()
    initial_weights: tuple[StartedFrom, ...] = ()
    pause: TrialPaused | None = None
    finished: TrialFinished | None = None

    @property
    def number(self) -> int:
        return self.started.trial

    @property
    def first_workers(self) -> int:
        """The number of workers at its start."""
        return int(self.started.execution.get("workers", 1))

    @property
    def epochs_done(self) -> int:
        """The epochs that it completed, including those that it repeated after a pause."""
        paused = [self.pause.epoch] if self.pause is not None else []
        return max((*paused, *(report.epoch for report, _ in self.reports[-1:])), default=0)

    def after(self, entry: Entry, now_s: float) -> TrialSummary:
        """Return the summary after ``entry``, a record of this trial."""
        changes: dict[str, Any] = {"last_at": entry.at, "last_s": now_s}
        if isinstance(entry.record, TrialReported | TrialPaused | TrialFinished) and entry.record.cost is not None:
            changes["cost"] = entry.record.cost
        match entry.record:
            case TrialReported(report=report, workers=average):
                before = self.metrics if report.epoch == self.epoch else {}
                changes |= {"epoch": report.epoch, "epochs": report.epochs, "metrics": {**before, **report.metrics}}
                changes |= {"average": average, "reports": (*self.reports, (report, self.workers))}
            case TrialRegrouped(change=change):
                return replace(self, workers=len(change.members))
            case TrialAdopted(adopted=adopted):
                return replace(self, workers=len(adopted.workers))
            case TrialStartedFrom(start=start) if (
                start not in self.initial_weights
            ):  # else: it has lost all workers, and began again
                return replace(self, initial_weights=(*self.initial_weights, start))
            case TrialPaused() as pause:
                changes |= {"state": "paused", "epoch": pause.epoch, "pause": pause}
                changes |= {"seconds": self.seconds + pause.seconds}
                changes |= {"worker_seconds": self.worker_seconds + pause.worker_seconds}
            case TrialResumed(workers=workers, until_epoch=until_epoch):
                changes |= {
                    "state": "running",
                    "last_start_at": entry.at,
                    "workers": workers,
                    "until_epoch": until_epoch,
                }
            case TrialFinished(seconds=seconds, worker_seconds=measured_s) as finished:
                used_s = seconds * self.first_workers if measured_s is None else measured_s
                changes |= {"state": "over", "finished": finished, "seconds": seconds, "worker_seconds": used_s}
            case _:
                return self
        return self._with(changes)

    def _with(self, changes: dict[str, Any]) -> TrialSummary:
        """As ``replace``, which takes a third of the time of reading a long journal."""
        changed = object.__new__(TrialSummary)
        changed.__dict__.update(self.__dict__, **changes)
        return changed


class TrialTable:
    """The trials of a study by number, in the order they were first started; ``observe`` adds one entry
    after another.

    Attributes:
        ended: The numbers of the trials that are over, in the order they ended.
        cut_off: Trials that wait since a pause without a decision of the search, the longest waiting first.
        artifacts: The kept files of trials that are over.
        seconds: The time that controllers have worked on the study. Time between two controllers does not count.
        since: Trials with lower numbers began before an accepted change: they are not compared with others.
    """

    def __init__(self) -> None:
        self.trials: dict[int, TrialSummary] = {}
        self.ended: dict[int, None] = {}
        self.cut_off: dict[int, None] = {}
        self.artifacts: dict[int, ArtifactKept] = {}
        self.seconds = 0.0
        self.since = 0
        self._begin_at: float | None = None
        self._last_at = 0.0
        self._spans = _Spans()

    def observe(self, entry: Entry) -> None:
        """Add the next entry of the journal."""
        record = entry.record
        if isinstance(record, PredictionsAdded) and (kept := self.artifacts.get(record.trial)) is not None:
            digests = {**kept.predictions, record.name: record.sha256}
            self.artifacts[record.trial] = replace(kept, predictions=digests, size=record.size)
        if isinstance(record, AFTERWARDS):
            return
        if isinstance(record, StudyStarted | StudyFinished):
            self._spans.end_all("lost", self.seconds)
        self._keep_time(entry)
        if isinstance(record, ChangesAccepted):
            self.since = max(self.since, record.first_trial)
            self.cut_off = {number: None for number in self.cut_off if number >= self.since}
        if isinstance(record, ArtifactKept):
            self.artifacts[record.trial] = record
        elif isinstance(record, ArtifactRemoved):
            self.artifacts.pop(record.trial, None)
        if not isinstance(record, TrialRecord):
            return
        number = record.trial
        if isinstance(record, TrialStarted):
            self.trials[number] = _started(record, entry.at, self.seconds)
        elif number not in self.trials:
            return
        else:
            self.trials[number] = self.trials[number].after(entry, self.seconds)
        self._spans.observe(record, self.seconds)
        self._sort(record)

    @property
    def spans(self) -> tuple[AllocationSpan, ...]:
        """Every span of time in which a trial ran with unchanged workers, in the order they ended."""
        return (*self._spans.done, *self._spans.open_until(self.seconds))

    def spans_from(self, first: int) -> tuple[list[AllocationSpan], list[AllocationSpan]]:
        """Return the spans that have ended from number ``first`` on, and those that go on."""
        return self._spans.done[first:], self._spans.open_until(self.seconds)

    @property
    def spans_ended(self) -> int:
        """How many spans have ended."""
        return len(self._spans.done)

    def of(self, state: State) -> list[int]:
        """Return the numbers of the trials in that state, in the order they were started."""
        return [number for number, life in self.trials.items() if life.state == state]

    @property
    def paused(self) -> set[int]:
        """The trials that the search has paused; not those that were cut off, which go on first."""
        return set(self.of("paused")) - self.cut_off.keys()

    def _keep_time(self, entry: Entry) -> None:
        if self._begin_at is None:
            self._begin_at = self._last_at = entry.at
        if isinstance(entry.record, StudyStarted):
            self._begin_at += entry.at - self._last_at
        self._last_at = entry.at
        self.seconds = entry.at - self._begin_at

    def _sort(self, record: TrialRecord) -> None:
        number = record.trial
        if isinstance(record, TrialPaused):
            if record.cut_off:
                self.cut_off[number] = None
            return
        if isinstance(record, TrialStarted | TrialResumed | TrialFinished):
            self.cut_off.pop(number, None)
        if isinstance(record, TrialStarted | TrialFinished):
            self.ended.pop(number, None)
        if isinstance(record, TrialFinished):
            self.ended[number] = None


def fold(entries: Iterable[Entry]) -> TrialTable:
    """Return the trials in a journal.

    Example:
        >>> fold(read(out / "journal.jsonl")).of("over")
        [0, 2, 3]
    """
    table = TrialTable()
    for entry in entries:
        table.observe(entry)
    return table


def compared_all(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries as if no accepted change separated trials: all trials are compared with each other."""
    return [
        replace(entry, record=replace(entry.record, first_trial=0))
        if isinstance(entry.record, ChangesAccepted)
        else entry
        for entry in entries
    ]


def _started(record: TrialStarted, at: float, now_s: float) -> TrialSummary:
    workers = int(record.execution.get("workers", 1))
    return TrialSummary(record, at, at, at, now_s, workers, until_epoch=record.until_epoch)


class _Spans:
    """The workers of each trial over time, and the reasons of their changes."""

    def __init__(self) -> None:
        self.done: list[AllocationSpan] = []
        self._open: dict[int, AllocationSpan] = {}
        self._wanted: dict[int, str] = {}

    def observe(self, record: TrialRecord, now_s: float) -> None:
        match record:
            case TrialStarted(trial=trial, execution=execution):
                self._begin(trial, int(execution.get("workers", 1)), "started", now_s)
            case TrialResumed(trial=trial, workers=workers):
                self._begin(trial, workers, "resumed", now_s)
            case TrialAdopted(trial=trial, adopted=adopted):
                self._begin(trial, len(adopted.workers), "adopted", now_s)
            case TrialReallocated(trial=trial, reason=reason):
                self._wanted[trial] = reason
            case TrialRegrouped(trial=trial, change=change) if trial in self._open:
                if self._open[trial].workers != len(change.members):
                    self._end(trial, "regrouped", now_s, self._wanted.pop(trial, ""))
                    self._begin(trial, len(change.members), "regrouped", now_s)
                span = self._open[trial]
                self._open[trial] = replace(span, pause_s=span.pause_s + change.pause_s)
            case TrialPaused(trial=trial, reason=reason):
                self._end(trial, "paused", now_s, reason)
            case TrialFinished(trial=trial, state=state, reason=reason):
                self._end(trial, state, now_s, reason)

    def end_all(self, ended: str, now_s: float) -> None:
        """End all spans at the entry before: their true ends are not known."""
        for trial in list(self._open):
            self._end(trial, ended, now_s)

    def open_until(self, now_s: float) -> list[AllocationSpan]:
        return [replace(span, end_s=now_s) for span in self._open.values()]

    def _begin(self, trial: int, workers: int, began_as: str, now_s: float) -> None:
        self._end(trial, "lost", now_s)
        self._open[trial] = AllocationSpan(trial, now_s, now_s, workers, began_as, "running")

    def _end(self, trial: int, ended: str, now_s: float, reason: str = "") -> None:
        if trial in self._open:
            self.done.append(replace(self._open.pop(trial), end_s=now_s, ended=ended, reason=reason))


# What was spent according to journals: the cost of a run, and the worker-seconds behind a model's weights.
#
# A worker costs money from the moment that a host starts it until it has ended: while it starts, stands still,
# repeats a lost step or replaces a lost worker. Unused room on hosts is counted apart. Hosts that were waited for
# before the run began are not counted. The local machine is not counted either, because nobody has said how much of
# it belongs to the run.


# The cost of a run: its workers and the hosts that it could use, at the prices of that time.
@dataclass(frozen=True)
class RunPaid:
    """What was paid for, in seconds since the epoch: a run's ``workers``, and ``idle`` room."""

    workers: tuple[Paid, ...]
    idle: tuple[Paid, ...]


@dataclass(frozen=True)
class RunMoney:
    """The cost of a run, in units of the prices.

    Attributes:
        cost: The cost of its workers, for ``worker_hours``.
        idle_cost: The cost of room on hosts that nobody used, for ``idle_hours``; ``cost`` does not include it.
    """

    cost: float
    worker_hours: float
    idle_cost: float
    idle_hours: float

    @property
    def data(self) -> dict[str, Any]:
        """The values as a JSON value."""
        return asdict(self)

    @property
    def line(self) -> str:
        """``money   $1.23 for 0.41 h of workers' time; $0.20 for 4 min of room that nobody used``."""
        line = f"money   ${number(self.cost, 4)} for {duration(self.worker_hours * 3600)} of workers' time"
        if not self.idle_hours:
            return line
        return f"{line}; ${number(self.idle_cost, 4)} for {duration(self.idle_hours * 3600)} of room that nobody used"


def paid_for(entries: Sequence[Entry]) -> RunPaid:
    """Return what the run of ``entries`` paid for.

    Workers at the death of a controller count up to the last line that it wrote. Where another controller took over,
    they count on to its first line. The two clocks may differ by any amount, so that is at most the time for which
    workers look for a controller.
    """
    workers: list[Paid] = []
    idle: list[Paid] = []
    held, since_s, last_s = HostsHeld({}, {}), 0.0, 0.0
    for at, entry in enumerate(entries):
        match entry.record:
            case HostsHeld() as now:
                following = entries[at + 1].record if at + 1 < len(entries) else None
                grace_s = following.grace_s if isinstance(following, Adopted) else 0.0  # it begins with these two lines
                until_s = min(entry.at, last_s + grace_s) if grace_s else entry.at
            case RunStarted():
                now, until_s = HostsHeld({}, {}), last_s  # whoever held them before has said nothing after that
            case RunFinished() | RunFailed():
                now, until_s = HostsHeld({}, {}), entry.at
            case _:
                last_s = entry.at
                continue
        workers += _paid(held.workers, since_s, until_s)
        idle += _paid({kind: room - held.workers.get(kind, 0) for kind, room in held.room.items()}, since_s, until_s)
        held, since_s, last_s = now, entry.at, entry.at
    workers += _paid(held.workers, since_s, last_s)
    idle += _paid({kind: room - held.workers.get(kind, 0) for kind, room in held.room.items()}, since_s, last_s)
    return RunPaid(tuple(workers), tuple(idle))


def money(entries: Sequence[Entry], prices: Prices) -> RunMoney:
    """Return the cost of a run. Seconds in ``prices`` count from the run's first beginning.

    Raises ``UserError`` for a kind of host without a price.
    """
    start_s = next((entry.at for entry in entries if isinstance(entry.record, RunStarted)), None)
    relative, paid = prices.since(start_s), paid_for(entries)
    return RunMoney(
        bill(_since(paid.workers, start_s), relative),
        sum(each.worker_seconds for each in paid.workers) / 3600,
        bill(_since(paid.idle, start_s), relative),
        sum(each.worker_seconds for each in paid.idle) / 3600,
    )


def _paid(workers: Mapping[str, int], begin_s: float, end_s: float) -> list[Paid]:
    return [Paid(kind, n, begin_s, end_s) for kind, n in workers.items() if n > 0 and end_s > begin_s]


def _since(paid: Sequence[Paid], start_s: float | None) -> list[Paid]:
    origin_s = start_s or 0.0
    return [Paid(each.kind, each.workers, each.begin_s - origin_s, each.end_s - origin_s) for each in paid]


# The worker-seconds of a model's training, those of its initial weights included.
_JOURNAL = "journal.jsonl"


@dataclass(frozen=True)
class Training:
    """The ``worker_seconds`` of a training, as far as journals record them.

    ``unrecorded``: the initial weights whose training no journal records.
    """

    worker_seconds: float
    unrecorded: tuple[str, ...] = ()


def training_of(entries: Sequence[Entry], table: TrialTable, trials: Iterable[int]) -> Training:
    """Return the training of ``trials`` of a study, of their ancestors and of all their initial weights, each once.

    The rest of the study is left out.
    """
    line: dict[int, None] = {}
    unrecorded: dict[str, None] = {}
    for first in trials:
        trial: int | None = first
        while trial is not None and trial not in line:
            if trial not in table.trials:
                unrecorded[f"trial {trial}"] = None
                break
            line[trial] = None
            trial = table.trials[trial].started.parent
    starts = [start for trial in line for start in table.trials[trial].initial_weights]
    if line and not starts and (source := _initial_weights(entries)):
        unrecorded[source] = None
    before = _before(starts)
    own_s = sum(table.trials[trial].worker_seconds for trial in line)
    return Training(own_s + before.worker_seconds, (*unrecorded, *before.unrecorded))


def training_of_studies(trials: Iterable[tuple[Path, int]]) -> Training:
    """Return the training of trials of several studies, of their ancestors and of all their initial
    weights, each once.

    Trials are named by their study's folder and number. Raises ``UserError`` where a journal cannot be read.
    """
    todo, seen = list(trials), set[tuple[Path, int]]()
    journals: dict[Path, tuple[list[Entry], TrialTable]] = {}
    sources: dict[str, StartedFrom] = {}
    unrecorded: dict[str, None] = {}
    own_s = 0.0
    while todo:
        out, trial = todo.pop()
        out = out.resolve()
        if (out, trial) in seen:
            continue
        seen.add((out, trial))
        if out not in journals:
            entries = read(out / _JOURNAL)
            journals[out] = entries, fold(entries)
        entries, table = journals[out]
        if trial not in table.trials:
            unrecorded[f"trial {trial} of {out}"] = None
            continue
        life = table.trials[trial]
        own_s += life.worker_seconds
        if life.started.parent is not None:
            todo.append((out, life.started.parent))
        elif not life.initial_weights and (source := _initial_weights(entries)):
            unrecorded[source] = None
        for start in life.initial_weights:
            if (place := _source_trial(start)) is not None:
                todo.append(place)
            else:
                sources[start.sha256] = start
    before = _before(sources.values())
    return Training(own_s + before.worker_seconds, (*unrecorded, *before.unrecorded))


def _source_trial(start: StartedFrom) -> tuple[Path, int] | None:
    """The study and the trial of the initial weights, where these are still that trial's kept state."""
    folder = Path(start.source)
    if folder.parent.name != "trials" or not folder.name.isdecimal():
        return None
    try:
        kept = fold(read(folder.parents[1] / _JOURNAL)).artifacts.get(int(folder.name))
    except UserError:  # as in training_in
        return None
    return (folder.parents[1], int(folder.name)) if kept is not None and kept.seal == start.sha256 else None


def training_in(folder: Path) -> Training | None:
    """Return the training of the weights in the folder of a run, or of a trial of a study; None without a journal
    there.
    """
    try:
        if (folder / _JOURNAL).is_file():
            entries = read(folder / _JOURNAL)
            if not any(isinstance(entry.record, RunStarted) for entry in entries):
                return None
            before = _before(entry.record for entry in entries if isinstance(entry.record, StartedFrom))
            own_s = sum(each.worker_seconds for each in paid_for(entries).workers)
            return Training(own_s + before.worker_seconds, before.unrecorded)
        if folder.parent.name == "trials" and folder.name.isdecimal() and (folder.parents[1] / _JOURNAL).is_file():
            entries = read(folder.parents[1] / _JOURNAL)
            table, trial = fold(entries), int(folder.name)
            return training_of(entries, table, [trial]) if trial in table.trials else None
    except UserError:  # without a readable journal the weights are good, but their cost is unknown
        return None
    return None


def _before(starts: Iterable[StartedFrom]) -> Training:
    """The training of all sources together, each once."""
    sources = {start.sha256: start for start in starts}.values()
    known = [start.worker_seconds for start in sources if start.worker_seconds is not None]
    return Training(sum(known), tuple(start.source for start in sources if start.worker_seconds is None))


def _initial_weights(entries: Iterable[Entry]) -> str:
    source = next((e.record.settings.get("start_from") for e in entries if isinstance(e.record, StudyStarted)), None)
    return str(source.get("source")) if isinstance(source, dict) else ""
