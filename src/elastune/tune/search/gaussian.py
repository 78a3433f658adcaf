"""The sampler ``gp``: Optuna's Gaussian process with warped inputs, at a fraction of the computing time.

With one length scale per parameter, a process treats a step at 0.001 and a step at 0.9 alike. Here each input gets a
scale of its own, which is learnt together with the kernel (maximum a posteriori, gradient in closed form).
At 100 trials, ``GPSampler`` spends its time on evaluations of single points, and on fits that begin anew. Here all
starts climb together, parameters with many values climb as if they were continuous, and a fit begins on part of the
trials. The acquisition functions are Optuna's. They are not public, so pyproject.toml limits the versions of Optuna,
and this file is the only one that imports private names of Optuna.
A proposal is a function of the study and the seed alone: no state is kept between proposals that could change one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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

from elastune.tune.search.objective import Floats

# [warped] Inputs of a Gaussian process, each on a scale of its own that is learnt with the kernel.
#
# A process with one length scale a parameter takes a step at 0.001 and one at 0.9 for alike. Where all that matters of a
# weight decay between 0 and 0.1 happens below 0.01, it is wrong about one end or the other. So each parameter goes
# through a function that rises from 0 to 1 and may bend at either end: the distribution function of Kumaraswamy,
# 1 - (1 - x^a)^b (Snoek et al. 2014, "Input Warping for Bayesian Optimization of Non-stationary Functions", who use the
# beta distribution's; Cowen-Rivers et al. 2022, "HEBO", who use this one, as its derivatives are closed). With a = b = 1
# it is a straight line. Categories stay as they are.

EDGE = 1e-6  # the cube shrinks by so much on all sides: at 0 and 1 themselves the slopes of a bend have no bound
SPREAD = 0.5  # standard deviation, beforehand, of the logarithms of a and b around 0; HEBO's is 0.55


@dataclass(frozen=True)
class Warp:
    """a and b of every parameter, (d,) each, and which of them are categories, (d,)."""

    a: torch.Tensor
    b: torch.Tensor
    categorical: torch.Tensor

    def __call__(self, points: torch.Tensor) -> torch.Tensor:
        """Points (..., d) of the unit cube, warped."""
        inside = self._inside(points)
        return torch.where(self.categorical, points, 1 - (1 - inside**self.a) ** self.b)

    def slopes(self, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The derivatives of warped points (n, d) by the logarithms of a and of b, (n, d) each."""
        inside = self._inside(points)
        power = inside**self.a
        left = 1 - power
        by_a = self.a * self.b * left ** (self.b - 1) * power * inside.log()
        by_b = -self.b * left**self.b * left.log()
        return by_a.masked_fill(self.categorical, 0.0), by_b.masked_fill(self.categorical, 0.0)

    def _inside(self, points: torch.Tensor) -> torch.Tensor:
        """Points off the sides of the cube; those that differ stay different, and keep their slopes."""
        return EDGE + (1 - 2 * EDGE) * points.masked_fill(self.categorical, 0.5)


class WarpedProcess(GPRegressor):
    """Optuna's process over warped parameters. What it is asked about are points of the unit cube, as they are."""

    def __init__(
        self, points: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, scale: float, noise: float, warp: Warp
    ) -> None:
        """``points`` (n, d) with ``values`` (n,), standardised; ``lengths`` (d,) are inverse squared length scales."""
        self.warp = warp
        self._warped = warp(points)
        numbers = (lengths, *(torch.tensor(number, dtype=torch.float64) for number in (scale, noise)))
        super().__init__(warp.categorical, points, values, *numbers)
        self._squared_X_diff = squared_apart(self._warped, warp.categorical)
        self._cache_matrix()

    def kernel(self, X1: torch.Tensor | None = None, X2: torch.Tensor | None = None) -> torch.Tensor:
        if X1 is None:
            return super().kernel(X1, X2)
        other = self._warped if X2 is None or X2 is self._X_train else self.warp(X2)
        return super().kernel(self.warp(X1), other)


def squared_apart(points: torch.Tensor, categorical: torch.Tensor) -> torch.Tensor:
    """How far points (n, d) are apart along each parameter, squared (n, n, d); 1 where categories differ."""
    apart = (points[:, None, :] - points[None, :, :]).square_()
    if bool(categorical.any()):
        apart[..., categorical] = (apart[..., categorical] > 0).to(apart.dtype)
    return apart


# [kernel fit] Kernel and warp of a Gaussian process by maximum a posteriori, with the gradient in closed form.
#
# Optuna's ``GPSampler`` fits its kernel, which does not warp, with the same priors through autograd. Here the fit begins
# on part of the trials, where an evaluation is cheap, and ends on all of them. It is a function of the trials alone and
# remembers the newest few, so that proposals between which nothing was told share one fit.

FIRST = 48  # trials that the fit begins on
GRADIENT = 0.1  # where the search ends; Optuna's .01 takes half as long again, for a log posterior .1 higher at most
REMEMBERED = 32


def fit(points: Floats, values: Floats, categorical: NDArray[np.bool_], least_noise: float) -> WarpedProcess | None:
    """The process of ``values`` (n,), standardised, at ``points`` (n, d) of the unit cube; None where none is found.

    Each call makes a process of its own.
    """
    n, d = points.shape
    x, y = np.ascontiguousarray(points, dtype=np.float64), np.ascontiguousarray(values, dtype=np.float64)
    raw = _remembered(x.tobytes(), y.tobytes(), tuple(map(bool, categorical)), n, d, least_noise)
    if raw is None:
        return None
    whole = torch.tensor(raw, dtype=torch.float64).exp()
    warp = Warp(whole[d + 2 : 2 * d + 2], whole[2 * d + 2 :], torch.tensor(categorical))
    scale, noise = float(whole[d]), float(whole[d + 1]) + least_noise
    try:
        return WarpedProcess(torch.tensor(x), torch.tensor(y), whole[:d], scale, noise, warp)
    except RuntimeError:  # its covariance cannot be factored
        return None


def forget() -> None:
    """Fit anew what was fitted before: to measure what that takes, or to see that it changes nothing."""
    _remembered.cache_clear()


def fits() -> int:
    """How many fits were made since the last ``forget``."""
    return _remembered.cache_info().misses


@lru_cache(maxsize=REMEMBERED)
def _remembered(
    x: bytes, y: bytes, categorical: tuple[bool, ...], n: int, d: int, least_noise: float
) -> tuple[float, ...] | None:
    """The logarithms that ``posterior_loss`` is least at."""
    points = torch.frombuffer(bytearray(x), dtype=torch.float64).reshape(n, d)
    values = torch.frombuffer(bytearray(y), dtype=torch.float64)
    raw = np.zeros(3 * d + 2)
    parts = [slice(None)] if n < 2 * FIRST else [slice(None, None, -(-n // FIRST)), slice(None)]
    for part in parts:
        loss = posterior_loss(points[part], values[part], categorical, least_noise)
        found = minimize(loss, raw, jac=True, method="l-bfgs-b", options={"gtol": GRADIENT})
        # A line search that breaks off has found something, too.
        if not (math.isfinite(found.fun) and np.all(np.isfinite(found.x))):
            return None
        raw = found.x
    return tuple(map(float, raw))


def posterior_loss(
    points: torch.Tensor, values: torch.Tensor, categorical: tuple[bool, ...], least_noise: float
) -> Callable[[Floats], tuple[float, Floats]]:
    """The negative logarithm of the posterior, but for a constant, and its gradient: functions of logarithms (3d + 2,).

    They are those of the inverse squared length scales (d), of the variance, of the noise, and of the warp's a (d) and
    b (d). Priors are Optuna's (``optuna._gp.prior``) and ``SPREAD``. For K = scale M + noise I and u = K^-1 y the
    likelihood's derivative by a parameter t is tr((u u' - K^-1) dK/dt) / 2 (Rasmussen and Williams 2006, 5.9).
    """
    n, d = points.shape
    named, one = torch.tensor(categorical), torch.eye(n, dtype=torch.float64)

    def loss(raw: Floats) -> tuple[float, Floats]:
        whole = torch.from_numpy(raw).exp()
        inverse, scale, excess = whole[:d], float(whole[d]), float(whole[d + 1])
        warp, bends = Warp(whole[d + 2 : 2 * d + 2], whole[2 * d + 2 :], named), torch.from_numpy(raw[d + 2 :])
        at, noise = warp(points), excess + least_noise
        flat = squared_apart(at, named).reshape(n * n, d)
        squared = (flat @ inverse).reshape(n, n)
        root = torch.sqrt(5 * squared)
        falling = torch.exp(-root)
        correlation = falling * ((5 / 3) * squared + root + 1)
        factor, failed = torch.linalg.cholesky_ex(correlation * scale + one * noise)
        if int(failed):
            return math.inf, np.zeros(3 * d + 2)
        precision = torch.cholesky_inverse(factor)
        solved = precision @ values
        fits = -0.5 * float(values @ solved) - float(factor.diagonal().log().sum())
        weight = 0.5 * (torch.outer(solved, solved) - precision)
        by_squared = weight * (root + 1) * falling * (-5 / 6 * scale)
        by_length = by_squared.reshape(-1) @ flat + 0.1 / inverse**2 - 0.1
        by_scale = float((weight * correlation).sum()) + 1 / scale - 1
        by_noise = float(weight.diagonal().sum()) + 0.1 / noise - 30
        by_point = 4 * inverse * (by_squared.sum(1, keepdim=True) * at - by_squared @ at)
        by_bend = torch.cat([(by_point * slope).sum(0) for slope in warp.slopes(points)]) - bends / SPREAD**2
        prior = -float((0.1 / inverse + 0.1 * inverse).sum()) - float(bends @ bends) / (2 * SPREAD**2)
        prior += math.log(scale) - scale + 0.1 * math.log(noise) - 30 * noise
        by_numbers = torch.tensor([by_scale * scale, by_noise * excess], dtype=torch.float64)
        gradient = torch.cat([by_length * inverse, by_numbers, by_bend])
        return -fits - prior, -gradient.numpy()

    return loss


# [gaussian] Optuna's Gaussian process with warped inputs, fitted and searched at a fraction of its price.
#
# Where a proposal of ``GPSampler`` spends its time, at 100 trials: in evaluations of one point at a time, of which the
# line search along each parameter with many whole values makes hundreds, and the ascents of ten starts hundreds more
# (together only where greenlet is installed); and in fits that begin anew. Here all starts climb together, parameters
# with many values climb as if they were continuous, and processes come from ``kernel_fit``. Processes are of Optuna's
# kind, and what is maximised are Optuna's acquisition functions. Neither is its public interface, so pyproject.toml names
# the versions.
#
# A proposal is a function of the study and the seed: nothing is kept from one to the next that could change it.

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
