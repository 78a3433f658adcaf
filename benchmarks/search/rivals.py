"""Optuna's samplers as they come, behind what the benchmarks ask of a search.

elastune's ``tpe`` and ``gp`` are Optuna's models on elastune's scales, with its seeds and (``gp``) its optimizer, so
they are no rivals. These are: one sampler for a whole study, default settings, raw values, no estimates of open trials.
So is ``botorch``, where it is installed (``rival_botorch.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import optuna
from optuna.samplers import BaseSampler, GPSampler, NSGAIISampler, TPESampler

from elastune.core.journal.records import TrialFinished
from elastune.train.program.space import Space
from elastune.tuning.search.history import new_study, quiet
from elastune.tuning.search.objective import Objective
from elastune.tuning.search.suggester import Suggester

RAW: Mapping[str, Callable[[int], BaseSampler]] = {
    "optuna-tpe": lambda seed: TPESampler(seed=seed),
    "optuna-gp": lambda seed: GPSampler(seed=seed),
    "optuna-nsga2": lambda seed: NSGAIISampler(seed=seed),
}


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


class Search(Protocol):
    """What benchmarks ask of a search."""

    def ask(self) -> Any: ...

    def estimate(self, number: int, values: Sequence[float]) -> None: ...

    def tell(self, number: int, finished: TrialFinished) -> None: ...


def make_search(space: Space, objectives: Sequence[Objective], name: str, seed: int) -> Suggester | Search:
    """A search by one of elastune's samplers, one of ``RAW``, or ``botorch``."""
    if name in RAW:
        return Raw(space, objectives, name, seed)
    if name == "botorch":
        from benchmarks.search.rival_botorch import BoTorch

        return BoTorch(space, objectives, seed)
    return Suggester(space, objectives, sampler=name, seed=seed)
