"""The figures and tables of a search as a whole, and how its page tells of paused trials."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from tests.support.studies import SETTINGS, Telling, stopping_study

from elastune.report import matplotlib_png as static
from elastune.report import plotly_html as interactive
from elastune.report.figures import Axis, Bars, Figure, Panel
from elastune.report.overviews import gather_study
from elastune.report.page import write_report
from elastune.report.study import (
    failed_trials_table,
    front_over_time,
    front_table,
    importance_figure,
    importance_table,
    subset_table,
    trials_table,
    workers_by_trial,
)
from elastune.tuning.search.importance import Importance, ParameterShare
from elastune.tuning.study.results import Study

FOUND = Importance("accuracy", 40, (ParameterShare("lr", 0.8, 40), ParameterShare("$mo$", 0.2, 23)))


def study(journal: Telling) -> Study:
    return Study.of(Path("out"), journal.entries)


def test_no_two_trials_share_a_worker_and_thickness_is_their_number() -> None:
    study_result = study(stopping_study(40))
    figure = workers_by_trial(study_result)
    assert figure is not None
    (panel,) = figure.panels
    boxes = [
        (begin, end, y - thick / 2, y + thick / 2)
        for bars in panel.bars
        for begin, end, y, thick in zip(bars.begin, bars.end, bars.y, bars.thickness, strict=True)
    ]
    for (b1, e1, l1, h1), (b2, e2, l2, h2) in itertools.combinations(boxes, 2):
        assert min(e1, e2) <= max(b1, b2) or min(h1, h2) <= max(l1, l2), "no worker serves two trials"
    area = sum((end - begin) * (high - low) for begin, end, low, high in boxes)
    assert area == pytest.approx(sum(span.worker_seconds for span in study_result.spans))
    assert {bars.name for bars in panel.bars} == {"completed", "paused, not gone on with", "without a result"}
    assert "1 change of workers" in figure.caption


def test_a_trial_that_is_widened_keeps_its_workers() -> None:
    journal = Telling().start(0, lr=0.1).start(1, lr=0.1, workers=2).wait(10).resize(1, 2, 4).wait(10)
    journal.complete(1, 0.9, 20.0).wait(5).fail(0, "no")
    figure = workers_by_trial(study(journal))
    assert figure is not None
    done = next(bars for bars in figure.panels[0].bars if bars.name == "completed")
    lanes = [(y - t / 2, y + t / 2) for y, t in zip(done.y, done.thickness, strict=True)]
    assert lanes == [(1.0, 3.0), (1.0, 5.0)]


def test_the_front_grows_with_time() -> None:
    journal = Telling().start(0, lr=0.1).wait(5).fail(0, "no").start(1, lr=0.1).wait(10).complete(1, 0.5, 10.0)
    journal.start(2, lr=0.1).wait(10).complete(2, 0.9, 10.0).wait(7).finish()
    figure = front_over_time(study(journal))
    assert figure is not None
    (series,) = figure.panels[0].series
    assert series.x == (15.0, 25.0, 32.0), "the failed trial's time is in it"
    assert series.y[0] < series.y[1] == series.y[2] == 1.0
    single = Telling({**SETTINGS, "objectives": {"accuracy": "max"}})
    single.start(0, lr=0.1).wait(1).complete(0, 0.5, 1.0).start(1, lr=0.1).wait(1).complete(1, 0.4, 1.0)
    figure = front_over_time(study(single))
    assert figure is not None
    assert figure.panels[0].series[0].y == (0.5, 0.5)
    assert front_over_time(study(Telling())) is None
    assert workers_by_trial(study(Telling())) is None
    assert importance_figure([Importance("accuracy", 3, why_not="too few")]) is None


def test_importance_is_drawn_and_written_the_same() -> None:
    figure = importance_figure([FOUND])
    assert figure is not None
    (panel,) = figure.panels
    assert panel.y.names == ("lr", "$mo$")
    assert {bars.name: bars.end for bars in panel.bars} == {"share": (0.8, 0.2)}
    assert len(static.png(figure)) > 5000, "a dollar in a name is no formula"
    assert "$mo$" in interactive.div(figure)
    table = importance_table(FOUND)
    assert table.rows == (("lr", "80.0", "40"), ("$mo$", "20.0", "23"))
    assert "40 trials" in table.note


def test_bars_must_fit_together() -> None:
    with pytest.raises(ValueError, match="2 middles but 1 end"):
        Bars("a", "#000000", (1.0, 2.0), (0.0, 0.0), (1.0,), (1.0, 1.0), ("", ""))
    panel = Panel("", Axis("x"), Axis("y"), (), bars=(Bars("a", "#000000", (2.0,), (3.0,), (9.0,), (1.0,), ("",)),))
    assert panel.x_range()[0] < 3.0 < 9.0 < panel.x_range()[1]
    assert panel.y_range()[0] < 1.5 < 2.5 < panel.y_range()[1]
    assert not Figure("a", "a", (panel,)).needs_legend


def test_tables_tell_of_paused_trials_and_keep_them_off_the_front() -> None:
    journal = Telling().start(0, lr=0.1).wait(5).report(0, 2, 5.0, accuracy=0.99).pause(0, 2, 5.0, "rank 2 of 2")
    journal.start(1, lr=0.1).wait(5).complete(1, 0.9, 5.0)
    story = gather_study(journal.entries)
    assert story is not None
    paused, done = trials_table(story).rows
    assert paused == (
        "0",
        "search",
        "paused after epoch 2",
        "0.99",
        "5 s",
        "5 s",
        "1",
        "replicated",
        "0",
        "lr=0.1",
        "rank 2 of 2",
    )
    assert done[2] == "complete"
    assert [row[0] for row in front_table(story, (1,)).rows] == ["1"]
    assert failed_trials_table(story).rows == ()
    study_result = study(journal)
    assert subset_table(study_result, [(study_result.front()[0], "covers all")]).rows[0][-1] == "covers all"


def test_the_page_shows_what_the_search_came_to(tmp_path: Path) -> None:
    import matplotlib.image

    out = stopping_study(40).write(tmp_path)
    text = write_report(out).read_text()
    for title in ("In words", "What decides the objectives", "Who had the workers when", "What was found by when"):
        assert title in text
    assert "paused after epoch 1" in text
    for name in ("timeline", "importance", "front_over_time"):
        image = matplotlib.image.imread(out / f"{name}.png")
        assert image.shape[0] > 400
        assert len({tuple(pixel) for row in image[::20, ::20] for pixel in row.tolist()}) > 3
