"""Prices of workers: the cost of a run, tables of prices and spot availability, and the lowest possible cost.

Prices depend on the kind of host and may change over time. All time of a worker is paid for: training, starting,
standing still, repeating a lost step, waiting for work.

Tables are CSV with a first line of names. Times are seconds, or all of them ISO 8601 with an offset from UTC.

    time,workers        time,kind,price          kind,price
    0,32                0,spot,0.918             spot,0.918
    3600,27             7200,spot,1.04           on-demand,3.06
    40920,27            0,on-demand,3.06

The lowest possible cost is that of a job with perfect foresight: policies are compared with it. Workers come, go and
change for nothing there, so no real run can cost less. In a period with one offer and one price, each number of workers
has a cost and a speed. Changes between numbers reach the whole upper hull of these points. The segments of the hull are
amounts of work, each at a price. To take the cheapest segments first, in any period, is the optimum of the linear
program.
"""

from __future__ import annotations

import csv
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate, pairwise
from typing import Annotated, TypeVar

from pydantic import AwareDatetime, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from elastune.core.cost import ON_DEMAND, SPOT, Prices
from elastune.core.errors import UserError
from elastune.core.mesh import MOST_WORKERS

# Tables of spot availability and prices.

LONGEST_LINES = 1_000_000
_RULES = ConfigDict(extra="forbid", allow_inf_nan=False)
_Time = Annotated[float, Field(ge=0, le=1e11)] | AwareDatetime
_Price = Annotated[float, Field(ge=0, le=1e15)]
_Kind = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
T = TypeVar("T")


@checked(frozen=True, config=_RULES)
class _Offer:
    time: _Time
    workers: Annotated[int, Field(ge=0, le=MOST_WORKERS)]


@checked(frozen=True, config=_RULES)
class _Quote:
    time: _Time
    kind: _Kind
    price: _Price


@checked(frozen=True, config=_RULES)
class _Tag:
    kind: _Kind
    price: _Price


@dataclass(frozen=True)
class Availability:
    """The number of spot workers over time.

    Attributes:
        steps: Ascending pairs of seconds and a number from then on. The last pair ends the known time.
        absolute: Seconds are since the epoch.
    """

    steps: tuple[tuple[float, int], ...]
    absolute: bool = False

    @property
    def begin_s(self) -> float:
        """The first time."""
        return self.steps[0][0]

    @property
    def end_s(self) -> float:
        """The last time."""
        return self.steps[-1][0]

    def at(self, now_s: float) -> int:
        """Return the number of workers at that time."""
        return self.steps[max(0, bisect_right(self.steps, now_s, key=lambda step: step[0]) - 1)][1]

    def from_zero(self) -> Availability:
        """Return the same numbers, begun at second 0."""
        return replace(self, steps=tuple((at - self.begin_s, n) for at, n in self.steps), absolute=False)

    def worker_seconds(self, until_s: float) -> float:
        """Return all worker-seconds on offer from the first time to ``until_s``."""
        times = [at for at, _ in self.steps if at < until_s] + [min(until_s, self.end_s)]
        spans = zip(self.steps, times, times[1:], strict=False)
        return sum(n * (end - begin) for (_, n), begin, end in spans)


def parse_availability(text: str, name: str) -> Availability:
    """Return the trace in ``text``, which messages call ``name``. Raises ``UserError`` with the wrong line."""
    rows = _rows(text, name, TypeAdapter(_Offer), ("time,workers",))
    times, absolute = _times([row.time for row in rows], name)
    if len(times) < 2 or any(b <= a for a, b in pairwise(times)):
        raise UserError("a trace has two times or more, each later than the one before", name, "sort its lines")
    return Availability(tuple(zip(times, (row.workers for row in rows), strict=True)), absolute)


def parse_prices(text: str, name: str) -> Prices:
    """Return the table or trace in ``text``, which messages call ``name``. Raises ``UserError`` with the wrong line."""
    headers = ("time,kind,price", "kind,price")
    if _header(text).count(",") == 1:
        tags = _rows(text, name, TypeAdapter(_Tag), headers[1:])
        if len({tag.kind for tag in tags}) < len(tags):
            raise UserError("a table has one price for each kind", name, "give a time to each: time,kind,price")
        return Prices({tag.kind: ((0.0, tag.price),) for tag in tags})
    quotes = _rows(text, name, TypeAdapter(_Quote), headers)
    times, absolute = _times([quote.time for quote in quotes], name)
    steps: dict[str, list[tuple[float, float]]] = {}
    for at, quote in zip(times, quotes, strict=True):
        known = steps.setdefault(quote.kind, [])
        if known and at <= known[-1][0]:
            rule = "of each kind, every price comes later than the one before"
            raise UserError(rule, f"{name}: {quote.kind} at {at:g}", "sort its lines")
        known.append((at, quote.price))
    return Prices({kind: tuple(known) for kind, known in steps.items()}, absolute)


def _header(text: str) -> str:
    return "".join(text.lstrip("\ufeff").partition("\n")[0].split())


def _rows(text: str, name: str, kind: TypeAdapter[T], headers: Sequence[str]) -> list[T]:
    if _header(text) not in headers:
        rule = f"the first line must be {' or '.join(headers)}"
        raise UserError(rule, f"{name}: {_header(text)[:60]!r}", "name the columns there")
    names, *lines = csv.reader(text.lstrip("\ufeff").splitlines())
    rows = [(number, line) for number, line in enumerate(lines, start=2) if line]
    if not 1 <= len(rows) <= LONGEST_LINES:
        raise UserError(f"a trace has 1 to {LONGEST_LINES} lines", f"{name}: {len(rows)}", "see docs/spot.md")
    parsed = []
    for number, line in rows:
        cells = dict(zip((n.strip() for n in names), (cell.strip() for cell in line), strict=False))
        try:
            if len(line) != len(names):
                raise ValueError(f"{len(line)} values")
            parsed.append(kind.validate_python(cells))
        except ValidationError as error:
            problem = error.errors()[0]
            value = f"{name}, line {number}: {problem['loc'][0]} {str(problem['input'])[:40]!r}, {problem['msg']}"
            raise UserError(f"a line must be {_header(text)}", value, "mend the line") from None
        except ValueError as error:
            raise UserError(f"a line must be {_header(text)}", f"{name}, line {number}: {error}", "mend it") from None
    return parsed


def _times(times: Sequence[float | datetime], name: str) -> tuple[list[float], bool]:
    """The times as seconds, and whether they were dates."""
    dates = [at for at in times if isinstance(at, datetime)]
    if dates and len(dates) < len(times):
        raise UserError("times are all seconds, or all dates", name, "write them all alike")
    return [at.timestamp() if isinstance(at, datetime) else float(at) for at in times], bool(dates)


# The lowest possible cost of a job, with perfect foresight.

Speed = Callable[[int], float]
"""What so many workers do in a second, in seconds of one worker; 0 for none."""
_SAME = 1e-9


@dataclass(frozen=True)
class MarketSpan:
    """A time with one offer: ``spot`` workers, and the price of a worker-second of each kind."""

    seconds: float
    spot: int
    spot_price: float
    on_demand_price: float


def market_spans(offer: Availability, prices: Prices, until_s: float) -> list[MarketSpan]:
    """Return the market from second 0 to ``until_s``, cut at every change."""
    inside = {at for at in (*(at for at, _ in offer.steps), *prices.changes) if 0 < at < until_s}
    times = [0.0, *sorted(inside), until_s]
    return [
        MarketSpan(end - at, offer.at(at), prices.at(SPOT, at) / 3600, prices.at(ON_DEMAND, at) / 3600)
        for at, end in pairwise(times)
    ]


def least_cost(work_s: float, most: int, speed: Speed, market: Sequence[MarketSpan]) -> float | None:
    """Return the least cost of ``work_s`` seconds of one worker's work, on at most ``most`` workers at a time.

    None: the work is not possible in that time.
    """
    speeds = [speed(n) for n in range(most + 1)]
    offers: dict[tuple[int, float, float], list[tuple[float, float]]] = {}
    pieces: list[tuple[float, float]] = []  # the price of a second of work, and how many there are
    for span in market:
        key = span.spot, span.spot_price, span.on_demand_price
        if key not in offers:
            offers[key] = _hull(speeds, span)
        pieces += [(price, rate * span.seconds) for price, rate in offers[key]]
    total, left = 0.0, work_s
    for price, amount in sorted(pieces):
        taken = min(amount, left)
        total, left = total + price * taken, left - taken
        if left <= _SAME * work_s:
            return total
    return None


def _hull(speeds: Sequence[float], span: MarketSpan) -> list[tuple[float, float]]:
    """The segments of the upper hull over the cost of a second of each number of workers: (price, rate), ascending."""
    spot = [span.spot_price] * min(span.spot, len(speeds) - 1)
    each = sorted([*spot, *[span.on_demand_price] * (len(speeds) - 1)])[: len(speeds) - 1]
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
