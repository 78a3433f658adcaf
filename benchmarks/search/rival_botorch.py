"""BoTorch (Balandat et al. 2020) behind what the benchmarks ask of a search, where it is installed: no dependency.

As its tutorial on several objectives has it: a Gaussian process for each standardised objective, and the noisy expected
hypervolume improvement (qLogNEHVI, Ament et al. 2023), after as many quasi-random points as there are dimensions, plus
one, twice. Raw values; its own defaults otherwise. Measured in an environment of its own: ``pip install botorch``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import optuna
import torch
from benchmarks.search.rivals import Asked
from botorch import fit_gpytorch_mll
from botorch.acquisition.multi_objective.logei import qLogNoisyExpectedHypervolumeImprovement
from botorch.models import ModelListGP, SingleTaskGP
from botorch.models.transforms import Standardize
from botorch.optim import optimize_acqf
from botorch.sampling.normal import SobolQMCNormalSampler
from gpytorch.mlls import SumMarginalLogLikelihood
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution

from elastune.core.journal.records import TrialFinished
from elastune.train.program.space import Space
from elastune.tuning.search.history import new_study, quiet
from elastune.tuning.search.objective import Objective

RESTARTS, RAW_SAMPLES, MC_SAMPLES = 4, 128, 64


def value(one: BaseDistribution, unit: float) -> float | int:
    """Of a parameter, from the unit interval."""
    assert isinstance(one, FloatDistribution | IntDistribution), one
    whole = isinstance(one, IntDistribution)
    low, high = (one.low - 0.5, one.high + 0.5) if whole else (one.low, one.high)
    result = math.exp(math.log(low) + unit * math.log(high / low)) if one.log else low + unit * (high - low)
    return int(min(max(round(result), one.low), one.high)) if whole else min(max(result, one.low), one.high)


class BoTorch:
    """A study. All objectives are to be minimised."""

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int) -> None:
        self._space, self._objectives = space, objectives
        with quiet():
            trial = new_study(objectives).ask()
            space(trial)
        self._parameters = dict(trial.distributions)
        self._begin = 2 * (len(self._parameters) + 1)
        self._sobol = torch.quasirandom.SobolEngine(len(self._parameters), scramble=True, seed=seed)
        torch.manual_seed(seed)
        self._x: list[torch.Tensor] = []
        self._y: dict[int, list[float]] = {}

    def ask(self) -> Asked:
        number = len(self._x)
        fresh = number < self._begin
        unit = self._sobol.draw(1, dtype=torch.double)[0] if fresh else self._best()
        self._x.append(unit)
        params = {name: value(one, float(u)) for (name, one), u in zip(self._parameters.items(), unit, strict=True)}
        return Asked(number, params, self._space(optuna.trial.FixedTrial(params)))

    def _best(self) -> torch.Tensor:
        x = torch.stack([self._x[number] for number in self._y])
        y = -torch.tensor(list(self._y.values()), dtype=torch.double)  # BoTorch maximises
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parts = [SingleTaskGP(x, y[:, i : i + 1], outcome_transform=Standardize(m=1)) for i in range(y.shape[1])]
            model = ModelListGP(*parts)
            fit_gpytorch_mll(SumMarginalLogLikelihood(model.likelihood, model))
            worst, best = y.min(dim=0).values, y.max(dim=0).values
            acquisition = qLogNoisyExpectedHypervolumeImprovement(
                model,
                ref_point=(worst - 0.1 * (best - worst)).tolist(),
                X_baseline=x,
                prune_baseline=True,
                sampler=SobolQMCNormalSampler(torch.Size([MC_SAMPLES]), seed=len(self._x)),
            )
            bounds = torch.stack([torch.zeros_like(x[0]), torch.ones_like(x[0])])
            result, _ = optimize_acqf(acquisition, bounds, 1, num_restarts=RESTARTS, raw_samples=RAW_SAMPLES)
        return result[0].detach()

    def estimate(self, number: int, values: Sequence[float]) -> None:
        """Not told: it has no place for it."""

    def tell(self, number: int, finished: TrialFinished) -> None:
        self._y[number] = [finished.values[objective.name] for objective in self._objectives]
