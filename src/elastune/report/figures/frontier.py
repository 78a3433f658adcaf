"""The figures of a frontier: the trade-off against the worker count, before and after, and the front."""

from __future__ import annotations

import math
from collections.abc import Sequence

from elastune.core.text import count, number, plain, plus_minus
from elastune.journal.records import FrontierFound, FrontierRow
from elastune.report.figures import palette
from elastune.report.figures.figures import Axis, Figure, Level, Panel, Series

NAIVE = "before: naive rule (batch and learning rate × workers)"
TUNED = "after: tuned"


def tradeoff(found: FrontierFound) -> Figure:
    """Quality and time against workers, before (naive rule) and after (tuned): the figure of Rojas and Meneses.

    Where several tuned rows share a worker count, the one shown is ``shown_row``.
    """
    naive = [row for row in found.rows if row.role == "naive"]
    tuned = list(_shown_by_workers(found).values())
    counts = tuple(float(w) for w in sorted({row.workers for row in found.rows}))
    workers = Axis("workers", log=True, ticks=counts)
    quality = plain(found.quality, 40)
    better = "higher is better" if found.direction == "max" else "lower is better"
    levels = (Level(found.target, f"target {number(found.target)}"),) if found.target is not None else ()
    panels = (
        Panel(
            f"Does {quality} hold?",
            workers,
            Axis(f"{quality} ({better})"),
            (
                _against_workers(NAIVE, naive, found, "quality"),
                _against_workers(TUNED, tuned, found, "quality"),
            ),
            levels,
        ),
        Panel(
            "What does it buy?",
            workers,
            Axis("training time (s)", log=True),
            (
                _against_workers(NAIVE, naive, found, "seconds"),
                _against_workers(TUNED, tuned, found, "seconds"),
            ),
        ),
    )
    return Figure("tradeoff", f"{_capital(quality)} and time against workers", panels, _caption(found))


def front(found: FrontierFound) -> Figure:
    """Quality against training time, worker counts in the markers; the front's points joined, the pick ringed."""
    drawn = [row for row in found.rows if math.isfinite(row.quality)]
    naive = [row for row in drawn if row.role == "naive"]
    tuned = [row for row in drawn if row.role == "tuned"]
    joined = sorted((row for row in drawn if row.on_front), key=lambda row: row.seconds)
    series = [
        Series(
            "Pareto front",
            tuple(row.seconds for row in joined),
            tuple(row.quality for row in joined),
            palette.QUIET,
            marker=None,
            line="solid",
            hollow=tuple(row.seconds_label == "modelled" for row in joined),
        ),
        _against_seconds("before: naive rule", naive, found),
        _against_seconds(TUNED, tuned, found),
    ]
    pick = found.rows[found.pick] if found.pick is not None else None
    if pick is not None and math.isfinite(pick.quality):
        label = (describe_row(pick, found),)
        series.append(Series("pick", (pick.seconds,), (pick.quality,), palette.PICK, marker="ring", labels=label))
    levels = (Level(found.target, f"target {number(found.target)}"),) if found.target is not None else ()
    quality = plain(found.quality, 40)
    better = "higher is better" if found.direction == "max" else "lower is better"
    panel = Panel("", Axis("training time (s)", log=True), Axis(f"{quality} ({better})"), tuple(series), levels)
    caption = f"Numbers in the markers are worker counts. {_caption(found)}"
    return Figure("front", f"The front: {quality} against time", (panel,), caption)


def shown_row(rows: Sequence[FrontierRow], found: FrontierFound) -> FrontierRow:
    """The row that stands for several: the pick if among them, else the fastest on target, else the best."""
    if found.pick is not None and found.rows[found.pick] in rows:
        return found.rows[found.pick]
    sign = 1 if found.direction == "max" else -1
    if found.target is not None:
        there = [row for row in rows if sign * row.quality >= sign * found.target]
        if there:
            return min(there, key=lambda row: row.seconds)
    return max(rows, key=lambda row: sign * row.quality if math.isfinite(row.quality) else -math.inf)


def describe_row(row: FrontierRow, found: FrontierFound) -> str:
    """One row in one line, for hovering."""
    data = "held-out data" if row.held_out else "validation data"
    parts = [
        f"{row.role}, {count(row.workers, 'worker')}",
        f"batch {row.batch_size}, lr {number(row.lr)} ({plain(row.lr_rule, 20)})",
        f"{plain(found.quality, 40)} {plus_minus(row.quality, row.ci)} on {data}, {count(row.seeds, 'seed')}",
        f"{number(row.seconds)} s ({row.seconds_label})",
    ]
    return "; ".join([*parts, f"{row.diverged} diverged"] if row.diverged else parts)


def _shown_by_workers(found: FrontierFound) -> dict[int, FrontierRow]:
    by_workers: dict[int, list[FrontierRow]] = {}
    for row in found.rows:
        if row.role == "tuned":
            by_workers.setdefault(row.workers, []).append(row)
    return {workers: shown_row(by_workers[workers], found) for workers in sorted(by_workers)}


def _against_workers(name: str, rows: Sequence[FrontierRow], found: FrontierFound, what: str) -> Series:
    rows = sorted(rows, key=lambda row: row.workers)
    timed = what == "seconds"
    values = [row.seconds if timed else row.quality for row in rows]
    return Series(
        name,
        tuple(float(row.workers) for row in rows),
        tuple(value if math.isfinite(value) and (value > 0 or not timed) else None for value in values),
        palette.BEFORE if name == NAIVE else palette.AFTER,
        marker="square" if name == NAIVE else "circle",
        line="solid",
        error=() if timed else tuple(row.ci for row in rows),
        hollow=tuple(timed and row.seconds_label == "modelled" for row in rows),
        labels=tuple(describe_row(row, found) for row in rows),
    )


def _against_seconds(name: str, rows: Sequence[FrontierRow], found: FrontierFound) -> Series:
    return Series(
        name,
        tuple(row.seconds for row in rows),
        tuple(row.quality for row in rows),
        palette.AFTER if name == TUNED else palette.BEFORE,
        marker="circle" if name == TUNED else "square",
        error=tuple(row.ci for row in rows),
        hollow=tuple(row.seconds_label == "modelled" for row in rows),
        labels=tuple(describe_row(row, found) for row in rows),
        inside=tuple(str(row.workers) for row in rows),
    )


def _caption(found: FrontierFound) -> str:
    fewest = min((row.seeds for row in found.rows), default=0)
    bars = f"Bars: 95 % confidence interval of the mean over at least {count(fewest, 'seed')} (Student's t)."
    if any(row.seconds_label == "modelled" for row in found.rows):
        bars += " Hollow markers and dashed lines: time from the step-time model."
    if emulated := sorted({row.workers for row in found.rows if row.quality_label == "emulated"}):
        bars += f" {_capital(found.quality)} of {', '.join(map(str, emulated))} workers is emulated on fewer."
    if any(not math.isfinite(row.quality) for row in found.rows):
        bars += " A cross on the lower edge: diverged."
    return bars


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
