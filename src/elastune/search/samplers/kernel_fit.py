"""Kernel and warp of a Gaussian process by maximum a posteriori, with the gradient in closed form.

Optuna's ``GPSampler`` fits its kernel, which does not warp, with the same priors through autograd. Here the fit begins
on part of the trials, where an evaluation is cheap, and ends on all of them. It is a function of the trials alone and
remembers the newest few, so that proposals between which nothing was told share one fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize

from elastune.search.samplers.warped import SPREAD, Warp, WarpedProcess, squared_apart
from elastune.search.space.objective import Floats

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
