"""The weights that trials have left, as tensors, and models that are filled with them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.mechanisms.scattered import whole
from elastune.reuse.candidates import Candidate


def weights_of(candidate: Candidate) -> dict[str, torch.Tensor]:
    """Return all tensors of the state of a candidate's model, without what is no tensor (a module's extra state)."""
    return {name: whole(stored) for name, stored in candidate.weights().items() if hasattr(stored, "shape")}


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all tensors of the state of ``model``."""
    return {name: tensor for name, tensor in model.state_dict().items() if hasattr(tensor, "shape")}


def numbers_in(tensors: Mapping[str, Any]) -> int:
    """Return how many numbers a state has, at least 1: what one inference uses, if each is used once."""
    return max(1, sum(prod(map(int, one.shape)) for one in tensors.values() if hasattr(one, "shape")))


def check_alike(own: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], whose: str) -> None:
    """Raise ``UserError`` where built tensors and those of ``whose`` differ in names or shapes."""
    for name in {**own, **found}:
        shapes = [tuple(of[name].shape) if name in of else None for of in (own, found)]
        if shapes[0] != shapes[1]:
            rule = "build(config) makes the model that the weights are of, tensor for tensor"
            raise UserError(rule, f"{name}: {shapes[0]} built, {shapes[1]} {whose}", "build it as the program did")


def fill(model: nn.Module, found: dict[str, torch.Tensor], whose: str) -> None:
    """Load ``found`` into ``model``. Raises ``UserError`` as ``check_alike``."""
    check_alike(tensors_of(model), found, whose)
    model.load_state_dict(found, strict=False)  # names were compared; a module's extra state is build's


def check_file(path: Path) -> None:
    """Raise ``UserError`` where no model could be written to ``path``; for use before a model is chosen."""
    if path.is_dir() or not path.parent.is_dir():
        raise UserError("a model is written to a file in a folder that is there", path, "name another one")
