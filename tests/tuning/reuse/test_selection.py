"""Who is chosen: the same as a plain loop over all choices, the known optimum, never more than the limits admit."""

from __future__ import annotations

import json
from itertools import combinations_with_replacement

import numpy as np
import pytest
import torch
from tests.tuning.reuse.reference_cases import CASES, FILE, MEMBERS, ROUNDS, Case, weights_of

from elastune.core.errors import UserError
from elastune.tuning.reuse.ensemble import (
    EnsembleLimits,
    best_single,
    greedy,
    onto_simplex,
    select,
    simplex_weights,
    stack,
)
from elastune.tuning.reuse.predictions import SCORES, Judged, Task, judged, score_for

CLASSES = Task("classification", "probabilities", 3)
VALUES = Task("regression", "values", 1)
ANY = EnsembleLimits(10**6)


def library(members: int, rows: int = 60, seed: int = 0) -> Judged:
    """Members that are right about 60 % of the time, each about other rows."""
    random = np.random.default_rng(seed)
    right = random.integers(3, size=rows)
    logits = random.normal(size=(members, rows, 3)) + 1.2 * np.eye(3)[right] * random.random((members, 1, 1))
    said = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return Judged(CLASSES, said, right)


def reference(said: np.ndarray, right: np.ndarray, rounds: int) -> list[int]:
    """Caruana et al. as their paper has it, by log loss, in plain loops."""
    chosen: list[int] = []
    losses: list[float] = []
    for _ in range(rounds):
        tried = []
        for candidate in range(len(said)):
            mean = sum(said[member] for member in [*chosen, candidate]) / (len(chosen) + 1)
            tried.append(float(-np.log(mean[np.arange(len(right)), right]).mean()))
        chosen.append(tried.index(min(tried)))
        losses.append(min(tried))
    return chosen[: losses.index(min(losses)) + 1]


@pytest.mark.parametrize("seed", range(5))
def test_it_chooses_as_the_paper_does(seed: int) -> None:
    seen = library(9, seed=seed)
    result = greedy(seen, SCORES["log_loss"], ANY, [1.0] * 9, rounds=12)
    assert result == reference(seen.outputs, seen.right, 12)


REFERENCES = json.loads(FILE.read_text())


def seen_in(case: Case) -> Judged:
    said, right = case.made()
    return Judged(VALUES if case.score == "mse" else Task("classification", "probabilities", case.classes), said, right)


def both(case: Case, theirs: list[float], chosen: list[int]) -> tuple[bool, float]:
    """Whether the choices are the same, and by how much ours is better."""
    seen, score = seen_in(case), SCORES[case.score]
    ours = np.array(weights_of(chosen, case.candidates))
    gains = [float(score.gain(np.tensordot(w, seen.outputs, 1), seen.right)) for w in (ours, np.array(theirs))]
    return np.allclose(ours, theirs, atol=1e-9), gains[0] - gains[1]


def test_autogluon_chooses_no_better() -> None:
    """The same, unless it rounds scores to 6 decimals, or candidates are as accurate: then ours has less log loss."""
    same: dict[str, int] = {}
    for case in CASES:
        theirs = REFERENCES["autogluon"]["weights"][case.name]
        chosen = greedy(seen_in(case), SCORES[case.score], ANY, [1.0] * case.candidates, rounds=ROUNDS)
        alike, better = both(case, theirs, chosen)
        assert alike or better > -1e-6, case
        if case.score == "accuracy":
            assert alike or both(Case("log_loss", case.seed), theirs, chosen)[1] > 0, case
        same[case.score] = same.get(case.score, 0) + alike
    assert same["mse"] == 6
    assert same["log_loss"] >= 5


def test_deephyper_chooses_no_better() -> None:
    """It stops at as many different members, or once nothing is better; ours comes there, and goes on."""
    for case in CASES:
        theirs = REFERENCES["deephyper"]["weights"][case.name]
        free = [1.0] * case.candidates
        chosen = greedy(seen_in(case), SCORES[case.score], EnsembleLimits(MEMBERS), free, rounds=ROUNDS)
        assert both(case, theirs, chosen)[1] > -1e-9, case
        if case.score != "accuracy":  # of equals it takes the first
            longest = greedy(seen_in(case), SCORES[case.score], ANY, free, rounds=ROUNDS)
            assert any(both(case, theirs, longest[:at])[0] for at in range(1, len(longest) + 1)), case


def test_a_toy_whose_optimum_is_known() -> None:
    """The first member is right on the first half and the second on the other; the third is a little better alone."""
    right = np.zeros(20, dtype=np.int64)
    sure, wrong = [0.95, 0.03, 0.02], [0.35, 0.4, 0.25]
    halves = [[sure] * 10 + [wrong] * 10, [wrong] * 10 + [sure] * 10]
    third = [[0.5, 0.3, 0.2]] * 11 + [[0.2, 0.5, 0.3]] * 9
    seen = Judged(CLASSES, np.array([*halves, third]), right)
    score = SCORES["accuracy"]
    assert best_single(seen, score) == 2
    weights = select(seen, score, ANY, [1.0] * 3, bags=0)
    mixed = np.tensordot(weights, seen.outputs, 1)
    assert score.of(mixed, right) == 1.0
    best = max(
        float(score.of(seen.outputs[list(chosen)].mean(0), right))
        for size in range(1, 6)
        for chosen in combinations_with_replacement(range(3), size)
    )
    assert best == 1.0
    assert score.of(seen.outputs[2], right) == 0.55


def test_a_warm_start_finds_what_steps_from_the_best_one_do_not() -> None:
    """Four members and five rows: whoever begins with the best one alone never takes the first one; the two best
    together do without the fourth one long enough."""
    hits = np.array(
        [[0.6, 0.6, 0.6, 0.4, 0.4], [0.6, 0.9, 0.4, 0.9, 0.4], [0.9, 0.6, 0.1, 0.4, 0.4], [0.9, 0.4, 0.4, 0.4, 0.9]]
    )
    seen = Judged(
        Task("classification", "probabilities", 2), np.stack([hits, 1 - hits], -1), np.zeros(5, dtype=np.int64)
    )
    score, limits, costs = SCORES["accuracy"], EnsembleLimits(4), [1.0] * 4

    def reached(chosen: list[int]) -> float:
        return float(score.of(seen.outputs[chosen].mean(0), seen.right))

    cold, warm = (greedy(seen, score, limits, costs, warm=each) for each in (1, None))
    assert (reached(cold), set(cold)) == (0.8, {1, 3})
    assert (reached(warm), warm[:2]) == (1.0, [1, 0])
    assert score.of(np.tensordot(select(seen, score, limits, costs, bags=0), seen.outputs, 1), seen.right) == 1.0
    assert set(greedy(seen, score, EnsembleLimits(1), costs, warm=None)) == {1}
    assert greedy(seen, score, limits, costs, warm=3)[:3] == [1, 0, 3], "by accuracy, then by log loss"


def test_it_is_no_worse_than_without_a_warm_start() -> None:
    for seed in range(8):
        seen, costs = library(12, seed=seed), [1.0] * 12
        score = SCORES["accuracy"]
        result = select(seen, score, EnsembleLimits(4), costs, bags=0)
        cold = seen.outputs[greedy(seen, score, EnsembleLimits(4), costs)].mean(0)
        gain = float(score.of(np.tensordot(result, seen.outputs, 1), seen.right))
        assert gain >= float(score.of(cold, seen.right)) - 1e-12


@pytest.mark.parametrize("name", ["accuracy", "log_loss", "brier"])
def test_it_is_never_worse_than_the_best_alone_on_what_it_chose_by(name: str) -> None:
    score = SCORES[name]
    for seed in range(5):
        seen = library(12, seed=seed)
        weights = select(seen, score, EnsembleLimits(4), [1.0] * 12, seed=seed)
        assert weights.sum() == pytest.approx(1)
        assert np.count_nonzero(weights) <= 4
        gain = float(score.gain(np.tensordot(weights, seen.outputs, 1), seen.right))
        assert gain >= float(score.gain(seen.outputs, seen.right).max()) - 1e-12


def test_limits_bound_members_and_their_cost() -> None:
    seen, costs = library(10), [float(1 + at) for at in range(10)]
    for method in (
        lambda limits: select(seen, SCORES["log_loss"], limits, costs),
        lambda limits: stack(seen, limits, costs),
    ):
        for limits in (EnsembleLimits(1), EnsembleLimits(3), EnsembleLimits(9, 12.0), EnsembleLimits(9, 1.0)):
            chosen = np.flatnonzero(method(limits))
            assert 1 <= len(chosen) <= limits.members
            assert sum(costs[at] for at in chosen) <= limits.cost
        assert not method(EnsembleLimits(9, 0.5)).any()


def test_bags_are_those_of_their_seed() -> None:
    seen = library(12)
    runs = [select(seen, SCORES["accuracy"], EnsembleLimits(5), [1.0] * 12, seed=seed) for seed in (1, 1, 2)]
    assert (runs[0] == runs[1]).all()


def test_stacked_probabilities_have_the_least_log_loss() -> None:
    seen = library(4, rows=200)
    weights = simplex_weights(seen)
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1)
    loss = SCORES["log_loss"].of
    best = float(loss(np.tensordot(weights, seen.outputs, 1), seen.right))
    grid = [np.bincount(c, minlength=4) / 12 for c in combinations_with_replacement(range(4), 12)]
    assert best <= min(float(loss(np.tensordot(point, seen.outputs, 1), seen.right)) for point in grid) + 1e-9


def test_stacked_values_find_the_weights_that_made_them() -> None:
    random = np.random.default_rng(3)
    said = random.normal(size=(5, 400, 1))
    wanted = np.array([0.5, 0.0, 0.2, 0.3, 0.0])
    right = np.tensordot(wanted, said, 1)
    assert simplex_weights(Judged(VALUES, said, right)) == pytest.approx(wanted, abs=1e-6)
    beyond = np.tensordot(np.array([1.5, -0.5, 0, 0, 0]), said, 1)  # best within the simplex: the first alone
    assert simplex_weights(Judged(VALUES, said, beyond))[1] == 0


@pytest.mark.parametrize("point", [[0.2, 0.3, 0.5], [3.0, 0.0, 0.0], [-1.0, -1.0, -1.0], [0.6, 0.6, -5.0]])
def test_projections_lie_in_the_simplex(point: list[float]) -> None:
    result = onto_simplex(np.array(point))
    assert result.min() >= 0
    assert result.sum() == pytest.approx(1)


def test_the_task_is_told_by_shapes_and_types() -> None:
    logits, classes = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    assert judged({0: {"outputs": logits, "targets": classes}}).task == Task("classification", "logits", 3)
    likely = judged({0: {"outputs": logits.softmax(-1), "targets": classes}})
    assert likely.task == CLASSES
    words = judged({0: {"outputs": torch.randn(2, 4, 3), "targets": torch.tensor([[0, 1, -100, 2], [1, 1, 0, -100]])}})
    assert words.outputs.shape == (1, 6, 3)
    assert words.right.tolist() == [0, 1, 2, 1, 1, 0]
    values = judged({0: {"outputs": torch.randn(6, 1), "targets": torch.randn(6)}})
    assert (values.task.kind, values.outputs.shape, values.right.shape) == ("regression", (1, 6, 1), (6, 1))


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [
        (torch.randn(6), torch.zeros(6, dtype=torch.int64)),
        (torch.randn(6, 3), torch.full((6,), 3)),
        (torch.randn(6, 3), torch.full((6,), -1)),
        (torch.randn(6, 3), torch.full((6,), -100)),
        (torch.randn(6, 3), torch.zeros(6, 2, dtype=torch.int64)),
        (torch.randn(6, 3), torch.randn(6)),
    ],
)
def test_what_fits_no_task_is_refused(outputs: torch.Tensor, targets: torch.Tensor) -> None:
    with pytest.raises(UserError):
        judged({0: {"outputs": outputs, "targets": targets}})


def test_members_predict_the_same_samples() -> None:
    one = {"outputs": torch.randn(4, 2), "targets": torch.tensor([0, 1, 0, 1])}
    other = {"outputs": torch.randn(4, 2), "targets": torch.tensor([1, 1, 0, 1])}
    with pytest.raises(UserError, match="the same samples"):
        judged({0: one, 7: other})
    with pytest.raises(UserError, match="the same task"):
        judged({0: one, 7: {**one, "outputs": torch.randn(4, 3)}})


def test_a_score_is_of_its_task() -> None:
    assert score_for(None, "classification").name == "accuracy"
    assert score_for(None, "regression").name == "mse"
    for name in ("mse", "test_accuracy", ""):
        if name:
            with pytest.raises(UserError, match="one of its scores"):
                score_for(name, "classification")


@pytest.mark.parametrize("name", ["mse", "rmse", "mae", "r2"])
def test_scores_of_values_equal_scikit_learns(name: str) -> None:
    from sklearn import metrics

    random = np.random.default_rng(0)
    said, right = random.normal(size=(50, 1)), random.normal(size=(50, 1))
    theirs = {
        "mse": metrics.mean_squared_error,
        "rmse": metrics.root_mean_squared_error,
        "mae": metrics.mean_absolute_error,
        "r2": metrics.r2_score,
    }[name](right, said)
    assert float(SCORES[name].of(said, right)) == pytest.approx(theirs)


def test_what_is_too_much_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    class Predictions(dict):
        def __getitem__(self, trial: int) -> dict[str, torch.Tensor]:
            read.append(trial)
            return {"outputs": torch.zeros(100, 2), "targets": torch.zeros(100, dtype=torch.int64)}

    monkeypatch.setattr("elastune.tuning.reuse.predictions.LARGEST_BYTES", 8 * 4 * 200)
    assert judged(Predictions.fromkeys(range(4))).outputs.shape == (4, 100, 2)
    assert read == [0, 1, 2, 3]
    with pytest.raises(UserError, match="5 trials"):
        judged(Predictions.fromkeys(range(5)))
    assert read == [0, 1, 2, 3, 0]
