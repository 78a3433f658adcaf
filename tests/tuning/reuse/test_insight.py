"""What an ensemble lives on, against figures that are known, and formulas written out."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from elastune.tuning.reuse.ensemble import contributions, diversity, mixed, uncertainty
from elastune.tuning.reuse.predictions import SCORES, Judged, Task

CLASSES = Task("classification", "probabilities", 2)
VALUES = Task("regression", "values", 1)


def classes(members: int, rows: int = 40, seed: int = 0) -> Judged:
    random = np.random.default_rng(seed)
    first = random.random((members, rows))
    return Judged(CLASSES, np.stack([first, 1 - first], -1), random.integers(2, size=rows))


def test_equal_members_have_nothing_to_disagree_about() -> None:
    one = classes(1)
    same = Judged(CLASSES, np.repeat(one.outputs, 3, 0), one.right)
    result = diversity(same)
    assert result.disagreement == 0
    assert result.error_correlation == pytest.approx(1)
    assert uncertainty(same, np.full(3, 1 / 3)).epistemic == pytest.approx(0, abs=1e-12)
    assert diversity(one).disagreement is None


def test_opposite_certainties_are_epistemic_and_coins_are_aleatoric() -> None:
    certain = np.array([[[1.0, 0.0]], [[0.0, 1.0]]])
    result = uncertainty(Judged(CLASSES, certain, np.zeros(1, dtype=int)), np.array([0.5, 0.5]))
    assert (result.aleatoric, result.epistemic) == (pytest.approx(0, abs=1e-9), pytest.approx(np.log(2)))
    coins = Judged(CLASSES, np.full((2, 1, 2), 0.5), np.zeros(1, dtype=int))
    result = uncertainty(coins, np.array([0.5, 0.5]))
    assert (result.aleatoric, result.epistemic) == (pytest.approx(np.log(2)), pytest.approx(0, abs=1e-12))


def test_members_errors_are_the_means_and_their_spread() -> None:
    """The ambiguity decomposition (Krogh and Vedelsby 1995)."""
    random = np.random.default_rng(1)
    seen = Judged(VALUES, random.normal(size=(3, 30, 1)), random.normal(size=(30, 1)))
    weights = np.array([0.2, 0.3, 0.5])
    result = uncertainty(seen, weights)
    mean_of_errors = float(weights @ ((seen.outputs - seen.right) ** 2).mean((1, 2)))
    assert result.aleatoric + result.epistemic == pytest.approx(mean_of_errors)


def test_members_that_come_together_contribute_together() -> None:
    seen, weights, score = classes(4), np.array([0.4, 0.3, 0.2, 0.1]), SCORES["log_loss"]
    pairs = contributions(seen, weights, score, players=[[0, 2], [1, 3]])
    mixed_pairs = np.stack([mixed(seen.outputs[at], weights[at] / weights[at].sum()) for at in ([0, 2], [1, 3])])
    merged = contributions(Judged(CLASSES, mixed_pairs, seen.right), np.array([0.6, 0.4]), score)
    for one, other in zip(pairs, merged, strict=True):
        assert (one.left_out, one.shapley) == (pytest.approx(other.left_out), pytest.approx(other.shapley))


def test_shapley_values_are_the_mean_over_all_orders() -> None:
    seen, weights, score = classes(4), np.array([0.4, 0.3, 0.2, 0.1]), SCORES["log_loss"]
    prior = np.bincount(seen.right) / len(seen.right)

    def worth(coalition: tuple[int, ...]) -> float:
        if not coalition:
            return float(score.gain(np.tile(prior, (len(seen.right), 1)), seen.right))
        part = list(coalition)
        return float(score.gain(mixed(seen.outputs[part], weights[part] / weights[part].sum()), seen.right))

    gains = np.zeros(4)
    orders = list(permutations(range(4)))
    for order in orders:
        for at, member in enumerate(order):
            gains[member] += (worth(order[: at + 1]) - worth(order[:at])) / len(orders)
    result = contributions(seen, weights, score)
    assert [one.shapley for one in result] == pytest.approx(gains)
    assert sum(one.shapley for one in result) == pytest.approx(worth((0, 1, 2, 3)) - worth(()))
    assert result[0].left_out == pytest.approx(worth((0, 1, 2, 3)) - worth((1, 2, 3)))
    assert {one.shapley_error for one in result} == {0.0}


def test_many_members_are_sampled_and_the_error_is_told() -> None:
    seen, weights = classes(11, rows=10), np.full(11, 1 / 11)
    result = contributions(seen, weights, SCORES["brier"], seed=3)
    assert all(one.shapley_error > 0 for one in result)
    whole = float(SCORES["brier"].gain(mixed(seen.outputs, weights), seen.right))
    prior = np.bincount(seen.right, minlength=2) / len(seen.right)
    nothing = float(SCORES["brier"].gain(np.tile(prior, (10, 1)), seen.right))
    assert sum(one.shapley for one in result) == pytest.approx(whole - nothing), "every order adds up to the whole"
