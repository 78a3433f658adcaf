"""What samplers for several objectives reach on problems whose fronts are known.

ZDT1 (Zitzler, Deb, Thiele 2000): f2 = 1 - sqrt(f1) on the front, for f1 from 0 to 1. Up to the reference point
(1.1, 1.1) it covers 2/3 + 0.1 above f1 in [0, 1], and 0.1 * 1.1 beyond. DTLZ2 (Deb, Thiele, Laumanns, Zitzler 2002) has
an octant of the unit sphere as its front, which up to (1.1, 1.1, 1.1) covers 1.1^3 - pi / 6.
"""

import math

import numpy as np
import pytest
from tests.soaked import soaked

from elastune.core.journal.records import TrialFinished
from elastune.tuning.search.front import hypervolume
from elastune.tuning.search.objective import parse_objectives
from elastune.tuning.search.suggester import Suggester

TRIALS, GENES = 600, 6
GOAL = 0.79  # of ZDT1's 0.877, with 12 genes, by 1,000 trials


def space_of(genes):
    return lambda trial: {f"x{i}": trial.suggest_float(f"x{i}", 0, 1) for i in range(genes)}


def zdt1(x):
    g = 1 + 9 * sum(x[1:]) / (len(x) - 1)
    return [x[0], g * (1 - math.sqrt(x[0] / g))]


def dtlz2(x):
    radius = 1 + sum((each - 0.5) ** 2 for each in x[2:])
    a, b = (each * math.pi / 2 for each in x[:2])
    return [radius * math.cos(a) * math.cos(b), radius * math.cos(a) * math.sin(b), radius * math.sin(a)]


PROBLEMS = {"zdt1": (zdt1, 2, 0.1 + 2 / 3 + 0.1 * 1.1), "dtlz2": (dtlz2, 3, 1.1**3 - math.pi / 6)}


def reached(problem, sampler, seed=0, genes=GENES, trials=TRIALS):
    """The hypervolume of a search as a share of the front's."""
    function, k, known = PROBLEMS[problem]
    suggester = Suggester(
        space_of(genes), parse_objectives({f"f{i}": "min" for i in range(k)}), sampler=sampler, seed=seed
    )
    points = []
    for _ in range(trials):
        suggestion = suggester.ask()
        points.append(function(list(suggestion.values.values())))
        values = {f"f{i}": value for i, value in enumerate(points[-1])}
        suggester.tell(suggestion.number, TrialFinished(suggestion.number, "complete", values))
    return hypervolume(np.array(points), np.full(k, 1.1)) / known


@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_known_hypervolume_is_that_of_a_dense_front(problem):
    function, k, known = PROBLEMS[problem]
    if problem == "zdt1":
        front = [function([x, *[0.0] * (GENES - 1)]) for x in np.linspace(0, 1, 3000)]
    else:
        front = [function([a, b, *[0.5] * (GENES - 2)]) for a in np.linspace(0, 1, 25) for b in np.linspace(0, 1, 25)]
    assert hypervolume(np.array(front), np.full(k, 1.1)) == pytest.approx(known, rel=0.05 if k == 3 else 1e-3)


@pytest.mark.parametrize(
    ("sampler", "problem", "share"),
    [("nsga2", "zdt1", 0.89), ("genetic", "dtlz2", 0.8), *soaked(("nsga2", "dtlz2", 0.78), ("genetic", "zdt1", 0.95))],
)
def test_a_search_reaches_most_of_it(sampler, problem, share):
    assert share <= reached(problem, sampler) <= 1.0


@pytest.mark.soak
def test_a_genetic_search_at_its_defaults_reaches_the_goal():
    known = PROBLEMS["zdt1"][2]
    results = [known * reached("zdt1", "genetic", seed, genes=12, trials=1000) for seed in range(3)]
    assert sorted(results)[1] >= GOAL, results
    as_crays = known * reached("zdt1", "genetic:step=0", genes=12, trials=1000)
    assert as_crays < GOAL, "the goal asks for something"


def test_by_half_the_trials_steps_are_ahead_of_fresh_draws():
    steps, fresh = (reached("zdt1", sampler, genes=12, trials=400) for sampler in ("genetic", "genetic:step=0"))
    assert steps > fresh + 0.1


def test_a_random_search_does_not():
    assert reached("zdt1", "random") < 0.1
    assert reached("dtlz2", "random") < 0.7
