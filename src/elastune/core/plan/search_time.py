"""How long a search takes: its trainings in rounds, each with as many steps as its batch needs.

A batch B needs steps in proportion to 1 + B_noise / B (McCandlish et al., "An Empirical Model of Large-Batch Training",
2018, section 2.3). With ``width`` concurrent trainings each proposal knows less than in a sequential search. The search
then needs ``crowding`` x (width - 1) more trainings, relative to ``runs``, up to the number that random search needs.
Trainings differ in length: at the end, workers wait for the last training, or in a generational search for the longest
of each generation. ``benchmarks/search/search_model.py`` fits crowding, variation and the savings of early stopping to
simulated studies.

A genetic search whose generations wait for each other fixes the trainings of a generation (``generation``). Its
proposals rest on earlier generations alone. So concurrent trainings lose nothing, and more than a generation of them
gain nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from elastune.core.plan.step_model import NORMAL_80

Floats = NDArray[np.float64]
POINTS = 4_000  # of the integral over a training's length
Stopping = Literal["none", "asha"]
# As benchmarks/results/search_model.json has them: simulated studies on the lcbench surrogate.
CROWDING: Mapping[bool, tuple[float, tuple[float, float]]] = MappingProxyType(
    {False: (0.0785, (0.0479, 0.1191)), True: (0.0762, (0.0441, 0.1202))}
)
"""Whether the search waits for generations -> more trainings for each further concurrent one, and the 80 % interval."""
RANDOM_SEARCH_FACTOR = 5.4
"""Random search needs this many times as many trainings: no number of concurrent trainings costs more."""
VARIATION = 0.74
GENETIC = 0.81
"""A genetic search in Cray's manner needs this many times the trainings of a random one for the same result."""
KEPT: Mapping[Stopping, float] = MappingProxyType({"none": 1.0, "asha": 0.66})
"""The share of all steps that remains, by the method of early stopping."""


@dataclass(frozen=True)
class SearchModel:
    """The search whose time is modelled.

    Attributes:
        runs: The trainings that it needs one after another, each of ``steps`` steps at ``base_batch``.
        noise_scale: The gradient noise scale, in samples; 0: a larger batch saves no step.
        variation: The coefficient of variation of trainings' lengths.
        generations: Whether the search waits for each round. If not, a new training replaces each ended one at once.
        kept: The share of all steps that early stopping leaves.
        crowding_within: The ends of crowding's 80 % interval; None: crowding was declared.
        blind: The largest factor of additional trainings, however many run at once: that of random search.
        generation: The trainings of a generation, where the search fixes them and waits for each; 0: it does not.
            Crowding does not count then.
        beside_s: Seconds of each training outside of its steps: its processes, its data, its report.
    """

    runs: int
    steps: float
    base_batch: int
    noise_scale: float
    crowding: float = 0.0
    variation: float = 0.0
    generations: bool = False
    kept: float = 1.0
    crowding_within: tuple[float, float] | None = None
    blind: float = math.inf
    generation: int = 0
    beside_s: float = 0.0

    def __post_init__(self) -> None:
        if self.runs < 1 or self.base_batch < 1 or not 0 < self.steps < math.inf:
            raise ValueError(f"a search has trainings, steps and samples, not {self}")
        others = (self.noise_scale, self.crowding, self.variation, self.generation, self.beside_s)
        if not all(0 <= each < math.inf for each in (*others, *(self.crowding_within or ()))):
            raise ValueError(f"noise scale, crowding, variation and what is beside are not negative, not {self}")
        if not self.blind >= 1:
            raise ValueError(f"random search needs no fewer trainings, not {self}")
        if not 0 < self.kept <= 1:
            raise ValueError(f"early stopping leaves a share of steps above 0 and at most 1, not {self}")

    def needed(self, width: Floats) -> Floats:
        """Return the number of trainings in all, where ``width`` of them run at once."""
        if self.generation:
            return np.full(np.shape(width), float(self.runs))
        return np.asarray(self.runs * np.minimum(1 + self.crowding * (width - 1), self.blind), dtype=np.float64)

    def rounds(self, width: Floats) -> Floats:
        """Return how many trainings of mean length follow one another, where ``width`` of them run at once."""
        if self.generation:
            generations, rest = divmod(self.runs, self.generation)
            return np.asarray(generations * self._waited(self.generation, width) + self._waited(rest, width))
        needed = self.needed(width)
        whole = np.ceil(needed / width)
        if not self.variation:
            return np.asarray(whole, dtype=np.float64)
        at_once = np.minimum(width, needed)
        sizes, back = np.unique(at_once, return_inverse=True)
        longest = np.array([longest_of(float(size), self.variation) for size in sizes])[back]
        if self.generations:
            return np.asarray(whole * longest, dtype=np.float64)
        # All are busy until the last begins; then the longest of those that run is waited for.
        return np.asarray(needed / at_once - 1 + longest, dtype=np.float64)

    def _waited(self, trainings: int, width: Floats) -> Floats:
        """The rounds of so many ``trainings`` where the search waits for all of them at the end."""
        at_once = np.minimum(width, max(trainings, 1))
        if not self.variation or not trainings:
            return np.asarray(np.ceil(trainings / at_once), dtype=np.float64)
        longest = np.array([longest_of(float(size), self.variation) for size in at_once])
        return np.asarray(trainings / at_once - 1 + longest, dtype=np.float64)

    def spread(self, width: Floats) -> Floats:
        """Return the standard deviation of the logarithm of ``rounds`` that comes from the uncertainty of crowding."""
        if self.crowding_within is None:
            return np.zeros(len(width))
        low, high = (replace(self, crowding=each).rounds(width) for each in self.crowding_within)
        return np.asarray(np.log(high / low) / 2 / NORMAL_80, dtype=np.float64)

    def steps_of(self, batch: Floats) -> Floats:
        """Return the steps of one training with a global ``batch`` that reach as far as ``steps`` steps with
        ``base_batch``.
        """
        return self.steps * (1 + self.noise_scale / batch) / (1 + self.noise_scale / self.base_batch)

    def seconds(self, width: Floats, batch: Floats, step_s: Floats) -> Floats:
        """Return the seconds until the search is done."""
        return self.rounds(width) * self.training_s(batch, step_s)

    def training_s(self, batch: Floats, step_s: Floats) -> Floats:
        """Return the mean seconds of one training."""
        return self.kept * self.steps_of(batch) * step_s + self.beside_s


@lru_cache(maxsize=4096)
def longest_of(count: float, variation: float) -> float:
    """Return the expected longest of ``count`` trainings, in mean lengths; lengths are log-normal.

    The integral of 1 - F(t)^count over t.
    """
    if not variation or count <= 1:
        return 1.0
    spread = math.sqrt(math.log(1 + variation**2))
    reach = np.linspace(-8.0, 8.0 + math.sqrt(2 * math.log(count)), POINTS)
    times = np.exp(spread * reach - spread**2 / 2)
    below = 0.5 * (1 + np.array([math.erf(each / math.sqrt(2)) for each in reach]))
    return float(times[0] + np.trapezoid(1 - below**count, times))
