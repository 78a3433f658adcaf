"""Rungs of successive halving: after how many passes trials are compared, and who of them ranks first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from elastune.search.genetic_operators import best_first
from elastune.search.objective import Floats


@dataclass(frozen=True)
class Entrant:
    """A trial at a rung: its values there, smaller is better, and its largest violation (0 or less: feasible)."""

    trial: int
    values: tuple[float, ...]
    violation: float = 0.0

    @property
    def feasible(self) -> bool:
        return self.violation <= 0 and all(map(math.isfinite, self.values))


def levels(least: int, eta: int, epochs: int) -> list[int]:
    """Passes after which trials of ``epochs`` are compared: least, least x eta, ..., below ``epochs``."""
    found = []
    while least < epochs:
        found.append(least)
        least *= eta
    return found


def ranked(entrants: Sequence[Entrant], k: int) -> list[int]:
    """The ``k`` best trials, best first, by constrained domination (Deb et al. 2002, VI).

    The feasible come first, by front and crowding; then the infeasible, by their violation. The earlier of equals.
    """
    feasible = [e for e in reversed(entrants) if e.feasible]  # best_first prefers the later of equals
    found = [feasible[i].trial for i in best_first(_points(feasible), k)] if feasible else []
    broken = sorted(
        (e for e in entrants if not e.feasible), key=lambda e: (not math.isfinite(e.violation), e.violation)
    )
    return found + [e.trial for e in broken[: k - len(found)]]


def _points(entrants: Sequence[Entrant]) -> Floats:
    return np.array([e.values for e in entrants])


@dataclass
class Rung:
    """Who came to a rung, in order, and who went on from it."""

    entrants: dict[int, Entrant] = field(default_factory=dict)
    gone_on: set[int] = field(default_factory=set)
    _best: tuple[int, list[int]] = (0, [])

    def enter(self, entrant: Entrant) -> None:
        self.entrants[entrant.trial] = entrant
        self._best = 0, []

    def best(self, eta: int) -> list[int]:
        """The best 1/``eta`` of those who came so far, best first."""
        if self._best[0] != eta:
            self._best = eta, ranked(list(self.entrants.values()), len(self.entrants) // eta)
        return self._best[1]
