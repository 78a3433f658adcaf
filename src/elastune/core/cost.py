"""What a run costs: workers x time x price, and the names of the metrics that elastune measures of every run.

Prices depend on the kind of host and may change over time. A worker costs money whether it trains or not: while it
starts, stands still, repeats a lost step or waits for work.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from elastune.core.errors import UserError

MEASURED = ("seconds", "cost")  # by elastune, of every training: no program may report them
SPOT, ON_DEMAND = "spot", "on-demand"
KINDS = (SPOT, ON_DEMAND)
"""Kinds of hosts: those that may be taken away at any time, and those that stay."""
UNKNOWN = ""
"""The kind of hosts that report none: this machine, and hosts of a launcher of workers."""
ANY = "any"
"""In a table of prices: every kind that the table does not name."""
ONE_PRICE = "a worker-hour costs what one price or a file of prices says"


@dataclass(frozen=True)
class Cost:
    """Workers held for a time, and the price of a worker-hour. At a price of 1.0 the unit is the worker-hour."""

    worker_seconds: float
    price_per_worker_hour: float = 1.0

    @property
    def total(self) -> float:
        """The cost in units of the price."""
        return self.worker_seconds / 3600 * self.price_per_worker_hour


def check_price(price: float) -> float:
    """Return ``price`` if it can be the price of a worker-hour. Raises ``UserError``."""
    if isinstance(price, bool) or not isinstance(price, (int, float)) or not (math.isfinite(price) and price > 0):
        raise UserError("a price of a worker-hour must be above 0", price, "use 1 for costs in worker-hours")
    return float(price)


@dataclass(frozen=True)
class Prices:
    """Prices of a worker-hour by kind of host.

    Attributes:
        steps: For each kind, ascending pairs of a time in seconds and the price from then on. Before the first time the
            first price holds.
        absolute: Times are seconds since the epoch, not since the beginning of the paid work.
    """

    steps: Mapping[str, tuple[tuple[float, float], ...]]
    absolute: bool = False

    @classmethod
    def constant(cls, price_per_worker_hour: float) -> Prices:
        """Return one price for all kinds at all times."""
        return cls({ANY: ((0.0, price_per_worker_hour),)})

    def at(self, kind: str, now_s: float) -> float:
        """Return the price of a worker-hour on ``kind`` at a time. Raises ``UserError`` for a kind without a price."""
        steps = self._of(kind)
        return steps[max(0, bisect_right(steps, now_s, key=lambda step: step[0]) - 1)][1]

    def cost(self, paid: Paid) -> float:
        """Return the cost of ``paid``. Raises ``UserError`` for a kind without a price."""
        steps = self._of(paid.kind)
        first, last = (bisect_right(steps, at, key=lambda step: step[0]) for at in (paid.begin_s, paid.end_s))
        times = [paid.begin_s, *(at for at, _ in steps[first:last]), paid.end_s]
        spans = pairwise(times)
        return sum(Cost(paid.workers * (end - begin), self.at(paid.kind, begin)).total for begin, end in spans)

    def assuming(self, kind: str) -> Prices:
        """Return these prices for hosts that do not report their kind: they count as ``kind``. Raises ``UserError`` for
        a kind without a price.
        """
        return replace(self, steps={**self.steps, UNKNOWN: self._of(kind)})

    @property
    def digest(self) -> str:
        """Return a digest that is equal for equal prices only."""
        content = [self.absolute, *sorted([kind, list(steps)] for kind, steps in self.steps.items())]
        return hashlib.sha256(repr(content).encode()).hexdigest()

    @property
    def changes(self) -> list[float]:
        """All times at which a price changes, ascending."""
        return sorted({at for steps in self.steps.values() for at, _ in steps})

    def since(self, begin_s: float | None) -> Prices:
        """Return these prices with times since ``begin_s``, in seconds since the epoch; None: since the first time of
        the prices.

        Times that are no dates stay as they are.
        """
        if not self.absolute:
            return self
        origin_s = self.changes[0] if begin_s is None else begin_s
        moved = {kind: tuple((at - origin_s, price) for at, price in steps) for kind, steps in self.steps.items()}
        return Prices(moved)

    def _of(self, kind: str) -> tuple[tuple[float, float], ...]:
        steps = self.steps.get(kind) or self.steps.get(ANY)
        if not steps:
            rule = "every kind of host needs a price"
            raise UserError(rule, f"{kind!r}, known: {', '.join(sorted(self.steps))}", f"add {kind} or {ANY} to them")
        return steps


@dataclass(frozen=True)
class Paid:
    """``workers`` on hosts of one ``kind``, paid for from ``begin_s`` to ``end_s``."""

    kind: str
    workers: float
    begin_s: float
    end_s: float

    @property
    def worker_seconds(self) -> float:
        """The time of all of them together."""
        return self.workers * (self.end_s - self.begin_s)


def bill(paid: Iterable[Paid], prices: Prices) -> float:
    """What all of ``paid`` costs. Raises ``UserError`` for a kind without a price."""
    return sum(map(prices.cost, paid))
