"""What was spent according to journals: the cost of a run, and the worker-seconds behind a model's weights.

A worker costs money from the moment that a host starts it until it has ended: while it starts, stands still, repeats a
lost step or replaces a lost worker. Unused room on hosts is counted apart. Hosts that were waited for before the run
began are not counted. The local machine is not counted either, because nobody has said how much of it belongs to the
run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastune.core.cost import Paid, Prices, bill
from elastune.core.errors import UserError
from elastune.core.formatting import duration, number
from elastune.core.journal.files import read
from elastune.core.journal.records import (
    Adopted,
    Entry,
    HostsHeld,
    RunFailed,
    RunFinished,
    RunStarted,
    StartedFrom,
    StudyStarted,
)
from elastune.core.journal.trials import TrialTable, fold

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
