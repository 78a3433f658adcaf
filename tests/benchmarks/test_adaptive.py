"""The pure parts of benchmarks/adaptive/adaptive.py: who is tuned by what, modelled time, and who beats whom."""

from __future__ import annotations

import json

import pytest
from benchmarks.adaptive.adaptive_analysis import (
    MONITORED,
    at_most_workers,
    at_workers,
    batches_over_time,
    row,
    seconds,
    to_target,
    verdict,
)
from benchmarks.adaptive.adaptive_search import (
    BATCHES,
    FACTORS,
    Chosen,
    Method,
    Size,
    best,
    fixed_methods,
    rates,
    tuning,
)
from benchmarks.adaptive.adaptive_trial import Course, Look, Setting, course_from_json

from elastune.core.plan.data_parallel import DataParallelStep

MODEL = DataParallelStep(base_s=1.0, per_sample_s=0.01, latency_s=0.1, seconds_per_byte=0.0, grad_bytes=100)
STEP_S = at_workers(MODEL, 1)
GNS = ("gns:max_batch=512",)


def course(batch: int, curve: list[float], policies: tuple[str, ...] = (), seed: int = 0, steps: int = 10) -> Course:
    """A look after every ``steps`` steps; test accuracy is a point below validation."""
    looks = tuple(Look(((batch, steps * (i + 1)),), v, v - 0.01) for i, v in enumerate(curve))
    return Course(Setting("mnist", batch, 0.1, policies=policies, seed=seed), looks)


def chosen(name: str, batch: int, curves: list[list[float]], policies: tuple[str, ...] = (), steps: int = 10) -> Chosen:
    method = Method(name, "mnist", batch, policies=policies)
    courses = tuple(course(batch, curve, policies, seed, steps) for seed, curve in enumerate(curves))
    return Chosen(method, 0.1, ((0.05, 0.8), (0.1, 0.9), (0.2, None)), courses)


SLOW = chosen("fixed 100", 100, [[0.85, 0.90], [0.86, 0.91], [0.84, 0.92]])
FAST = chosen("fixed 400", 400, [[0.80, 0.85], [0.81, 0.86], [0.79, 0.84]], steps=2)


def test_every_method_is_tuned_by_as_many_trials() -> None:
    methods = [*fixed_methods("mnist", BATCHES), Method("gns", "mnist", 64, policies=GNS)]
    assert {len(tuning(method, Size())) for method in methods} == {len(FACTORS)}
    assert {(s.decay, s.policies) for m in methods for s in tuning(m, Size())} == {
        ("none", ()), ("cosine", ()), ("none", GNS),
    }  # fmt: skip


def test_rates_are_spread_alike_about_the_root_of_the_batch() -> None:
    assert rates(64, (0.5, 1.0, 2.0)) == [0.01, 0.02, 0.04]
    assert rates(256, (0.5, 1.0, 2.0)) == [0.02, 0.04, 0.08]


def test_a_collapsed_or_diverged_trial_is_never_the_best() -> None:
    collapsed, diverged = course(64, [0.9, 0.1]), Course(Setting("mnist", 64, 0.4), failed="loss is nan")
    well = course(64, [0.5, 0.6])
    assert best([collapsed, well, diverged]) is well
    assert best([collapsed, diverged]) is None


def test_a_course_survives_the_cache() -> None:
    whole = Course(Setting("mnist", 64, 0.1, policies=GNS), (Look(((64, 3), (128, 2)), 0.9),), "", ((3, {"x": 1}),))
    assert course_from_json(json.loads(json.dumps(whole.to_json()))) == whole


def test_time_adds_up_steps_of_every_size_and_charges_for_monitors() -> None:
    look = Look(((50, 3), (100, 2)), 0.9)
    assert seconds(STEP_S, look, monitored=False) == pytest.approx(3 * 1.5 + 2 * 2.0)
    assert seconds(STEP_S, look, monitored=True) == pytest.approx(8.5 * MONITORED)


def test_small_batches_need_not_pay_for_all_workers() -> None:
    step_s = at_most_workers(MODEL, 16)
    assert step_s(10) == MODEL.step_s(10, 1)
    assert step_s(4000) == MODEL.step_s(4000, 16)


def test_a_target_that_one_seed_never_reaches_has_no_time() -> None:
    assert to_target(SLOW.courses, 0.86, STEP_S) == pytest.approx((40 + 20 + 40) / 3)
    assert to_target(SLOW.courses, 0.915, STEP_S) is None


def test_the_best_fixed_setting_is_chosen_on_validation_among_those_that_never_fail() -> None:
    unstable = chosen("fixed 50", 50, [[0.95, 0.96], [0.95, 0.97], [0.9, 0.1]])
    assert row(unstable, STEP_S).failed == 1
    adaptive = chosen("gns", 64, [[0.90, 0.91]] * 3, GNS, steps=5)
    judged = verdict(adaptive, [SLOW, FAST, unstable], STEP_S)
    assert judged is not None
    assert judged.best_fixed == "fixed 100"
    assert judged.within
    assert judged.time_ratio == pytest.approx(10 * 1.64 * MONITORED / 40)
    assert judged.holds


@pytest.mark.parametrize(
    ("curve", "steps", "within", "dominated"),
    [
        (0.80, 10, False, ("fixed 400",)),  # worse than the fast one, and slower
        (0.89, 2, True, ()),  # quickest, and within the interval of the best
        (0.90, 30, True, ("fixed 100",)),  # as good as it, but slower
    ],
)
def test_domination(curve: float, steps: int, within: bool, dominated: tuple[str, ...]) -> None:
    adaptive = chosen("gns", 64, [[curve / 2, curve]] * 3, GNS, steps=steps)
    judged = verdict(adaptive, [SLOW, FAST], STEP_S)
    assert judged is not None
    assert (judged.within, judged.dominated_by) == (within, dominated)
    assert judged.holds == (within and not dominated)


def test_batches_over_time_follow_the_decisions() -> None:
    looks = (Look(((50, 4), (100, 6)), 0.9, 0.9),)
    changes = ((2, {"lr_factor": 2.0}), (4, {"batch_size": 100}))
    grown = Course(Setting("mnist", 50, 0.1, policies=GNS), looks, changes=changes)
    assert batches_over_time(grown, STEP_S) == [(0.0, 50), (pytest.approx(6.0), 100), (pytest.approx(18.0), 100)]
