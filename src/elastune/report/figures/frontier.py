"""The figures of a frontier: the trade-off against the worker count, before and after, and the front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from elastune.core.text import count, duration, estimate, modelled, number, plain, rate
from elastune.journal.records import FrontierFound, FrontierRow
from elastune.report.figures import palette
from elastune.report.figures.figures import Axis, Figure, Level, Marker, Panel, Series, without_outliers

What = Literal["quality", "seconds", "throughput"]
NAIVE = "before: naive rule (batch and learning rate × workers)"
TUNED = "after: tuned"
ELSEWHERE = "the pick's settings, time alone"


def tradeoff(found: FrontierFound) -> Figure:
    """Quality, time and throughput against workers, before (naive rule) and after (tuned): Rojas and Meneses' figure.

    Lines join points of one setting: those of the naive rule, those of equal tuned settings, and the pick's settings
    on all worker counts. Where several rows of a role share a worker count, the one shown is ``shown_row``.
    """
    naive, tuned = _shown_by_workers(found, "naive"), _shown_by_workers(found, "tuned")
    alike = dict[str, list[FrontierRow]]()
    for row in tuned:
        alike.setdefault(row.settings, []).append(row)
    counts = tuple(float(w) for w in sorted({row.workers for row in found.rows}))
    workers = Axis("workers", log=True, ticks=counts)
    quality = plain(found.quality, 40)
    better = "higher is better" if found.direction == "max" else "lower is better"
    shown: tuple[tuple[str, Axis, What], ...] = (
        (f"Does {quality} hold?", Axis(f"{quality} ({better})"), "quality"),
        ("What does it buy?", Axis("training time (s)", log=True), "seconds"),
        ("How much is done?", Axis("throughput (samples/s)", log=True), "throughput"),
    )
    panels = tuple(
        Panel(
            title,
            workers,
            axis,
            (
                _against_workers(NAIVE, naive, found, what),
                *_pick_elsewhere(found, what),
                *(_against_workers(TUNED, rows, found, what) for rows in alike.values()),
                *_ring(found, "workers", what),
            ),
            _levels(found) if what == "quality" else (),
            within=_within(found) if what == "quality" else None,
        )
        for title, axis, what in shown
    )
    return Figure("tradeoff", f"{_capital(quality)}, time and throughput against workers", panels, _caption(found))


def front(found: FrontierFound) -> Figure:
    """Quality against training time, worker counts in the markers; the front's points joined, the pick ringed."""
    drawn = [row for row in found.rows if math.isfinite(row.quality)]
    naive = [row for row in drawn if row.role == "naive"]
    tuned = [row for row in drawn if row.role == "tuned"]
    joined = _in_the_picture([row for row in drawn if row.on_front], found)
    series = [
        Series(
            "Pareto front" if found.target is None else "Pareto front of what may reach the target",
            tuple(row.seconds for row in joined),
            tuple(row.quality for row in joined),
            palette.QUIET,
            marker=None,
            line="solid",
            hollow=tuple(row.seconds_label == "modelled" for row in joined),
        ),
        *_by_mechanism("before: naive rule", "square", naive, palette.BEFORE, found),
        *_by_mechanism(TUNED, "circle", tuned, palette.AFTER, found),
        *_ring(found, "seconds", "quality"),
    ]
    quality = plain(found.quality, 40)
    better = "higher is better" if found.direction == "max" else "lower is better"
    time, value = Axis("training time (s)", log=True), Axis(f"{quality} ({better})")
    panel = Panel("", time, value, tuple(series), _levels(found), within=_within(found))
    caption = (
        "Numbers in the markers are worker counts. The line joins rows that no other one beats in quality and time; "
    )
    caption += f"on the table's front cost counts, too. {_caption(found)}"
    return Figure("front", f"The front: {quality} against time", (panel,), caption)


def _in_the_picture(rows: Sequence[FrontierRow], found: FrontierFound) -> list[FrontierRow]:
    """Those of ``rows`` that no other one beats in quality and time, fastest first."""
    sign, kept = 1 if found.direction == "max" else -1, list[FrontierRow]()
    for row in sorted(rows, key=lambda row: (row.seconds, -sign * row.quality)):
        if not kept or sign * row.quality > sign * kept[-1].quality:
            kept.append(row)
    return kept


def _levels(found: FrontierFound) -> tuple[Level, ...]:
    return (Level(found.target, f"target {number(found.target)}"),) if found.target is not None else ()


def _within(found: FrontierFound) -> tuple[float, float] | None:
    """What the axis of quality shows: the target, the pick and the front in any case, and no outliers."""
    kept = [row.quality for i, row in enumerate(found.rows) if i == found.pick or row.on_front]
    kept += [] if found.target is None else [found.target]
    keep = [value for value in kept if math.isfinite(value)]
    return without_outliers([row.quality for row in found.rows], keep)


def _ring(found: FrontierFound, across: Literal["workers", "seconds"], what: What) -> list[Series]:
    """The pick, last of all and so on top."""
    row = found.rows[found.pick] if found.pick is not None else None
    value = None if row is None else getattr(row, what)
    if row is None or value is None or not math.isfinite(value) or (what != "quality" and value <= 0):
        return []
    at, label = (float(getattr(row, across)),), (describe_row(row, found),)
    return [Series("pick", at, (value,), palette.PICK, marker="ring", labels=label)]


def _pick_elsewhere(found: FrontierFound, what: What) -> list[Series]:
    """The pick's settings on the other worker counts, of which times alone are known: what workers buy."""
    row = found.rows[found.pick] if found.pick is not None else None
    points = [] if row is None else [point for point in row.scaling if point.seconds > 0]
    if row is None or what == "quality" or len(points) < 2 or not row.throughput:
        return []
    work, seconds = row.throughput * row.seconds, what == "seconds"
    hollow = tuple(point.seconds_label == "modelled" for point in points)
    values = tuple(point.seconds if seconds else work / point.seconds for point in points)
    labels = tuple(
        f"the pick's settings on {count(point.workers, 'worker')}; {duration(point.seconds)} "
        f"({'measured' if point.seconds_label == 'measured' else modelled(point.seconds_factor)})"
        for point in points
    )
    at = tuple(float(point.workers) for point in points)
    return [Series(ELSEWHERE, at, values, palette.PICK, marker="diamond", line="solid", hollow=hollow, labels=labels)]


def shown_row(rows: Sequence[FrontierRow], found: FrontierFound) -> FrontierRow:
    """The row that stands for several: the pick, or the fastest on target, or the best; of equal ones the fastest."""
    if found.pick is not None and found.rows[found.pick] in rows:
        return found.rows[found.pick]
    sign = 1 if found.direction == "max" else -1
    if found.target is not None:
        there = [row for row in rows if sign * row.quality >= sign * found.target]
        if there:
            return min(there, key=lambda row: row.seconds)
    return max(rows, key=lambda row: (sign * row.quality if math.isfinite(row.quality) else -math.inf, -row.seconds))


def describe_row(row: FrontierRow, found: FrontierFound) -> str:
    """One row in one line, for hovering."""
    data = "held-out data" if row.held_out else "validation data"
    parts = [
        ", ".join(word for word in (row.role, count(row.workers, "worker"), plain(row.apart, 200)) if word),
        f"batch {row.batch_size}, lr {number(row.lr)} ({plain(row.lr_rule, 20)})",
        f"{plain(found.quality, 40)} {estimate(row.quality, row.ci)} {row.quality_label} on {data}, "
        f"{count(row.seeds, 'seed')}: {row.verdict}",
        f"{duration(row.seconds)} ({'measured' if row.seconds_label == 'measured' else modelled(row.seconds_factor)})",
        rate(row.throughput),
    ]
    return "; ".join([*parts, f"{row.diverged} diverged"] if row.diverged else parts)


def _shown_by_workers(found: FrontierFound, role: str) -> list[FrontierRow]:
    by_workers: dict[int, list[FrontierRow]] = {}
    for row in found.rows:
        if row.role == role:
            by_workers.setdefault(row.workers, []).append(row)
    return [shown_row(by_workers[workers], found) for workers in sorted(by_workers)]


def _against_workers(name: str, rows: Sequence[FrontierRow], found: FrontierFound, what: What) -> Series:
    rows = sorted(rows, key=lambda row: row.workers)
    clocked = what != "quality"
    values = [getattr(row, what) for row in rows]
    return Series(
        name,
        tuple(float(row.workers) for row in rows),
        tuple(v if v is not None and math.isfinite(v) and (v > 0 or not clocked) else None for v in values),
        palette.BEFORE if name == NAIVE else palette.AFTER,
        marker="square" if name == NAIVE else "circle",
        line="solid",
        error=tuple(_reach(row, what) for row in rows),
        hollow=tuple(clocked and row.seconds_label == "modelled" for row in rows),
        labels=tuple(describe_row(row, found) for row in rows),
    )


def _reach(row: FrontierRow, what: What) -> tuple[float, float] | None:
    """How far below and above: the confidence interval of quality; of a model's figure, by what it may be off."""
    if what == "quality":
        if row.ci is None or not math.isfinite(row.quality):
            return None
        return max(0.0, row.quality - row.ci[0]), max(0.0, row.ci[1] - row.quality)
    value, factor = getattr(row, what), row.seconds_factor
    if value is None or factor is None or factor <= 1:
        return None
    return value - value / factor, value * factor - value


def _by_mechanism(
    name: str, marker: Marker, rows: Sequence[FrontierRow], color: str, found: FrontierFound
) -> list[Series]:
    """Rows of one rule; each mechanism's in its own colour, where there are several."""
    mechanisms = sorted({row.mechanism for row in found.rows})
    if len(mechanisms) == 1:
        return [_against_seconds(name, marker, rows, color, found)]
    colors = {mechanism: palette.SEQUENCE[i % len(palette.SEQUENCE)] for i, mechanism in enumerate(mechanisms)}
    series = []
    for mechanism in dict.fromkeys(row.mechanism for row in rows):
        own = [row for row in rows if row.mechanism == mechanism]
        series.append(_against_seconds(f"{name}, {plain(mechanism, 40)}", marker, own, colors[mechanism], found))
    return series


def _against_seconds(
    name: str, marker: Marker, rows: Sequence[FrontierRow], color: str, found: FrontierFound
) -> Series:
    return Series(
        name,
        tuple(row.seconds for row in rows),
        tuple(row.quality for row in rows),
        color,
        marker=marker,
        error=tuple(_reach(row, "quality") for row in rows),
        hollow=tuple(row.seconds_label == "modelled" for row in rows),
        labels=tuple(describe_row(row, found) for row in rows),
        inside=tuple(str(row.workers) for row in rows),
    )


def _caption(found: FrontierFound) -> str:
    fewest, quality = min((row.seeds for row in found.rows), default=0), plain(found.quality, 40)
    words = f"Bars of {quality}: 95 % confidence interval of the mean over at least {count(fewest, 'seed')}."
    if any(row.seconds_label == "modelled" for row in found.rows):
        factors = [row.seconds_factor for row in found.rows if row.seconds_label == "modelled" and row.seconds_factor]
        words += " Hollow markers and dashed lines: time and throughput from the step-time model, "
        if factors:
            words += f"with bars as far as it was off where it could be checked (×÷ {number(max(factors), 3)})."
        else:
            words += "which could not be checked here."
    if len({(row.role, row.workers) for row in found.rows}) < len(found.rows):
        words += " Of several rows of as many workers the pick or the fastest of the best is shown."
    if emulated := sorted({row.workers for row in found.rows if row.quality_label == "emulated"}):
        words += f" {_capital(quality)} of {', '.join(map(str, emulated))} workers is emulated on fewer."
    if found.rows and len({row.settings for row in found.rows if row.role == "tuned"}) > 1:
        words += " Lines join points of one setting: tuned points without a line are settings of their own."
    if _within(found) is not None:
        words += " A triangle at the edge: beyond the axis."
    if any(not math.isfinite(row.quality) for row in found.rows):
        words += " A cross on the lower edge: diverged."
    return words


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
