"""Inputs of a Gaussian process, each on a scale of its own that is learnt with the kernel.

A process with one length scale a parameter takes a step at 0.001 and one at 0.9 for alike. Where all that matters of a
weight decay between 0 and 0.1 happens below 0.01, it is wrong about one end or the other. So each parameter goes
through a function that rises from 0 to 1 and may bend at either end: the distribution function of Kumaraswamy,
1 - (1 - x^a)^b (Snoek et al. 2014, "Input Warping for Bayesian Optimization of Non-stationary Functions", who use the
beta distribution's; Cowen-Rivers et al. 2022, "HEBO", who use this one, as its derivatives are closed). With a = b = 1
it is a straight line. Categories stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from optuna._gp.gp import GPRegressor

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
