"""What a figure shows, as data: Plotly and matplotlib draw the same numbers from these classes.

Colours stay apart for colour-blind readers and in grey (Okabe and Ito, "Color Universal Design", 2008).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import quantiles
from typing import Literal, NamedTuple

BEFORE = "#D55E00"  # vermillion
AFTER = "#0072B2"  # blue
BEST = "#009E73"  # bluish green
PICK = "#CC79A7"  # reddish purple
QUIET = "#8A8F98"
INK = "#1F2430"
GRID = "#E3E6EB"
SEQUENCE = (AFTER, BEFORE, BEST, PICK, "#E69F00", "#56B4E9")
"""For series without a role of their own, in order."""


Marker = Literal["circle", "square", "diamond", "ring"]
Line = Literal["solid", "dotted", "steps"]
COLUMNS = 3  # panels side by side at most
FARTHEST = 1e100  # the farthest from 0 that an axis reaches: differences of such numbers are still finite
FAR_OUT = 6.0
"""How far from the middle half of all values outliers lie, in spreads of that half; Tukey's fences have 1.5 and 3."""


@dataclass(frozen=True)
class Axis:
    """An axis: its label with the unit, its scale, and its ticks (empty: chosen to fit); ``names`` of ticks, if any.

    ``whole``: it counts something, so that only whole numbers are ticks.
    """

    label: str
    log: bool = False
    ticks: tuple[float, ...] = ()
    names: tuple[str, ...] = ()
    whole: bool = False

    def ticks_within(self, low: float, high: float) -> tuple[float, ...]:
        """The ticks of an axis that covers [low, high]; () where a renderer chooses them."""
        if self.ticks:
            return self.ticks
        if self.log:
            return log_ticks(low, high)
        return whole_ticks(low, high) if self.whole else ()


class EdgeSide(NamedTuple):
    """Where a point lies beyond its axes: left of them or below (-1), right of them or above (1), or neither (0)."""

    across: int
    up: int

    @property
    def arrow(self) -> Literal["left", "right", "down", "up"]:
        """Where its triangle points to."""
        if self.up:
            return "down" if self.up < 0 else "up"
        return "left" if self.across < 0 else "right"


@dataclass(frozen=True)
class Series:
    """Points of one meaning, in order of x where they are joined. Optional tuples are empty or as long as ``x``.

    A ``y`` of None is a point without a value (it diverged, it failed): a cross on the lower edge. ``error`` holds
    how far each reaches (below, above), shown as bars or, with ``band``, as a shaded band along the line.
    ``hollow`` points are modelled, not measured; lines that lead to one are dashed. ``labels`` show on hover,
    ``inside`` stands within the marker. ``links``: the table row to which a click on each point leads. ``faint`` series
    stay behind the others.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    color: str
    marker: Marker | None = "circle"
    line: Line | None = None
    error: tuple[tuple[float, float] | None, ...] = ()
    hollow: tuple[bool, ...] = ()
    labels: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    faint: bool = False
    band: bool = False

    def __post_init__(self) -> None:
        for name in ("y", "error", "hollow", "labels", "inside", "links"):
            length = len(getattr(self, name))
            if length != len(self.x) and (length or name == "y"):
                raise ValueError(f"series {self.name!r} has {len(self.x)} points but {length} of {name}")
        for name in ("x", "y"):
            object.__setattr__(self, name, tuple(map(_drawable, getattr(self, name))))
        reaches = (each and (min(FARTHEST, each[0]), min(FARTHEST, each[1])) for each in self.error)
        object.__setattr__(self, "error", tuple(reaches))

    def beyond(self, panel: Panel) -> dict[int, EdgeSide]:
        """The points that lie beyond the axes of ``panel``, and on which side."""
        points = enumerate(zip(self.x, self.y, strict=True))
        sides = {i: EdgeSide(panel.beside(x), panel.beyond(y)) for i, (x, y) in points if y is not None}
        return {i: side for i, side in sides.items() if side != EdgeSide(0, 0)}

    def is_hollow(self, i: int) -> bool:
        """Whether point ``i`` is modelled."""
        return bool(self.hollow) and self.hollow[i]

    def reach(self, i: int) -> tuple[float, float]:
        """How far the error bar of point ``i`` reaches below and above it; 0 where it has none."""
        return (self.error[i] or (0.0, 0.0)) if self.error else (0.0, 0.0)

    def edges(self, floor: float) -> tuple[list[float], list[float], list[float]]:
        """The band around the valued points: x, lower and upper edge, nothing below ``floor``."""
        valued = [(x, y, *self.reach(i)) for i, (x, y) in enumerate(zip(self.x, self.y, strict=True)) if y is not None]
        return (
            [x for x, _, _, _ in valued],
            [max(y - below, min(y, floor)) for _, y, below, _ in valued],
            [y + above for _, y, _, above in valued],
        )

    def pieces(self) -> list[tuple[list[int], bool]]:
        """The line in pieces of one style: the points each joins, in order, and whether it is dashed."""
        pieces: list[tuple[list[int], bool]] = []
        for i, j in pairwise(i for i, y in enumerate(self.y) if y is not None):
            dashed = self.is_hollow(i) or self.is_hollow(j)
            if pieces and pieces[-1][1] == dashed:
                pieces[-1][0].append(j)
            else:
                pieces.append(([i, j], dashed))
        return pieces


@dataclass(frozen=True)
class Bars:
    """Lying bars of one meaning: each from ``begin`` to ``end``, of ``thickness`` around the middle ``y``.

    ``labels`` show on hover. ``links``: the table row to which a click on each bar leads; or none.
    """

    name: str
    color: str
    y: tuple[float, ...]
    begin: tuple[float, ...]
    end: tuple[float, ...]
    thickness: tuple[float, ...]
    labels: tuple[str, ...]
    links: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("begin", "end", "thickness", "labels", *(["links"] if self.links else [])):
            if len(getattr(self, name)) != len(self.y):
                raise ValueError(f"bars {self.name!r} have {len(self.y)} middles but {len(getattr(self, name))} {name}")


@dataclass(frozen=True)
class Level:
    """A horizontal line, such as a target; the legend names it."""

    y: float
    name: str


@dataclass(frozen=True)
class Mark:
    """Something that happened at ``x``: a vertical line. ``label``: a word or two at its head, "" for none.

    ``detail`` shows on hover. ``strange``: it stands out.
    """

    x: float
    label: str
    detail: str
    strange: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes and what lies in it."""

    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    levels: tuple[Level, ...] = ()
    bars: tuple[Bars, ...] = ()
    within: tuple[float, float] | None = None
    """What the y axis shows at most; points beyond stand at its edge as triangles. None: it shows every point."""
    across: tuple[float, float] | None = None
    """The same of the x axis."""

    def x_range(self) -> tuple[float, float]:
        """What the x axis covers."""
        values = [x for series in self.series for x in series.x if self.beside(x) == 0]
        values += [x for bars in self.bars for x in (*bars.begin, *bars.end)]
        return _padded([*values, *self.x.ticks], self.x.log, 0.07)

    def y_range(self) -> tuple[float, float]:
        """What the y axis covers: every point and level; error bars up to half the points' own span beyond them.

        A wild interval of three seeds would otherwise press everything else flat.
        """
        points = [y for series in self.series for y in series.y if y is not None and self.beyond(y) == 0]
        for bars in self.bars:
            edges = zip(bars.y, bars.thickness, strict=True)
            points += [edge for middle, thick in edges for edge in (middle - thick / 2, middle + thick / 2)]
        levels = [level.y for level in self.levels]
        low, high = min(points + levels, default=0.0), max(points + levels, default=1.0)
        reach = (high - low) / 2 or abs(high) / 2
        for series in self.series:
            for i, y in enumerate(series.y):
                if y is not None and self.beyond(y) == 0:
                    below, above = series.reach(i)
                    points += [max(y - below, low - reach), min(y + above, high + reach)]
        return _padded(points + levels, self.y.log, 0.08)

    def beyond(self, y: float) -> int:
        """-1 and 1 where a point lies below and above what the axis shows; else 0."""
        return _side_of(y, self.within)

    def beside(self, x: float) -> int:
        """-1 and 1 where a point lies left and right of what the axis shows; else 0."""
        return _side_of(x, self.across)

    def floor(self) -> float:
        """Where points without a value are drawn."""
        return _at(self.y_range(), self.y.log, 0.035)

    def drawn(self, x: float, y: float) -> tuple[float, float]:
        """Where a point is drawn: at the edge if it lies beyond an axis."""
        return self.drawn_across(x), _at_edge(y, self.beyond(y), self.y_range(), self.y.log)

    def drawn_across(self, x: float) -> float:
        """Where on the x axis a point is drawn."""
        return _at_edge(x, self.beside(x), self.x_range(), self.x.log)


@dataclass(frozen=True)
class Figure:
    """Panels under one title, side by side or, where ``stacked``, below each other on one x axis, that of the first.

    ``marks`` run through all panels of a stack. ``name`` is also the stem of its file.
    """

    name: str
    title: str
    panels: tuple[Panel, ...]
    caption: str = ""
    stacked: bool = False
    marks: tuple[Mark, ...] = ()

    @property
    def columns(self) -> int:
        """How many panels stand side by side."""
        return 1 if self.stacked else min(COLUMNS, len(self.panels))

    def x_range(self) -> tuple[float, float]:
        """What the shared x axis of a stack covers: every point, bar and mark."""
        values = [x for panel in self.panels for series in panel.series for x in series.x]
        values += [x for panel in self.panels for bars in panel.bars for x in (*bars.begin, *bars.end)]
        return _padded([*values, *(mark.x for mark in self.marks)], self.panels[0].x.log, 0.07)

    @property
    def needs_legend(self) -> bool:
        """Whether any panel has several series, levels or bars, which only a legend can name."""
        return any(len(panel.series) + len(panel.levels) + len(panel.bars) > 1 for panel in self.panels)

    @property
    def has_hollow(self) -> bool:
        """Whether any point is modelled."""
        return any(any(series.hollow) for panel in self.panels for series in panel.series)


def _side_of(value: float, shown: tuple[float, float] | None) -> int:
    if shown is None:
        return 0
    return -1 if value < shown[0] else 1 if value > shown[1] else 0


def _at_edge(value: float, side: int, limits: tuple[float, float], log: bool) -> float:
    return value if side == 0 else _at(limits, log, 0.035 if side < 0 else 0.965)


def _at(limits: tuple[float, float], log: bool, share: float) -> float:
    low, high = limits
    return low * (high / low) ** share if log else low + (high - low) * share


def without_outliers(
    values: Sequence[float], keep: Sequence[float] = (), *, log: bool = False
) -> tuple[float, float] | None:
    """The range that an axis should show: ``values`` without outliers, and all of ``keep``; None without outliers.

    ``log``: the axis is logarithmic, and so are distances on it. All values are positive then.
    """
    finite = sorted(value for value in values if math.isfinite(value))
    if len(finite) < 4:
        return None
    placed = [math.log(value) for value in finite] if log else finite
    first, _, third = quantiles(placed, n=4, method="inclusive")
    away = FAR_OUT * (third - first)
    inside = [value for value, at in zip(finite, placed, strict=True) if first - away <= at <= third + away]
    if away == 0 or len(inside) == len(finite):
        return None
    shown = [*inside, *keep]
    return min(shown), max(shown)


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Round values in [low, high], low > 0, the fewer of each decade the more decades there are."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    decades = math.log10(high / low)
    steps = (1, 1.5, 2, 3, 4, 5, 7) if decades <= 1 else (1, 2, 5) if decades <= 3 else (1,)
    ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    inside = [tick for tick in ticks if low <= tick <= high]
    if len(inside) >= 2:
        return tuple(inside)
    middle = math.sqrt(low * high)
    return tuple(float(f"{value:.3g}") for value in (low * 1.02, middle, high * 0.98))


def whole_ticks(low: float, high: float) -> tuple[float, ...]:
    """Whole numbers in [low, high], at most ten, at equal distances of 1, 2 or 5 times a power of ten."""
    first, last = math.ceil(low), math.floor(high)
    rough = max(1.0, (last - first) / 8)
    power = 10.0 ** math.floor(math.log10(rough))
    step = round(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough))
    return tuple(float(tick) for tick in range(-(-first // step) * step, last + 1, step))


def _drawable(value: float | None) -> float | None:
    """``value`` clipped to the numbers that an axis can hold."""
    return None if value is None else max(-FARTHEST, min(FARTHEST, value))


def _padded(values: list[float], log: bool, share: float) -> tuple[float, float]:
    if log:
        values = [value for value in values if value > 0]
        low, high = min(values, default=1.0), max(values, default=1.0)
        pad = max((high / low) ** share, 1.15)
        return low / pad, high * pad
    low, high = min(values, default=0.0), max(values, default=1.0)
    pad = (high - low) * share or abs(high) * share or 1.0
    return low - pad, high + pad
