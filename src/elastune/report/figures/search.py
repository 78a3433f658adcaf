"""Figures of a search as a whole: who had the workers when, what decided it, and how its front grew with time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from elastune.core.text import count, duration, number, plain
from elastune.journal.trials import AllocationSpan
from elastune.report.figures import palette
from elastune.report.figures.figures import Axis, Bars, Figure, Panel, Series
from elastune.report.figures.study import front_growth
from elastune.search.analysis.importance import Importance
from elastune.search.space.objective import oriented
from elastune.study.results.study import Study

FATES = {
    "complete": ("completed", palette.AFTER),
    "paused": ("paused, not gone on with", palette.PICK),
    "infeasible": ("without a result", palette.BEFORE),
    "unfinished": ("not ended", palette.QUIET),
}
MOST_SPANS = 3000
MOST_BARS = 12  # parameters, or pairs of them, of an objective
MOST_OBJECTIVES = 3
NAME_WIDTH = 26
MICRO_S = 1e-6  # shorter than any span that matters


def workers_by_trial(study: Study) -> Figure | None:
    """Which trial had which part of the workers when: white is waiting. Bars are as thick as their workers are many."""
    shown = [span for span in study.spans if span.end_s - span.begin_s > MICRO_S]
    if not shown:
        return None
    left_out = len(shown) - MOST_SPANS
    lanes = _lanes(shown)
    fates = {trial.number: trial.state for trial in study.trials}
    bars = []
    for fate, (words, color) in FATES.items():
        own = [
            (span, low, high)
            for span, runs in zip(shown[-MOST_SPANS:], lanes[-MOST_SPANS:], strict=True)
            if fates.get(span.trial, "unfinished") == fate
            for low, high in runs
        ]
        if own:
            bars.append(
                Bars(
                    words,
                    color,
                    y=tuple((low + high) / 2 for _, low, high in own),
                    begin=tuple(span.begin_s for span, _, _ in own),
                    end=tuple(span.end_s for span, _, _ in own),
                    thickness=tuple(float(high - low) for _, low, high in own),
                    labels=tuple(_told(span) for span, _, _ in own),
                )
            )
    if not bars:
        return None
    pauses = sum(span.ended == "paused" for span in study.spans)
    resumes = sum(span.begun == "resumed" for span in study.spans)
    moves = sum(span.ended == "regrouped" for span in study.spans)
    caption = (
        "A bar is a stretch of a trial with unchanged workers, as thick as they are many; its colour says what became "
        f"of the trial. {count(pauses, 'pause')}, {count(resumes, 'resumption')}, "
        f"{count(moves, 'change')} of workers while a trial ran."
    )
    if left_out > 0:
        caption += f" The first {left_out} stretches are not drawn."
    panel = Panel("", Axis("time of the study (s)"), Axis("workers"), (), bars=tuple(bars))
    return Figure("timeline", "Who had the workers when", (panel,), caption)


def importance(found: Sequence[Importance]) -> Figure | None:
    """What decides each objective: its parameters, by their shares."""
    panels = tuple(_importance(each) for each in found if each.parameters)[:MOST_OBJECTIVES]
    if not panels:
        return None
    caption = "How far a parameter's values among the best quarter of the trials differ from those among all."
    return Figure("importance", "What decides the objectives", panels, caption)


def front_over_time(study: Study) -> Figure | None:
    """What the front covers as the study's time goes by; with one objective, its best value."""
    done = sorted((t for t in study.complete if t.phase == "search"), key=lambda trial: trial.ended_s)
    if not done:
        return None
    points = oriented([trial.values for trial in done], study.counted)
    first = study.objectives[0]
    if len(study.objectives) == 1:
        best = np.minimum.accumulate(points[:, 0]) * (-1.0 if first.direction == "max" else 1.0)
        heights, label = best.tolist(), f"best {plain(first.name, 40)} so far"
    else:
        heights, label = front_growth(points), "hypervolume / final hypervolume"
    times = [trial.ended_s for trial in done]
    labels = [
        f"trial {trial.number}; after {duration(trial.ended_s)}; {number(h)}"
        for trial, h in zip(done, heights, strict=True)
    ]
    if study.seconds > times[-1]:
        times, heights, labels = [*times, study.seconds], [*heights, heights[-1]], [*labels, "end of the journal"]
    series = Series(label, tuple(times), tuple(heights), palette.BEST, marker=None, line="steps", labels=tuple(labels))
    panel = Panel("", Axis("time of the study (s)"), Axis(label), (series,))
    return Figure("front_over_time", "What was found by when", (panel,), "Failed and paused trials take time as well.")


def _importance(found: Importance) -> Panel:
    shown = found.parameters[:MOST_BARS]
    places = tuple(float(len(shown) - i) for i in range(len(shown)))  # the most important on top
    names = tuple(plain(each.name, NAME_WIDTH) for each in shown)
    labels = tuple(f"{name}; {each.share:.1%}" for name, each in zip(names, shown, strict=True))
    ends = tuple(each.share for each in shown)
    bars = Bars("share", palette.AFTER, places, (0.0,) * len(shown), ends, (0.6,) * len(shown), labels)
    axis = Axis("", ticks=places, names=names)
    return Panel(plain(found.objective, 40), Axis("share of what decides it"), axis, (), bars=(bars,))


def _lanes(spans: Sequence[AllocationSpan]) -> list[list[tuple[int, int]]]:
    """Of each span, the runs [low, high) of worker lanes that it is drawn on: free ones, the lowest first.

    A trial whose workers change keeps what it had, as far as it may.
    """
    events = sorted(
        [(span.begin_s, True, span.trial, i) for i, span in enumerate(spans)]
        + [(span.end_s, False, span.trial, i) for i, span in enumerate(spans)]
    )
    taken: dict[int, list[int]] = {}  # by span
    used: set[int] = set()
    last: dict[int, list[int]] = {}  # by trial, where it was
    runs: list[list[tuple[int, int]]] = [[] for _ in spans]
    for _, begins, _, i in events:
        span = spans[i]
        if not begins:
            last[span.trial] = taken.pop(i)
            used.difference_update(last[span.trial])
            continue
        own = set([lane for lane in last.get(span.trial, []) if lane not in used][: span.workers])
        lane = 0
        while len(own) < span.workers:
            own |= {lane} - used
            lane += 1
        taken[i] = sorted(own)
        used.update(own)
        runs[i] = [(run[0], run[-1] + 1) for run in _consecutive(taken[i])]
    return runs


def _consecutive(numbers: Sequence[int]) -> list[list[int]]:
    return [[n for _, n in group] for _, group in groupby(enumerate(numbers), key=lambda each: each[1] - each[0])]


def _told(span: AllocationSpan) -> str:
    ended = f"{span.ended}: {plain(span.reason, 100)}" if span.reason else span.ended
    return (
        f"trial {span.trial}; {count(span.workers, 'worker')}; {span.begun} after {duration(span.begin_s)}; "
        f"{duration(span.end_s - span.begin_s)}; {ended}"
    )
