"""NePS's MOASHA in the benchmarks' loop, where it is installed: ``pip install neural-pipeline-search``.

It asks for a configuration and so many epochs; one that was trained before goes on from there, and counts only what is
new. Its options are at their defaults: uniform sampling, candidates chosen by EpsNet. Version 0.17.0 fails where all
trials of a rung are still being trained, as at the start with several workers; here none is promoted then.
"""

from __future__ import annotations

import random
from typing import Any

import neps
import numpy as np
import torch
from benchmarks.search.fidelity_loop import Study, Training
from benchmarks.search.sampler import EPOCHS, OBJECTIVES, PARAMETERS, Surrogate
from neps.optimizers.algorithms import moasha
from neps.optimizers.utils.brackets import Rung

from elastune.tuning.search.schedule import ToTheEnd

_chosen = Rung.epsnet_selector


def _chosen_of_told(rung: Any, *, k: int, contenders: Any) -> Any:
    result = contenders["perf"].notna().any()
    return _chosen(rung, k=k, contenders=contenders) if result else contenders.iloc[:0]


Rung.epsnet_selector = _chosen_of_told


def neps_space() -> neps.SearchSpace:
    results: dict[str, Any] = {}
    for p in PARAMETERS:
        if p.name == "epoch":
            results[p.name] = neps.HPOInteger(1, EPOCHS, is_fidelity=True)
        elif p.whole:
            results[p.name] = neps.HPOInteger(int(p.low), int(p.high), log=p.log)
        else:
            results[p.name] = neps.HPOFloat(p.low, p.high, log=p.log)
    return neps.SearchSpace(results)


class NepsStudy(Study):
    """Who is asked, and told, is NePS."""

    def __init__(self, surrogate: Surrogate, seed: int) -> None:
        super().__init__(surrogate, "random", ToTheEnd(), seed)
        random.seed(seed)  # it draws from the global generators
        np.random.seed(seed)
        torch.manual_seed(seed)
        self._neps = neps.AskAndTell(moasha(neps_space()))
        self._asked: dict[int, tuple[Any, int]] = {}

    def _fill(self, now: float) -> None:
        trial = self._neps.ask()
        number = int(str(trial.id).split("_")[0])
        values = dict(trial.config)
        self._asked[number] = trial, int(values.pop("epoch"))
        if number not in self._trainings:
            self._trainings[number] = Training(self._curve({**values, "epoch": EPOCHS}))
            self.outcome.asked += 1
        self._go_on(now, number)

    def _epoch(self, now: float, number: int) -> None:
        training = self._trainings[number]
        trial, until = self._asked[number]
        training.epoch += 1
        self._epochs += 1
        if training.epoch < until:
            self._go_on(now, number)
            return
        point = training.curve[training.epoch - 1]
        self._neps.tell(trial, {"objective_to_minimize": [float(value) for value in point[: len(OBJECTIVES)]]})
        if training.epoch == EPOCHS:
            self.outcome.points.append(point)
            self.outcome.spent.append(self._epochs / EPOCHS)
