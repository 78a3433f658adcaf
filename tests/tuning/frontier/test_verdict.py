"""Whether quality holds is said only of what the seeds show."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.frontiers import FREE, TARGETED, training

from elastune.tuning.frontier.criteria import FrontierCriteria, judge
from elastune.tuning.frontier.trainings import Training
from elastune.tuning.search.objective import Objective


def seeds(*values: float | None, samples: int | None = None) -> list[Training]:
    return [training(value, seed, samples=samples) for seed, value in enumerate(values)]


BASE = seeds(0.970, 0.975, 0.980)


def word(tried: list[Training], by: FrontierCriteria = FREE, base: list[Training] = BASE) -> str:
    verdict = judge(tried, base, by, "accuracy")
    assert verdict is not None
    return verdict.word


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0.969, 0.974, 0.979), "holds"),
        ((0.990, 0.991, 0.992), "holds"),
        ((0.950, 0.975, 0.980), "not shown"),
        ((0.870, 0.875, 0.880), "falls"),
        ((0.95, 0.78, 0.28), "not shown"),
        ((0.969, 0.974, 0.979, None), "not shown"),
        ((0.969, None, None), "falls"),
        ((0.969,), "not shown"),
    ],
)
def test_against_the_baseline_with_the_same_seeds(values: tuple[float | None, ...], message: str) -> None:
    assert word(seeds(*values)) == message


def test_the_margin_is_the_users() -> None:
    tried = seeds(0.950, 0.956, 0.962)
    assert word(tried) == "falls", "worse by 0.019 or so, where a hundredth of the range is allowed"
    assert word(tried, replace(FREE, margin=0.03)) == "holds"


def test_seeds_that_differ_in_level_but_not_in_pairs_hold() -> None:
    """Paired by seed: the spread that both share says nothing against it."""
    base = seeds(0.80, 0.90, 0.99)
    assert word(seeds(0.799, 0.899, 0.989), base=base) == "holds"
    other = [replace(t, seed=t.seed + 1000) for t in base]
    assert word(seeds(0.799, 0.899, 0.989), base=other) == "not shown", "no seed in common"


def test_a_target_is_met_where_the_lower_bound_is() -> None:
    """The mean alone once decided: 0.905 ± 0.03 was "at 0.9"."""
    assert word(seeds(0.89, 0.905, 0.92), TARGETED) == "not shown"
    assert word(seeds(0.95, 0.951, 0.952), TARGETED) == "holds"
    assert word(seeds(0.95, 0.951, 0.952, samples=30), TARGETED) == "not shown", "of 30 test samples nobody can tell"
    assert word(seeds(0.5, 0.51, 0.52), TARGETED) == "falls"
    assert word(seeds(0.95), TARGETED) == "not shown"


def test_of_a_loss_the_upper_bound_counts() -> None:
    loss = Objective("accuracy", "min", low=0.0)
    by = replace(TARGETED, quality=loss, target=0.3)
    assert word(seeds(0.2, 0.201, 0.202), by) == "holds"
    assert word(seeds(0.2, 0.25, 0.35), by) == "not shown"
    assert word(seeds(0.4, 0.41, 0.42), by) == "falls"
    free = replace(FREE, quality=loss)
    assert word(seeds(0.31, 0.32, 0.33), free, seeds(0.2, 0.21, 0.22)) == "falls"
    assert word(seeds(0.21, 0.22, 0.23), replace(free, margin=0.05), seeds(0.2, 0.21, 0.22)) == "holds"


def test_default_margins() -> None:
    assert FREE.margin_at(0.9) == pytest.approx(0.01)
    assert replace(FREE, quality=Objective("score", "max", low=0.0, high=100.0)).margin_at(90.0) == pytest.approx(1.0)
    assert replace(FREE, quality=Objective("loss", "min", low=0.0)).margin_at(0.5) == pytest.approx(0.01)
    assert replace(FREE, margin=0.2).margin_at(0.9) == 0.2


def test_nothing_is_said_where_all_diverged() -> None:
    assert judge(seeds(None, None), BASE, FREE, "accuracy") is None
