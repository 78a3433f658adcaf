"""The rule by which a result agrees with a document or differs from it, and what a section of the page consists of.

Pure: a document's figure gives a range, a result gives an interval, and the two give a verdict. ``rojas.py``,
``kungfu.py`` and ``heye.py`` make the rows of each document, ``page.py`` draws them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

How = Literal["measured", "emulated", "modelled", "simulated", "replayed"]
Verdict = Literal["agrees", "differs", "not shown", "base"]
HOW: dict[How, str] = {
    "measured": "real trainings or steps, at their own speed",
    "emulated": "real processes and sums; compute is paced to a declared speed, or links are shaped",
    "modelled": "times come from a model whose parts were measured",
    "simulated": "the program's decisions on a simulated clock; no training ran",
    "replayed": "a search runs again over trainings that were measured once",
}
SAME_RATIO = 1.25
SAME_POINTS = 0.5
LEAST_SEEDS = 3
NOT_GIVEN = "not given here"


@dataclass(frozen=True)
class Range:
    """The values that agree with a document, both ends included."""

    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True)
class Ours:
    """A result: the value, its interval (None where the result has none), and the seeds or rounds behind it."""

    value: float
    interval: tuple[float, float] | None
    seeds: int


@dataclass(frozen=True)
class Row:
    """A row of a section: the document's cells, our other cells, and the two figures that are compared.

    ``given``: None where the document's figure is not known here. ``ours``: None where nothing was measured. ``base``:
    the other rows are divided by this one, so that it has no verdict.
    """

    name: str
    document: tuple[str, ...]
    more: tuple[str, ...]
    given: Range | None
    ours: Ours | None
    how: How
    base: bool = False


@dataclass(frozen=True)
class Section:
    """A table or a figure of a document.

    ``differs``: the difference of the settings, one line. ``result``: the stem of the JSON file ("" where there is
    none yet). ``command``: what measures it today. ``compared``, ``interval``, ``seeds``: what these three columns
    hold. ``room``: the folders whose commits make the result older. ``digits``: of our figures.
    """

    title: str
    differs: str
    result: str
    command: str
    compared: str = ""
    interval: str = ""
    seeds: str = "seeds"
    document_columns: tuple[str, ...] = ()
    our_columns: tuple[str, ...] = ()
    rows: Callable[[Any], Sequence[Row]] = lambda result: ()
    room: tuple[str, ...] = ("benchmarks", "src/elastune")
    digits: int = 2
    after: Callable[[Any], str] = lambda result: ""


@dataclass(frozen=True)
class Document:
    """A document: what it is, what it asked, where its figures were read, and its sections in its own order."""

    name: str
    asked: str
    address: str
    sections: tuple[Section, ...]


def about(value: float) -> Range:
    """What agrees with a ratio or a time: a quarter more or less."""
    return Range(value / SAME_RATIO, value * SAME_RATIO)


def about_percent(value: float) -> Range:
    """What agrees with an accuracy in per cent: half a point more or less."""
    return Range(value - SAME_POINTS, value + SAME_POINTS)


def at_least(value: float) -> Range:
    """What agrees with "at least ``value``"."""
    return Range(low=value)


def at_most(value: float) -> Range:
    """What agrees with "at most ``value``"."""
    return Range(high=value)


def judged(row: Row) -> tuple[Verdict, str]:
    """The verdict on a row by the rule of the page; and, where nothing is shown, the reason.

    Example:
        >>> judged(Row("data", ("3.5",), (), about(3.5), Ours(3.2, (3.1, 3.3), 3), "emulated"))
        ('agrees', '')
    """
    if row.base:
        return "base", ""
    if row.ours is None:
        return "not shown", "not measured"
    if row.given is None:
        return "not shown", "no figure"
    if row.ours.seeds < LEAST_SEEDS:
        return "not shown", "one seed" if row.ours.seeds == 1 else f"{row.ours.seeds} seeds"
    if row.ours.interval is None:
        return "not shown", "no interval"
    low, high = row.ours.interval
    if row.given.low <= low and high <= row.given.high:
        return "agrees", ""
    if high < row.given.low or low > row.given.high:
        return "differs", ""
    return "not shown", "crosses an end"


RULE = f"""\
1. A document's figure gives a **range**. A ratio or a time agrees with a quarter more or less ({SAME_RATIO} times). An
   accuracy agrees with half a point more or less. Where only a direction is known here ("less", "at least"), the range
   is that direction, and the cell says so.
2. Our result gives an **interval**, named in each section, and the number of seeds or rounds behind it.
3. **agrees**: the whole interval is inside the range. **differs**: the whole interval is outside.
4. **not shown**: all else. The interval crosses an end of the range; or there are fewer than {LEAST_SEEDS} seeds or
   rounds, no interval, no figure of the document, or no result. The cell has the reason.
5. **base**: other rows are divided by this one, or it is one of the factors. It has no verdict.

A verdict compares figures, not machines. A row that is *modelled*, *simulated* or *replayed* agrees as such only."""
