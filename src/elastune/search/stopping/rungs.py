"""Rungs of successive halving: after how many passes trials are compared, and who of them ranks first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from elastune.search.samplers.genetic_operators import best_first
from elastune.search.space.objective import Floats
from elastune.search.space.scales import on_scales


@dataclass(frozen=True)
class RungEntry:
    """A trial at a rung: its values there, smaller is better, and its largest violation (0 or less: feasible)."""

    trial: int
    values: tuple[float, ...]
    violation: float = 0.0

    @property
    def feasible(self) -> bool:
        return self.violation <= 0 and all(map(math.isfinite, self.values))


def levels(min_resource: int, eta: int, epochs: int) -> list[int]:
    """Passes after which trials of ``epochs`` are compared: min_resource, min_resource x eta, ..., below ``epochs``."""
    found = []
    level = min_resource
    while level < epochs:
        found.append(level)
        level *= eta
    return found


def ranked(entrants: Sequence[RungEntry], k: int) -> list[int]:
    """The ``k`` best trials, best first, by constrained domination (Deb et al. 2002, VI).

    The feasible come first, by front and by crowding on the scales that samplers see; then the infeasible, by their
    violation. The earlier of equals.
    """
    feasible = [e for e in reversed(entrants) if e.feasible]  # best_first prefers the later of equals
    found = [feasible[i].trial for i in best_first(_points(feasible), k)] if feasible else []
    broken = sorted((e for e in entrants if not e.feasible), key=_brokenness)
    return found + [e.trial for e in broken[: k - len(found)]]


def _brokenness(entrant: RungEntry) -> float:
    return entrant.violation if all(map(math.isfinite, (*entrant.values, entrant.violation))) else math.inf


def _points(entrants: Sequence[RungEntry]) -> Floats:
    return on_scales(np.array([e.values for e in entrants]))


class Rung:
    """Who came to a rung, in order, and who went on from it. 1 of ``eta`` is among its best.

    Ranking many by several objectives takes long: from the hundredth on it is done for each fiftieth part more.
    """

    def __init__(self, eta: int) -> None:
        self.gone_on: set[int] = set()
        self._eta = eta
        self._entrants: list[RungEntry] = []
        self._compared = 0
        self._best: frozenset[int] | None = None

    def __len__(self) -> int:
        return len(self._entrants)

    def enter(self, entrant: RungEntry) -> bool:
        """A trial has come; whether all are compared again."""
        self._entrants.append(entrant)
        again = len(entrant.values) == 1 or len(self) >= int(1.02 * self._compared)
        if again:
            self._compared, self._best = len(self), None
        return again

    @property
    def best(self) -> frozenset[int]:
        """The best 1/eta of those that are compared."""
        if self._best is None:
            self._best = frozenset(ranked(self._entrants[: self._compared], self._compared // self._eta))
        return self._best
