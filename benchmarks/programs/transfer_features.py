"""What a source's trunk makes of a new task's images, for ``elastune predict``: see ``transferability.py``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.programs.transfer_train import build, config, splits

__all__ = ["build", "halves", "new_task", "predict"]


def halves(seed: int) -> tuple[list[int], list[int]]:
    """Five classes for sources, and the five of the new task."""
    order = torch.randperm(10, generator=torch.Generator().manual_seed(seed)).tolist()
    return sorted(order[:5]), sorted(order[5:])


def new_task(name: str) -> dict[str, Any]:
    """Settings of ``transfer_train`` for the task "fashion_1000_3": the data, how many images, the seed."""
    data, train, seed = name.split("_")
    return {"data": data, "train": int(train), "seed": int(seed), "classes": halves(int(seed))[1]}


def predict(model: nn.Module, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Features before the head, and the new task's targets."""
    if name.count("_") != 2:
        return None
    x, y = splits({**config, **new_task(name)}).train.tensors
    with torch.no_grad():
        features: torch.Tensor = model.trunk(x)  # type: ignore[operator]
    return features, y
