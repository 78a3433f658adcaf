"""Journals of studies as a driver writes them, made up: for tests of what is read from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
)

from elastune.core.journal.records import (
    Entry,
    Record,
    Regrouped,
    Reported,
    StudyFinished,
    StudyStarted,
    TrialFinished,
    TrialPaused,
    TrialReallocated,
    TrialRegrouped,
    TrialReported,
    TrialResumed,
    TrialStarted,
    encode_entry,
)
from elastune.runtime.job.output import JOURNAL

SPACE: Mapping[str, BaseDistribution] = {
    "lr": FloatDistribution(1e-4, 1.0, log=True),
    "optimizer": CategoricalDistribution(["sgd", "adam"]),
    "momentum": FloatDistribution(0.0, 0.99),
    "workers": IntDistribution(1, 4),
}
SETTINGS: Mapping[str, Any] = {
    "kind": "tune",
    "program": "examples/digits.py",
    "objectives": {"accuracy": "max", "seconds": "min"},
    "workers": 6,
    "seed": 0,
    "epochs": 4,
    "price_per_worker_hour": 2.0,
    "defaults": {"lr": 0.1, "optimizer": "sgd", "momentum": None, "name": None},
}


class Telling:
    """Entries, written one after another; ``wait`` lets time pass between them."""

    def __init__(self, settings: Mapping[str, Any] = SETTINGS, at: float = 1_700_000_000.0) -> None:
        self.entries: list[Entry] = []
        self.settings = dict(settings)
        self._at = at
        self.tell(StudyStarted(self.settings, {"cores": 4}))

    @property
    def now(self) -> float:
        return self._at

    def wait(self, seconds: float) -> Telling:
        self._at += seconds
        return self

    def tell(self, *records: Record) -> Telling:
        self.entries += [Entry(self._at, record) for record in records]
        return self

    def start(self, trial: int, parent: int | None = None, seed: int = 0, **params: Any) -> Telling:
        """A trial begins. Its configuration is its parameters, with None where SPACE has one that it lacks."""
        config = {**{name: params.get(name) for name in SPACE}, "name": None, **params}
        execution = {"workers": config.pop("workers") or 1, "mode": "fast", "mechanism": "replicated", "num_slots": 8}
        distributions = {name: distribution_to_json(SPACE[name]) for name in params if name in SPACE}
        return self.tell(TrialStarted(trial, config, execution, seed, "search", params, distributions, parent=parent))

    def report(self, trial: int, epoch: int, seconds: float, workers: float = 1.0, **metrics: float) -> Telling:
        told = Reported(epoch, 10 * epoch, 640 * epoch, seconds, metrics, epochs=4)
        return self.tell(TrialReported(trial, told, workers))

    def pause(self, trial: int, epoch: int, seconds: float, reason: str = "", cut_off: bool = False) -> Telling:
        return self.tell(TrialPaused(trial, epoch, seconds, seconds, reason, cut_off))

    def resume(self, trial: int, workers: int = 1, reason: str = "") -> Telling:
        return self.tell(TrialResumed(trial, workers, reason))

    def resize(self, trial: int, before: int, after: int, reason: str = "") -> Telling:
        change = Regrouped(2, list(range(after)), True, 5, 0.01, 0)
        return self.tell(TrialReallocated(trial, before, after, reason), TrialRegrouped(trial, change))

    def complete(self, trial: int, accuracy: float, seconds: float, worker_seconds: float | None = None) -> Telling:
        values = {"accuracy": accuracy, "seconds": seconds}
        metrics = {**values, "cost": 2.0 * (worker_seconds or seconds) / 3600}
        ended = TrialFinished(trial, "complete", values, metrics, seconds=seconds, worker_seconds=worker_seconds)
        return self.tell(ended)

    def fail(self, trial: int, reason: str, seconds: float = 1.0) -> Telling:
        return self.tell(TrialFinished(trial, "infeasible", seconds=seconds, reason=reason))

    def finish(self, reason: str = "40 trials") -> Telling:
        return self.tell(StudyFinished(reason, self._at - self.entries[0].at))

    def write(self, out: Path) -> Path:
        """The journal in folder ``out``."""
        out.mkdir(parents=True, exist_ok=True)
        (out / JOURNAL).write_bytes(b"".join(encode_entry(entry) + b"\n" for entry in self.entries))
        return out


def stopping_study(trials: int = 40, seed: int = 0) -> Telling:
    """A study of six workers that stops trials early: accuracy hangs on the learning rate (best at 1, the bound) and,
    of SGD alone, on momentum; time on the workers. Three run at a time, some fail, some are resumed, one is widened."""
    draw, whole = np.random.default_rng(seed), Telling()
    lanes = [Telling() for _ in range(3)]
    for number in range(trials):
        params: dict[str, Any] = {
            "lr": float(10 ** draw.uniform(-4, 0)),
            "optimizer": str(draw.choice(["sgd", "adam"])),
            "workers": 1 if number % 3 else 2,
        }
        if params["optimizer"] == "sgd":
            params["momentum"] = float(draw.uniform(0, 0.99))
        _one(min(lanes, key=lambda lane: lane.now), number, params, draw)
    whole.entries += sorted((entry for lane in lanes for entry in lane.entries[1:]), key=lambda entry: entry.at)
    return whole.wait(max(lane.now for lane in lanes) - whole.now + 1.0).finish(f"{trials} trials")


def _one(told: Telling, number: int, params: Mapping[str, Any], draw: np.random.Generator) -> None:
    workers = int(params["workers"])
    accuracy = 0.7 + 0.06 * math.log10(params["lr"] / 1e-4) + 0.05 * params.get("momentum", 0.0)
    epoch_s = float(8 / workers * draw.uniform(0.8, 1.2))
    told.start(number, **params)
    if number % 9 == 4:
        told.wait(2.0).fail(number, "diverged: loss is NaN at step 12", 2.0)
        return
    told.wait(epoch_s).report(number, 1, epoch_s, workers, accuracy=accuracy - 0.1)
    if accuracy < 0.8:
        told.pause(number, 1, epoch_s, "rank 3 of 4 at epoch 1")
        if number % 5:
            return
        told.wait(1.0).resume(number, workers, "rank 1 of 3 at epoch 1")
    if number == 6:
        told.resize(number, workers, 4, "rank 1 of 5 at epoch 1")
        workers = 4
    told.wait(3 * epoch_s).report(number, 4, 4 * epoch_s, workers, accuracy=accuracy)
    told.complete(number, accuracy, 4 * epoch_s, 4 * epoch_s * workers)
