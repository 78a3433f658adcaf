"""How a child's settings differ from its parent's in population-based training: *explore*, by resampling or a push.

Jaderberg et al. 2017, "Population Based Training of Neural Networks", section 4: each hyperparameter is drawn afresh
from its prior (*resample*), or multiplied by 1.2 or 0.8 (*perturb*).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from elastune.search.space.space import Sample, Space, compose, draw, nth, size


def explore(
    space: Space,
    params: Mapping[str, Any],
    *,
    resample: float,
    factor: float,
    fixed: Collection[str],
    rng: np.random.Generator,
) -> Sample:
    """``params`` with each parameter drawn afresh with probability ``resample``, else pushed; ``fixed`` ones stay.

    What ``params`` lack, or hold out of range because another parameter decides the range, is drawn.
    """

    def choose(name: str, distribution: BaseDistribution) -> Any:
        if name not in params or not distribution._contains(distribution.to_internal_repr(params[name])):
            return draw(distribution, rng)
        if name in fixed:
            return params[name]
        fresh, up = rng.random() < resample, rng.random() < 0.5
        return draw(distribution, rng) if fresh else pushed(distribution, params[name], factor, up=up)

    return compose(space, choose)


def pushed(distribution: BaseDistribution, value: Any, factor: float, *, up: bool) -> Any:
    """``value`` times ``factor`` or, not ``up``, divided by it, within the bounds.

    Where values have steps, the nearest one, but at least the next. Categories that are ascending numbers: the next.
    Others have no order, and stay.
    """
    towards = 1 if up else -1
    match distribution:
        case CategoricalDistribution(choices=choices):
            at = choices.index(value)
            return choices[min(max(at + towards, 0), len(choices) - 1)] if _ascends(choices) else value
        case FloatDistribution(step=None, low=low, high=high):
            return min(max(value * factor**towards, low), high)
        case IntDistribution(low=low, step=unit) | FloatDistribution(low=low, step=float() as unit):
            at, target = round((value - low) / unit), round((value * factor**towards - low) / unit)
            if target == at:
                target += towards
            return nth(distribution, min(max(target, 0), int(size(distribution)) - 1))
    raise AssertionError(f"unknown distribution {distribution}")


def _ascends(choices: tuple[Any, ...]) -> bool:
    numbers = [c for c in choices if isinstance(c, (int, float)) and not isinstance(c, bool)]
    return len(numbers) == len(choices) and all(a < b for a, b in pairwise(numbers))
