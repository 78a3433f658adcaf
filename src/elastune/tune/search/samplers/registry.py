"""Which of Optuna's samplers proposes the next trial, and with which settings."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any

import optuna
from optuna.samplers import (
    BaseSampler,
    CmaEsSampler,
    NSGAIIISampler,
    NSGAIISampler,
    RandomSampler,
    TPESampler,
)
from optuna.samplers.nsgaii import PolynomialMutation
from optuna.trial import FrozenTrial, TrialState

from elastune.core.errors import UserError
from elastune.core.options import options_of, read, split
from elastune.tune.search.objective import Objective
from elastune.tune.search.samplers.gaussian import GaussianSampler
from elastune.tune.search.samplers.genetic import GeneticOptions, GeneticSampler, parse_genetics

SAMPLERS = ("auto", "random", "grid", "tpe", "gp", "nsga2", "nsga3", "cmaes", "genetic")
MODELS = ("auto", "gp", "tpe")  # these model the values of objectives, so their scale counts
GENERATIONAL = ("nsga2", "nsga3", "cmaes")  # which generation a trial belongs to is decided as it is asked for

ENTRY_POINTS = "elastune.samplers"
"""The group of entry points by which installed packages offer samplers: a function from a seed to an Optuna sampler."""

GP_TRIALS = 200  # fully trained ones, from which on TPE does as well
GP_S = 0.25  # CPU seconds of a proposal beside 7 running trials, while there is little to fit; benchmarks/search/proposals.py
GP_SLOWER_FROM = 150  # trials told, estimates included: then it takes as long again, and grows by their square
GP_OBJECTIVES = 3  # the hypervolume improvement gets slow beyond
MUTATION = 5.0  # index of NSGA-II's polynomial mutation (Deb et al. 2002); without it Optuna draws a gene afresh
POPULATION = 20  # covers more than Optuna's 50 within the some hundred trials that trainings allow
_SEEDS = 2**32


def check_sampler(name: str, objectives: Sequence[Objective]) -> None:
    """Raise ``UserError`` for an unknown sampler, or one that cannot have these objectives.

    ``genetic`` may name its settings: ``genetic:demes=2,population=16`` (see ``GeneticOptions``).
    """
    known, options = split(name, "a sampler", "tpe or genetic:demes=2,population=16")
    if known not in SAMPLERS:
        _installed(known)
    read(known, options, options_of(GeneticOptions) if known == "genetic" else {})
    if name == "cmaes" and len(objectives) > 1:
        names = ", ".join(o.name for o in objectives)
        raise UserError("cmaes optimises one objective", names, "keep one, or use auto or nsga2")


def generational(name: str) -> bool:
    """Whether a sampler waits for the trials of a generation before it breeds the next."""
    return name.startswith("genetic") and not parse_genetics(name).steady


def generation_size(name: str) -> int:
    """How many trials a generation of a genetic search has, in all its demes; 1 for any other sampler."""
    if not name.startswith("genetic"):
        return 1
    genetics = parse_genetics(name)
    return genetics.demes * genetics.population


def resolve(
    name: str,
    objectives: Sequence[Objective],
    trials: Sequence[FrozenTrial],
    *,
    trained: int = 0,
    every_s: float = math.inf,
) -> str:
    """``name``, or what ``auto`` stands for after ``trials``: ``gp`` as long as it works well and pays, else ``tpe``.

    Optuna's GP models only the parameters that every trial has and draws the others at random, so a conditional space
    is TPE's. ``trained``: how many of ``trials`` came to their ends; ``every_s``: a proposal is wanted so often.
    """
    if name != "auto":
        return name
    if trained >= GP_TRIALS or len(objectives) > GP_OBJECTIVES or conditional(trials):
        return "tpe"
    told = sum(trial.state == TrialState.COMPLETE for trial in trials)
    return "gp" if gp_s(told) <= every_s else "tpe"


def gp_s(told: int) -> float:
    """CPU seconds that a proposal of the Gaussian process takes, roughly, after so many trials were told.

    A formula and no measurement: what is proposed must follow from the journal alone.
    """
    return GP_S * (1 + (told / GP_SLOWER_FROM) ** 2)


def make_sampler(name: str, seed: int, trials: Sequence[FrozenTrial] = ()) -> BaseSampler:
    """A fresh sampler (not ``auto`` or ``grid``) for one proposal after ``trials``."""
    seed %= _SEEDS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        match name:
            case "random":
                return RandomSampler(seed=seed)
            case "gp":
                return GaussianSampler(seed)
            case "tpe" if conditional(trials):
                return TPESampler(seed=seed, multivariate=True, group=True)
            case "tpe":
                return TPESampler(seed=seed)
            case "nsga2":
                steps = PolynomialMutation(eta=MUTATION)
                return NSGAIISampler(seed=seed, population_size=POPULATION, mutation=steps)
            case "nsga3":
                return NSGAIIISampler(seed=seed, population_size=POPULATION)
            case "cmaes":
                return CmaEsSampler(seed=seed, warn_independent_sampling=False)
    if name.startswith("genetic"):
        return GeneticSampler(seed, parse_genetics(name))
    made = _installed(name)(seed)
    if not isinstance(made, BaseSampler):
        raise UserError(f"the sampler {name} must be one of Optuna's kind", made, "derive it from optuna's BaseSampler")
    return made


def _installed(name: str) -> Callable[[int], Any]:
    """The function from a seed to a sampler that an installed package offers as ``name``."""
    offered = entry_points(group=ENTRY_POINTS)
    if name not in offered.names:
        known = ", ".join([*SAMPLERS, *sorted(offered.names)])
        raise UserError("a sampler must be known", repr(name), f"one of {known}")
    try:
        make = offered[name].load()
    except Exception as error:
        rule = f"an installed sampler must load: {type(error).__name__}: {error}"
        raise UserError(rule, offered[name].value, "fix its package") from error
    if not callable(make):
        raise UserError(f"the entry point {name} must name a function of a seed", make, "fix its package")
    found: Callable[[int], Any] = make
    return found


def conditional(trials: Sequence[FrozenTrial]) -> bool:
    """Whether the trials' parameters differ in more than their values."""
    finished = [trial.distributions for trial in trials if trial.state == TrialState.COMPLETE]
    return any(distributions != finished[0] for distributions in finished)
