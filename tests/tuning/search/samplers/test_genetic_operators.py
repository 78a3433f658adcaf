import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from elastune.train.program.space import Sample, draw
from elastune.tuning.search.front import best_first, crowding
from elastune.tuning.search.genetic import (
    GeneticOptions,
    breed,
    cross,
    is_copy,
    mutate,
    mutation,
    tournament,
)

DISTRIBUTIONS = [
    FloatDistribution(-2.0, 3.0),
    FloatDistribution(1e-5, 0.1, log=True),
    FloatDistribution(0.1, 0.9, step=0.2),
    FloatDistribution(2.0, 2.0),
    IntDistribution(1, 9),
    IntDistribution(2, 20, step=3),
    IntDistribution(1, 512, log=True),
    CategoricalDistribution(["sgd", "adam", None]),
]


@pytest.mark.parametrize(
    ("points", "k", "expected"),
    [
        ([[3.0], [1.0], [2.0]], 2, [1, 2]),
        ([[1.0], [1.0], [2.0]], 3, [1, 0, 2]),  # the youngest of equals first
        ([[2.0, 2.0], [0.0, 3.0], [1.0, 1.0], [3.0, 0.0]], 4, [3, 1, 2, 0]),  # front by front, extremes first
        ([[0.0, 9.0], [1.0, 7.0], [2.0, 6.5], [9.0, 0.0]], 3, [3, 0, 2]),  # the lonelier of the middle ones
        (np.zeros((0, 2)), 3, []),
    ],
)
def test_the_fittest_come_first(points, k, expected):
    assert best_first(np.array(points), k) == expected


def test_values_that_are_not_finite_cannot_be_ranked():
    with pytest.raises(ValueError, match="finite"):
        best_first(np.array([[math.nan, 1.0]]), 1)


def test_crowding_is_the_neighbours_distance_in_units_of_the_range():
    result = crowding(np.array([[0.0, 10.0], [1.0, 5.0], [2.0, 4.0], [4.0, 0.0]]))
    assert result.tolist() == pytest.approx([math.inf, 2 / 4 + 6 / 10, 3 / 4 + 5 / 10, math.inf])
    assert crowding(np.array([[1.0, 1.0]])).tolist() == [math.inf]


def test_a_larger_tournament_is_won_by_fitter_ones():
    rng = np.random.default_rng(0)
    execution = [statistics.mean(tournament(10, entrants, rng) for _ in range(400)) for entrants in (1, 2, 5)]
    assert execution == pytest.approx(
        [4.5, 8 / 3, 5 / 6], abs=0.4
    )  # (n - entrants) / (entrants + 1), drawn from 0..n-1
    assert tournament(10, 99, rng) == 0
    assert tournament(1, 2, rng) == 0


@given(st.integers(0, 2**32), st.sampled_from(DISTRIBUTIONS), st.sampled_from([0.0, 0.01, 0.1, 1.0]))
@settings(max_examples=300, deadline=None)
def test_a_mutation_is_a_value_of_the_gene(seed, distribution, step):
    rng = np.random.default_rng(seed)
    value = draw(distribution, rng)
    result = mutation(distribution, value, step, rng)
    assert type(result) is type(value) or isinstance(distribution, CategoricalDistribution)
    assert distribution._contains(distribution.to_internal_repr(result))
    if step and isinstance(distribution, IntDistribution) and not distribution.log:
        assert result != value, "a step moves by one place at least"


def test_a_small_step_stays_near_and_a_new_draw_does_not():
    rng = np.random.default_rng(0)
    gene = FloatDistribution(1e-4, 1.0, log=True)
    near = [abs(math.log10(mutation(gene, 1e-2, 0.02, rng)) + 2) for _ in range(200)]
    anew = [abs(math.log10(mutation(gene, 1e-2, 0.0, rng)) + 2) for _ in range(200)]
    assert max(near) < 4 * 0.02 * 5
    assert statistics.mean(anew) == pytest.approx(1.0, abs=0.15)  # uniform on the log scale


GENES = {f"g{i}": each for i, each in enumerate(DISTRIBUTIONS)}


@st.composite
def samples(draw_from):
    rng = np.random.default_rng(draw_from(st.integers(0, 2**32)))
    names = draw_from(st.sets(st.sampled_from(sorted(GENES)), min_size=1))
    return Sample({name: draw(GENES[name], rng) for name in names}, {name: GENES[name] for name in names}, {})


@given(samples(), samples(), st.floats(0, 1), st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_each_gene_of_a_crossing_comes_from_a_parent_that_has_it(first, second, share, seed):
    child = cross(first, second, share, np.random.default_rng(seed))
    assert set(child.params) == set(child.distributions) == {*first.params, *second.params}
    for name, value in child.params.items():
        assert value in [parent.params[name] for parent in (first, second) if name in parent.params]


def test_a_crossing_takes_its_share_and_leaves_alone_what_does_not_fit():
    first = Sample({f"x{i}": 0 for i in range(1000)}, {f"x{i}": IntDistribution(0, 1) for i in range(1000)}, {})
    second = Sample({f"x{i}": 1 for i in range(1000)}, dict(first.distributions), {})
    second.distributions["x7"] = IntDistribution(1, 5)
    rng = np.random.default_rng(0)
    assert sum(cross(first, second, 0.33, rng).params.values()) == pytest.approx(330, abs=50)
    everything = cross(first, second, 1.0, rng)
    assert [name for name, value in everything.params.items() if value == 0] == ["x7"]
    assert everything.distributions["x7"] == IntDistribution(0, 1)
    assert cross(first, second, 0.0, rng).params == first.params


def test_mutation_hits_its_share_of_the_genes():
    genes = {f"x{i}": 0.5 for i in range(1000)}
    distributions = dict.fromkeys(genes, FloatDistribution(0.0, 1.0))
    for rate, expected in ((0.0, 0), (0.05, 50), (1.0, 1000)):
        result = mutate(genes, distributions, rate, 0.0, np.random.default_rng(0))
        assert sum(value != 0.5 for value in result.values()) == pytest.approx(expected, abs=20)


@pytest.mark.parametrize(
    ("child", "tried", "expected"),
    [
        ({"a": 1, "b": 2}, [{"a": 1, "b": 2}], True),
        ({"a": 1, "b": 2}, [{"a": 1}], True),  # b was not asked for, nor would it be
        ({"a": 1}, [{"a": 1, "b": 2}], False),
        ({"a": 1, "b": 2}, [{"a": 1, "b": 3}], False),
        ({"a": 1}, [], False),
    ],
)
def test_a_copy_is_recognised(child, tried, expected):
    assert is_copy(child, tried) == expected


@given(st.lists(samples(), min_size=1, max_size=6), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_without_mutation_all_genes_are_inherited(pool, seed):
    child = breed(pool, [], GeneticOptions(mutation=0.0), np.random.default_rng(seed))
    for name, value in child.params.items():
        assert value in [one.params[name] for one in pool if name in one.params]


@given(samples(), st.integers(0, 2**32), st.sampled_from([0.0, 0.1]))
@settings(max_examples=100, deadline=None)
def test_a_child_that_were_a_copy_is_mutated_further(parent, seed, step):
    rates = GeneticOptions(mutation=0.0, step=step)
    child = breed([parent], [parent.params], rates, np.random.default_rng(seed))
    movable = any(not each.single() for each in parent.distributions.values())
    assert is_copy(child.params, [parent.params]) != movable


def test_what_has_one_value_only_may_be_copied():
    only = Sample({"x": 1}, {"x": IntDistribution(1, 1)}, {})
    assert breed([only], [only.params], GeneticOptions(), np.random.default_rng(0)).params == {"x": 1}
