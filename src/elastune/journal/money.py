"""What a run has cost, from its journal: its workers and the hosts that it could use, at the prices of that time.

A worker is paid for from the moment that a host is told to start it until it has ended, whatever it does: starting,
standing still, doing a lost step again, replacing a lost one. Room on hosts that nobody used is told apart: hosts that
were waited for before the run began are not in it, nor is this machine, of which nobody has said how much is the run's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elastune.core.cost import Paid, Prices, bill
from elastune.core.text import duration, number
from elastune.journal.entry import Entry
from elastune.journal.records import Adopted, HostsHeld, RunFailed, RunFinished, RunStarted


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
