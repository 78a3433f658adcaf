"""The figure of a run that adapts: loss, noise scale, batch, learning rate, workers and how they agree, on one axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from elastune.core.text import count, number, plain
from elastune.journal.records import Decided, Measured
from elastune.report.figures import palette
from elastune.report.figures.figures import Axis, Figure, Mark, Marker, Panel, Series
from elastune.report.figures.sync_bands import bands, distances, sent
from elastune.report.gather import RunStory
from elastune.report.tables.adapting import Adaptation
from elastune.report.tables.decision_text import LOSS, NOISE_SCALE, change_text, decided_line, measured_text
from elastune.report.tables.sync_story import SyncStory

MOST_LABELS = 12  # decisions, beyond which their words would cover each other
MOST_MARKS = 80
MOST_LETTERS = 18
MOST_COUNTS = 8  # that an axis can name each of


def over_time(run: RunStory, adaptation: Adaptation, story: SyncStory | None = None) -> Figure | None:
    """All that was measured over the seconds of training, decisions as vertical lines, strategies and topologies as
    bands; None where nothing was measured and nothing asked for."""
    measured, story = adaptation.measured, story or SyncStory()
    if not measured and not story.any:
        return None
    panels = [
        _panel("loss", _losses(run, measured)),
        _panel("samples", (*_noise_scale(measured), _batch(measured)), log=True),
        _panel("learning rate", (_steps("learning rate", measured, lambda m: m.lr, 3),)),
        _panel("workers", (_steps("workers", measured, lambda m: float(m.workers), 1),), ticks=_counts(measured)),
        _panel("learners' distance", distances(measured)),
        _panel("bytes a step", sent(measured), log=True),
        bands(story),
    ]
    drawn = [panel for panel in panels if panel.bars or any(series.x for series in panel.series)]
    drawn[-1] = replace(drawn[-1], x=Axis("training time (s)"))
    decided = adaptation.decided
    words = []
    if panels[4].series:
        words.append(
            "Learners' distance: root mean square from their mean where a round ends, over the norm of the mean."
        )
    if panels[5].series:
        words.append("Bytes: of all workers' collectives.")
    if any(series.band for panel in drawn for series in panel.series):
        words.append("Shaded: one standard error.")
    if decided:
        words.append("Vertical lines: decisions, dotted where nothing was changed.")
    if len(decided) > MOST_MARKS:
        words.append(f"The last {MOST_MARKS} of {count(len(decided), 'decision')} are drawn; the table has all.")
    return Figure(
        "adapting",
        "Noise scale and batch size over training" if len(panels[1].series) > 1 else "What was measured over training",
        tuple(drawn),
        " ".join(words),
        stacked=True,
        marks=_marks(decided),
    )


def _panel(label: str, series: Sequence[Series], log: bool = False, ticks: tuple[float, ...] = ()) -> Panel:
    return Panel("", Axis(""), Axis(label, log=log, ticks=ticks), tuple(series))


def _counts(measured: Sequence[Measured]) -> tuple[float, ...]:
    """The worker counts there were, if they are few: there is no half a worker."""
    counts = sorted({float(m.workers) for m in measured})
    return tuple(counts) if len(counts) <= MOST_COUNTS else ()


def _losses(run: RunStory, measured: Sequence[Measured]) -> tuple[Series, ...]:
    """The measured training loss; where no monitor told it, what the program reported as its loss."""
    told = [(m, value) for m in measured if (value := _signal(m, LOSS)[0]) is not None]
    if told:
        return (_line("loss", told, palette.INK),)
    reports = [r for r in run.reports if math.isfinite(r.metrics.get(LOSS, math.nan))]
    if not reports:
        return ()
    x, y = tuple(r.seconds for r in reports), tuple(r.metrics[LOSS] for r in reports)
    return (Series("reported loss", x, y, palette.INK, line="solid"),)


def _noise_scale(measured: Sequence[Measured]) -> tuple[Series, ...]:
    told = [(m, *_signal(m, NOISE_SCALE)) for m in measured]
    known = [(m, value, error) for m, value, error in told if value is not None and value > 0]
    if not known:
        return ()
    series = _line("gradient noise scale", [(m, value) for m, value, _ in known], palette.BEST)
    errors = tuple(None if error is None else (error, error) for _, _, error in known)
    return (replace(series, error=errors, band=True) if any(errors) else series,)


def _batch(measured: Sequence[Measured]) -> Series:
    return _steps("batch size", measured, lambda m: float(m.batch_size), 0)


def _line(name: str, told: Sequence[tuple[Measured, float]], color: str) -> Series:
    return Series(
        name,
        tuple(m.seconds for m, _ in told),
        tuple(value for _, value in told),
        color,
        marker=_marker(len(told)),
        line="solid",
        labels=tuple(_label(m) for m, _ in told),
    )


def _steps(name: str, measured: Sequence[Measured], value: Callable[[Measured], float], color: int) -> Series:
    """What holds until it is changed: a stair."""
    x, y = tuple(m.seconds for m in measured), tuple(value(m) for m in measured)
    return Series(name, x, y, palette.SEQUENCE[color], marker=_marker(len(x)), line="steps")


def _marks(decided: Sequence[Decided]) -> tuple[Mark, ...]:
    shown = decided[-MOST_MARKS:]
    return tuple(
        Mark(
            each.cause.seconds,
            _first_change(each) if len(shown) <= MOST_LABELS else "",
            decided_line(each),
            strange=each.outcome != "applied",
        )
        for each in shown
    )


def _first_change(decided: Decided) -> str:
    """``batch 32→64``: what stands at the head of a line; the rest shows on hover and in the table."""
    first = change_text(decided).partition(", ")[0].partition(" over ")[0]
    return plain(first.replace(" -> ", "→"), MOST_LETTERS)


def _marker(points: int) -> Marker | None:
    """Lines stand alone, unless there is nothing to join."""
    return None if points > 1 else "circle"


def _signal(measured: Measured, name: str) -> tuple[float | None, float | None]:
    """A signal's value and error, None where it is missing or not finite."""
    value, error = measured.signals.get(name, (math.nan, None))
    known = error if error is not None and math.isfinite(error) else None
    return (value, known) if math.isfinite(value) else (None, None)


def _label(m: Measured) -> str:
    told = measured_text(m).replace(", ", "; ")
    return f"step {m.step}, {number(m.seconds, 4)} s; {told}"
