"""The sampler ``genetic``: several populations that breed separately and exchange their best configurations.

Populations advance by generations, or steadily as trials finish. The operators are pure functions: rank by front and
crowding, choose pairs by tournament, cross, mutate.
It is a plain ``BaseSampler``. Optuna's ``BaseGASampler`` is private, knows one population, and writes generations and
parents into the study. Here the number of a trial decides its population, and the finished trials decide its parents.
So a proposal is a function of the trials and a seed, and a replayed study continues alike. One exception: trials lost
in a crash are not in the replayed study, so the few trials requested after them may change population.
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
from elastune.tune.search.front import best_first, nondominated
from elastune.tune.search.history import ALLOWED, TRAINED
from elastune.tune.search.objective import Floats

# [genetic operators] What a genetic search does to configurations: ranks them, pairs them, crosses them, mutates them. Pure functions.


def tournament(n: int, entrants: int, rng: np.random.Generator) -> int:
    """The best (smallest) of ``entrants`` ranks drawn without repetition out of 0..n-1."""
    drawn: NDArray[np.intp] = rng.choice(n, size=min(entrants, n), replace=False)
    return int(drawn.min())


def cross(first: Sample, second: Sample, share: float, rng: np.random.Generator) -> Sample:
    """``first`` with each gene taken from ``second`` with probability ``share``; ``values`` stay empty.

    A gene that only one parent has comes from that one: whether it is used, the space decides. One that both have out
    of different distributions stays the first's.
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
    """``child`` with each gene mutated with probability ``rate``: see ``mutation``."""
    return {
        name: mutation(distributions[name], child[name], step, rng) if rng.random() < rate else child[name]
        for name in sorted(child)
    }


def mutation(distribution: BaseDistribution, value: Any, step: float, rng: np.random.Generator) -> Any:
    """A gene's new value: drawn afresh where ``step`` is 0, else near ``value``.

    Near: a normal step with a standard deviation of ``step`` of the gene's range (on its log scale where it has one),
    to the bound where it would lead beyond, since optima often lie there; at least one place where the values are
    finitely many. Categories are always drawn afresh.
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
    """Whether the space, given the genes of ``child``, would ask for a configuration that was tried before."""
    return any(params.items() <= child.items() for params in tried)


# [genetic] A genetic search: demes that breed apart and send each other their best, synchronously or as trials finish.
#
# A plain ``BaseSampler``, not Optuna's ``BaseGASampler``: that class is private (``optuna.samplers._ga``), knows one
# population, writes the generation and the chosen parents into the study through private calls, and lets a generation
# overflow while its last trials run. Nothing needs to be written: where a trial belongs follows from how many were asked
# for before it, and who may be a parent from what has finished. So a proposal is a function of the trials and a seed, a
# straggler counts as soon as it ends, and a replayed study goes on alike. (Trials that a crash took away are not in the
# replayed study: the few that were asked for after them, and had finished before, then change deme.)

_RENEWALS = 20  # genes mutated beyond the rate, at most, so that a child is not a copy


@dataclass(frozen=True)
class GeneticOptions:
    """How a genetic search breeds. The rates and the migration are the Cray tool's defaults; its demes are 2 x 32.

    Steps find what lies near: with genes that are always drawn afresh, as the Cray tool draws them (``step=0``), a
    search comes to less of the front of ZDT1 by 1,000 trials (``tests/tune/search/samplers/test_known_fronts.py``).

    ``demes`` of ``population`` each; a parent wins a tournament of ``tournament``; each gene comes from the second
    parent with probability ``crossover``, and mutates with probability ``mutation``, afresh or, with ``step`` > 0, by
    a normal step of that share of its range. Every ``migration`` generations (0: never) the best of a deme joins the
    next. ``steady`` 1: all that finished may be parents; 0: only earlier generations.
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
    """The settings that ``sampler`` names, such as "genetic:demes=2,population=16". Raises ``UserError``."""
    name, options = split(sampler, "a sampler", "genetic:demes=2,population=16")
    return parse(name, options, GeneticOptions)


@dataclass(frozen=True)
class Lineage:
    """Where a trial belongs: its deme, and its generation there. The first generation is 0, drawn at random."""

    deme: int
    generation: int


def place(index: int, genetics: GeneticOptions) -> Lineage:
    """Of the trial asked for after ``index`` others: the demes take turns."""
    return Lineage(index % genetics.demes, index // genetics.demes // genetics.population)


def members(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The trials that have a place, in the order they were asked for: not those given up or forbidden to start."""
    alive = (TrialState.COMPLETE, TrialState.RUNNING)
    return [trial for trial in trials if trial.state in alive and trial.constraints.get(ALLOWED, 0.0) <= 0]


def unfinished(trials: Sequence[FrozenTrial], genetics: GeneticOptions) -> int:
    """How many trials of generations before the next trial's still run.

    Whoever waits for 0 before asking runs generation after generation; with ``steady`` 0 exactly as the textbook does.
    """
    known = members(trials)
    now = place(len(known), genetics).generation
    before = known[: now * genetics.demes * genetics.population]
    return sum(trial.state == TrialState.RUNNING for trial in before)


def parents(
    trials: Sequence[FrozenTrial], directions: Sequence[StudyDirection], genetics: GeneticOptions
) -> list[FrozenTrial]:
    """Who may breed the trial asked for after ``trials``, fittest first; empty where it should be drawn at random.

    The ``population`` fittest of its deme and of those who migrated there. Trials that break a constraint breed only
    while none of any deme breaks none, those that break least; trials without valid values never do.
    """
    known = members(trials)
    here = place(len(known), genetics)
    if here.generation == 0:
        return []
    demes: list[list[tuple[int, FrozenTrial]]] = [[] for _ in range(genetics.demes)]  # (generation, trial)
    for index, trial in enumerate(known):
        home = place(index, genetics)
        old_enough = genetics.steady or home.generation < here.generation
        if trial.state == TrialState.COMPLETE and trial.constraints.get(TRAINED, 0.0) <= 0 and old_enough:
            demes[home.deme].append((home.generation, trial))
    signs = np.array([-1.0 if direction == StudyDirection.MAXIMIZE else 1.0 for direction in directions])
    native = [trial for _, trial in demes[here.deme]]
    pool = _joined(native, _immigrants(demes, here.generation, signs, genetics)[here.deme])
    everyone = [trial for deme in demes for _, trial in deme]
    for group in (pool, everyone):
        if feasible := [trial for trial in group if _violation(trial) <= 0]:
            return _fittest(feasible, signs, genetics.population)
    return sorted(pool, key=_violation)[: genetics.population]


def _immigrants(
    demes: Sequence[Sequence[tuple[int, FrozenTrial]]], generation: int, signs: Floats, genetics: GeneticOptions
) -> list[list[FrozenTrial]]:
    """Who has come to each deme by ``generation``: in a ring, the best feasible of the deme before it.

    Only each deme's front so far is carried from one migration to the next: the best of all is the best of it.
    """
    arrived: list[list[FrozenTrial]] = [[] for _ in demes]
    if not genetics.migration or len(demes) == 1:
        return arrived
    fronts: list[list[FrozenTrial]] = [[] for _ in demes]
    born: list[dict[int, list[FrozenTrial]]] = [defaultdict(list) for _ in demes]  # by the migration that follows
    for found, deme in zip(born, demes, strict=True):
        for when, trial in deme:
            if _violation(trial) <= 0:
                found[when // genetics.migration + 1].append(trial)
    for migration in range(1, generation // genetics.migration + 1):
        fronts = [_front(_joined(front, found[migration]), signs) for front, found in zip(fronts, born, strict=True)]
        leaving = [_fittest(front, signs, 1) for front in fronts]
        arrived = [_joined(guests, leaving[i - 1]) for i, guests in enumerate(arrived)]
        fronts = [_joined(front, leaving[i - 1]) for i, front in enumerate(fronts)]
    return arrived


def _front(trials: Sequence[FrozenTrial], signs: Floats) -> list[FrozenTrial]:
    kept = nondominated(_points(trials, signs))
    return [trial for trial, stays in zip(trials, kept, strict=True) if stays]


def _joined(some: Sequence[FrozenTrial], others: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Both, each trial once, in the order they were asked for."""
    return sorted({trial.number: trial for trial in (*some, *others)}.values(), key=lambda trial: trial.number)


def _fittest(trials: Sequence[FrozenTrial], signs: Floats, k: int) -> list[FrozenTrial]:
    return [trials[i] for i in best_first(_points(trials, signs), k)]


def _points(trials: Sequence[FrozenTrial], signs: Floats) -> Floats:
    values: Floats = np.array([trial.values for trial in trials], dtype=float)
    return values.reshape(len(trials), len(signs)) * signs


def _violation(trial: FrozenTrial) -> float:
    return sum(max(violation, 0.0) for violation in trial.constraints.values())


class GeneticSampler(BaseSampler):
    """Proposes by breeding. Holds nothing but the settings and the seed of one proposal: make one for each trial.

    A child that would be a copy of a trial known already has further genes mutated, one by one: without this most
    children of a few genes would be copies, and the copy of a training teaches nothing.
    """

    def __init__(self, seed: int, genetics: GeneticOptions) -> None:
        self._seed = seed
        self._genetics = genetics

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All genes that any trial has had, each out of its latest distribution."""
        found: dict[str, BaseDistribution] = {}
        for other in _before(study, trial):
            found |= other.distributions
        return found

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """A child's genes, those too that its other genes may leave unused; none in the first generation."""
        trials = _before(study, trial)
        pool = parents(trials, study.directions, self._genetics)
        if not pool:
            return {}
        rng = np.random.default_rng(self._seed)
        tried = [other.params for other in members(trials)]
        bred = breed([Sample(one.params, one.distributions, {}) for one in pool], tried, self._genetics, rng)
        return bred.params

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """A gene that no parent could give, drawn at random."""
        return draw(param_distribution, np.random.default_rng(derive(self._seed, "gene", param_name)))


def breed(
    pool: Sequence[Sample], tried: Sequence[dict[str, Any]], genetics: GeneticOptions, rng: np.random.Generator
) -> Sample:
    """A child of two of ``pool`` (fittest first), and no copy of what was ``tried`` where mutation can help it."""
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
