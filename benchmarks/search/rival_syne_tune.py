"""Syne Tune's MOASHA (Schmucker et al. 2021) as an early stopping of the benchmarks, where it is installed.

It stops trials for good at rungs of epochs by the ranks of what they have shown so far, and samples at random; all
options are at their defaults. Measured in an environment of its own: ``pip install syne-tune``.
"""

from __future__ import annotations

import contextlib
import datetime
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from benchmarks.search.sampler import EPOCHS, OBJECTIVES
from syne_tune.backend.trial_status import Trial
from syne_tune.config_space import uniform
from syne_tune.optimizer.schedulers.multiobjective.moasha import MOASHA

from elastune.tuning.search.schedule import IntermediateResult, ToTheEnd


class Moasha(ToTheEnd):
    """As far as ``fidelity_loop.Study`` asks a schedule; trials that it stops never go on."""

    def __init__(self, seed: int) -> None:
        np.random.seed(seed)  # it draws brackets from the global generator; here there is one
        self._names = [objective.name for objective in OBJECTIVES]
        self._moasha = MOASHA({"x": uniform(0, 1)}, metrics=self._names, time_attr="epoch", max_t=EPOCHS)
        self._trials: dict[int, Trial] = {}

    def started(self, trial: int, params: Mapping[str, Any], parent: int | None = None) -> None:
        self._trials[trial] = Trial(trial_id=trial, config={}, creation_time=datetime.datetime.now())
        with contextlib.redirect_stdout(io.StringIO()):
            self._moasha.on_trial_add(self._trials[trial])

    def reported(self, intermediate: IntermediateResult) -> str:
        results = {"epoch": intermediate.epoch, **dict(zip(self._names, intermediate.values, strict=True))}
        decision = self._moasha.on_trial_result(self._trials[intermediate.trial], results)
        return "stopped" if decision == "STOP" else ""
