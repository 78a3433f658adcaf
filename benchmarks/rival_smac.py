"""SMAC (Lindauer et al. 2022) behind what the benchmarks ask of a search, where it is installed: it is no dependency.

Its facade for hyperparameters (random forest, log of expected improvement) with ParEGO for several objectives, each
configuration evaluated once, all else as it comes. Measured in an environment of its own: ``pip install smac``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import ConfigSpace
import optuna
from optuna.distributions import FloatDistribution, IntDistribution
from rivals import Asked
from smac import HyperparameterOptimizationFacade, Scenario
from smac.multi_objective.parego import ParEGO
from smac.runhistory.dataclasses import TrialInfo, TrialValue

from elastune.journal.records import TrialFinished
from elastune.search.samplers.optuna_study import new_study, quiet
from elastune.search.space.objective import Objective
from elastune.search.space.space import Space


def configuration_space(space: Space, objectives: Sequence[Objective], seed: int) -> ConfigSpace.ConfigurationSpace:
    """What ``space`` suggests, which must be numbers."""
    with quiet():
        trial = new_study(objectives).ask()
        space(trial)
    found = ConfigSpace.ConfigurationSpace(seed=seed)
    for name, one in trial.distributions.items():
        assert isinstance(one, FloatDistribution | IntDistribution), one
        kind = ConfigSpace.Integer if isinstance(one, IntDistribution) else ConfigSpace.Float
        found.add(kind(name, (one.low, one.high), log=one.log))
    return found


class Smac:
    """A study of SMAC's that is to have so many ``trials``."""

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int, trials: int) -> None:
        self._space, self._objectives = space, objectives
        self._folder = tempfile.TemporaryDirectory(prefix="smac-")
        scenario = Scenario(
            configuration_space(space, objectives, seed),
            name="study",
            output_directory=Path(self._folder.name),
            deterministic=True,
            objectives=[objective.name for objective in objectives],
            n_trials=trials,
            seed=seed,
        )
        self._facade = HyperparameterOptimizationFacade(
            scenario,
            lambda config, seed: [0.0 for _ in objectives],  # never called: it is asked and told
            multi_objective_algorithm=ParEGO(scenario),
            intensifier=HyperparameterOptimizationFacade.get_intensifier(scenario, max_config_calls=1),
            logging_level=False,
            overwrite=True,
        )
        self._open: dict[int, TrialInfo] = {}
        self._asked = 0

    def ask(self) -> Asked:
        info = self._facade.ask()
        number, self._asked = self._asked, self._asked + 1
        self._open[number] = info
        params = dict(info.config)
        return Asked(number, params, self._space(optuna.trial.FixedTrial(params)))

    def estimate(self, number: int, values: Sequence[float]) -> None:
        """Not told: SMAC has no place for it."""

    def tell(self, number: int, finished: TrialFinished) -> None:
        cost = [finished.values[objective.name] for objective in self._objectives]
        self._facade.tell(self._open.pop(number), TrialValue(cost=cost, time=0.0), save=False)
