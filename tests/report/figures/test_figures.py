import math
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.journal.records import Entry, FrontierAnswer
from elastune.report import matplotlib_png as static
from elastune.report import plotly_html as interactive
from elastune.report.figures import Axis, Figure, Level, Panel, Series, log_ticks, without_outliers
from elastune.report.frontier import pareto_figure, shown_row, tradeoff_figure
from elastune.report.overviews import front_trials, gather_run, gather_study
from elastune.report.study import MAX_CURVES, curves_figure, front_figure, history_figure


def series_of(figure, start, panel=0):
    return next(s for s in figure.panels[panel].series if s.name.startswith(start))


def test_tradeoff_holds_the_numbers_of_the_rows(found):
    alike = {"lr": 0.05, "batch_size": 64}
    found = replace(found, rows=[replace(r, config=alike if r.role == "tuned" else r.config) for r in found.rows])
    figure = tradeoff_figure(found)
    for role, start in (("naive", "before"), ("tuned", "after")):
        rows = [row for row in found.rows if row.role == role]
        quality, seconds, throughput = (series_of(figure, start, panel) for panel in (0, 1, 2))
        assert quality.x == seconds.x == tuple(row.workers for row in rows)
        assert quality.y == tuple(row.quality for row in rows)
        assert [(y - below, y + above) for y, (below, above) in zip(quality.y, quality.error, strict=True)] == [
            pytest.approx(row.ci) for row in rows
        ]
        assert throughput.y == tuple(row.throughput for row in rows)
        assert throughput.hollow == seconds.hollow
        assert seconds.y == tuple(row.seconds for row in rows)
        assert seconds.hollow == tuple(row.seconds_label == "modelled" for row in rows)
        assert not any(quality.hollow), "quality is always measured"
    below, above = seconds.error[-1]
    modelled_s = found.rows[-1].seconds
    assert (modelled_s - below, modelled_s + above) == (
        pytest.approx(modelled_s / 1.4),
        pytest.approx(modelled_s * 1.4),
    )
    assert "off where it could be checked (×÷ 1.4)" in figure.caption
    assert figure.panels[0].levels == (Level(0.975, "target 0.975"),)
    assert figure.panels[0].x.ticks == (1, 2, 4, 8)
    assert "modelled" in seconds.labels[-1]
    assert "measured" in seconds.labels[0]


def test_tradeoff_marks_what_diverged(with_rows):
    figure = tradeoff_figure(with_rows({3: {"quality": math.nan, "ci": None, "diverged": 3}}))
    naive = series_of(figure, "before")
    assert naive.y[3] is None
    assert "3 diverged" in naive.labels[3]
    assert "diverged" in figure.caption
    low, high = figure.panels[0].y_range()
    assert math.isfinite(low)
    assert math.isfinite(high)


def test_front_holds_the_numbers_of_the_rows(found):
    figure = pareto_figure(found)
    tuned = [row for row in found.rows if row.role == "tuned"]
    drawn = series_of(figure, "after")
    assert list(zip(drawn.x, drawn.y, drawn.inside, strict=True)) == [
        (row.seconds, row.quality, str(row.workers)) for row in tuned
    ]
    joined = series_of(figure, "Pareto")
    assert joined.x == tuple(sorted(row.seconds for row in found.rows if row.on_front))
    slower = list(found.rows)
    slower[4] = replace(slower[4], quality=0.9772)
    assert series_of(pareto_figure(replace(found, rows=slower)), "Pareto").x == joined.x[:-1], (
        "beaten in all that is drawn"
    )
    pick = series_of(figure, "pick")
    assert (pick.x, pick.y) == ((found.rows[7].seconds,), (found.rows[7].quality,))


def test_lines_join_points_of_one_setting(found):
    """A curve called "tuned" once went .87, 1.73, .49 s: its middle point was the naive rule."""
    apart = [s for s in tradeoff_figure(found).panels[1].series if s.name.startswith("after")]
    assert [s.x for s in apart] == [(1,), (2,), (4,), (8,)], "each has a rate of its own"
    assert "Lines join points of one setting" in tradeoff_figure(found).caption
    rows = list(found.rows)
    rows[6] = replace(rows[6], config=rows[4].config)
    apart = [s for s in tradeoff_figure(replace(found, rows=rows)).panels[1].series if s.name.startswith("after")]
    assert [s.x for s in apart] == [(1, 4), (2,), (8,)]
    elsewhere = series_of(tradeoff_figure(found), "the pick's settings", 1)
    assert (elsewhere.x, elsewhere.y, elsewhere.hollow) == ((1, 8), (36.2, 7.4), (False, True))
    work = series_of(tradeoff_figure(found), "the pick's settings", 2)
    assert work.y == pytest.approx((64_000 / 36.2, 64_000 / 7.4))
    assert not any(s.name.startswith("the pick's settings") for s in tradeoff_figure(found).panels[0].series), (
        "times alone"
    )


@pytest.mark.parametrize("log", [False, True])
def test_points_beyond_the_x_axis_stand_at_its_edge(log: bool) -> None:
    xs = (1.0, 1.1, 1.2, 1.3, 500.0)
    series = Series("trials", xs, (0.5, 0.6, 0.7, 0.8, None), "#0072B2", inside=tuple("abcde"))
    both = replace(series, y=(0.5, 0.6, 0.7, 0.8, 9.0))
    across = without_outliers(xs, log=log)
    assert across == (1.0, 1.3)
    panel = Panel("", Axis("seconds", log=log), Axis("loss"), (series, both), within=(0.5, 0.8), across=across)
    assert panel.x_range()[1] < 2.0
    assert both.beyond(panel) == {4: (1, 1)}
    assert replace(both, y=(0.5, 0.6, 0.7, 0.8, 0.6)).beyond(panel)[4].arrow == "right"
    x, y = panel.drawn(500.0, 9.0)
    assert 1.3 <= x < panel.x_range()[1]
    assert 0.8 <= y < panel.y_range()[1]
    assert panel.drawn(1.1, 0.6) == (1.1, 0.6)
    figure = Figure("front", "The front", (replace(panel, within=None, series=(both, series)),))
    assert '"triangle-right"' in interactive.div(figure)
    assert static.png(figure).startswith(b"\x89PNG")


def test_outliers_stand_at_the_edge_and_the_pick_on_top(with_rows):
    """One diverged run pressed all others into a line."""
    changed = with_rows({3: {"quality": 0.11, "ci": (0.1, 0.12)}})
    for figure in (pareto_figure(changed), tradeoff_figure(changed)):
        panel = figure.panels[0]
        low, high = panel.y_range()
        assert low > 0.8
        naive = series_of(figure, "before")
        assert naive.beyond(panel) == {3: (0, -1)}
        assert low < panel.drawn(naive.x[3], 0.11)[1] < panel.drawn(naive.x[3], 9.0)[1] < high
        assert "A triangle at the edge" in figure.caption
        assert panel.series[-1].marker == "ring"
        assert '"triangle-down"' in interactive.div(figure)
        assert static.png(figure) != static.png(
            replace(figure, panels=tuple(replace(p, within=None) for p in figure.panels))
        )
    kept = with_rows({7: {"quality": 0.11, "ci": (0.1, 0.12)}})
    assert pareto_figure(kept).panels[0].y_range()[0] < 0.11, "the pick is always shown"
    assert without_outliers([0.9, 0.91]) is None
    assert without_outliers([0.9, 0.91, 0.92, 0.93]) is None
    assert without_outliers([0.9, 0.91, 0.92, 0.93, 0.1]) == (0.9, 0.93)


def test_front_without_a_pick_has_no_ring(found):
    assert not any(
        s.name == "pick" for s in pareto_figure(replace(found, answer=FrontierAnswer("None."))).panels[0].series
    )


def test_of_several_tuned_rows_one_stands_for_a_worker_count(found, with_rows):
    tuned = found.rows[4:]
    assert shown_row(tuned, found) is found.rows[7], "the pick"
    without = replace(found, answer=FrontierAnswer("None."))
    assert shown_row(tuned, without) is tuned[3], "the fastest on target"
    assert shown_row(tuned, replace(without, target=0.99)) is tuned[0], "the best where none is on target"
    lower = replace(without, direction="min", target=None)
    assert shown_row(tuned, lower) is tuned[3], "the smallest where smaller is better"
    assert (
        shown_row(found.rows[:2], with_rows({0: {"quality": math.nan}}, answer=FrontierAnswer("None."), target=None))
        is found.rows[0]
    )


def test_history_holds_every_trial_and_the_best_so_far(frontier_entries):
    study = gather_study(frontier_entries)
    figure = history_figure(study)
    search = series_of(figure, "search")
    expected = [t.value("accuracy") for t in study.ended if t.phase == "search"]
    assert list(search.y) == expected
    best = series_of(figure, "best")
    assert list(best.y) == list(accumulate((v for v in expected if v is not None), max))
    drawn = sum(len(s.x) for s in figure.panels[0].series if s is not best)
    assert drawn == 40, "calibration is no result"
    assert "4 trials without a result" in figure.caption


def test_history_of_two_objectives_adds_a_growing_hypervolume(study_entries):
    figure = history_figure(gather_study(study_entries))
    shares = figure.panels[1].series[0].y
    assert shares[-1] == pytest.approx(1.0)
    assert all(a <= b + 1e-12 for a, b in pairwise(shares))
    assert shares[0] < 0.9


def test_history_of_a_minimised_objective_goes_down(study_entries):
    first = study_entries[0]
    settings = {**first.record.settings, "objectives": {"seconds": "min"}}
    study = gather_study([Entry(first.at, replace(first.record, settings=settings)), *study_entries[1:]])
    best = series_of(history_figure(study), "best").y
    assert best[-1] == min(best)
    assert best[0] > best[-1]


def test_study_front_parts_the_front_from_the_rest(study_entries):
    study = gather_study(study_entries)
    best = front_trials(study)
    figure = front_figure(study, best)
    on, off = series_of(figure, "front"), series_of(figure, "other")
    assert len(on.x) == len(best)
    assert len(on.x) + len(off.x) == sum(t.complete for t in study.trials)
    assert list(on.x) == sorted(on.x)
    assert on.y == tuple(sorted(on.y)), "along a front, more time buys more accuracy"


def test_nothing_to_draw_is_no_figure(study_entries, run_entries):
    started = gather_study(study_entries[:1])
    assert history_figure(started) is None
    assert front_figure(started, ()) is None
    assert curves_figure(gather_run(run_entries[:1])) is None


def test_curves_hold_the_reports(run_entries):
    run = gather_run(run_entries)
    figure = curves_figure(run)
    assert [panel.y.label for panel in figure.panels] == ["accuracy", "loss"]
    accuracy = figure.panels[0].series[0]
    assert accuracy.x == tuple(r.step for r in run.reports)
    assert accuracy.y == tuple(r.metrics["accuracy"] for r in run.reports)


def test_curves_of_many_metrics_are_bounded_and_say_so(run_entries):
    reports = [replace(e.record, metrics={f"m{i}": 1.0 * i for i in range(9)}) for e in run_entries[1:5]]
    run = gather_run([run_entries[0], *(Entry(0.0, r) for r in reports)])
    figure = curves_figure(run)
    assert len(figure.panels) == MAX_CURVES
    assert "3 further metrics" in figure.caption


def test_series_of_unequal_lengths_are_refused():
    with pytest.raises(ValueError, match="2 points but 1 of y"):
        Series("a", (1.0, 2.0), (1.0,), "#000000")
    with pytest.raises(ValueError, match="2 points but 1 of error"):
        Series("a", (1.0, 2.0), (1.0, 2.0), "#000000", error=((0.1, 0.1),))


def test_a_wild_interval_does_not_press_the_rest_flat():
    panel = Panel(
        "", Axis("x"), Axis("y"), (Series("a", (1.0, 2.0), (0.9, 0.8), "#000000", error=((0.01, 0.01), (50.0, 50.0))),)
    )
    low, high = panel.y_range()
    assert high - low < 0.3


@given(
    st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=6),
    st.booleans(),
    st.lists(st.none() | st.floats(0, 10), min_size=6, max_size=6),
)
def test_every_point_lies_within_its_axes(values, log, errors):
    ones = tuple(float(i + 1) for i in range(len(values)))
    series = Series(
        "a",
        ones,
        tuple(values),
        "#000000",
        error=tuple(None if e is None else (e / 2, e) for e in errors[: len(values)]),
    )
    panel = Panel("", Axis("x"), Axis("y", log=log), (series,))
    low, high = panel.y_range()
    assert low < min(values) <= max(values) < high
    assert low < panel.floor() < high
    if log:
        assert low > 0
        ticks = log_ticks(low, high)
        assert len(ticks) >= 2
        assert all(low <= tick <= high for tick in ticks)
