"""Kernel parameters of a Gaussian process by maximum a posteriori, with the gradient in closed form.

Optuna's ``GPSampler`` fits the same posterior through autograd, from the same point for every proposal. Here the fit
begins on part of the trials, where an evaluation is cheap, and ends on all of them. It is a function of the trials
alone and remembers the newest few, so that proposals between which nothing was told share one fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize

from elastune.search.space.objective import Floats

FIRST = 48  # trials that the fit begins on
GRADIENT = 1e-2  # as Optuna's: a larger one ends the search too soon, a smaller one changes no proposal
REMEMBERED = 32


@dataclass(frozen=True)
class Kernel:
    """Of a Matern 5/2 process: what squared distances are multiplied with (d,), its variance, that of the noise."""

    inverse_squared_lengthscales: tuple[float, ...]
    scale: float
    noise: float


def fit(points: Floats, values: Floats, categorical: NDArray[np.bool_], least_noise: float) -> Kernel | None:
    """The kernel of ``values`` (n,), standardised, at ``points`` (n, d) of the unit cube; None where none is found."""
    n, d = points.shape
    x, y = np.ascontiguousarray(points, dtype=np.float64), np.ascontiguousarray(values, dtype=np.float64)
    return _remembered(x.tobytes(), y.tobytes(), tuple(map(bool, categorical)), n, d, least_noise)


def forget() -> None:
    """Fit anew what was fitted before: to measure what that takes, or to see that it changes nothing."""
    _remembered.cache_clear()


def fits() -> int:
    """How many fits were made since the last ``forget``."""
    return _remembered.cache_info().misses


@lru_cache(maxsize=REMEMBERED)
def _remembered(x: bytes, y: bytes, categorical: tuple[bool, ...], n: int, d: int, least_noise: float) -> Kernel | None:
    points = torch.frombuffer(bytearray(x), dtype=torch.float64).reshape(n, d)
    values = torch.frombuffer(bytearray(y), dtype=torch.float64)
    raw = np.zeros(d + 2)
    raw[-1] = math.log(1.0 - 0.99 * least_noise)
    parts = [slice(None)] if n < 2 * FIRST else [slice(None, None, -(-n // FIRST)), slice(None)]
    for part in parts:
        loss = posterior_loss(points[part], values[part], categorical, least_noise)
        found = minimize(loss, raw, jac=True, method="l-bfgs-b", options={"gtol": 0.9 * GRADIENT})
        if not (found.success and np.all(np.isfinite(found.x))):
            return None
        raw = found.x
    whole = np.exp(raw)
    return Kernel(tuple(map(float, whole[:d])), float(whole[d]), float(whole[d + 1]) + least_noise)


def posterior_loss(
    points: torch.Tensor, values: torch.Tensor, categorical: tuple[bool, ...], least_noise: float
) -> Callable[[Floats], tuple[float, Floats]]:
    """The negative logarithm of the posterior of log parameters (d + 2,), but for a constant, and its gradient.

    With Optuna's priors (``optuna._gp.prior``). For K = scale M + noise I and a = K^-1 y the likelihood's derivative
    by a parameter t is tr((a a' - K^-1) dK/dt) / 2 (Rasmussen and Williams 2006, 5.9).
    """
    n, d = points.shape
    apart = (points[:, None, :] - points[None, :, :]).square_()
    if any(categorical):
        named = torch.tensor(categorical)
        apart[..., named] = (apart[..., named] > 0).to(apart.dtype)
    flat, one = apart.reshape(n * n, d), torch.eye(n, dtype=torch.float64)

    def loss(raw: Floats) -> tuple[float, Floats]:
        inverse, (scale, excess) = np.exp(raw[:d]), map(float, np.exp(raw[d:]))
        noise = excess + least_noise
        squared = (flat @ torch.from_numpy(inverse)).reshape(n, n)
        root = torch.sqrt(5 * squared)
        falling = torch.exp(-root)
        correlation = falling * ((5 / 3) * squared + root + 1)
        factor, failed = torch.linalg.cholesky_ex(correlation * scale + one * noise)
        if int(failed):
            return math.inf, np.zeros(d + 2)
        precision = torch.cholesky_inverse(factor)
        solved = precision @ values
        fits = -0.5 * float(values @ solved) - float(factor.diagonal().log().sum())
        weight = 0.5 * (torch.outer(solved, solved) - precision)
        by_length = ((weight * (root + 1) * falling).reshape(-1) @ flat).numpy() * (-5 / 6 * scale)
        by_length += 0.1 / inverse**2 - 0.1
        by_scale = float((weight * correlation).sum()) + 1 / scale - 1
        by_noise = float(weight.diagonal().sum()) + 0.1 / noise - 30
        prior = -float((0.1 / inverse + 0.1 * inverse).sum())
        prior += math.log(scale) - scale + 0.1 * math.log(noise) - 30 * noise
        gradient = np.concatenate([by_length * inverse, [by_scale * scale, by_noise * excess]])
        return -fits - prior, -gradient

    return loss
