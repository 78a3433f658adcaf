"""Samplers and early stopping by name: which one proposes or stops trials, and with which settings."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
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
from elastune.core.options import options_of, parse, read, split
from elastune.core.plugins import Plugins
from elastune.train.program.space import Space
from elastune.tuning.search.constraint import Constraint, violations
from elastune.tuning.search.genetic import GeneticOptions, GeneticSampler, parse_genetics
from elastune.tuning.search.halving import Halving, SuccessiveHalving
from elastune.tuning.search.objective import Objective
from elastune.tuning.search.population import PopulationBasedTraining, Selection
from elastune.tuning.search.schedule import Schedule, ToTheEnd

# Which of Optuna's samplers proposes the next trial, and with which settings.

SAMPLERS = ("auto", "random", "grid", "tpe", "gp", "nsga2", "nsga3", "cmaes", "genetic")
MODELS = ("auto", "gp", "tpe")  # these model the values of objectives, so that the scale of the values counts
GENERATIONAL = ("nsga2", "nsga3", "cmaes")  # these decide the generation of a trial when it is requested
INSTALLED = Plugins("elastune.samplers", "sampler")
"""Samplers of other packages: each is a function from a seed to an Optuna sampler."""
GP_TRIALS = 200  # from so many fully trained trials on, TPE does as well
GP_S = 0.25  # CPU seconds of a proposal beside 7 running trials and few finished ones; benchmarks/search/proposals.py
GP_SLOWER_FROM = 150  # at so many finished trials, estimates included, the time has doubled; it grows by the square
GP_OBJECTIVES = 3  # with more objectives the hypervolume improvement gets slow
MUTATION = 5.0  # index of NSGA-II's polynomial mutation (Deb et al. 2002); without it Optuna draws genes afresh
POPULATION = 20  # covers more of the front than Optuna's 50 within a few hundred trials
_SEEDS = 2**32


def check_sampler(name: str, objectives: Sequence[Objective]) -> None:
    """Raise ``UserError`` for an unknown sampler, or one that cannot have these objectives.

    ``genetic`` may name its settings: ``genetic:demes=2,population=16`` (see ``GeneticOptions``).
    """
    sampler, options = split(name, "a sampler", "tpe or genetic:demes=2,population=16")
    if sampler not in SAMPLERS:
        _installed(sampler)
    read(sampler, options, options_of(GeneticOptions) if sampler == "genetic" else {})
    if name == "cmaes" and len(objectives) > 1:
        names = ", ".join(o.name for o in objectives)
        raise UserError("cmaes optimises one objective", names, "keep one, or use auto or nsga2")


def generational(name: str) -> bool:
    """Return whether a sampler waits for the trials of a generation before it breeds the next."""
    return name.startswith("genetic") and not parse_genetics(name).steady


def generation_size(name: str) -> int:
    """Return how many trials a generation of a genetic search has, in all its demes; 1 for any other sampler."""
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
    """Return the sampler for the next trial: ``name`` itself, or what ``auto`` stands for.

    ``auto`` is ``gp`` as long as that works well and is fast enough, else ``tpe``. Optuna's Gaussian process models
    only the parameters that all trials have and draws the others at random, so ``tpe`` serves conditional spaces.

    Args:
        name: A sampler.
        objectives: The objectives of the study.
        trials: All trials so far.
        trained: How many of ``trials`` were trained to their ends.
        every_s: Seconds from one request for a proposal to the next.
    """
    if name != "auto":
        return name
    if trained >= GP_TRIALS or len(objectives) > GP_OBJECTIVES or conditional(trials):
        return "tpe"
    finished = sum(trial.state == TrialState.COMPLETE for trial in trials)
    return "gp" if gp_s(finished) <= every_s else "tpe"


def gp_s(finished: int) -> float:
    """Return roughly the CPU seconds of a proposal of the Gaussian process after so many finished trials.

    This is a formula, not a measurement, since proposals must follow from the journal alone.
    """
    return GP_S * (1 + (finished / GP_SLOWER_FROM) ** 2)


def make_sampler(name: str, seed: int, trials: Sequence[FrozenTrial] = ()) -> BaseSampler:
    """Return a new sampler (not ``auto`` or ``grid``) for one proposal after ``trials``."""
    seed %= _SEEDS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        match name:
            case "random":
                return RandomSampler(seed=seed)
            case "gp":
                # It imports torch and scipy, which take seconds that other samplers need not.
                from elastune.tuning.search.gaussian import GaussianSampler

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
    if name not in INSTALLED.names():
        names = ", ".join([*SAMPLERS, *INSTALLED.names()])
        raise UserError("a sampler must be known", repr(name), f"one of {names}")
    make = INSTALLED.load(name)
    if not callable(make):
        raise UserError(f"the entry point {name} must name a function of a seed", make, "fix its package")
    factory: Callable[[int], Any] = make
    return factory


def conditional(trials: Sequence[FrozenTrial]) -> bool:
    """Return whether the finished trials differ in which parameters they have, or in the distributions of these."""
    finished = [trial.distributions for trial in trials if trial.state == TrialState.COMPLETE]
    return any(distributions != finished[0] for distributions in finished)


# Early stopping as users write it: "none", "asha", "hyperband:eta=4", "pbt:every=2".

STOPPINGS = ("none", "asha", "hyperband", "pbt")
_HALVING = ("asha", "hyperband")


def halves(text: str) -> bool:
    """Return whether most of the trials that this early stopping pauses never go on."""
    return text.strip().partition(":")[0] in _HALVING


def make_schedule(
    text: str,
    objectives: Sequence[Objective],
    seed: int = 0,
    *,
    space: Space | None = None,
    constraints: Sequence[Constraint] = (),
) -> Schedule:
    """Return the schedule that ``text`` names.

    Args:
        text: A name of ``STOPPINGS``, with options of ``Halving`` or ``Selection``.
        objectives: The objectives of the study.
        seed: For population-based training, which changes settings.
        space: The space in which it changes them.
        constraints: The constraints that the changed settings must hold.

    Raises:
        UserError: For an unknown name or option.
    """
    name, options = split(text, "early stopping", "asha:eta=3,min_resource=1")
    if name not in STOPPINGS:
        raise UserError("early stopping must be one that is known", repr(text), f"one of {', '.join(STOPPINGS)}")
    if name == "none":
        read(name, options, {})
        return ToTheEnd()
    if name == "pbt":
        selection = parse(name, options, Selection)
        if space is None:
            raise UserError("population-based training changes settings within a space", "no space", "give it one")
        return PopulationBasedTraining(
            objectives,
            space,
            selection,
            seed,
            lambda sample: all(violation <= 0 for violation in violations(constraints, sample.values).values()),
        )
    if name == "asha":
        return SuccessiveHalving(objectives, parse(name, options, Halving, brackets=1))
    fields = {"brackets": 3, **read(name, options, options_of(Halving))}
    return SuccessiveHalving(objectives, Halving(**fields))
