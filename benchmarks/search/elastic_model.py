"""Trials for the simulator: lcbench's learning curves, on workers that scale as Pollux's authors measured.

Curves and seconds on one worker: the lcbench surrogate (see ``sampler.py``), which takes the epoch as an input.
Scaling: measured steps of ``placements.csv`` (one node of four GPUs) and ``scalability.csv`` (up to 16 nodes) of the
traces of Qiao et al., "Pollux" (OSDI 2021), by GPUs and samples per GPU, interpolated (linear in the logarithm of the
samples, linear in GPUs); more samples than a GPU was measured with are done in several passes, of which the last
reduces; fewer than the fewest take as long as these. GPUs are packed four to a node.

The global batch stays what the configuration says, however many GPUs there are: lcbench's 16 to 512 samples stand for
1/32 of to the whole of the largest batch that was measured for the model (imagenet 400 to 12,800, cifar10 128 to
4,096), so that small batches gain little by more GPUs. It is cut into ``SLOTS`` slots.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import numpy as np
from benchmarks.search.sampler import EPOCHS, PARAMETERS, Surrogate
from numpy.typing import NDArray

from elastune.core.run import Config

Floats = NDArray[np.float64]
SLOTS = 64
PER_NODE = 4
SAMPLES = 4096  # of an epoch: it cancels out
LARGEST = {"imagenet": 12800, "cifar10": 4096}


class Scaling:
    """Seconds of a step by GPUs and global batch, as measured for one model."""

    def __init__(self, folder: Path, model: str) -> None:
        self.largest_batch = LARGEST[model]
        result: dict[int, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
        with (folder / model / "placements.csv").open() as file:
            for row in csv.DictReader(file):
                gpus = sum(map(int, row["placement"]))
                if len(row["placement"]) == max(1, math.ceil(gpus / PER_NODE)):
                    result[gpus][int(row["local_bsz"])].append((float(row["step_time"]), float(row["sync_time"])))
        with (folder / model / "scalability.csv").open() as file:
            for row in csv.DictReader(file):
                gpus = int(row["num_replicas"])
                if int(row["num_nodes"]) * PER_NODE == gpus:
                    result[gpus][int(row["local_bsz"])].append((float(row["step_time"]), float(row["sync_time"])))
        self._rows = {gpus: self._table(rows) for gpus, rows in sorted(result.items())}
        self._gpus = list(self._rows)

    @staticmethod
    def _table(rows: dict[int, list[tuple[float, float]]]) -> tuple[Floats, Floats, Floats]:
        sizes = sorted(rows)
        step = [fmean(pair[0] for pair in rows[size]) for size in sizes]
        sync = [fmean(pair[1] for pair in rows[size]) for size in sizes]
        return np.log(sizes), np.array(step), np.array(sync)

    def step_s(self, gpus: int, batch: int) -> float:
        """Seconds of a step of ``batch`` samples; the GPU with most slots decides."""
        share = math.ceil(SLOTS / gpus) * batch / SLOTS
        if gpus in self._rows:
            return self._measured_s(gpus, share)
        after = next(seen for seen in self._gpus if seen > gpus)
        before = self._gpus[self._gpus.index(after) - 1]
        part = (gpus - before) / (after - before)
        return (1 - part) * self._measured_s(before, share) + part * self._measured_s(after, share)

    def _measured_s(self, gpus: int, share: float) -> float:
        sizes, step, sync = self._rows[gpus]
        passes = math.ceil(share / math.exp(sizes[-1]) - 1e-9)
        size = math.log(share / passes)
        step_s, sync_s = float(np.interp(size, sizes, step)), float(np.interp(size, sizes, sync))
        return (passes - 1) * (step_s - sync_s) + step_s

    def speedup(self, gpus: int, batch: int) -> float:
        return self.step_s(1, batch) / self.step_s(gpus, batch)


@dataclass
class Model:
    """A ``TrialModel`` of ``elastune.tuning.simulate.cluster``: curves of one instance, scaling of one model."""

    surrogate: Surrogate
    scaling: Scaling
    start_s: float = 2.0
    resize_pause_s: float = 0.5
    scale: float = 1.0
    _curves: dict[tuple[float, ...], Floats] = field(default_factory=dict)
    _speedups: dict[tuple[int, int], float] = field(default_factory=dict)

    def epochs(self, config: Config, asked: int | None) -> int:
        return asked or EPOCHS

    def samples(self, config: Config) -> int:
        return SAMPLES

    def batch(self, config: Config) -> int:
        return SAMPLES // 16

    def metrics(self, config: Config, seed: int, epoch: int) -> dict[str, float]:
        error, seconds = self.curve(config)[epoch - 1]
        return {"error": float(error), "time": float(seconds)}

    def epoch_s(self, config: Config, workers: int, epoch: int) -> float:
        curve = self.curve(config)[:, 1]
        alone_s = curve[epoch - 1] - (curve[epoch - 2] if epoch > 1 else 0.0)
        batch = round(float(config["batch_size"]) / 512 * self.scaling.largest_batch)  # type: ignore[arg-type]
        key = workers, batch
        if key not in self._speedups:
            self._speedups[key] = self.scaling.speedup(workers, batch)
        return float(alone_s) * self.scale / self._speedups[key]

    def curve(self, config: Config) -> Floats:
        """(error, seconds on one worker so far) after each epoch, shape (epochs, 2)."""
        key = tuple(float(config[p.name]) for p in PARAMETERS if p.name != "epoch")  # type: ignore[arg-type]
        if key not in self._curves:
            curve = self.surrogate(np.array([[epoch, *key] for epoch in range(1, EPOCHS + 1)]))
            curve[:, 1] = curve[-1, 1] / EPOCHS * np.arange(1, EPOCHS + 1)  # an epoch's work is always the same
            self._curves[key] = curve
        return self._curves[key]
