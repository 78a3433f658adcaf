"""How far apart learners are where a round ends, from what each of them knows alone before the exchange.

With d_i the way of learner i since the round began, mean |x_i - mean x|^2 = mean |d_i|^2 - |mean d|^2: one number of
each learner rides in the exchange that brings the mean, and nothing is exchanged twice. Ways are short beside
parameters, so the difference keeps its digits; where learners are closer together than some 1e-3 of their common way,
it is rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Values = Sequence[torch.Tensor]


def squared_way(values: Values, begun: Values) -> torch.Tensor:
    """The squared norm of ``values - begun``, as one number on their device, in single precision."""
    # One tensor at a time: a second copy of all parameters is not held for a figure.
    norms = [torch.linalg.vector_norm((now - then).float()) for now, then in zip(values, begun, strict=True)]
    return torch.stack(norms).square().sum()


def distance(mean_square: float, means: Values, begun: Values) -> float | None:
    """The root mean square of learners' distances from their mean, over the norm of the mean; relative, without unit.

    (Consensus distance, over the norm of the model: Kong et al., ICML 2021, arXiv 2102.04828.)

    Args:
        mean_square: The mean of learners' ``squared_way``.
        means: The means of their parameters.
        begun: The parameters that the round began with.

    Returns:
        None where it is no finite number: a learner has diverged, or all parameters are zero.
    """
    norms = torch.stack([torch.linalg.vector_norm(mean.float()) for mean in means])
    common, square = torch.stack([squared_way(means, begun), norms.square().sum()]).tolist()
    if not (math.isfinite(mean_square - common) and 0 < square < math.inf):
        return None
    return math.sqrt(max(0.0, mean_square - common) / square)
