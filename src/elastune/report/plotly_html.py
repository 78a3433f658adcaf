"""A figure as HTML that can be zoomed and hovered, drawn by Plotly. The page inlines Plotly's script once."""

from __future__ import annotations

import html
import math
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from elastune.core.formatting import number
from elastune.report import figures as palette
from elastune.report.figures import Axis, Bars, Figure, Marker, Panel, Series, log_ticks

SYMBOLS: dict[Marker, str] = {"circle": "circle", "square": "square", "diamond": "diamond", "ring": "circle"}
PANEL_HEIGHT_PX = 360
STACKED_HEIGHT_PX = 190
LEGEND_BELOW_PX = 58
BAND_OPACITY = 0.2
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def script() -> str:
    """Plotly's own JavaScript, to stand once in a page before any ``div``."""
    return str(get_plotlyjs())


def div(figure: Figure) -> str:
    """``figure`` as an HTML fragment. Everything that came from a journal is escaped."""
    columns = figure.columns
    rows = math.ceil(len(figure.panels) / columns)
    plot = make_subplots(
        rows=rows,
        cols=columns,
        subplot_titles=[_escaped(panel.title) for panel in figure.panels],
        horizontal_spacing=0.11 if columns > 1 else 0.0,
        vertical_spacing=(0.04 if figure.stacked else 0.18) if rows > 1 else 0.0,
        shared_xaxes=figure.stacked,
    )
    named: set[str] = set()
    for place, panel in enumerate(figure.panels):
        _draw(plot, panel, place // columns + 1, place % columns + 1, named)
    if figure.stacked:
        plot.update_xaxes(range=figure.x_range())
        _marks(plot, figure)
    height = (STACKED_HEIGHT_PX if figure.stacked else PANEL_HEIGHT_PX) * rows
    headroom = 65 if any(mark.label for mark in figure.marks) else 0
    plot.update_layout(
        height=height + 90 + headroom,
        margin={"l": 70, "r": 25, "t": 45 + headroom, "b": 60},
        template="none",
        barmode="overlay",
        paper_bgcolor="white",
        plot_bgcolor="white",
        font={"family": FONT, "color": palette.INK, "size": 13},
        showlegend=figure.needs_legend,
        legend={"orientation": "h", "yanchor": "top", "y": -LEGEND_BELOW_PX / height, "x": 0.5, "xanchor": "center"},
        hoverlabel={"bgcolor": "white", "font": {"color": palette.INK}},
    )
    if figure.has_hollow:
        plot.add_trace(_hollow_key(), row=1, col=1)
    config = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["lasso2d"]}
    return str(plot.to_html(full_html=False, include_plotlyjs=False, div_id=f"figure-{figure.name}", config=config))


def _draw(plot: go.Figure, panel: Panel, row: int, col: int, named: set[str]) -> None:
    for series in panel.series:
        if not series.x:
            continue
        for trace in _traces(series, panel, show=series.name not in named):
            plot.add_trace(trace, row=row, col=col)
        named.add(series.name)
    for bars in panel.bars:
        plot.add_trace(_bars(bars, show=bars.name not in named), row=row, col=col)
        named.add(bars.name)
    for level in panel.levels:
        line = {"color": palette.INK, "width": 1, "dash": "dot"}
        ends = list(panel.x_range())
        legend = {"name": _escaped(level.name), "legendgroup": level.name, "showlegend": level.name not in named}
        trace = go.Scatter(x=ends, y=[level.y] * 2, mode="lines", line=line, hoverinfo="skip", **legend)
        plot.add_trace(trace, row=row, col=col)
        named.add(level.name)
    plot.update_xaxes(_axis(panel.x, panel.x_range()), row=row, col=col)
    plot.update_yaxes(_axis(panel.y, panel.y_range()), row=row, col=col)


def _bars(bars: Bars, show: bool) -> go.Bar:
    return go.Bar(
        name=_escaped(bars.name),
        legendgroup=bars.name,
        showlegend=show,
        orientation="h",
        y=list(bars.y),
        base=list(bars.begin),
        x=[end - begin for begin, end in zip(bars.begin, bars.end, strict=True)],
        width=list(bars.thickness),
        marker={"color": bars.color, "line": {"width": 0.5, "color": "white"}},
        hovertext=["<br>".join(map(_escaped, label.split("; "))) for label in bars.labels],
        hoverinfo="text",
        textposition="none",
    )


def _traces(series: Series, panel: Panel, show: bool) -> list[go.Scatter]:
    """The band, the line's pieces, the points, the crosses; the points (else the line) stand in the legend."""
    shared: dict[str, Any] = {"name": _escaped(series.name), "legendgroup": series.name, "showlegend": False}
    lines = _lines(series, shared)
    beyond = series.beyond(panel)
    valued = [i for i, y in enumerate(series.y) if y is not None and i not in beyond]
    missing = [i for i, y in enumerate(series.y) if y is None]
    points = [_points(series, series.marker, valued, shared)] if series.marker and valued else []
    crosses = [_crosses(series, missing, panel.floor(), shared)] if missing else []
    outside = [_outside(series, beyond, panel, shared)] if beyond and series.marker else []
    band = [_band(series, panel.y_range()[0], shared)] if series.band else []
    for speaker in (*points, *lines, *crosses, *outside)[:1]:
        speaker.showlegend = show
    return [*band, *lines, *points, *crosses, *outside]


def _marks(plot: go.Figure, figure: Figure) -> None:
    """Lines through the whole stack; at their heads labels, and a point each to hover over."""
    for mark in figure.marks:
        color = palette.BEFORE if mark.strange else palette.QUIET
        line = {"color": color, "width": 1, "dash": "dot" if mark.strange else "solid"}
        plot.add_shape(type="line", xref="x", yref="paper", x0=mark.x, x1=mark.x, y0=0, y1=1, line=line, layer="below")
        if mark.label:
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
            showlegend=False,
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


def _outside(series: Series, beyond: dict[int, int], panel: Panel, shared: dict[str, Any]) -> go.Scatter:
    """Points beyond the axis, at its edge."""
    points = list(beyond)
    return go.Scatter(
        x=[series.x[i] for i in points],
        y=[panel.edge(side) for side in beyond.values()],
        mode="markers+text" if series.inside else "markers",
        text=[_escaped(series.inside[i]) for i in points] if series.inside else None,
        textposition="middle right",
        textfont={"size": 11, "color": series.color},
        marker={
            "symbol": ["triangle-down" if side < 0 else "triangle-up" for side in beyond.values()],
            "size": 12,
            "color": series.color,
        },
        hovertext=_hover(series, points),
        hoverinfo="text",
        **shared,
    )


def _crosses(series: Series, points: list[int], floor: float, shared: dict[str, Any]) -> go.Scatter:
    return go.Scatter(
        x=[series.x[i] for i in points],
        y=[floor] * len(points),
        mode="markers",
        marker={"symbol": "x-thin", "size": 9, "line": {"width": 2, "color": series.color}},
        hovertext=_hover(series, points),
        hoverinfo="text",
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
        **shared,
    )


def _hover(series: Series, points: list[int]) -> list[str]:
    if not series.labels:
        return [f"{_escaped(series.name)}: {number(series.y[i])}" for i in points]
    return ["<br>".join(map(_escaped, series.labels[i].split("; "))) for i in points]


def _escaped(text: str) -> str:
    return html.escape(text, quote=False)


def _hollow_key() -> go.Scatter:
    return go.Scatter(
        x=[None],
        y=[None],
        mode="lines+markers",
        name="hollow, dashed: modelled time",
        line={"color": palette.QUIET, "dash": "dash"},
        marker={"color": "white", "size": 9, "line": {"width": 2, "color": palette.QUIET}},
    )


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
        "automargin": bool(axis.names),
    }
    ticks = axis.ticks or (log_ticks(*limits) if axis.log else ())
    if ticks:
        texts = [_escaped(name) for name in axis.names] or [number(tick) for tick in ticks]
        drawn |= {"tickmode": "array", "tickvals": list(ticks), "ticktext": texts}
    return drawn
