"""Learning rates as functions of time: for LambdaLR a factor on the first rate, for MultiplicativeLR on the last one.

Objects, not functions: torch saves the numbers that stand in them, and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class InverseTime:
    """1 / (1 + decay t)."""

    decay: float

    def __call__(self, t: int) -> float:
        return 1 / (1 + self.decay * t)


@dataclass(frozen=True)
class InverseTimeRatio:
    """What takes ``InverseTime`` from t - 1 to t."""

    decay: float

    def __call__(self, t: int) -> float:
        return (1 + self.decay * (t - 1)) / (1 + self.decay * t)


@dataclass(frozen=True)
class Polynomial:
    """(1 - t / total)^power, and 0 from there on."""

    power: float
    total: int

    def __call__(self, t: int) -> float:
        return float(max(0.0, 1 - t / self.total) ** self.power)


@dataclass(frozen=True)
class StepDecay:
    """gamma^floor(t / step_size)."""

    gamma: float
    step_size: int

    def __call__(self, t: int) -> float:
        return float(self.gamma ** (t // self.step_size))


@dataclass(frozen=True)
class StepDrop:
    """gamma at each step_size-th t, else 1: what takes ``StepDecay`` from t - 1 to t."""

    gamma: float
    step_size: int

    def __call__(self, t: int) -> float:
        return self.gamma if t % self.step_size == 0 else 1.0


@dataclass(frozen=True)
class Geometric:
    """gamma at each t."""

    gamma: float

    def __call__(self, t: int) -> float:
        return self.gamma


@dataclass(frozen=True)
class Cosine:
    """From 1 to final_factor along half a cosine over ``total``, then flat (Loshchilov & Hutter 2017, equation 5).

    A factor, unlike torch's ``eta_min``: every group falls in proportion, also when rates are scaled while training.
    """

    final_factor: float
    total: int

    def __call__(self, t: int) -> float:
        fallen = (1 + math.cos(math.pi * min(t, self.total) / self.total)) / 2
        return self.final_factor + (1 - self.final_factor) * fallen
