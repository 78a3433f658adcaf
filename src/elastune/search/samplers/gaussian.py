"""Optuna's Gaussian process with warped inputs, fitted and searched at a fraction of its price.

Where a proposal of ``GPSampler`` spends its time, at 100 trials: in evaluations of one point at a time, of which the
line search along each parameter with many whole values makes hundreds, and the ascents of ten starts hundreds more
(together only where greenlet is installed); and in fits that begin anew. Here all starts climb together, parameters
with many values climb as if they were continuous, and processes come from ``kernel_fit``. Processes are of Optuna's
kind, and what is maximised are Optuna's acquisition functions. Neither is its public interface, so pyproject.toml names
the versions.

A proposal is a function of the study and the seed: nothing is kept from one to the next that could change it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from optuna._gp.acqf import (
    BaseAcquisitionFunc,
    LogCEHVI,
    LogCEI,
    LogEHVI,
    LogEI,
    qLogCEHVI,
    qLogCEI,
    qLogEHVI,
    qLogEI,
)
from optuna._gp.gp import GPRegressor, fit_kernel_params
from optuna._gp.search_space import SearchSpace
from optuna._gp.thread_limiting import limit_threads_in_optimization
from optuna.distributions import BaseDistribution
from optuna.samplers import GPSampler
from optuna.samplers._gp.sampler import _MAX_QMC_SEED_VALUE, EPS, _get_params, _standardize_values
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial
from scipy.optimize import minimize

from elastune.search.samplers.kernel_fit import fit
from elastune.search.space.objective import Floats

ACQUISITIONS: dict[tuple[bool, bool, bool], Callable[..., BaseAcquisitionFunc]] = {
    (False, False, False): LogEI,
    (False, False, True): qLogEI,
    (False, True, False): LogCEI,
    (False, True, True): qLogCEI,
    (True, False, False): LogEHVI,
    (True, False, True): qLogEHVI,
    (True, True, False): LogCEHVI,
    (True, True, True): qLogCEHVI,
}
"""Several objectives? constraints? running trials?"""

CANDIDATES = 512  # where climbing may begin; Optuna's are 2,048
STARTS = 6  # of them, the best ones of the trials included; Optuna's are 10
FANTASIES = 64  # samples of what trials may reach, where there are several objectives; Optuna's are 128
STABLE = 1e-6  # variance that is added where a covariance cannot be factored; Optuna's is 1e-12
ROUNDS = 2  # of climbing along what is continuous and choosing among what is not
STEPS = 30  # of a climb
ALIKE = 1e-6  # apart in no coordinate by more: two points are one
FEW = 16  # values of a parameter that are all tried; as in Optuna


class GaussianSampler(GPSampler):
    """One proposal, by the expected improvement of the hypervolume under a Gaussian process for each objective."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed, warn_independent_sampling=False)
        self._n_local_search = STARTS
        self._tried: Floats | None = None  # points (n, d) of the trials that were begun

    def _sample_relative_impl(
        self,
        study: Study,
        completed_trials: list[FrozenTrial],
        running_trials: list[FrozenTrial],
        search_space: dict[str, BaseDistribution],
    ) -> dict[str, Any]:
        space = SearchSpace(search_space)
        points = space.get_normalized_params(completed_trials)
        asked = [_get_params(trial) for trial in running_trials]
        running = space.get_normalized_params(running_trials, asked) if asked else None
        signs = [-1.0 if direction == StudyDirection.MINIMIZE else 1.0 for direction in study.directions]
        scores = _standardize_values(np.array([trial.values for trial in completed_trials]) * signs)[0]
        broken = np.array([list(trial.constraints.values()) for trial in completed_trials])
        with limit_threads_in_optimization():  # all of it: sums over threads round by their number
            self._tried = points if running is None else np.vstack([points, running])
            acquisition, best = self._acquisition(space, points, scores, broken, running)
            found: dict[str, Any] = space.get_unnormalized_param(self._optimize_acqf(acquisition, best))
        return found

    def _acquisition(
        self, space: SearchSpace, points: Floats, scores: Floats, broken: Floats, running: Floats | None
    ) -> tuple[BaseAcquisitionFunc, Floats | None]:
        """What is to be maximised, and good points to begin at: of trials at ``points`` (n, d) of the unit cube.

        ``scores`` (n, objectives) are standardised, the more the better; ``broken`` (n, constraints) are violations.
        """
        several, rng = scores.shape[1] > 1, self._rng.rng
        feasible = np.all(broken <= 0, axis=1) if broken.size else np.full(len(points), True)
        told, points_told = scores[feasible], points[feasible]
        given: dict[str, Any] = {"search_space": space}
        if several:
            baseline = torch.from_numpy(told) if len(told) else None
            given["gpr_list"] = self._fitted(space, points, scores)
            given["Y_feasible" if broken.size else "Y_train"] = baseline
        else:
            given |= {"gpr": self._fitted(space, points, scores)[0], "threshold": told.max(initial=-np.inf)}
        if broken.size:
            allowed, means, spreads = _standardize_values(-broken)
            given["constraints_gpr_list"] = self._fitted(space, points, allowed)
            given["constraints_threshold_list"] = list(-means / np.maximum(EPS, spreads))
        if running is not None:
            given["normalized_params_of_running_trials"] = running
        if several or running is not None:
            given["n_qmc_samples"] = FANTASIES if several else self._n_qmc_samples_qei
            given["qmc_seed"] = rng.randint(_MAX_QMC_SEED_VALUE)
        kind = ACQUISITIONS[several, bool(broken.size), running is not None]
        try:
            acquisition = kind(**given)
        except RuntimeError:  # running trials so much alike that their covariance cannot be factored
            acquisition = kind(**given, stabilizing_noise=STABLE)
        if not len(told):
            return acquisition, None
        if several:
            return acquisition, self._get_best_params_for_multi_objective(points_told, told)
        return acquisition, points_told[[int(np.argmax(told))]]

    def _fitted(self, space: SearchSpace, points: Floats, columns: Floats) -> list[GPRegressor]:
        """A process for each of the standardised ``columns``; Optuna's own where none is found that warps."""
        named, least_noise = space.is_categorical, self._minimum_noise
        found: list[GPRegressor] = []
        for column in columns.T:
            process: GPRegressor | None = fit(points, column, named, least_noise)
            if process is None:
                process = fit_kernel_params(points, column, named, self._log_prior, least_noise, False)
            found.append(process)
        return found

    def _optimize_acqf(self, acqf: BaseAcquisitionFunc, best_params: Floats | None) -> Floats:
        rng: np.random.RandomState = self._rng.rng
        drawn = _untried(acqf.search_space.sample_normalized_params(CANDIDATES, rng=rng), self._tried)
        worth = acqf.eval_acqf_no_grad(drawn)
        starts = drawn[_roulette(worth, self._n_local_search - (0 if best_params is None else len(best_params)), rng)]
        starts = starts if best_params is None else np.vstack([starts, best_params])
        return climb(acqf, starts, self._tried)


def _roulette(worth: Floats, k: int, rng: np.random.RandomState) -> list[int]:
    """The best of ``worth``, which is logarithmic, and up to ``k`` - 1 others, drawn in proportion."""
    best = int(np.argmax(worth))
    share = np.exp(worth - worth[best])
    share[best] = 0.0
    others = min(k - 1, int(np.count_nonzero(share > 0)))
    if others <= 0:
        return [best]
    return [best, *map(int, rng.choice(len(worth), size=others, replace=False, p=share / share.sum()))]


def climb(acqf: BaseAcquisitionFunc, starts: Floats, tried: Floats | None = None) -> Floats:
    """The best that is reached from ``starts`` (k, d): a row that lies on the grid of its parameters.

    One of ``tried`` (n, d) only where nothing else is reached: to train the same again tells little.
    """
    space = acqf.search_space
    grids = dict(zip(map(int, space.discrete_indices), space.get_choices_of_discrete_params(), strict=True))
    few = [i for i, grid in grids.items() if space.is_categorical[i] or len(grid) <= FEW]
    smooth = [i for i in range(space.dim) if i not in few]
    at = starts.copy()
    for _ in range(ROUNDS):
        if smooth:
            at = _ascend(acqf, at, smooth)
        for i in smooth:
            if i in grids:
                at[:, i] = _nearest(grids[i], at[:, i])
        before = at.copy()
        for i in few:
            at = _best_of_each(acqf, at, i, grids[i])
        if np.array_equal(at, before):
            break
    reached = _untried(np.vstack([at, starts]), tried)
    best: Floats = reached[int(np.argmax(acqf.eval_acqf_no_grad(reached)))]
    return best


def _untried(rows: Floats, tried: Floats | None) -> Floats:
    """Those of ``rows`` (k, d) that are none of ``tried`` (n, d); all of them where each is."""
    if tried is None:
        return rows
    apart = np.max(np.abs(rows[:, None, :] - tried[None, :, :]), axis=2)
    new = np.min(apart, axis=1) > ALIKE
    return rows[new] if np.any(new) else rows


def _ascend(acqf: BaseAcquisitionFunc, at: Floats, smooth: list[int]) -> Floats:
    """All rows at once, along the ``smooth`` coordinates, in units of their lengths (the mean slope of a warp is 1)."""
    unit = acqf.length_scales[smooth]

    def loss(flat: Floats) -> tuple[float, Floats]:
        rows = at.copy()
        rows[:, smooth] = flat.reshape(len(at), -1) * unit
        x = torch.from_numpy(rows).requires_grad_(True)
        total = -acqf.eval_acqf(x).sum()
        total.backward()
        assert x.grad is not None
        return total.item(), (x.grad.numpy()[:, smooth] * unit).ravel()

    bounds = [(0.0, 1.0 / each) for each in unit] * len(at)
    first = (at[:, smooth] / unit).ravel()
    found = minimize(loss, first, jac=True, method="l-bfgs-b", bounds=bounds, options={"maxiter": STEPS, "gtol": 1e-2})
    climbed = at.copy()
    climbed[:, smooth] = np.clip(found.x.reshape(len(at), -1) * unit, 0.0, 1.0)
    return climbed


def _nearest(grid: Floats, values: Floats) -> Floats:
    right = np.clip(np.searchsorted(grid, values), 1, len(grid) - 1)
    low, high = grid[right - 1], grid[right]
    return np.where(values - low < high - values, low, high)


def _best_of_each(acqf: BaseAcquisitionFunc, at: Floats, i: int, grid: Floats) -> Floats:
    """Each row with the value of parameter ``i`` that is best for it."""
    tried = np.repeat(at, len(grid), axis=0)
    tried[:, i] = np.tile(grid, len(at))
    best = acqf.eval_acqf_no_grad(tried).reshape(len(at), len(grid)).argmax(axis=1)
    changed = at.copy()
    changed[:, i] = grid[best]
    return changed
