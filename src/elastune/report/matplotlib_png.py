"""A figure as a PNG, drawn by matplotlib, because Plotly's own export needs a browser."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from elastune.core.formatting import number
from elastune.report import figures as palette
from elastune.report.figures import Axis, Figure, Mark, Marker, Panel, Series

MARKERS: dict[Marker, str] = {"circle": "o", "square": "s", "diamond": "D", "ring": "o"}
PANEL_INCHES = (4.6, 3.7)
STACKED_INCHES = (9.2, 1.9)
BAND_OPACITY = 0.22
LABEL_ROOM = 0.02  # of the width: what a slanted label of a mark takes
DPI = 200
DOTS = (0, (1, 2))
ARROWS = {"down": "v", "up": "^", "left": "<", "right": ">"}
MAX_CROSSINGS = 60  # markers on a line, beyond which the line stands alone


def png(figure: Figure) -> bytes:
    """``figure`` as a PNG file's bytes. The same figure gives the same bytes."""
    columns = figure.columns
    rows = math.ceil(len(figure.panels) / columns)
    each = STACKED_INCHES if figure.stacked else PANEL_INCHES
    width = max(each[0] * columns, 6.4)
    canvas = Canvas(figsize=(width, each[1] * rows + 0.9), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(canvas)
    grid = canvas.subplots(rows, columns, squeeze=False, sharex=figure.stacked)
    axes = [ax for row in grid for ax in row]
    for ax, panel in zip(axes, figure.panels, strict=False):
        _draw(ax, panel)
    for ax in axes[len(figure.panels) :]:
        ax.set_axis_off()
    if figure.stacked:
        axes[0].set_xlim(figure.x_range())
        canvas.align_ylabels(axes)
        _marks(axes, figure.marks)
    title = canvas.suptitle(figure.title, fontsize=13, fontweight="bold", color=palette.INK)
    title.set_parse_math(False)
    if figure.needs_legend:
        _draw_legend(canvas, _legend(figure), width)
    file = io.BytesIO()
    canvas.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _draw(ax: Axes, panel: Panel) -> None:
    ax.set_xlim(_axis(ax, panel.x, panel.x_range(), across=True))
    ax.set_ylim(_axis(ax, panel.y, panel.y_range(), across=False))
    ax.set_title(panel.title, fontsize=10.5, color=palette.INK, parse_math=False)
    ax.grid(True, color=palette.GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(palette.QUIET)
    ax.tick_params(colors=palette.INK, labelsize=9)
    for level in panel.levels:
        ax.axhline(level.y, color=palette.INK, linewidth=1, linestyle=DOTS, zorder=1.5)
    for bars in panel.bars:
        lengths = [end - begin for begin, end in zip(bars.begin, bars.end, strict=True)]
        look: dict[str, Any] = {"color": bars.color, "edgecolor": "white", "linewidth": 0.3, "zorder": 2}
        ax.barh(bars.y, lengths, height=bars.thickness, left=bars.begin, **look)
    for series in panel.series:
        _line(ax, series)
        _points(ax, series, panel)


def _axis(ax: Axes, axis: Axis, limits: tuple[float, float], across: bool) -> tuple[float, float]:
    side = ax.xaxis if across else ax.yaxis
    if axis.log:
        (ax.set_xscale if across else ax.set_yscale)("log")
        side.set_minor_locator(NullLocator())
    if ticks := axis.ticks_within(*limits):
        side.set_major_locator(FixedLocator(list(ticks)))
        names = {tick: name.replace("$", r"\$") for tick, name in zip(axis.ticks, axis.names, strict=False)}
        side.set_major_formatter(FuncFormatter(lambda value, _: names.get(value, number(value))))
    elif not across:
        ax.ticklabel_format(axis="y", useOffset=False)
    (ax.set_xlabel if across else ax.set_ylabel)(axis.label, fontsize=9.5, color=palette.INK, parse_math=False)
    return limits


def _marks(axes: Sequence[Axes], marks: Sequence[Mark]) -> None:
    """Lines through all ``axes``; their labels stand above the first, but for those that would cover one another."""
    low, high = axes[0].get_xlim()
    free_from = low
    for mark in marks:
        color = palette.BEFORE if mark.strange else palette.QUIET
        for ax in axes:
            ax.axvline(mark.x, color=color, linewidth=0.9, linestyle=DOTS if mark.strange else "-", zorder=1.4)
        if mark.label and mark.x >= free_from:
            free_from = mark.x + LABEL_ROOM * (high - low)
            at: dict[str, Any] = {"xy": (mark.x, 1.0), "xycoords": axes[0].get_xaxis_transform()}
            look: dict[str, Any] = {"rotation": 40, "ha": "left", "va": "bottom", "fontsize": 7.5, "color": palette.INK}
            axes[0].annotate(mark.label, **at, xytext=(0, 2), textcoords="offset points", parse_math=False, **look)


def _line(ax: Axes, series: Series) -> None:
    if series.band:
        xs, low, high = series.edges(floor=ax.get_ylim()[0])
        ax.fill_between(xs, low, high, color=series.color, alpha=BAND_OPACITY, linewidth=0, zorder=1.8)
    if series.line is None:
        return
    shape = "steps-post" if series.line == "steps" else "default"
    for points, dashed in series.pieces():
        xs, ys = _at(series, points)
        style = "--" if dashed else ":" if series.line == "dotted" else "-"
        ax.plot(xs, ys, color=series.color, linewidth=1.6, linestyle=style, drawstyle=shape, zorder=2)


def _points(ax: Axes, series: Series, panel: Panel) -> None:
    shape = series.marker
    if shape is None:
        return
    order = 2.5 if series.faint else 4.0 if shape == "ring" else 3.0  # a ring lies on top of what it marks
    floor, beyond = panel.floor(), series.beyond(panel)
    valued = [i for i, y in enumerate(series.y) if y is not None and i not in beyond]
    lost = [panel.drawn_across(series.x[i]) for i in range(len(series.x)) if series.y[i] is None]
    ax.plot(lost, [floor] * len(lost), "x", color=series.color, markersize=7, markeredgewidth=1.8, zorder=order)
    for i, side in beyond.items():
        mark: dict[str, Any] = {"color": series.color, "markersize": 9, "zorder": order}
        drawn = panel.drawn(series.x[i], series.y[i] or 0.0)
        ax.plot([drawn[0]], [drawn[1]], ARROWS[side.arrow], **mark)
        if series.inside:
            away: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 7.5}
            away |= {"xytext": (-8, 0), "ha": "right"} if side.across > 0 else {"xytext": (8, 0)}
            ax.annotate(series.inside[i], drawn, color=series.color, **away)
    barred = [i for i in valued if any(series.reach(i)) and not series.band]
    if barred:
        bars = list(zip(*map(series.reach, barred), strict=True))
        look: dict[str, Any] = {"color": series.color, "elinewidth": 1.2, "capsize": 3, "linestyle": "none"}
        ax.errorbar(*_at(series, barred), bars, zorder=order - 0.4, **look)
    if series.line is not None and len(series.x) > MAX_CROSSINGS:
        return
    size = 14.0 if shape == "ring" else 11.0 if series.inside else 4.0 if series.faint else 6.0
    if not series.inside:
        for hollow in (False, True):
            alike = [i for i in valued if series.is_hollow(i) == hollow]
            ax.plot(*_at(series, alike), zorder=order, **_look(series, shape, size, hollow))
        return
    place: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": 7.5, "fontweight": "bold"}
    for i in valued:  # one by one: where markers overlap, the later hides the words of the earlier
        hollow = series.is_hollow(i)
        ax.plot(*_at(series, [i]), zorder=order, **_look(series, shape, size, hollow))
        color = series.color if hollow else "white"
        ax.annotate(series.inside[i], (series.x[i], series.y[i] or 0.0), color=color, zorder=order, **place)


def _at(series: Series, points: Sequence[int]) -> tuple[list[float], list[float]]:
    return [series.x[i] for i in points], [series.y[i] or 0.0 for i in points]


def _look(series: Series, shape: Marker, size: float, hollow: bool) -> dict[str, Any]:
    open_inside = hollow or shape == "ring"
    return {
        "marker": MARKERS[shape],
        "markersize": size,
        "markerfacecolor": "none" if shape == "ring" else "white" if open_inside else series.color,
        "markeredgecolor": series.color if open_inside else "white",
        "markeredgewidth": 2.0 if shape == "ring" else 1.5 if open_inside else 0.6,
        "alpha": 0.55 if series.faint else 1.0,
        "linestyle": "none",
    }


def _draw_legend(canvas: Canvas, handles: Sequence[Line2D], width: float) -> None:
    """Below the panels, in as many rows as its words need."""
    names = [str(handle.get_label()) for handle in handles]
    columns = next((n for n in range(len(names), 1, -1) if _fits(names, n, width)), 1)
    legend = canvas.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _legend(figure: Figure) -> list[Line2D]:
    """One handle for each name, and one that explains hollow markers if any are hollow."""
    handles: dict[str, Line2D] = {}
    for series in (series for panel in figure.panels for series in panel.series if series.x):
        line = {"solid": "-", "dotted": ":", "steps": "-", None: "none"}[series.line]
        look = _look(series, series.marker, 6.5, False) if series.marker else {}
        style = {**look, "linestyle": line, "color": series.color, "linewidth": 1.6, "label": series.name}
        handles.setdefault(series.name, Line2D([], [], **style))
    for bars in (bars for panel in figure.panels for bars in panel.bars):
        patch = Line2D([], [], linestyle="none", marker="s", markersize=8, color=bars.color, label=bars.name)
        handles.setdefault(bars.name, patch)
    for level in (level for panel in figure.panels for level in panel.levels):
        dots = Line2D([], [], color=palette.INK, linewidth=1, linestyle=DOTS, label=level.name)
        handles.setdefault(level.name, dots)
    if figure.has_hollow:
        hollow = Line2D([], [], color=palette.QUIET, linestyle="--", marker="o", markerfacecolor="white")
        hollow.set_label("hollow, dashed: modelled time")
        handles["modelled"] = hollow
    return list(handles.values())


def _fits(names: Sequence[str], columns: int, width: float) -> bool:
    """Whether a legend of so many ``columns``, filled as matplotlib does, is no wider than ``width`` inches."""
    longest = [max(map(len, column)) for column in np.array_split(np.array(names), columns)]
    return sum(length + 10 for length in longest) <= 13 * width
