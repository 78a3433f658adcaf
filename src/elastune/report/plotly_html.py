"""A figure as HTML that can be zoomed and hovered, drawn by Plotly. The page inlines Plotly's script once."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from elastune.core.formatting import number
from elastune.report import figures as palette
from elastune.report.figures import Axis, Bars, EdgeSide, Figure, Line, Marker, Panel, Series

SYMBOLS: dict[Marker, str] = {"circle": "circle", "square": "square", "diamond": "diamond", "ring": "circle"}
PANEL_HEIGHT_PX = 360
STACKED_HEIGHT_PX = 190
LABEL_ROOM = 0.07  # of the width: what a slanted label of a mark takes on a narrow screen
BAND_OPACITY = 0.2
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def script() -> str:
    """Plotly's own JavaScript, to stand once in a page before any ``div``."""
    return str(get_plotlyjs())


def div(figure: Figure) -> str:
    """``figure`` as an HTML fragment: its legend and its panels. Everything that came from a journal is escaped.

    Panels stand side by side only where the page is wide enough, so each is a plot of its own; a stack, whose panels
    share their x axis, is one plot.
    """
    if figure.stacked:
        plots = [_plot(figure, figure.panels, f"figure-{figure.name}")]
    else:
        plots = [_plot(figure, (panel,), f"figure-{figure.name}-{i}") for i, panel in enumerate(figure.panels)]
    titles = [""] if figure.stacked else [html.escape(panel.title) for panel in figure.panels]
    shown = "".join(
        f"<div class=panel>{f'<h3>{title}</h3>' if title else ''}<div class=plot>{plot}</div></div>"
        for title, plot in zip(titles, plots, strict=True)
    )
    columns = {1: "panels", 2: "panels two"}.get(figure.columns, "panels three")
    return f'{_legend(figure)}<div class="{columns}">{shown}</div>'


def _plot(figure: Figure, panels: Sequence[Panel], name: str) -> str:
    rows = len(panels)
    plot = make_subplots(rows=rows, cols=1, vertical_spacing=0.04 if rows > 1 else 0.0, shared_xaxes=figure.stacked)
    for place, panel in enumerate(panels):
        _draw(plot, panel, place + 1)
    if figure.stacked:
        plot.update_xaxes(range=figure.x_range())
        _marks(plot, figure)
    headroom = 65 if figure.stacked and any(mark.label for mark in figure.marks) else 0
    plot.update_layout(
        height=(STACKED_HEIGHT_PX if figure.stacked else PANEL_HEIGHT_PX) * rows + 40 + headroom,
        margin={"l": 62, "r": 14, "t": 14 + headroom, "b": 52},
        template="none",
        barmode="overlay",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": FONT, "color": palette.INK, "size": 13},
        showlegend=False,
        hoverlabel={"bgcolor": "white", "font": {"color": palette.INK}},
    )
    config = {"displayModeBar": False, "responsive": True}
    return str(plot.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=config))


def _legend(figure: Figure) -> str:
    """The names of series, levels and bars, each with its mark, if any panel has several; it wraps as text does."""
    if not figure.needs_legend and not figure.has_hollow:
        return ""
    keys: dict[str, str] = {}
    for panel in figure.panels:
        for series in panel.series:
            if series.x:
                keys.setdefault(series.name, _key(series.color, series.line, series.marker))
        for bars in panel.bars:
            keys.setdefault(bars.name, f'<rect x="5" y="2" width="18" height="10" fill="{bars.color}"/>')
        for level in panel.levels:
            keys.setdefault(level.name, _key(palette.INK, "dotted", None))
    if figure.has_hollow:
        dashed = f'<path d="M0 7H28" stroke="{palette.QUIET}" stroke-width="2" stroke-dasharray="4 3"/>'
        ring = f'<circle cx="14" cy="7" r="4.5" fill="white" stroke="{palette.QUIET}" stroke-width="2"/>'
        keys["hollow, dashed: modelled time"] = dashed + ring
    entries = "".join(
        f'<li><svg viewBox="0 0 28 14" aria-hidden="true">{key}</svg>{_escaped(name)}</li>'
        for name, key in keys.items()
    )
    return f"<ul class=legend>{entries}</ul>"


def _key(color: str, line: Line | None, marker: Marker | None) -> str:
    """The mark of a series in a legend, as SVG."""
    dashes = ' stroke-dasharray="2 3"' if line == "dotted" else ""
    drawn = f'<path d="M0 7H28" stroke="{color}" stroke-width="2"{dashes}/>' if line else ""
    shapes: dict[Marker, str] = {
        "circle": f'<circle cx="14" cy="7" r="5" fill="{color}"/>',
        "square": f'<rect x="9.5" y="2.5" width="9" height="9" fill="{color}"/>',
        "diamond": f'<path d="M14 1L20 7L14 13L8 7Z" fill="{color}"/>',
        "ring": f'<circle cx="14" cy="7" r="5" fill="none" stroke="{color}" stroke-width="2.5"/>',
    }
    return drawn + (shapes[marker] if marker else "")


def _draw(plot: go.Figure, panel: Panel, row: int) -> None:
    for series in panel.series:
        for trace in _traces(series, panel) if series.x else ():
            plot.add_trace(trace, row=row, col=1)
    for bars in panel.bars:
        plot.add_trace(_bars(bars), row=row, col=1)
    for level in panel.levels:
        line = {"color": palette.INK, "width": 1, "dash": "dot"}
        ends = list(panel.x_range())
        trace = go.Scatter(
            x=ends, y=[level.y] * 2, mode="lines", line=line, hoverinfo="skip", name=_escaped(level.name)
        )
        plot.add_trace(trace, row=row, col=1)
    plot.update_xaxes(_axis(panel.x, panel.x_range()), row=row, col=1)
    plot.update_yaxes(_axis(panel.y, panel.y_range()), row=row, col=1)


def _bars(bars: Bars) -> go.Bar:
    return go.Bar(
        name=_escaped(bars.name),
        orientation="h",
        y=list(bars.y),
        base=list(bars.begin),
        x=[end - begin for begin, end in zip(bars.begin, bars.end, strict=True)],
        width=list(bars.thickness),
        marker={"color": bars.color, "line": {"width": 0.5, "color": "white"}},
        hovertext=["<br>".join(map(_escaped, label.split("; "))) for label in bars.labels],
        hoverinfo="text",
        textposition="none",
        customdata=list(bars.links) or None,
    )


def _traces(series: Series, panel: Panel) -> list[go.Scatter]:
    """The band, the line's pieces, the points, the crosses, and the points beyond the axis at its edge."""
    shared: dict[str, Any] = {"name": _escaped(series.name)}
    lines = _lines(series, shared)
    beyond = series.beyond(panel)
    valued = [i for i, y in enumerate(series.y) if y is not None and i not in beyond]
    missing = [i for i, y in enumerate(series.y) if y is None]
    points = [_points(series, series.marker, valued, shared)] if series.marker and valued else []
    crosses = [_crosses(series, missing, panel, shared)] if missing else []
    outside = [_outside(series, beyond, panel, shared)] if beyond and series.marker else []
    band = [_band(series, panel.y_range()[0], shared)] if series.band else []
    return [*band, *lines, *points, *crosses, *outside]


def _marks(plot: go.Figure, figure: Figure) -> None:
    """Lines through the whole stack; at their heads a point each to hover over, and labels that do not overlap."""
    low, high = figure.x_range()
    free_from = low
    for mark in figure.marks:
        color = palette.BEFORE if mark.strange else palette.QUIET
        line = {"color": color, "width": 1, "dash": "dot" if mark.strange else "solid"}
        plot.add_shape(type="line", xref="x", yref="paper", x0=mark.x, x1=mark.x, y0=0, y1=1, line=line, layer="below")
        if mark.label and mark.x >= free_from:
            free_from = mark.x + LABEL_ROOM * (high - low)
            at = {
                "x": mark.x,
                "xref": "x",
                "y": 1.0,
                "yref": "paper",
                "yshift": 8,
                "xanchor": "left",
                "yanchor": "bottom",
            }
            plot.add_annotation(text=_escaped(mark.label), textangle=-40, showarrow=False, font={"size": 11}, **at)
    if figure.marks:
        heads = go.Scatter(
            x=[mark.x for mark in figure.marks],
            y=[figure.panels[0].y_range()[1]] * len(figure.marks),
            mode="markers",
            marker={
                "symbol": "triangle-down",
                "size": 10,
                "color": [palette.BEFORE if mark.strange else palette.INK for mark in figure.marks],
            },
            hovertext=["<br>".join(map(_escaped, mark.detail.split("; "))) for mark in figure.marks],
            hoverinfo="text",
            cliponaxis=False,
        )
        plot.add_trace(heads, row=1, col=1)


def _band(series: Series, floor: float, shared: dict[str, Any]) -> go.Scatter:
    xs, low, high = series.edges(floor)
    return go.Scatter(
        x=[*xs, *reversed(xs)],
        y=[*high, *reversed(low)],
        fill="toself",
        fillcolor=f"rgba({','.join(str(int(series.color[i : i + 2], 16)) for i in (1, 3, 5))},{BAND_OPACITY})",
        mode="lines",
        line={"width": 0},
        hoverinfo="skip",
        **shared,
    )


def _outside(series: Series, beyond: dict[int, EdgeSide], panel: Panel, shared: dict[str, Any]) -> go.Scatter:
    """Points beyond the axes, at their edges."""
    points = list(beyond)
    drawn = [panel.drawn(series.x[i], series.y[i] or 0.0) for i in points]
    return go.Scatter(
        x=[x for x, _ in drawn],
        y=[y for _, y in drawn],
        mode="markers+text" if series.inside else "markers",
        text=[_escaped(series.inside[i]) for i in points] if series.inside else None,
        textposition=["middle left" if side.across > 0 else "middle right" for side in beyond.values()],
        textfont={"size": 11, "color": series.color},
        marker={
            "symbol": [f"triangle-{side.arrow}" for side in beyond.values()],
            "size": 12,
            "color": series.color,
        },
        hovertext=_hover(series, points),
        hoverinfo="text",
        customdata=[series.links[i] for i in points] if series.links else None,
        **shared,
    )


def _crosses(series: Series, points: list[int], panel: Panel, shared: dict[str, Any]) -> go.Scatter:
    return go.Scatter(
        x=[panel.drawn_across(series.x[i]) for i in points],
        y=[panel.floor()] * len(points),
        mode="markers",
        marker={"symbol": "x-thin", "size": 9, "line": {"width": 2, "color": series.color}},
        hovertext=_hover(series, points),
        hoverinfo="text",
        customdata=[series.links[i] for i in points] if series.links else None,
        **shared,
    )


def _lines(series: Series, shared: dict[str, Any]) -> list[go.Scatter]:
    if series.line is None:
        return []
    style = {"color": series.color, "width": 2, "shape": "hv" if series.line == "steps" else "linear"}
    pieces: dict[bool, tuple[list[float | None], list[float | None], list[str]]] = {}
    for points, dashed in series.pieces():
        xs, ys, hover = pieces.setdefault(dashed, ([], [], []))
        xs += [*(series.x[i] for i in points), None]
        ys += [*(series.y[i] for i in points), None]
        hover += [*_hover(series, points), ""]
    speaks = series.marker is None and bool(series.labels)  # else its points do
    plain_dash = "dot" if series.line == "dotted" else "solid"
    return [
        go.Scatter(
            x=xs,
            y=ys,
            mode="lines",
            line={**style, "dash": "dash" if dashed else plain_dash},
            hovertext=hover if speaks else None,
            hoverinfo="text" if speaks else "skip",
            **shared,
        )
        for dashed, (xs, ys, hover) in sorted(pieces.items(), reverse=True)
    ]


def _points(series: Series, shape: Marker, points: list[int], shared: dict[str, Any]) -> go.Scatter:
    ring = shape == "ring"
    symbol = SYMBOLS[shape]
    reaches = [(0.0, 0.0) if series.band else series.reach(i) for i in points]
    below, above = [reach[0] for reach in reaches], [reach[1] for reach in reaches]
    return go.Scatter(
        x=[series.x[i] for i in points],
        y=[series.y[i] for i in points],
        error_y={
            "type": "data",
            "symmetric": False,
            "array": above,
            "arrayminus": below,
            "color": series.color,
            "thickness": 1.3,
            "visible": any(above) or any(below),
        },
        mode="markers+text" if series.inside else "markers",
        text=[_escaped(series.inside[i]) for i in points] if series.inside else None,
        textfont={
            "size": 11,
            "weight": "bold",
            "color": [series.color if series.is_hollow(i) else "white" for i in points],
        },
        marker={
            "symbol": [f"{symbol}-open" if ring else symbol for _ in points],
            "size": 25 if ring else 18 if series.inside else 6 if series.faint else 9,
            "color": [series.color if ring or not series.is_hollow(i) else "white" for i in points],
            "opacity": 0.55 if series.faint else 1.0,
            "line": {
                "width": [2.5 if ring else 2 if series.is_hollow(i) else 1 for i in points],
                "color": [series.color if ring or series.is_hollow(i) else "white" for i in points],
            },
        },
        hovertext=_hover(series, points),
        hoverinfo="text",
        customdata=[series.links[i] for i in points] if series.links else None,
        **shared,
    )


def _hover(series: Series, points: list[int]) -> list[str]:
    if not series.labels:
        return [f"{_escaped(series.name)}: {number(series.y[i])}" for i in points]
    return ["<br>".join(map(_escaped, series.labels[i].split("; "))) for i in points]


def _escaped(text: str) -> str:
    return html.escape(text, quote=False)


def _axis(axis: Axis, limits: tuple[float, float]) -> dict[str, Any]:
    low, high = (math.log10(limits[0]), math.log10(limits[1])) if axis.log else limits
    drawn: dict[str, Any] = {
        "title": {"text": _escaped(axis.label), "standoff": 8},
        "type": "log" if axis.log else "linear",
        "range": [low, high],
        "gridcolor": palette.GRID,
        "linecolor": palette.QUIET,
        "showline": True,
        "zeroline": False,
        "ticks": "outside",
        "tickcolor": palette.QUIET,
        "automargin": True,
        "tickangle": 0,
    }
    if ticks := axis.ticks_within(*limits):
        texts = [_escaped(name) for name in axis.names] or [number(tick) for tick in ticks]
        drawn |= {"tickmode": "array", "tickvals": list(ticks), "ticktext": texts}
    return drawn
