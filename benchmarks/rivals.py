"""Optuna's samplers as they come, behind what the benchmarks ask of a search; and who beats whom, by paired seeds.

elastune's ``tpe`` and ``gp`` are Optuna's models on elastune's scales, with its seeds and (``gp``) its optimizer, so
they are no rivals. These are: one sampler for a whole study, default settings, raw values, no estimates of open trials.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.samplers import BaseSampler, GPSampler, TPESampler

from elastune.journal.records import TrialFinished
from elastune.search.samplers.optuna_study import new_study, quiet
from elastune.search.samplers.suggest import Suggester
from elastune.search.space.objective import Objective
from elastune.search.space.space import Space

RAW: Mapping[str, Callable[[int], BaseSampler]] = {
    "optuna-tpe": lambda seed: TPESampler(seed=seed),
    "optuna-gp": lambda seed: GPSampler(seed=seed),
}
TIE = 0.01  # of the hypervolume: closer is level


@dataclass(frozen=True)
class Asked:
    number: int
    params: dict[str, Any]
    values: dict[str, Any]


class Raw:
    """A study of one of ``RAW``."""

    def __init__(self, space: Space, objectives: Sequence[Objective], name: str, seed: int) -> None:
        self._space, self._objectives = space, objectives
        self._study = new_study(objectives)
        self._study.sampler = RAW[name](seed)
        self._open: dict[int, optuna.Trial] = {}

    def ask(self) -> Asked:
        with quiet():
            trial = self._study.ask()
            values = self._space(trial)
        self._open[trial.number] = trial
        return Asked(trial.number, dict(trial.params), values)

    def estimate(self, number: int, values: Sequence[float]) -> None:
        """Not told: Optuna has no place for it."""

    def tell(self, number: int, finished: TrialFinished) -> None:
        with quiet():
            self._study.tell(self._open.pop(number), [finished.values[o.name] for o in self._objectives])


def make_search(space: Space, objectives: Sequence[Objective], name: str, seed: int) -> Suggester | Raw:
    """A search by one of elastune's samplers, or by one of ``RAW``."""
    if name in RAW:
        return Raw(space, objectives, name, seed)
    return Suggester(space, objectives, sampler=name, seed=seed)


def paired(reached: Mapping[str, Mapping[str, Sequence[float]]], ours: str) -> dict[str, Any]:
    """``ours`` against every other: pairs of equal instance and seed that it wins, ties (``TIE``) and loses.

    ``reached``: instance -> sampler -> a hypervolume for each seed. The gain is the median over pairs, with its range.
    """
    found: dict[str, Any] = {}
    for other in sorted({name for row in reached.values() for name in row} - {ours}):
        gains = [
            a - b
            for row in reached.values()
            if ours in row and other in row
            for a, b in zip(row[ours], row[other], strict=False)
        ]
        if gains:
            wins, losses = sum(gain > TIE for gain in gains), sum(gain < -TIE for gain in gains)
            found[other] = {"wins": wins, "ties": len(gains) - wins - losses, "losses": losses}
            found[other] |= {"median_gain": round(statistics.median(gains), 4)}
            found[other] |= {"least": round(min(gains), 4), "most": round(max(gains), 4)}
    return found
