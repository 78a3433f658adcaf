"""Optuna's samplers as they come, behind what the benchmarks ask of a search; and who beats whom, by paired seeds.

elastune's ``tpe`` and ``gp`` are Optuna's models on elastune's scales, with its seeds and (``gp``) its optimizer, so
they are no rivals. These are: one sampler for a whole study, default settings, raw values, no estimates of open trials.
So is ``botorch``, where it is installed (``rival_botorch.py``).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
AHEAD = 0.03  # the goal for the mean over instances


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
        from rival_botorch import BoTorch

        return BoTorch(space, objectives, seed)
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


def judged(reached: Mapping[str, Mapping[str, Sequence[float]]], ours: str) -> dict[str, Any]:
    """``ours`` against every other by medians of instances, over the seeds that both have, and what that says of goals.

    ``reached``: as of ``paired``. An instance is won, tied (``TIE``) or lost.
    """
    others = sorted({name for row in reached.values() for name in row} - {ours})
    found = {other: _by_instance(reached, ours, other) for other in others}
    found = {other: told for other, told in found.items() if told["by_instance"]}
    never = all(one["gain"] >= -TIE for told in found.values() for one in told["by_instance"].values())
    ahead = min((told["mean_gain"] for told in found.values()), default=0.0)
    return {
        "of": ours,
        "against": found,
        "goals": {
            f"never behind by more than {TIE} in the median of an instance": "met" if never else "MISSED",
            f"ahead of the best other by {AHEAD} in the mean over instances": "met" if ahead >= AHEAD else "MISSED",
        },
        "ahead_of_the_best_other": ahead,
    }


def _by_instance(reached: Mapping[str, Mapping[str, Sequence[float]]], ours: str, other: str) -> dict[str, Any]:
    rows = {}
    for instance, row in reached.items():
        pairs = list(zip(row.get(ours, ()), row.get(other, ()), strict=False))
        if pairs:
            mine, theirs = statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)
            gains = [a - b for a, b in pairs]
            rows[instance] = {
                "seeds": len(pairs),
                "ours": round(mine, 4),
                "other": round(theirs, 4),
                "gain": round(mine - theirs, 4),
                "paired": [round(one, 4) for one in (min(gains), statistics.median(gains), max(gains))],
            }
    gains = [row["gain"] for row in rows.values()]
    won, lost = sum(gain > TIE for gain in gains), sum(gain < -TIE for gain in gains)
    mean = round(statistics.mean(gains), 4) if gains else 0.0
    return {"wins": won, "ties": len(gains) - won - lost, "losses": lost, "mean_gain": mean, "by_instance": rows}
