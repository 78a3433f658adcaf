"""The least that a job could have cost, had everything been known: the mark that a policy is held against. Pure.

Workers come, go and change for nothing here, so no real run can cost less. Of every stretch of time with one offer and
one price, n workers cost so much and do so much a second; by changing between numbers all on the upper hull of these
points can be had. Its segments are amounts of work, each at a price, and dearer the further up: to take the cheapest
first, wherever they lie, is the optimum of the linear programme.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from elastune.core.cost import ON_DEMAND, SPOT, Prices
from elastune.plan.traces import Availability

Speed = Callable[[int], float]
"""What so many workers do in a second, in seconds of one worker; 0 for none."""
_SAME = 1e-9


@dataclass(frozen=True)
class MarketSpan:
    """A time with one offer: ``spot`` workers, and what a worker-second costs of each kind."""

    seconds: float
    spot: int
    spot_price: float
    on_demand_price: float


def stretches(offer: Availability, prices: Prices, until_s: float) -> list[MarketSpan]:
    """The market from second 0 to ``until_s``, cut where anything changes."""
    inside = {at for at in (*(at for at, _ in offer.steps), *prices.changes) if 0 < at < until_s}
    times = [0.0, *sorted(inside), until_s]
    return [
        MarketSpan(end - at, offer.at(at), prices.at(SPOT, at) / 3600, prices.at(ON_DEMAND, at) / 3600)
        for at, end in pairwise(times)
    ]


def least_cost(work_s: float, most: int, speed: Speed, market: Sequence[MarketSpan]) -> float | None:
    """What ``work_s`` seconds of one worker's work cost at least, on at most ``most`` workers at a time; None: it
    cannot be done in that time."""
    speeds = [speed(n) for n in range(most + 1)]
    offers: dict[tuple[int, float, float], list[tuple[float, float]]] = {}
    pieces: list[tuple[float, float]] = []  # the price of a second of work, and how many there are
    for stretch in market:
        key = stretch.spot, stretch.spot_price, stretch.on_demand_price
        if key not in offers:
            offers[key] = _hull(speeds, stretch)
        pieces += [(price, rate * stretch.seconds) for price, rate in offers[key]]
    total, left = 0.0, work_s
    for price, amount in sorted(pieces):
        taken = min(amount, left)
        total, left = total + price * taken, left - taken
        if left <= _SAME * work_s:
            return total
    return None


def _hull(speeds: Sequence[float], stretch: MarketSpan) -> list[tuple[float, float]]:
    """The segments of the upper hull over what a second of each number of workers costs: (price, rate), ascending."""
    spot = [stretch.spot_price] * min(stretch.spot, len(speeds) - 1)
    each = sorted([*spot, *[stretch.on_demand_price] * (len(speeds) - 1)])[: len(speeds) - 1]
    hull = [(0.0, 0.0)]
    for cost, speed in zip(accumulate(each), speeds[1:], strict=True):
        if speed <= hull[-1][1]:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-1], (cost, speed)):
            hull.pop()
        hull.append((cost, speed))
    return [(_slope(low, high), high[1] - low[1]) for low, high in pairwise(hull)]


def _slope(low: tuple[float, float], high: tuple[float, float]) -> float:
    return (high[0] - low[0]) / (high[1] - low[1])
