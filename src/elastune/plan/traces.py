"""Markets as text: how many spot workers could be had, and what a worker-hour cost, line by line. Pure.

Both are CSV with a first line of names. Times are seconds, or all of them ISO 8601 with an offset from UTC.

    time,workers        time,kind,price          kind,price
    0,32                0,spot,0.918             spot,0.918
    3600,27             7200,spot,1.04           on-demand,3.06
    40920,27            0,on-demand,3.06
"""

from __future__ import annotations

import csv
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from typing import Annotated, TypeVar

from pydantic import AwareDatetime, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from elastune.core.cost import Prices
from elastune.core.errors import UserError
from elastune.core.mesh import MOST_WORKERS

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
    """How many spot workers can be had: ascending pairs of seconds and a number from then on; the last one's time is
    the end of what is known. ``absolute``: seconds since the epoch."""

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
        """How many there are then."""
        return self.steps[max(0, bisect_right(self.steps, now_s, key=lambda step: step[0]) - 1)][1]

    def from_zero(self) -> Availability:
        """The same, begun at second 0."""
        return replace(self, steps=tuple((at - self.begin_s, n) for at, n in self.steps), absolute=False)

    def worker_seconds(self, until_s: float) -> float:
        """All that could be had from the first time to ``until_s``."""
        times = [at for at, _ in self.steps if at < until_s] + [min(until_s, self.end_s)]
        spans = zip(self.steps, times, times[1:], strict=False)
        return sum(n * (end - begin) for (_, n), begin, end in spans)


def parse_availability(text: str, name: str) -> Availability:
    """The trace in ``text``, which a message calls ``name``. Raises ``UserError`` with the line that is wrong."""
    rows = _rows(text, name, TypeAdapter(_Offer), ("time,workers",))
    times, absolute = _times([row.time for row in rows], name)
    if len(times) < 2 or any(b <= a for a, b in pairwise(times)):
        raise UserError("a trace has two times or more, each later than the one before", name, "sort its lines")
    return Availability(tuple(zip(times, (row.workers for row in rows), strict=True)), absolute)


def parse_prices(text: str, name: str) -> Prices:
    """The table or trace in ``text``, which a message calls ``name``. Raises ``UserError`` as above."""
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
    found = []
    for number, line in rows:
        told = dict(zip((n.strip() for n in names), (cell.strip() for cell in line), strict=False))
        try:
            if len(line) != len(names):
                raise ValueError(f"{len(line)} values")
            found.append(kind.validate_python(told))
        except ValidationError as error:
            problem = error.errors()[0]
            value = f"{name}, line {number}: {problem['loc'][0]} {str(problem['input'])[:40]!r}, {problem['msg']}"
            raise UserError(f"a line must be {_header(text)}", value, "mend the line") from None
        except ValueError as error:
            raise UserError(f"a line must be {_header(text)}", f"{name}, line {number}: {error}", "mend it") from None
    return found


def _times(times: Sequence[float | datetime], name: str) -> tuple[list[float], bool]:
    """As seconds, and whether they were dates."""
    dates = [at for at in times if isinstance(at, datetime)]
    if dates and len(dates) < len(times):
        raise UserError("times are all seconds, or all dates", name, "write them all alike")
    return [at.timestamp() if isinstance(at, datetime) else float(at) for at in times], bool(dates)
