"""Figures of benchmarks/user/transfer.py: compute by shapes, epochs to a target, gains with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from torch import nn

from elastune.core.plan.confidence_intervals import mean_ci

TRAINED = 3
"""Forward passes' worth of a sample that is trained by: one forward, two backward (inputs' and weights' gradients)."""


NEAR = 0.95
"""Of the target: looked at after the first run, where accuracies of the last epochs were found to go up and down."""


def multiplications(model: nn.Module, example: torch.Tensor) -> int:
    """Multiply-adds of one sample's way through convolutions and linear layers; ``example``: (1, ...)."""
    counts: list[int] = []

    def hook(layer: Any, inputs: Any, said: torch.Tensor) -> None:
        counts.append(said[0].numel() * layer.weight[0].numel())

    hooks = [m.register_forward_hook(hook) for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    with torch.no_grad():
        model(example)
    for one in hooks:
        one.remove()
    return sum(counts)


def epochs_to(accuracies: Sequence[float], target: float) -> int | None:
    """After which epoch ``target`` was first reached."""
    return next((at for at, one in enumerate(accuracies, 1) if one >= target), None)


def gained(values: Sequence[float], digits: int = 2) -> dict[str, Any]:
    """Their mean with its 95 % interval, and what that says: above 0, below, or neither."""
    mean, half = mean_ci(values)
    results = {"mean": round(mean, digits), "ci95_half": None if half is None else round(half, digits)}
    return {**results, "verdict": verdict(mean, half), "each": [round(one, digits) for one in values]}


def verdict(mean: float, half: float | None) -> str:
    """In words."""
    if half is None:
        return "one seed tells nothing"
    if mean - half > 0:
        return "pays"
    return "does not pay" if mean + half < 0 else "no difference shown"


def started(found: Sequence[dict[str, Any]], epochs: int) -> dict[str, Any]:
    """Of one pair of tasks over seeds. A target that was not reached counts as one epoch more than there were."""
    saved = [one["cold_epochs"] - (one["warm_epochs"] or epochs + 1) for one in found]
    near = [
        (epochs_to(one["cold"], NEAR * one["cold"][-1]), epochs_to(one["warm"], NEAR * one["cold"][-1]) or epochs + 1)
        for one in found
    ]
    passes = [gain * one["target_samples"] - one["source_passes"] for gain, one in zip(saved, found, strict=True)]
    return {
        "cold_epochs": [one["cold_epochs"] for one in found],
        "warm_epochs": [one["warm_epochs"] for one in found],
        "epochs_saved": gained(saved),
        "near_target_epochs": near,
        "epochs_saved_near_target": gained([cold - warm for cold, warm in near]),
        "test_points": gained([100 * (one["warm_test"] - one["cold_test"]) for one in found]),
        "after_one_epoch_points": gained([100 * (one["warm"][0] - one["cold"][0]) for one in found]),
        "sample_passes_saved_with_the_source_counted": gained(passes, 0),
        "seeds": list(found),
    }


def compared(found: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Each way over seeds, beside the flat model of the same seed and compute. ``found``: by name, of each seed."""
    results = {}
    for name in found[0]:
        column = [seed[name] for seed in found]
        gains = [100 * (seed[name]["test"] - seed["flat"]["test"]) for seed in found]
        results[name] = {
            "test_percent": round(100 * fmean(one["test"] for one in column), 2),
            "points_over_flat": gained(gains),
            "compute_over_flat": round(fmean(s[name]["compute"] / s["flat"]["compute"] for s in found), 3),
            "inference_over_flat": round(fmean(s[name]["inference"] / s["flat"]["inference"] for s in found), 2),
            "worker_seconds": round(fmean(one["worker_seconds"] for one in column), 2),
        }
    return results
