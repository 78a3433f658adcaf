"""How long a search takes: its trainings in rounds, each of as many steps as its batch needs. Pure.

A batch B needs steps in proportion to 1 + B_noise / B (McCandlish et al., "An Empirical Model of Large-Batch Training",
2018, section 2.3). Of ``width`` trainings at once each proposal knows less than if they were made one after another: a
search then needs ``crowding`` x (width - 1) more trainings, relative to ``runs``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SearchModel:
    """What is to be searched. ``runs``: trainings that it needs one after another, each of ``steps`` at ``base_batch``.

    ``noise_scale``: of the gradient, in samples; 0: a larger batch saves no step.
    """

    runs: int
    steps: float
    base_batch: int
    noise_scale: float
    crowding: float = 0.0

    def __post_init__(self) -> None:
        if self.runs < 1 or self.base_batch < 1 or not 0 < self.steps < math.inf:
            raise ValueError(f"a search has trainings, steps and samples, not {self}")
        if not (0 <= self.noise_scale < math.inf and 0 <= self.crowding < math.inf):
            raise ValueError(f"noise scale and crowding are not negative, not {self}")

    def rounds(self, width: Floats) -> Floats:
        """How many trainings follow one another where ``width`` of them run at once."""
        return np.ceil(self.runs * (1 + self.crowding * (width - 1)) / width)

    def steps_of(self, batch: Floats) -> Floats:
        """Steps of one training with a global ``batch``, to where ``base_batch`` comes in ``steps``."""
        return self.steps * (1 + self.noise_scale / batch) / (1 + self.noise_scale / self.base_batch)

    def seconds(self, width: Floats, batch: Floats, step_s: Floats) -> Floats:
        """Until the search is done."""
        return self.rounds(width) * self.steps_of(batch) * step_s
