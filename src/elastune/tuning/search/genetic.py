"""The sampler ``genetic``: several populations (demes) that breed separately and exchange their best configurations.

Populations advance by generations, or steadily as trials finish. A child comes from the fittest trials, by front and
crowding: a tournament chooses the pair, which is crossed and mutated. The sampler is a plain ``BaseSampler``. Optuna's
``BaseGASampler`` is private, knows one population, and writes generations and parents into the study. Here the number
of a trial decides its population, and the finished trials decide its parents. So a proposal is a function of the trials
and a seed, and a replayed study continues alike. One exception: trials lost in a crash are not in the replayed study,
so the few trials requested after them may change population.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from elastune.core.options import Range, parse, split
from elastune.core.run import derive
from elastune.train.program.space import Sample, draw, nth, size
from elastune.tuning.search.front import best_first, nondominated
from elastune.tuning.search.history import ALLOWED, TRAINED
from elastune.tuning.search.objective import Floats

_RENEWALS = 20  # genes mutated beyond the rate, at most, so that a child is not a copy

# --- operators: pure functions that pair, cross and mutate configurations ---


def tournament(n: int, entrants: int, rng: np.random.Generator) -> int:
    """Draw ``entrants`` of the ranks 0..n-1 without repetition, and return the best (smallest) of them."""
    drawn: NDArray[np.intp] = rng.choice(n, size=min(entrants, n), replace=False)
    return int(drawn.min())


def cross(first: Sample, second: Sample, share: float, rng: np.random.Generator) -> Sample:
    """Return ``first`` with each gene taken from ``second`` with probability ``share``; ``values`` stay empty.

    A gene that only one parent has comes from that parent: the space decides whether it is used. A gene that both
    parents have, but from different distributions, stays the first's.
    """
    params, distributions = {**second.params, **first.params}, {**second.distributions, **first.distributions}
    for name in sorted(params):
        swapped = rng.random() < share
        if swapped and name in second.params and second.distributions[name] == distributions[name]:
            params[name] = second.params[name]
    return Sample(params, distributions, {})


def mutate(
    child: Mapping[str, Any],
    distributions: Mapping[str, BaseDistribution],
    rate: float,
    step: float,
    rng: np.random.Generator,
) -> dict[str, Any]:
    """Return ``child`` with each gene mutated with probability ``rate``: see ``mutation``."""
    return {
        name: mutation(distributions[name], child[name], step, rng) if rng.random() < rate else child[name]
        for name in sorted(child)
    }


def mutation(distribution: BaseDistribution, value: Any, step: float, rng: np.random.Generator) -> Any:
    """Return a gene's new value: drawn afresh where ``step`` is 0, else near ``value``.

    Near ``value``: a normal step with a standard deviation of ``step`` of the gene's range, on its log scale if it has
    one. A step beyond a bound ends at the bound, since optima often lie there. Among finitely many values a step moves
    at least one place. Categories are always drawn afresh.
    """
    if step == 0 or distribution.single() or isinstance(distribution, CategoricalDistribution):
        return draw(distribution, rng)
    match distribution:
        case FloatDistribution(log=True, low=low, high=high):
            moved = _moved(math.log(value), math.log(low), math.log(high), step, rng)
            return min(max(math.exp(moved), low), high)
        case FloatDistribution(step=None, low=low, high=high):
            return min(max(_moved(value, low, high, step, rng), low), high)
        case IntDistribution(log=True, low=low, high=high):
            moved = _moved(math.log(value), math.log(low - 0.5), math.log(high + 0.5), step, rng)
            return min(max(round(math.exp(moved)), low), high)
        case IntDistribution(low=low, step=unit) | FloatDistribution(low=low, step=float() as unit):
            return nth(distribution, _stepped(round((value - low) / unit), int(size(distribution)) - 1, step, rng))
    raise AssertionError(f"unknown distribution {distribution}")


def _moved(value: float, low: float, high: float, step: float, rng: np.random.Generator) -> float:
    return min(max(value + rng.normal(0.0, step * (high - low)), low), high)


def _stepped(index: int, last: int, step: float, rng: np.random.Generator) -> int:
    """Another index of 0..``last``, near ``index``."""
    by = rng.normal(0.0, step * last)
    target = min(max(index + round(by), 0), last)
    if target != index:
        return target
    return index + 1 if index == 0 or (by > 0 and index < last) else index - 1


def is_copy(child: Mapping[str, Any], tried: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the space, with the genes of ``child``, would request a configuration that was tried before."""
    return any(params.items() <= child.items() for params in tried)


# --- the search: demes, their members and migration ---


@dataclass(frozen=True)
class GeneticOptions:
    """How a genetic search breeds. The rates and the migration are the Cray tool's defaults; its demes are 2 x 32.

    Attributes:
        demes: Populations that breed separately.
        population: Members of each deme.
        mutation: Probability that a gene mutates.
        crossover: Probability that a gene comes from the second parent.
        tournament: Candidates from which a tournament chooses a parent.
        migration: Generations after which the best of a deme joins the next deme; 0: never.
        steady: 1: all finished trials may be parents; 0: only trials of earlier generations.
        step: Standard deviation of a mutation's normal step, as a share of the gene's range; 0: genes are drawn afresh,
            as the Cray tool draws them. Without steps a search covers less of the front of ZDT1 by 1,000 trials
            (``tests/tuning/search/samplers/test_known_fronts.py``).
    """

    demes: Annotated[int, Range(1, 1024)] = 2
    population: Annotated[int, Range(2, 65536)] = 10
    mutation: Annotated[float, Range(0, 1)] = 0.05
    crossover: Annotated[float, Range(0, 1)] = 0.33
    tournament: Annotated[int, Range(1, 65536)] = 2
    migration: Annotated[int, Range(0, 65536)] = 5
    steady: Annotated[int, Range(0, 1)] = 1
    step: Annotated[float, Range(0, 1)] = 0.1


def parse_genetics(sampler: str) -> GeneticOptions:
    """Return the options in ``sampler``, such as "genetic:demes=2,population=16". Raises ``UserError``."""
    name, options = split(sampler, "a sampler", "genetic:demes=2,population=16")
    return parse(name, options, GeneticOptions)


@dataclass(frozen=True)
class Lineage:
    """Where a trial belongs: its deme, and its generation in that deme. Generation 0 is drawn at random."""

    deme: int
    generation: int


def place(index: int, genetics: GeneticOptions) -> Lineage:
    """Return the place of the trial that is requested after ``index`` others: the demes take turns."""
    return Lineage(index % genetics.demes, index // genetics.demes // genetics.population)


def members(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Return the trials that have a place, in the order of their requests; failed and forbidden trials have none."""
    alive = (TrialState.COMPLETE, TrialState.RUNNING)
    return [trial for trial in trials if trial.state in alive and trial.constraints.get(ALLOWED, 0.0) <= 0]


def unfinished(trials: Sequence[FrozenTrial], genetics: GeneticOptions) -> int:
    """Return how many trials of generations before the next trial's still run.

    A caller that waits for 0 before each request runs generation after generation; with ``steady`` 0 exactly as the
    textbook does.
    """
    placed = members(trials)
    now = place(len(placed), genetics).generation
    before = placed[: now * genetics.demes * genetics.population]
    return sum(trial.state == TrialState.RUNNING for trial in before)


def parents(
    trials: Sequence[FrozenTrial], directions: Sequence[StudyDirection], genetics: GeneticOptions
) -> list[FrozenTrial]:
    """Return the possible parents of the trial requested after ``trials``, fittest first; none: draw it at random.

    These are the ``population`` fittest trials of its deme and of the immigrants. While all trials of all demes break a
    constraint, those that break least are parents. Trials without valid values never are.
    """
    placed = members(trials)
    child = place(len(placed), genetics)
    if child.generation == 0:
        return []
    demes: list[list[tuple[int, FrozenTrial]]] = [[] for _ in range(genetics.demes)]  # (generation, trial)
    for index, trial in enumerate(placed):
        home = place(index, genetics)
        old_enough = genetics.steady or home.generation < child.generation
        if trial.state == TrialState.COMPLETE and trial.constraints.get(TRAINED, 0.0) <= 0 and old_enough:
            demes[home.deme].append((home.generation, trial))
    signs = np.array([-1.0 if direction == StudyDirection.MAXIMIZE else 1.0 for direction in directions])
    native = [trial for _, trial in demes[child.deme]]
    pool = _joined(native, _immigrants(demes, child.generation, signs, genetics)[child.deme])
    everyone = [trial for deme in demes for _, trial in deme]
    for group in (pool, everyone):
        if feasible := [trial for trial in group if _violation(trial) <= 0]:
            return _fittest(feasible, signs, genetics.population)
    return sorted(pool, key=_violation)[: genetics.population]


def _immigrants(
    demes: Sequence[Sequence[tuple[int, FrozenTrial]]], generation: int, signs: Floats, genetics: GeneticOptions
) -> list[list[FrozenTrial]]:
    """The trials that migrated to each deme by ``generation``: in a ring, the best feasible one of the deme before it.

    Each migration carries over only the front of each deme so far, since the best of all trials is on it.
    """
    arrived: list[list[FrozenTrial]] = [[] for _ in demes]
    if not genetics.migration or len(demes) == 1:
        return arrived
    fronts: list[list[FrozenTrial]] = [[] for _ in demes]
    births_of: list[dict[int, list[FrozenTrial]]] = [defaultdict(list) for _ in demes]  # by the migration that follows
    for births, deme in zip(births_of, demes, strict=True):
        for when, trial in deme:
            if _violation(trial) <= 0:
                births[when // genetics.migration + 1].append(trial)
    for migration in range(1, generation // genetics.migration + 1):
        fronts = [
            _front(_joined(front, births[migration]), signs) for front, births in zip(fronts, births_of, strict=True)
        ]
        leaving = [_fittest(front, signs, 1) for front in fronts]
        arrived = [_joined(guests, leaving[i - 1]) for i, guests in enumerate(arrived)]
        fronts = [_joined(front, leaving[i - 1]) for i, front in enumerate(fronts)]
    return arrived


def _front(trials: Sequence[FrozenTrial], signs: Floats) -> list[FrozenTrial]:
    kept = nondominated(_points(trials, signs))
    return [trial for trial, stays in zip(trials, kept, strict=True) if stays]


def _joined(some: Sequence[FrozenTrial], others: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Both lists, each trial once, in the order of their requests."""
    return sorted({trial.number: trial for trial in (*some, *others)}.values(), key=lambda trial: trial.number)


def _fittest(trials: Sequence[FrozenTrial], signs: Floats, k: int) -> list[FrozenTrial]:
    return [trials[i] for i in best_first(_points(trials, signs), k)]


def _points(trials: Sequence[FrozenTrial], signs: Floats) -> Floats:
    values: Floats = np.array([trial.values for trial in trials], dtype=float)
    return values.reshape(len(trials), len(signs)) * signs


def _violation(trial: FrozenTrial) -> float:
    return sum(max(violation, 0.0) for violation in trial.constraints.values())


class GeneticSampler(BaseSampler):
    """Proposes trials by breeding. It holds only the options and the seed of one proposal: make one for each trial.

    If a child would be a copy of an earlier trial, further genes mutate, one by one. Without this most children of a
    few genes would be copies, and the copy of a training gives no new information.
    """

    def __init__(self, seed: int, genetics: GeneticOptions) -> None:
        self._seed = seed
        self._genetics = genetics

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Return all genes that any trial has had, each with its latest distribution."""
        genes: dict[str, BaseDistribution] = {}
        for other in _before(study, trial):
            genes |= other.distributions
        return genes

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return a child's genes, also those that its other genes may leave unused; none in the first generation."""
        trials = _before(study, trial)
        pool = parents(trials, study.directions, self._genetics)
        if not pool:
            return {}
        rng = np.random.default_rng(self._seed)
        tried = [other.params for other in members(trials)]
        bred = breed([Sample(parent.params, parent.distributions, {}) for parent in pool], tried, self._genetics, rng)
        return bred.params

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Draw a gene that no parent has at random."""
        return draw(param_distribution, np.random.default_rng(derive(self._seed, "gene", param_name)))


def breed(
    pool: Sequence[Sample], tried: Sequence[dict[str, Any]], genetics: GeneticOptions, rng: np.random.Generator
) -> Sample:
    """Return a child of two of ``pool`` (fittest first); mutation keeps it from being a copy of a ``tried`` one."""
    first = tournament(len(pool), genetics.tournament, rng)
    others = [*pool[:first], *pool[first + 1 :]] or [pool[first]]
    second = others[tournament(len(others), genetics.tournament, rng)]
    child = cross(pool[first], second, genetics.crossover, rng)
    genes = mutate(child.params, child.distributions, genetics.mutation, genetics.step, rng)
    movable = [name for name in sorted(pool[first].params) if not child.distributions[name].single()]
    for _ in range(_RENEWALS if movable else 0):
        if not is_copy(genes, tried):
            break
        name = movable[int(rng.integers(len(movable)))]
        genes[name] = mutation(child.distributions[name], genes[name], genetics.step, rng)
    return Sample(genes, child.distributions, {})


def _before(study: Study, trial: FrozenTrial) -> list[FrozenTrial]:
    return [other for other in study.get_trials(deepcopy=False) if other.number < trial.number]
