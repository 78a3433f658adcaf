"""How a run's workers agreed, over the seconds of training: strategies and topologies as bands, distance and bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from elastune.core.text import byte_count, duration, number, plain
from elastune.journal.records import Measured
from elastune.report.figures import palette
from elastune.report.figures.figures import Axis, Bars, Marker, Panel, Series
from elastune.report.tables.decision_text import LEARNERS_DISTANCE, SENT_BYTES
from elastune.report.tables.sync_story import Since, SyncStory, spans

THICK = 0.7
MOST_LETTERS = 70


def bands(story: SyncStory) -> Panel:
    """A row of bands for strategies and one for topologies, a colour each; none where there is nothing to tell."""
    rows = [told for told in (story.topologies, story.strategies) if told] if story.any else []
    found: dict[tuple[str, str], Bars] = {}
    for place, told in enumerate(rows):
        for each, begin, end in spans(told, story.seconds):
            key = (each.which, each.what)
            color = palette.SEQUENCE[len(found) % len(palette.SEQUENCE)]
            own = found.setdefault(key, Bars(_name(each), color, (), (), (), (), ()))
            found[key] = replace(
                own,
                y=(*own.y, float(place)),
                begin=(*own.begin, begin),
                end=(*own.end, end),
                thickness=(*own.thickness, THICK),
                labels=(*own.labels, _label(each, begin, end)),
            )
    ticks, names = tuple(float(place) for place in range(len(rows))), tuple(told[0].which for told in rows)
    return Panel("", Axis(""), Axis("", ticks=ticks, names=names), (), bars=tuple(found.values()))


def distances(measured: Sequence[Measured]) -> tuple[Series, ...]:
    """How far apart learners were; a line for each time that the run had any."""
    return tuple(
        _line("learners' distance", part, LEARNERS_DISTANCE, palette.PICK)
        for has, group in groupby(measured, lambda m: _known(m, LEARNERS_DISTANCE))
        if has and (part := list(group))
    )


def sent(measured: Sequence[Measured]) -> tuple[Series, ...]:
    """The bytes of a step, where there were any: a worker alone sends none."""
    told = [m for m in measured if _known(m, SENT_BYTES) and m.signals[SENT_BYTES][0] > 0]
    return (_line("bytes a step", told, SENT_BYTES, palette.AFTER),) if told else ()


def _line(name: str, told: Sequence[Measured], signal: str, color: str) -> Series:
    values = tuple(m.signals[signal][0] for m in told)
    shown = [byte_count(round(value)) if signal == SENT_BYTES else number(value, 3) for value in values]
    labels = tuple(
        f"step {m.step}, {number(m.seconds, 4)} s; {name} {text}" for m, text in zip(told, shown, strict=True)
    )
    marker: Marker | None = "circle" if len(told) == 1 else None
    return Series(name, tuple(m.seconds for m in told), values, color, marker=marker, line="solid", labels=labels)


def _known(measured: Measured, signal: str) -> bool:
    return math.isfinite(measured.signals.get(signal, (math.nan, None))[0])


def _name(each: Since) -> str:
    return plain(each.what if each.which == "strategy" else f"sums by {each.what}", MOST_LETTERS)


def _label(each: Since, begin: float, end: float) -> str:
    what = plain(each.what, 120).replace("; ", ", ")
    why = plain(each.why, 200).replace("; ", ", ")
    return f"{each.which} {what}; from step {each.step}, {number(begin, 4)} s, for {duration(end - begin)}; {why}"
