"""The rows of a frontier's table: pure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.frontiers import FREE, cell, training
from tests.support.frontiers import TARGETED as BY

from elastune.core.journal.records import FrontierRow, RunFinished
from elastune.core.mesh import Mesh
from elastune.core.plan.confidence_intervals import bounded_ci, wilson
from elastune.core.run import ExecutionSettings
from elastune.tuning.frontier.criteria import FrontierCriteria, mark_front, noise_scale_of, row
from elastune.tuning.frontier.trainings import Recipe, StepKind, Training
from elastune.tuning.search.objective import Objective


def made(trainings: list[Training], workers: int = 1, by: FrontierCriteria = BY) -> FrontierRow | None:
    config = trainings[0].config if trainings else {"batch_size": 10, "lr": 0.1}
    layout = ExecutionSettings(workers=workers, num_slots=workers)
    return row("naive", layout, Recipe(config), "linear", trainings, by)


def test_a_row_is_the_mean_of_its_seeds() -> None:
    result = made([training(0.90, 1, test=0.80), training(0.94, 2, test=0.84), training(None, 3)])
    assert result is not None
    assert (result.validation, result.quality, result.held_out) == (pytest.approx(0.92), pytest.approx(0.82), True)
    assert result.ci == bounded_ci([0.80, 0.84], 0, 1)
    assert (result.seeds, result.diverged, result.trials) == (2, 1, [1, 2, 3])
    assert (result.seconds, result.seconds_label) == (pytest.approx(30 * 0.5), "measured")
    assert result.cost == pytest.approx(15 / 3600 * 2.0)


def test_a_row_says_whether_so_many_workers_trained_it() -> None:
    alone, for_four = made([training(0.9)]), made([training(0.9)], workers=4)
    assert alone is not None
    assert for_four is not None
    assert (alone.quality_label, for_four.quality_label) == ("measured", "emulated")


def test_validation_stands_in_where_a_seed_has_no_held_out_figure() -> None:
    result = made([training(0.90, test=0.5), training(0.94)])
    assert result is not None
    assert (result.quality, result.held_out) == (pytest.approx(0.92), False)


def test_no_row_where_all_diverged() -> None:
    assert made([training(None), training(None)]) is None
    assert made([]) is None


def test_times_beyond_the_measured_are_modelled() -> None:
    result = made([training(0.9)], workers=4)
    assert result is not None
    step_s = 0.01 + 0.001 * 3 + 2 * 3 * 0.002
    assert (result.seconds, result.seconds_label) == (pytest.approx(30 * step_s), "modelled")
    assert result.cost == pytest.approx(4 * 30 * step_s / 3600 * 2.0)


def test_a_model_of_another_size_is_timed_by_its_own_steps() -> None:
    alone = made([training(0.9, grad_bytes=80)])
    assert alone is not None
    assert (alone.seconds, alone.seconds_label) == (pytest.approx(30 * 0.6), "measured")
    two = made([training(0.9, batch=20, grad_bytes=80)], workers=2)
    assert two is not None
    assert two.seconds_label == "modelled", "what was measured was another model"
    assert two.seconds == pytest.approx(30 * (0.6 / 0.03 * 0.02 + 2 * 0.002))


def test_intervals_keep_the_bounds_and_count_the_test_set() -> None:
    """0.67 ± 0.83 once stretched the axis to 1.4."""
    collapsed = made([training(0.95, 1), training(0.78, 2), training(0.28, 3)])
    assert collapsed is not None
    assert collapsed.ci is not None
    assert 0 < collapsed.ci[0] < collapsed.quality < collapsed.ci[1] < 1
    same = made([training(0.98, 1, samples=400), training(0.98, 2, samples=400)])
    assert same is not None
    assert (same.test_samples, same.ci) == (400, pytest.approx(wilson(392, 400)))
    told_by_one = made([training(0.98, 1, samples=400), training(0.98, 2)])
    assert told_by_one is not None
    assert told_by_one.test_samples is None


def test_values_out_of_bounds_are_not_forced_into_them() -> None:
    """A program's accuracy may be percent: its name was no promise."""
    percent = made([training(98.2, 1, samples=400), training(98.6, 2, samples=400)])
    assert percent is not None
    assert percent.ci == bounded_ci([98.2, 98.6])


def test_a_loss_does_not_reach_below_zero() -> None:
    by = replace(BY, quality=Objective("accuracy", "min", low=0.0), target=None)
    result = made([training(0.3, 1), training(0.01, 2), training(0.02, 3)], by=by)
    assert result is not None
    assert result.ci is not None
    assert 0 < result.ci[0] < 0.1 < 0.3 < result.ci[1]


def test_modelled_times_tell_by_how_much_they_may_be_off() -> None:
    measured, modelled = made([training(0.9)]), made([training(0.9)], workers=4)
    assert measured is not None
    assert modelled is not None
    assert (measured.seconds_factor, modelled.seconds_factor) == (1.0, pytest.approx(1.25)), "1 / 0.8, the largest miss"
    unchecked = made([training(0.9)], workers=4, by=replace(BY, times=replace(BY.times, errors={})))
    assert unchecked is not None
    assert unchecked.seconds_factor is None


def test_throughput_is_samples_by_the_rows_own_time() -> None:
    result = made([training(0.9)])
    assert result is not None
    assert result.throughput == pytest.approx(300 / 15)


def test_scaling_efficiency_compares_the_same_settings_on_fewer_workers() -> None:
    """A tuned row once had 346 %: its settings' gain was counted as its workers'."""
    one, two, eight = StepKind(Mesh()), StepKind(Mesh(data=2)), StepKind(Mesh(data=8))
    others = {1: one, 2: two, 8: eight}

    def of(workers: int, batch: int) -> FrontierRow:
        layout = ExecutionSettings(workers=workers, num_slots=workers)
        recipe = Recipe({"batch_size": batch, "lr": 0.1})
        result = row("tuned", layout, recipe, "none", [training(0.9, batch=batch)], BY, (), others[workers], "", others)
        assert result is not None
        return result

    fewest, measured, modelled = of(1, 10), of(2, 20), of(8, 10)
    assert (fewest.scaling_efficiency, fewest.scaling_label) == (None, None), "nothing to compare with"
    assert [point.workers for point in fewest.scaling] == [1, 2, 8]
    alone_s = 0.01 + 0.001 * 20  # of a batch of 20, which was measured on two workers alone
    assert measured.scaling_efficiency == pytest.approx(alone_s / 0.25 / 2)
    assert measured.scaling_label == "modelled", "either time decides"
    assert modelled.scaling_efficiency == pytest.approx(30 * 0.5 / modelled.seconds / 8)
    for each in (fewest, measured, modelled):
        own = next(point for point in each.scaling if point.workers == each.workers)
        assert (own.seconds, own.seconds_label, own.cost) == (each.seconds, each.seconds_label, each.cost)


def test_time_to_target_is_the_mean_over_seeds_of_the_first_report_there() -> None:
    at_end, at_two_thirds = training(0.9), training(1.4)
    assert [made([t]).time_to_target_s for t in (at_end, at_two_thirds)] == [pytest.approx(15), pytest.approx(10)]
    both = made([at_end, at_two_thirds])
    assert both is not None
    assert both.time_to_target_s == pytest.approx(12.5)
    assert both.time_to_target_ci == pytest.approx(bounded_ci([15.0, 10.0], 0.0))
    assert both.reached == 2
    missed = made([at_end, training(0.8)])
    assert missed is not None
    assert (missed.time_to_target_s, missed.time_to_target_ci, missed.reached) == (None, None, 1)
    assert made([at_end], by=replace(BY, target=None)).time_to_target_s is None


def test_the_front_is_over_quality_time_and_cost() -> None:
    rows = [cell(), cell(workers=2, quality=0.8), cell("tuned", 2), cell("tuned", 4, 0.95, cost=0.5)]
    assert [r.on_front for r in mark_front(rows, BY)] == [False, False, False, True]
    assert [r.on_front for r in mark_front(rows[:3], BY)] == [False, False, True]
    missed = [*rows, cell(quality=0.1, cost=0.1, seconds=0.1, verdict="falls")]
    assert [r.on_front for r in mark_front(missed, BY)] == [False, False, False, True, False], "it misses the target"
    assert mark_front(missed, FREE)[4].on_front, "without one it is a point like others"
    with_cheap = [*rows, cell(quality=0.1, cost=0.1, seconds=100.0)]
    assert [r.on_front for r in mark_front(with_cheap, BY)] == [False, False, False, True, True]


def with_scale(*signals: tuple[float, float | None]) -> list[RunFinished]:
    return [RunFinished("sha", 1, 30, 300, 1.0, {}, signals={"noise_scale": signal}) for signal in signals]


def test_the_noise_scale_of_a_row_is_the_mean_over_its_seeds() -> None:
    assert noise_scale_of(with_scale((400.0, 30.0))) == (400.0, 30.0)
    assert noise_scale_of(with_scale((390.0, 30.0), (410.0, 40.0))) == (400.0, 25.0), "what the runs say of themselves"
    mean, error = noise_scale_of(with_scale((300.0, 1.0), (500.0, 1.0)))
    assert (mean, error) == (400.0, pytest.approx(100.0)), "unless they differ by more"
    assert noise_scale_of(with_scale((400.0, None))) == (400.0, None)
    assert noise_scale_of([RunFinished("sha", 1, 30, 300, 1.0, {})]) == (None, None)
    one = training(0.9)
    assert one.run is not None
    measured = replace(one, result=replace(one.result, run=replace(one.run, signals={"noise_scale": (70.0, 5.0)})))
    result = made([measured])
    assert result is not None
    assert (result.noise_scale, result.noise_scale_error) == (70.0, 5.0)
