"""Which of Optuna's samplers proposes the next trial, and with which settings."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import optuna
from optuna.samplers import (
    BaseSampler,
    CmaEsSampler,
    GPSampler,
    NSGAIIISampler,
    NSGAIISampler,
    RandomSampler,
    TPESampler,
)
from optuna.trial import FrozenTrial, TrialState

from elastune.core.errors import UserError
from elastune.core.options import options_of, read, split
from elastune.search.samplers.genetic import Genetics, GeneticSampler, parse_genetics
from elastune.search.space.objective import Objective

SAMPLERS = ("auto", "random", "grid", "tpe", "gp", "nsga2", "nsga3", "cmaes", "genetic")
GENERATIONAL = ("nsga2", "nsga3", "cmaes")  # which generation a trial belongs to is decided as it is asked for

GP_TRIALS = 200  # a proposal takes 0.5 s at 300 trials and 5.6 s at 1,000; TPE 0.1 s
GP_OBJECTIVES = 3  # the hypervolume improvement gets slow beyond
POPULATION = 20  # covers more than Optuna's 50 within the some hundred trials that trainings allow
_SEEDS = 2**32


def check_sampler(name: str, objectives: Sequence[Objective]) -> None:
    """Raise ``UserError`` for an unknown sampler, or one that cannot have these objectives.

    ``genetic`` may name its settings: ``genetic:demes=2,population=16`` (see ``Genetics``).
    """
    known, options = split(name, "a sampler", "tpe or genetic:demes=2,population=16")
    if known not in SAMPLERS:
        raise UserError("a sampler must be known", repr(name), f"one of {', '.join(SAMPLERS)}")
    read(known, options, options_of(Genetics) if known == "genetic" else {})
    if name == "cmaes" and len(objectives) > 1:
        names = ", ".join(o.name for o in objectives)
        raise UserError("cmaes optimises one objective", names, "keep one, or use auto or nsga2")


def generational(name: str) -> bool:
    """Whether a sampler waits for the trials of a generation before it breeds the next."""
    return name.startswith("genetic") and not parse_genetics(name).steady


def resolve(name: str, objectives: Sequence[Objective], trials: Sequence[FrozenTrial]) -> str:
    """``name``, or what ``auto`` stands for after ``trials``: ``gp`` as long as it can work well, else ``tpe``.

    Optuna's GP models only the parameters that every trial has and draws the others at random, so a conditional space
    is TPE's.
    """
    if name != "auto":
        return name
    finished = sum(trial.state == TrialState.COMPLETE for trial in trials)
    if finished >= GP_TRIALS or len(objectives) > GP_OBJECTIVES or conditional(trials):
        return "tpe"
    return "gp"


def make_sampler(name: str, seed: int, trials: Sequence[FrozenTrial] = ()) -> BaseSampler:
    """A fresh sampler (not ``auto`` or ``grid``) for one proposal after ``trials``."""
    seed %= _SEEDS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        match name:
            case "random":
                return RandomSampler(seed=seed)
            case "gp":
                return GPSampler(seed=seed, warn_independent_sampling=False)
            case "tpe" if conditional(trials):
                return TPESampler(seed=seed, multivariate=True, group=True)
            case "tpe":
                return TPESampler(seed=seed)
            case "nsga2":
                return NSGAIISampler(seed=seed, population_size=POPULATION)
            case "nsga3":
                return NSGAIIISampler(seed=seed, population_size=POPULATION)
            case "cmaes":
                return CmaEsSampler(seed=seed, warn_independent_sampling=False)
    if name.startswith("genetic"):
        return GeneticSampler(seed, parse_genetics(name))
    raise ValueError(f"no sampler of Optuna's is called {name}")


def conditional(trials: Sequence[FrozenTrial]) -> bool:
    """Whether the trials' parameters differ in more than their values."""
    finished = [trial.distributions for trial in trials if trial.state == TrialState.COMPLETE]
    return any(distributions != finished[0] for distributions in finished)
