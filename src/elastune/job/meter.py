"""What each of several jobs on one cluster has cost, as time goes on. Pure.

Hosts are paid for whether they are used or not, at the price that holds, by their kind. A job pays for each of its
workers from the moment that its process is there until it has ended, whatever it does: it starts, stands still, does a
lost step again, is replaced. What nobody uses is shared among the jobs that have workers then, by their number of
workers; while none has, it is ``idle`` and nobody's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from elastune.core.cost import Paid, Prices

Workers = Mapping[str, int]
"""By the kind of host."""


class MoneyMeter:
    """Counts by ``prices``, whose times are those of the caller's clock and ``offset_s`` more.

    Attributes:
        costs: What each job has cost so far, in units of the prices.
        idle: What was paid for while no job had a worker.
    """

    def __init__(self, prices: Prices, offset_s: float = 0.0) -> None:
        self.costs: defaultdict[int, float] = defaultdict(float)
        self.idle = 0.0
        self._prices, self._offset_s = prices, offset_s
        self._at: float | None = None
        self._room: Workers = {}
        self._held: Mapping[int, Workers] = {}

    def look(self, now_s: float, room: Workers, held: Mapping[int, Workers]) -> None:
        """Count what was there at the look before until now; from now on there is ``room`` on all hosts, of which each
        job has ``held``. Raises ``UserError`` for a kind of host without a price."""
        if self._at is not None and now_s > self._at:
            self._count(self._at + self._offset_s, now_s + self._offset_s)
        self._at, self._room, self._held = now_s, dict(room), dict(held)

    def _count(self, begin_s: float, end_s: float) -> None:
        used: Counter[str] = Counter()
        for workers in self._held.values():
            used.update(workers)
        kinds = {*self._room, *used}
        each = {kind: self._prices.cost(Paid(kind, 1, begin_s, end_s)) for kind in kinds}
        unused = sum(each[kind] * max(0, self._room.get(kind, 0) - used[kind]) for kind in kinds)
        whole = used.total()
        if not whole:
            self.idle += unused
            return
        for job, workers in self._held.items():
            own = sum(each[kind] * n for kind, n in workers.items())
            self.costs[job] += own + unused * sum(workers.values()) / whole
