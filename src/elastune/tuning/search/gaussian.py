"""The sampler ``gp``: Optuna's Gaussian process with warped inputs, at a fraction of the computing time.

With one length scale per parameter, a process treats a step at 0.001 and a step at 0.9 alike. Here each input gets a
scale of its own, which is learnt together with the kernel (maximum a posteriori, gradient in closed form).
At 100 trials, ``GPSampler`` spends its time on evaluations of single points, and on fits that begin anew. Here all
starts climb together, parameters with many values climb as if they were continuous, and a fit begins on part of the
trials. Processes and acquisition functions are of Optuna's kind.
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

# Private names of Optuna, checked on 5.0; pyproject.toml therefore requires optuna>=5.0,<5.1, and no other file imports
# private names of Optuna. ``GaussianSampler`` and ``WarpedProcess`` also use private attributes of their base classes.
# When Optuna moves one of them, tests/tuning/search/samplers/test_gaussian.py fails first.
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

from elastune.tuning.search.objective import Floats

# --- warped inputs ---

EDGE = 1e-6  # the cube shrinks by so much on all sides: at 0 and 1 the slopes of a warp have no bound
SPREAD = 0.5  # prior standard deviation of the logarithms of a and b around 0; HEBO's is 0.55


@dataclass(frozen=True)
class Warp:
    """Maps each input to a scale of its own, which the fit learns together with the kernel.

    One length scale for a parameter is wrong where all that matters of a weight decay between 0 and 0.1 happens below
    0.01. So each parameter goes through a function that rises from 0 to 1 and may bend at either end. It is the
    distribution function of Kumaraswamy, 1 - (1 - x^a)^b, whose derivatives are closed (Cowen-Rivers et al. 2022,
    "HEBO"). Snoek et al. 2014, "Input Warping for Bayesian Optimization of Non-stationary Functions", use that of the
    beta distribution. With a = b = 1 it is a straight line. Categories stay as they are.

    Attributes:
        a: The exponent of each parameter at its lower end, (d,).
        b: The exponent of each parameter at its upper end, (d,).
        categorical: Which parameters are categories, (d,).
    """

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
        """Points moved off the sides of the cube; different points stay different, and keep their slopes."""
        return EDGE + (1 - 2 * EDGE) * points.masked_fill(self.categorical, 0.5)


class WarpedProcess(GPRegressor):
    """Optuna's Gaussian process over warped parameters. Callers pass points of the unit cube; it warps them itself."""

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
    """Return the squared distances (n, n, d) of points (n, d) along each parameter; 1 where categories differ."""
    apart = (points[:, None, :] - points[None, :, :]).square_()
    if bool(categorical.any()):
        apart[..., categorical] = (apart[..., categorical] > 0).to(apart.dtype)
    return apart


# --- fit of kernel and warp ---

FIRST = 48  # trials that the fit begins on
GRADIENT = 0.1  # where the fit ends; Optuna's .01 takes half as long again, for a log posterior .1 higher at most
REMEMBERED = 32  # fits


def fit(points: Floats, values: Floats, categorical: NDArray[np.bool_], least_noise: float) -> WarpedProcess | None:
    """Fit kernel and warp of a Gaussian process by maximum a posteriori.

    Optuna's ``GPSampler`` fits its kernel, which does not warp, with the same priors through autograd. This fit begins
    on part of the trials, where an evaluation is cheap, and ends on all of them. It depends on the trials alone. The
    newest fits are cached, so that proposals between which no trial ended share one fit.

    Args:
        points: Trials in the unit cube, (n, d).
        values: Their standardised values, (n,).
        categorical: Which parameters are categories, (d,).
        least_noise: The smallest variance of the noise.

    Returns:
        A new process at each call; None if the fit failed.
    """
    n, d = points.shape
    x, y = np.ascontiguousarray(points, dtype=np.float64), np.ascontiguousarray(values, dtype=np.float64)
    raw = _remembered(x.tobytes(), y.tobytes(), tuple(map(bool, categorical)), n, d, least_noise)
    if raw is None:
        return None
    parameters = torch.tensor(raw, dtype=torch.float64).exp()
    warp = Warp(parameters[d + 2 : 2 * d + 2], parameters[2 * d + 2 :], torch.tensor(categorical))
    scale, noise = float(parameters[d]), float(parameters[d + 1]) + least_noise
    try:
        return WarpedProcess(torch.tensor(x), torch.tensor(y), parameters[:d], scale, noise, warp)
    except RuntimeError:  # its covariance cannot be factored
        return None


def forget() -> None:
    """Clear the cache of fits: to measure how long fits take, or to test that the cache changes nothing."""
    _remembered.cache_clear()


def fits() -> int:
    """Return how many fits were made since the last ``forget``."""
    return _remembered.cache_info().misses


@lru_cache(maxsize=REMEMBERED)
def _remembered(
    x: bytes, y: bytes, categorical: tuple[bool, ...], n: int, d: int, least_noise: float
) -> tuple[float, ...] | None:
    """The logarithms at which ``posterior_loss`` is least."""
    points = torch.frombuffer(bytearray(x), dtype=torch.float64).reshape(n, d)
    values = torch.frombuffer(bytearray(y), dtype=torch.float64)
    raw = np.zeros(3 * d + 2)
    parts = [slice(None)] if n < 2 * FIRST else [slice(None, None, -(-n // FIRST)), slice(None)]
    for part in parts:
        loss = posterior_loss(points[part], values[part], categorical, least_noise)
        minimum = minimize(loss, raw, jac=True, method="l-bfgs-b", options={"gtol": GRADIENT})
        # A line search that breaks off has a usable result, too.
        if not (math.isfinite(minimum.fun) and np.all(np.isfinite(minimum.x))):
            return None
        raw = minimum.x
    return tuple(map(float, raw))


def posterior_loss(
    points: torch.Tensor, values: torch.Tensor, categorical: tuple[bool, ...], least_noise: float
) -> Callable[[Floats], tuple[float, Floats]]:
    """Return a function of 3d + 2 logarithms: the negative log posterior, but for a constant, and its gradient.

    The logarithms are those of the inverse squared length scales (d), the variance, the noise, and the warp's a (d) and
    b (d). Priors are Optuna's (``optuna._gp.prior``) and ``SPREAD``. For K = scale M + noise I and u = K^-1 y the
    likelihood's derivative by a parameter t is tr((u u' - K^-1) dK/dt) / 2 (Rasmussen and Williams 2006, 5.9).
    """
    n, d = points.shape
    is_category, identity = torch.tensor(categorical), torch.eye(n, dtype=torch.float64)

    def loss(raw: Floats) -> tuple[float, Floats]:
        parameters = torch.from_numpy(raw).exp()
        inverse, scale, excess = parameters[:d], float(parameters[d]), float(parameters[d + 1])
        warp = Warp(parameters[d + 2 : 2 * d + 2], parameters[2 * d + 2 :], is_category)
        bends = torch.from_numpy(raw[d + 2 :])
        warped, noise = warp(points), excess + least_noise
        flat = squared_apart(warped, is_category).reshape(n * n, d)
        squared = (flat @ inverse).reshape(n, n)
        root = torch.sqrt(5 * squared)
        falling = torch.exp(-root)
        correlation = falling * ((5 / 3) * squared + root + 1)
        factor, failed = torch.linalg.cholesky_ex(correlation * scale + identity * noise)
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
        by_point = 4 * inverse * (by_squared.sum(1, keepdim=True) * warped - by_squared @ warped)
        by_bend = torch.cat([(by_point * slope).sum(0) for slope in warp.slopes(points)]) - bends / SPREAD**2
        prior = -float((0.1 / inverse + 0.1 * inverse).sum()) - float(bends @ bends) / (2 * SPREAD**2)
        prior += math.log(scale) - scale + 0.1 * math.log(noise) - 30 * noise
        by_numbers = torch.tensor([by_scale * scale, by_noise * excess], dtype=torch.float64)
        gradient = torch.cat([by_length * inverse, by_numbers, by_bend])
        return -fits - prior, -gradient.numpy()

    return loss


# --- proposals ---

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
"""By: several objectives? constraints? running trials?"""
DRAWN = 10  # trials that are drawn at random before the first fit; as in Optuna
CANDIDATES = 512  # points where climbing may begin; Optuna's are 2,048
STARTS = 6  # points where climbing does begin, the best trials included; Optuna's are 10
FANTASIES = 64  # samples of what trials may reach, where there are several objectives; Optuna's are 128
STABLE = 1e-6  # variance that is added where a covariance cannot be factored; Optuna's is 1e-12
ROUNDS = 2  # of climbing along continuous parameters and choosing values of the others
STEPS = 30  # of a climb, at most
ALIKE = 1e-6  # two points that differ by no more in any coordinate count as one
FEW = 16  # a parameter with no more values tries them all; as in Optuna


class GaussianSampler(GPSampler):
    """Proposes one trial, by the expected improvement of the hypervolume under a Gaussian process for each objective.

    At 100 trials Optuna's ``GPSampler`` spends its time in evaluations of one point at a time: hundreds in the line
    search along each parameter with many whole values, and hundreds in the ascents of ten starts. The methods that
    this class replaces make these steps for all starts together, and take their processes from ``fit``.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed, n_startup_trials=DRAWN, warn_independent_sampling=False)
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
        running_params = [_get_params(trial) for trial in running_trials]
        running = space.get_normalized_params(running_trials, running_params) if running_params else None
        signs = [-1.0 if direction == StudyDirection.MINIMIZE else 1.0 for direction in study.directions]
        scores = _standardize_values(np.array([trial.values for trial in completed_trials]) * signs)[0]
        broken = np.array([list(trial.constraints.values()) for trial in completed_trials])
        with limit_threads_in_optimization():  # all of it: sums over threads round by their number
            self._tried = points if running is None else np.vstack([points, running])
            acquisition, best = self._acquisition(space, points, scores, broken, running)
            proposal: dict[str, Any] = space.get_unnormalized_param(self._optimize_acqf(acquisition, best))
        return proposal

    def _acquisition(
        self, space: SearchSpace, points: Floats, scores: Floats, broken: Floats, running: Floats | None
    ) -> tuple[BaseAcquisitionFunc, Floats | None]:
        """The acquisition function to maximise, and good points to begin at, from trials at ``points`` (n, d).

        ``scores`` (n, objectives) are standardised, larger is better; ``broken`` (n, constraints) are violations.
        """
        several, rng = scores.shape[1] > 1, self._rng.rng
        feasible = np.all(broken <= 0, axis=1) if broken.size else np.full(len(points), True)
        feasible_scores, feasible_points = scores[feasible], points[feasible]
        arguments: dict[str, Any] = {"search_space": space}
        if several:
            baseline = torch.from_numpy(feasible_scores) if len(feasible_scores) else None
            arguments["gpr_list"] = self._fitted(space, points, scores)
            arguments["Y_feasible" if broken.size else "Y_train"] = baseline
        else:
            arguments |= {
                "gpr": self._fitted(space, points, scores)[0],
                "threshold": feasible_scores.max(initial=-np.inf),
            }
        if broken.size:
            allowed, means, spreads = _standardize_values(-broken)
            arguments["constraints_gpr_list"] = self._fitted(space, points, allowed)
            arguments["constraints_threshold_list"] = list(-means / np.maximum(EPS, spreads))
        if running is not None:
            arguments["normalized_params_of_running_trials"] = running
        if several or running is not None:
            arguments["n_qmc_samples"] = FANTASIES if several else self._n_qmc_samples_qei
            arguments["qmc_seed"] = rng.randint(_MAX_QMC_SEED_VALUE)
        kind = ACQUISITIONS[several, bool(broken.size), running is not None]
        try:
            acquisition = kind(**arguments)
        except RuntimeError:  # running trials so much alike that their covariance cannot be factored
            acquisition = kind(**arguments, stabilizing_noise=STABLE)
        if not len(feasible_scores):
            return acquisition, None
        if several:
            return acquisition, self._get_best_params_for_multi_objective(feasible_points, feasible_scores)
        return acquisition, feasible_points[[int(np.argmax(feasible_scores))]]

    def _fitted(self, space: SearchSpace, points: Floats, columns: Floats) -> list[GPRegressor]:
        """A process for each of the standardised ``columns``; Optuna's own process where the fit with a warp failed."""
        is_category, least_noise = space.is_categorical, self._minimum_noise
        processes: list[GPRegressor] = []
        for column in columns.T:
            process: GPRegressor | None = fit(points, column, is_category, least_noise)
            if process is None:
                process = fit_kernel_params(points, column, is_category, self._log_prior, least_noise, False)
            processes.append(process)
        return processes

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
    """Return the best point reached from ``starts`` (k, d): a row that lies on the grid of its parameters.

    It is one of ``tried`` (n, d) only if no other point is reached, since a repeated training gives little information.
    """
    space = acqf.search_space
    grids = dict(zip(map(int, space.discrete_indices), space.get_choices_of_discrete_params(), strict=True))
    few = [i for i, grid in grids.items() if space.is_categorical[i] or len(grid) <= FEW]
    smooth = [i for i in range(space.dim) if i not in few]
    rows = starts.copy()
    for _ in range(ROUNDS):
        if smooth:
            rows = _ascend(acqf, rows, smooth)
        for i in smooth:
            if i in grids:
                rows[:, i] = _nearest(grids[i], rows[:, i])
        before = rows.copy()
        for i in few:
            rows = _best_of_each(acqf, rows, i, grids[i])
        if np.array_equal(rows, before):
            break
    reached = _untried(np.vstack([rows, starts]), tried)
    best: Floats = reached[int(np.argmax(acqf.eval_acqf_no_grad(reached)))]
    return best


def _untried(rows: Floats, tried: Floats | None) -> Floats:
    """The ``rows`` (k, d) that are not among ``tried`` (n, d); all rows if each of them is."""
    if tried is None:
        return rows
    apart = np.max(np.abs(rows[:, None, :] - tried[None, :, :]), axis=2)
    new = np.min(apart, axis=1) > ALIKE
    return rows[new] if np.any(new) else rows


def _ascend(acqf: BaseAcquisitionFunc, rows: Floats, smooth: list[int]) -> Floats:
    """Climb from all rows at once, along the ``smooth`` coordinates, in units of their length scales."""
    unit = acqf.length_scales[smooth]

    def loss(flat: Floats) -> tuple[float, Floats]:
        moved = rows.copy()
        moved[:, smooth] = flat.reshape(len(rows), -1) * unit
        x = torch.from_numpy(moved).requires_grad_(True)
        total = -acqf.eval_acqf(x).sum()
        total.backward()
        assert x.grad is not None
        return total.item(), (x.grad.numpy()[:, smooth] * unit).ravel()

    bounds = [(0.0, 1.0 / each) for each in unit] * len(rows)
    first = (rows[:, smooth] / unit).ravel()
    optimum = minimize(
        loss, first, jac=True, method="l-bfgs-b", bounds=bounds, options={"maxiter": STEPS, "gtol": 1e-2}
    )
    climbed = rows.copy()
    climbed[:, smooth] = np.clip(optimum.x.reshape(len(rows), -1) * unit, 0.0, 1.0)
    return climbed


def _nearest(grid: Floats, values: Floats) -> Floats:
    right = np.clip(np.searchsorted(grid, values), 1, len(grid) - 1)
    low, high = grid[right - 1], grid[right]
    return np.where(values - low < high - values, low, high)


def _best_of_each(acqf: BaseAcquisitionFunc, rows: Floats, i: int, grid: Floats) -> Floats:
    """Each row with its best value of parameter ``i``."""
    tried = np.repeat(rows, len(grid), axis=0)
    tried[:, i] = np.tile(grid, len(rows))
    best = acqf.eval_acqf_no_grad(tried).reshape(len(rows), len(grid)).argmax(axis=1)
    changed = rows.copy()
    changed[:, i] = grid[best]
    return changed
