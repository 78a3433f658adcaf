"""The table, the comparison and the answer of a frontier: pure tables."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from elastune.core.run import Means
from elastune.frontier.rows import (
    FrontierCriteria,
    Times,
    answer,
    falls,
    hypervolumes,
    mark_front,
    noise_scale_of,
    row,
    support,
)
from elastune.frontier.trainings import Training
from elastune.journal.records import FrontierRow, Reported, RunFinished, TrialFinished
from elastune.plan.step_time import StepTime
from elastune.search.space.objective import Objective

MODEL = StepTime(base_s=0.01, per_sample_s=0.001, latency_s=0.002, seconds_per_byte=0.0, grad_bytes=40)
BY = FrontierCriteria(Objective("accuracy", "max"), 0.9, 2.0, Times(MODEL, {(10, 1): 0.5, (20, 2): 0.25}))

FREE = replace(BY, target=None)


def cell(role: str = "naive", workers: int = 1, quality: float = 0.9, **changes: Any) -> FrontierRow:
    made = FrontierRow(
        role=role, workers=workers, batch_size=10 * workers, lr=0.1, lr_rule="linear", mechanism="ddp", mode="fast",
        config={}, quality=quality, ci=0.01, seeds=3, held_out=True, validation=quality, seconds=8.0 / workers,
        seconds_label="measured", cost=1.0,
    )  # fmt: skip
    return replace(made, **changes)


def training(
    quality: float | None, seed: int = 0, batch: int = 10, *, test: float | None = None, grad_bytes: int = 40
) -> Training:
    """Of 30 steps, with a report after every ten; ``quality`` None: it failed."""
    if quality is None:
        return Training(seed, {"batch_size": batch, "lr": 0.1}, seed, 1, "naive", (), TrialFinished(seed, "infeasible"))
    metrics = {"accuracy": quality} | ({} if test is None else {"test_accuracy": test})
    run = RunFinished("sha", 1, 30, 30 * batch, 1.0, metrics, step_s=0.6, grad_bytes=grad_bytes)
    reports = tuple(Reported(i, 10 * i, 0, 0.0, {"accuracy": quality * i / 3}) for i in (1, 2, 3))
    result = TrialFinished(seed, "complete", metrics=metrics, run=run)
    return Training(seed, {"batch_size": batch, "lr": 0.1}, seed, 1, "naive", reports, result)


def made(trainings: list[Training], workers: int = 1, by: FrontierCriteria = BY) -> FrontierRow | None:
    config = trainings[0].config if trainings else {"batch_size": 10, "lr": 0.1}
    return row("naive", workers, config, "linear", trainings, by, Means())


def test_a_row_is_the_mean_of_its_seeds() -> None:
    found = made([training(0.90, 1, test=0.80), training(0.94, 2, test=0.84), training(None, 3)])
    assert found is not None
    assert (found.validation, found.quality, found.held_out) == (pytest.approx(0.92), pytest.approx(0.82), True)
    # Student's t with one degree of freedom: 12.706 x 0.02828 / sqrt(2)
    assert found.ci == pytest.approx(12.7062 * 0.02, rel=1e-4)
    assert (found.seeds, found.diverged, found.trials) == (2, 1, [1, 2, 3])
    assert (found.seconds, found.seconds_label) == (pytest.approx(30 * 0.5), "measured")
    assert found.cost == pytest.approx(15 / 3600 * 2.0)


def test_a_row_says_whether_so_many_workers_trained_it() -> None:
    alone, for_four = made([training(0.9)]), made([training(0.9)], workers=4)
    assert alone is not None
    assert for_four is not None
    assert (alone.quality_label, for_four.quality_label) == ("measured", "emulated")


def test_validation_stands_in_where_a_seed_has_no_held_out_figure() -> None:
    found = made([training(0.90, test=0.5), training(0.94)])
    assert found is not None
    assert (found.quality, found.held_out) == (pytest.approx(0.92), False)


def test_no_row_where_all_diverged() -> None:
    assert made([training(None), training(None)]) is None
    assert made([]) is None


def test_times_beyond_the_measured_are_modelled() -> None:
    found = made([training(0.9)], workers=4)
    assert found is not None
    step_s = 0.01 + 0.001 * 3 + 2 * 3 * 0.002
    assert (found.seconds, found.seconds_label) == (pytest.approx(30 * step_s), "modelled")
    assert found.cost == pytest.approx(4 * 30 * step_s / 3600 * 2.0)


def test_a_model_of_another_size_is_timed_by_its_own_steps() -> None:
    alone = made([training(0.9, grad_bytes=80)])
    assert alone is not None
    assert (alone.seconds, alone.seconds_label) == (pytest.approx(30 * 0.6), "measured")
    two = made([training(0.9, batch=20, grad_bytes=80)], workers=2)
    assert two is not None
    assert two.seconds_label == "modelled", "what was measured was another model"
    assert two.seconds == pytest.approx(30 * (0.6 / 0.03 * 0.02 + 2 * 0.002))


def test_time_to_target_is_the_mean_over_seeds_of_the_first_report_there() -> None:
    at_end, at_two_thirds = training(0.9), training(1.4)
    assert [made([t]).time_to_target_s for t in (at_end, at_two_thirds)] == [pytest.approx(15), pytest.approx(10)]
    both = made([at_end, at_two_thirds])
    assert both.time_to_target_s == pytest.approx(12.5)
    assert both.time_to_target_ci == pytest.approx(12.706 * 2.5, rel=1e-3), "Student's t over two seeds"
    assert made([at_end]).time_to_target_ci is None
    assert made([at_end, training(0.8)]).time_to_target_s is None
    assert made([at_end], by=replace(BY, target=None)).time_to_target_s is None


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"quality": 0.87}, True),
        ({"quality": 0.89}, False),
        ({"quality": 0.95}, False),
        ({"quality": 0.80, "ci": 0.2}, False),
        ({"quality": 0.80, "ci": None}, True),
        ({"quality": 0.90, "diverged": 2, "seeds": 1}, True),
        ({"quality": 0.90, "diverged": 1, "seeds": 2}, False),
    ],
)
def test_falling_is_more_than_noise(other: dict[str, Any], expected: bool) -> None:
    assert falls(cell(), cell(workers=2, **other), FREE) is expected


def test_with_a_target_only_the_target_counts() -> None:
    assert not falls(cell(quality=0.99), cell(quality=0.9), BY)
    assert falls(cell(quality=0.9), cell(quality=0.899), BY)
    assert falls(cell(), cell(quality=0.95, diverged=2, seeds=1), BY)


def test_falling_of_a_loss_is_rising() -> None:
    loss = replace(FREE, quality=Objective("loss", "min"))
    assert falls(cell(quality=0.2), cell(quality=0.3), loss)
    assert not falls(cell(quality=0.3), cell(quality=0.2), loss)


def test_the_front_is_over_quality_time_and_cost() -> None:
    rows = [cell(), cell(workers=2, quality=0.8), cell("tuned", 2), cell("tuned", 4, 0.95, cost=0.5)]
    assert [r.on_front for r in mark_front(rows, BY)] == [False, False, False, True]
    assert [r.on_front for r in mark_front(rows[:3], BY)] == [False, False, True]
    with_cheap = [*rows, cell(quality=0.1, cost=0.1, seconds=100.0)]
    assert [r.on_front for r in mark_front(with_cheap, BY)] == [False, False, False, True, True]


def test_hypervolumes_are_parts_of_one_box() -> None:
    naive = [cell(), cell(workers=2, quality=0.8)]
    alone, alone_too = hypervolumes(naive, BY)
    assert alone == alone_too
    assert 0 < alone < 1
    less, more = hypervolumes([*naive, cell("tuned", 2, 0.95, cost=0.5)], BY)
    assert less < more
    best = [cell(), cell("tuned", 2, 0.95, cost=0.5)]
    assert hypervolumes(best, BY)[1] == pytest.approx(1.0), "what is best in all fills the box"
    assert hypervolumes(best, BY)[0] == pytest.approx((0.1 / 1.1) ** 3)
    assert hypervolumes([cell("tuned")], BY)[0] == 0.0
    assert all(math.isfinite(v) for v in hypervolumes([cell()], BY))


COUNTS = [1, 2, 4]
ANSWERS = {
    "holds": ([cell(), cell(workers=2), cell(workers=4), cell("tuned", 4, 0.91, seconds=1.0)], "holds up to 4 workers"),
    "falls": ([cell(), cell(workers=2, quality=0.7), cell(workers=4)], "pays from 2 workers on: 0.9000 ± 0.0100 falls"),
    "diverges": ([cell(), cell(workers=2)], "pays from 4 workers on: 0.9000 ± 0.0100 diverges"),
    "gain": (
        [cell(), cell("tuned", 2, 0.91, seconds=2.0), cell("tuned", 4, 0.9, seconds=4.0)],
        "up to 4 workers and are fastest on 2 (0.9100 ± 0.0100; batch 20, lr 0.1): 4 times as fast as 1 worker",
    ),
    "modelled gain": (
        [cell(), cell("tuned", 4, 0.9, seconds=2.0, seconds_label="modelled")],
        "by the step-time model, 4 times as fast as 1 worker",
    ),
    "nothing holds": ([cell(), cell("tuned", 4, 0.5)], "No settings that hold it were found"),
    "no base": ([cell(workers=2)], "own settings diverged at 1 worker"),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ANSWERS))
def test_answers(name: str) -> None:
    rows, said = ANSWERS[name]
    assert said in answer(rows, COUNTS, FREE)


def test_an_answer_to_a_target() -> None:
    assert "pays from 2 workers on: 0.9000 ± 0.0100 falls to 0.8950" in answer(
        [cell(), cell(workers=2, quality=0.895)], COUNTS, BY
    )
    assert "miss the target 0.9 at 1 worker: 0.8000" in answer([cell(quality=0.8)], COUNTS, BY)


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
    found = made([measured])
    assert found is not None
    assert (found.noise_scale, found.noise_scale_error) == (70.0, 5.0)


def test_the_noise_scale_says_how_many_workers_it_supports() -> None:
    text, workers = support(cell(noise_scale=412.3, noise_scale_error=29.6), MODEL)
    assert workers == 41
    assert text == (
        "gradient noise scale 412 ± 30 at the end of training: batches up to about 412 keep their efficiency; at 10 "
        "samples per worker (where a worker is still 50 % efficient by the fitted step-time model) that supports "
        "41 workers"
    )
    text, workers = support(cell(noise_scale=4.2), MODEL)
    assert workers == 1, "one worker always works"
    assert "noise scale 4.2 at the end" in text
    assert text.endswith("that supports no more than 1 worker")
    text, workers = support(cell(noise_scale=400.0), replace(MODEL, per_sample_s=0.0))
    assert workers == 1
    assert "samples cost too little" in text
    assert support(cell(), MODEL) == ("", None)
    assert support(cell(noise_scale=math.inf), MODEL) == ("", None)
