"""What was spent according to journals: the cost of a run, and the worker-seconds behind a model's weights.

A worker costs money from the moment that a host is told to start it until it has ended, whatever it does meanwhile.
Unused room on hosts is counted apart. Room that was waited for before the run began is not counted, nor is the local
machine, because nobody has said how much of it belongs to the run.
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

# What a run has cost, from its journal: its workers and the hosts that it could use, at the prices of that time.
#
# A worker is paid for from the moment that a host is told to start it until it has ended, whatever it does: starting,
# standing still, doing a lost step again, replacing a lost one. Room on hosts that nobody used is told apart: hosts
# that were waited for before the run began are not in it, nor is this machine, of which nobody has said how much is the
# run's.


@dataclass(frozen=True)
class RunPaid:
    """What was paid for, in seconds since the epoch: a run's ``workers``, and room that was ``idle``."""

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
        told = f"money   ${number(self.cost, 4)} for {duration(self.worker_hours * 3600)} of workers' time"
        if not self.idle_hours:
            return told
        return f"{told}; ${number(self.idle_cost, 4)} for {duration(self.idle_hours * 3600)} of room that nobody used"


def paid_for(entries: Sequence[Entry]) -> RunPaid:
    """What ``entries`` tell was paid for.

    What was held when a controller died is counted up to the last line that it wrote; where another took it over, on to
    that, but for no longer than workers would have looked for it: two controllers' clocks may differ by any amount.
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
    """What a run has cost. Seconds in ``prices`` count from its first beginning. Raises ``UserError`` for a kind of
    host without a price."""
    begun_s = next((entry.at for entry in entries if isinstance(entry.record, RunStarted)), None)
    relative, found = prices.since(begun_s), paid_for(entries)
    return RunMoney(
        bill(_since(found.workers, begun_s), relative),
        sum(each.worker_seconds for each in found.workers) / 3600,
        bill(_since(found.idle, begun_s), relative),
        sum(each.worker_seconds for each in found.idle) / 3600,
    )


def _paid(workers: Mapping[str, int], begin_s: float, end_s: float) -> list[Paid]:
    return [Paid(kind, n, begin_s, end_s) for kind, n in workers.items() if n > 0 and end_s > begin_s]


def _since(paid: Sequence[Paid], begun_s: float | None) -> list[Paid]:
    begun = begun_s or 0.0
    return [Paid(each.kind, each.workers, each.begin_s - begun, each.end_s - begun) for each in paid]


# What a model's training has taken in all: its own, and that of the weights that it began with.

_JOURNAL = "journal.jsonl"


@dataclass(frozen=True)
class Training:
    """``worker_seconds``, as far as journals tell. ``untold``: weights that were begun with, of which none tells."""

    worker_seconds: float
    untold: tuple[str, ...] = ()


def training_of(entries: Sequence[Entry], table: TrialTable, trials: Iterable[int]) -> Training:
    """That of ``trials`` of a study, of those that they descend from, and of what all these began with, each once.

    What else the study has tried is left out.
    """
    line: dict[int, None] = {}
    untold: dict[str, None] = {}
    for first in trials:
        trial: int | None = first
        while trial is not None and trial not in line:
            if trial not in table.trials:
                untold[f"trial {trial}"] = None
                break
            line[trial] = None
            trial = table.trials[trial].started.parent
    begun = [told for trial in line for told in table.trials[trial].begun]
    if line and not begun and (source := _begun_with(entries)):
        untold[source] = None  # a study from before trials told it
    before = _before(begun)
    own_s = sum(table.trials[trial].worker_seconds for trial in line)
    return Training(own_s + before.worker_seconds, (*untold, *before.untold))


def training_of_studies(trials: Iterable[tuple[Path, int]]) -> Training:
    """That of trials of several studies, each in its folder, of those that they descend from, and of what all these
    began with: each once, however many began with it. Raises ``UserError`` where a study's journal cannot be read."""
    todo, seen = list(trials), set[tuple[Path, int]]()
    journals: dict[Path, tuple[list[Entry], TrialTable]] = {}
    sources: dict[str, StartedFrom] = {}
    untold: dict[str, None] = {}
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
            untold[f"trial {trial} of {out}"] = None
            continue
        life = table.trials[trial]
        own_s += life.worker_seconds
        if life.started.parent is not None:
            todo.append((out, life.started.parent))
        elif not life.begun and (source := _begun_with(entries)):
            untold[source] = None
        for told in life.begun:
            if (place := _trial_there(told)) is not None:
                todo.append(place)
            else:
                sources[told.sha256] = told
    before = _before(sources.values())
    return Training(own_s + before.worker_seconds, (*untold, *before.untold))


def _trial_there(told: StartedFrom) -> tuple[Path, int] | None:
    """The study and the trial whose weights were begun with, where these are still what it has left."""
    folder = Path(told.source)
    if folder.parent.name != "trials" or not folder.name.isdecimal():
        return None
    try:
        kept = fold(read(folder.parents[1] / _JOURNAL)).artifacts.get(int(folder.name))
    except UserError:  # as in training_in
        return None
    return (folder.parents[1], int(folder.name)) if kept is not None and kept.seal == told.sha256 else None


def training_in(folder: Path) -> Training | None:
    """That of the weights in the folder of a run, or of a trial of a study; None where no journal there tells."""
    try:
        if (folder / _JOURNAL).is_file():
            entries = read(folder / _JOURNAL)
            if not any(isinstance(entry.record, RunStarted) for entry in entries):
                return None
            before = _before(entry.record for entry in entries if isinstance(entry.record, StartedFrom))
            own_s = sum(each.worker_seconds for each in paid_for(entries).workers)
            return Training(own_s + before.worker_seconds, before.untold)
        if folder.parent.name == "trials" and folder.name.isdecimal() and (folder.parents[1] / _JOURNAL).is_file():
            entries = read(folder.parents[1] / _JOURNAL)
            table, trial = fold(entries), int(folder.name)
            return training_of(entries, table, [trial]) if trial in table.trials else None
    except UserError:  # a journal that cannot be read tells nothing, and the weights are good all the same
        return None
    return None


def _before(begun: Iterable[StartedFrom]) -> Training:
    """That of all sources together, each once."""
    sources = {told.sha256: told for told in begun}.values()
    known = [told.worker_seconds for told in sources if told.worker_seconds is not None]
    return Training(sum(known), tuple(told.source for told in sources if told.worker_seconds is None))


def _begun_with(entries: Iterable[Entry]) -> str:
    begun = next((e.record.settings.get("start_from") for e in entries if isinstance(e.record, StudyStarted)), None)
    return str(begun.get("source")) if isinstance(begun, dict) else ""
