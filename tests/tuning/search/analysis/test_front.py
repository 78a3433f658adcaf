import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from elastune.core.errors import UserError
from elastune.tuning.search.front import (
    bounds,
    default_reference,
    hypervolume,
    nondominated,
    pick,
    recommend,
    representative,
)
from elastune.tuning.search.objective import parse_objectives


def dominates(a, b):
    return all(x <= y for x, y in zip(a, b, strict=True)) and any(x < y for x, y in zip(a, b, strict=True))


def union_of_boxes(points, reference):
    """Inclusion-exclusion over all subsets."""
    total = 0.0
    for size in range(1, len(points) + 1):
        for subset in itertools.combinations(points, size):
            sides = np.maximum(reference - np.max(subset, axis=0), 0.0)
            total += (-1) ** (size + 1) * float(np.prod(sides))
    return total


# few different values, so that ties and duplicates are common
point_sets = st.integers(1, 4).flatmap(
    lambda k: arrays(float, st.tuples(st.integers(0, 9), st.just(k)), elements=st.integers(0, 5).map(float))
)


@given(point_sets)
def test_nondominated_equals_brute_force(points):
    expected = [not any(dominates(q, p) for q in points) for p in points]
    assert nondominated(points).tolist() == expected


@settings(deadline=None)
@given(point_sets)
def test_hypervolume_equals_inclusion_exclusion(points):
    reference = np.array([5.0, 4.5, 6.0, 4.0])[: points.shape[1]]
    inside = [p for p in points if (p < reference).all()]
    assert hypervolume(points, reference) == pytest.approx(union_of_boxes(inside, reference), abs=1e-9)


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_hypervolume_agrees_with_monte_carlo(k):
    rng = np.random.default_rng(k)
    points = rng.random((25, k))
    sample = rng.random((40_000, k)) * 1.1
    covered = np.mean([(points <= s).all(axis=1).any() for s in sample])
    exact = hypervolume(points, np.full(k, 1.1)) / 1.1**k
    assert exact == pytest.approx(covered, abs=4 * np.sqrt(covered * (1 - covered) / len(sample)))


def test_an_invalid_row_is_never_on_the_front_and_covers_nothing():
    points = np.array([[1.0, 2.0], [np.nan, 0.0], [0.0, np.inf], [-np.inf, 0.0], [2.0, 1.0], [2.0, 2.0]])
    assert nondominated(points).tolist() == [True, False, False, False, True, False]
    assert hypervolume(points, np.array([3.0, 3.0])) == 3.0
    assert hypervolume(points[1:2], np.array([3.0, 3.0])) == 0.0
    assert hypervolume(np.empty((0, 2)), np.array([3.0, 3.0])) == 0.0


def test_wrong_shapes_are_errors():
    with pytest.raises(ValueError, match="shape"):
        nondominated(np.zeros(3))
    with pytest.raises(ValueError, match="reference"):
        hypervolume(np.zeros((2, 2)), np.zeros(3))


def test_large_fronts_are_quick():
    x = np.linspace(0, 1, 5000)
    assert hypervolume(np.stack([x, 1 - x], axis=1), np.ones(2)) == pytest.approx(0.5, abs=1e-3)


CURVE = np.array([[0.0, 10.0], [1.0, 3.0], [2.0, 2.0], [6.0, 1.0], [10.0, 0.5], [5.0, 5.0], [1.0, 3.0]])


def test_bounds_and_reference_of_a_curve():
    ideal, nadir = bounds(CURVE)
    assert ideal.tolist() == [0.0, 0.5]
    assert nadir.tolist() == [10.0, 10.0]
    np.testing.assert_allclose(default_reference(CURVE), [11.0, 10.95])


def test_representative_points_are_the_best_subset_here():
    reference = np.array([11.0, 11.0])
    chosen = representative(CURVE, 2, reference)
    best = max(itertools.combinations(range(6), 2), key=lambda pair: hypervolume(CURVE[list(pair)], reference))
    covered = hypervolume(CURVE[chosen], reference)
    assert covered >= (1 - 1 / np.e) * hypervolume(CURVE[list(best)], reference)
    assert chosen[0] == max(range(6), key=lambda i: hypervolume(CURVE[[i]], reference))
    assert sorted(representative(CURVE, 99)) == [0, 1, 2, 3, 4], "no dominated point, no duplicate"
    with pytest.raises(UserError):
        representative(CURVE, 0)


@settings(deadline=None)
@given(
    st.integers(2, 3).flatmap(
        lambda k: arrays(float, st.tuples(st.integers(1, 8), st.just(k)), elements=st.integers(0, 9).map(float))
    ),
    st.integers(1, 4),
)
def test_representative_points_cover_nearly_as_much_as_the_best_subset(points, k):
    """Greedy choice reaches 1 - 1/e of the best of all subsets, on the front alone, none twice, none left out idly."""
    reference = np.full(points.shape[1], 9.5)
    chosen = representative(points, k, reference)
    front = np.flatnonzero(nondominated(points))
    different = len({tuple(points[i]) for i in front})
    assert set(chosen) <= set(front.tolist())
    assert len({tuple(points[i]) for i in chosen}) == len(chosen) == min(k, different)
    best = max(hypervolume(points[list(some)], reference) for some in itertools.combinations(front, min(k, len(front))))
    assert hypervolume(points[chosen], reference) >= (1 - 1 / np.e) * best - 1e-9
    for n in range(1, len(chosen)):
        assert representative(points, n, reference) == chosen[:n], "the most important first"


OBJECTIVES = parse_objectives({"accuracy": "max", "seconds": "min", "cost": "min"})
TRIALS = [
    {"accuracy": 0.99, "seconds": 100.0, "cost": 3.0},
    {"accuracy": 0.985, "seconds": 50.0, "cost": 4.0},
    {"accuracy": 0.98, "seconds": 50.0, "cost": 2.0},
    {"accuracy": 0.90, "seconds": 5.0, "cost": 1.0},
    {"accuracy": 0.985, "seconds": 60.0, "cost": 5.0},  # dominated
    {"accuracy": float("nan"), "seconds": 1.0, "cost": 0.1},
]


@pytest.mark.parametrize(
    ("targets", "index"),
    [({"accuracy": 0.98}, 2), ({"accuracy": 0.985}, 1), ({"accuracy": 0.99}, 0), ({"seconds": 10.0}, 3)],
)
def test_pick_by_target(targets, index):
    picked = pick(TRIALS, OBJECTIVES, targets=targets)
    assert picked.index == index
    name, goal = next(iter(targets.items()))
    assert f"{name} {goal:g}" in picked.reason


def test_pick_reasons_name_the_value():
    assert (
        pick(TRIALS, OBJECTIVES, targets={"accuracy": 0.98}).reason
        == "reaches accuracy 0.98 with the best seconds (50 s)"
    )


def test_pick_by_several_targets_or_all():
    assert pick(TRIALS, OBJECTIVES, targets={"accuracy": 0.98, "seconds": 60}).index == 2
    assert pick(TRIALS, OBJECTIVES, targets={"accuracy": 0.98, "seconds": 60, "cost": 4}).index == 1
    with pytest.raises(UserError, match="together with"):
        pick(TRIALS, OBJECTIVES, targets={"accuracy": 0.99, "seconds": 60})


def test_pick_by_weights():
    assert pick(TRIALS, OBJECTIVES, weights={"accuracy": 1}).index == 0
    assert pick(TRIALS, OBJECTIVES, weights={"seconds": 1, "accuracy": 0.01}).index == 3
    assert pick(TRIALS, OBJECTIVES, weights={"cost": 1}, targets={"accuracy": 0.97}).index == 2


@pytest.mark.parametrize(
    ("kwargs", "rule"),
    [
        ({"targets": {"accuracy": 0.999}}, "reach accuracy 0.999"),
        ({"targets": {"speed": 1}}, "objectives only"),
        ({"weights": {"speed": 1}}, "objectives only"),
        ({"weights": {"cost": -1}}, ">= 0"),
        ({"weights": {"cost": 0}}, ">= 0"),
        ({"weights": {"cost": float("nan")}}, ">= 0"),
    ],
)
def test_impossible_picks_are_user_errors(kwargs, rule):
    with pytest.raises(UserError, match=rule):
        pick(TRIALS, OBJECTIVES, **kwargs)


def test_nothing_to_pick_from():
    with pytest.raises(UserError, match="finished"):
        pick([], OBJECTIVES)
    with pytest.raises(UserError, match="finished"):
        pick(TRIALS[-1:], OBJECTIVES)


def rows(*values, names=("accuracy", "seconds", "cost")):
    return [dict(zip(names, each, strict=True)) for each in values]


def test_without_a_preference_the_pick_is_nearly_the_best_and_fast():
    recommendation = recommend(rows((0.99, 2, 2), (0.97, 1.5, 1.5), (0.11, 1, 1)), OBJECTIVES)
    assert [(each.index, each.reason) for each in recommendation] == [
        (0, "the best accuracy, and the fastest within 1% of it"),
        (1, "the cheapest within 5% of the best accuracy"),
    ]
    two = rows((0.073, 1.0), (0.76, 2.0), names=("accuracy", "seconds"))
    assert [each.index for each in recommend(two, parse_objectives({"accuracy": "max", "seconds": "min"}))] == [1]


def test_three_points_are_named_where_they_differ():
    recommendation = recommend(rows((0.99, 9, 9), (0.985, 4, 5), (0.95, 3, 1), (0.5, 1, 0.5)), OBJECTIVES)
    assert [(each.index, each.reason) for each in recommendation] == [
        (1, "the fastest within 1% of the best accuracy"),
        (0, "the best accuracy"),
        (2, "the cheapest within 5% of the best accuracy"),
    ]
    assert pick(rows((0.99, 9, 9), (0.985, 4, 5)), OBJECTIVES).index == 1


def test_nothing_is_given_up_for_a_time_that_is_no_shorter():
    recommendation = recommend(rows((0.99, 2.0, 1.0), (0.985, 1.99, 1.0)), OBJECTIVES)
    assert [(each.index, each.reason) for each in recommendation] == [
        (0, "the best accuracy, and the fastest (to 1%) within 1% of it")
    ]


def test_a_cost_that_is_a_time_counts_once():
    values = rows((0.99, 9, 9), (0.985, 4, 4))
    assert (
        recommend(values, OBJECTIVES, proportional={"cost"})[0].reason
        == "the fastest and cheapest within 1% of the best accuracy"
    )


def test_nothing_below_a_floor_and_nothing_that_breaks_the_condition_is_named():
    values = rows((0.6, 9, 9), (0.58, 1, 1))
    assert [each.index for each in recommend(values, OBJECTIVES)] == [0, 1]
    assert [each.index for each in recommend(values, OBJECTIVES, floor=0.59)] == [0]
    with pytest.raises(UserError, match="accuracy 0.7 of chance.*at best 0.6"):
        recommend(values, OBJECTIVES, floor=0.7)
    losses = parse_objectives({"loss": "min", "seconds": "min"})
    of_losses = rows((0.3, 9.0), (0.31, 1.0), names=("loss", "seconds"))
    assert [each.index for each in recommend(of_losses, losses, floor=0.305)] == [0]
    far = recommend(rows((0.9, 9, 9), (0.6, 1, 1)), OBJECTIVES, condition="accuracy >= 0.5")
    assert far[1].reason == "the cheapest that fulfils accuracy >= 0.5"


def test_the_first_that_is_no_time_says_how_good_a_trial_is():
    turned = parse_objectives({"seconds": "min", "accuracy": "max"})
    assert recommend(rows((1.0, 0.1), (9.0, 0.9), names=("seconds", "accuracy")), turned)[0].index == 1
    times = parse_objectives({"seconds_to_target": "min", "cost": "min"})
    assert recommend(rows((5.0, 9.0), (9.0, 1.0), names=("seconds_to_target", "cost")), times)[0].index == 0
    sizes = parse_objectives({"accuracy": "max", "parameters": "min"})
    named = recommend(rows((0.9, 900.0), (0.895, 500.0), names=("accuracy", "parameters")), sizes)
    assert named[0].reason == "the best parameters within 1% of the best accuracy"


@settings(deadline=None)
@given(
    st.lists(st.tuples(*[st.integers(0, 40).map(lambda i: i / 40)] * 3), min_size=1, max_size=12),
    st.sampled_from([frozenset(), frozenset({"cost"})]),
)
def test_what_is_recommended_is_on_the_front_and_nearly_the_best(points, proportional):
    values = rows(*points)
    recommendation = recommend(values, OBJECTIVES, proportional=proportional)
    on_front = nondominated(np.array([[-a, s, c] for a, s, c in points]))
    assert 1 <= len(recommendation) <= 3
    assert len({each.index for each in recommendation}) == len(recommendation)
    assert all(on_front[each.index] for each in recommendation)
    best = max(a for a, _, _ in points)
    assert points[recommendation[0].index][0] >= best - 0.01 * best
    assert all(points[each.index][0] >= best - 0.05 * best for each in recommendation)
    near = [s for (a, s, _), on in zip(points, on_front, strict=True) if on and a >= best - 0.01 * best]
    assert points[recommendation[0].index][1] <= min(near) * 1.01
    assert any(points[each.index][0] == best for each in recommendation)
