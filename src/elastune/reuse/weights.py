"""The weights that trials have left, as tensors, and models that are filled with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.mechanisms.scattered import whole
from elastune.reuse.candidates import Candidate
from elastune.train.program.causes import cause_of

Build = Callable[[dict[str, Any]], nn.Module]
"""Makes a program's model from the settings of a trial."""


def weights_of(candidate: Candidate) -> dict[str, torch.Tensor]:
    """Return all tensors of the state of a candidate's model, without what is no tensor (a module's extra state)."""
    return {name: whole(stored) for name, stored in candidate.weights().items() if hasattr(stored, "shape")}


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all tensors of the state of ``model``."""
    return {name: tensor for name, tensor in model.state_dict().items() if hasattr(tensor, "shape")}


def numbers_in(tensors: Mapping[str, Any]) -> int:
    """Return how many numbers a state has, at least 1: what one inference uses, if each is used once."""
    return max(1, sum(prod(map(int, one.shape)) for one in tensors.values() if hasattr(one, "shape")))


def built(build: Build, config: Mapping[str, Any], whose: str) -> nn.Module:
    """Return the model that ``build`` makes of the settings ``whose``. Raises ``UserError`` where it makes none."""
    try:
        model: object = build(dict(config))
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        rule, settings = "build(config) takes the settings of a trial", f"{dict(config)}"[:200]
        fix = "give the build of the program that was trained"
        raise UserError(rule, f"{cause_of(error)} for {settings}, {whose}", fix) from error
    if not isinstance(model, nn.Module):
        raise UserError("build(config) gives a torch.nn.Module", type(model).__name__, "return the model")
    return model


def check_alike(own: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], whose: str) -> None:
    """Raise ``UserError`` where built tensors and those of ``whose`` differ in names, shapes or kinds of numbers.

    Precision may differ: a model that was trained in bfloat16 may be built in float32.
    """
    for name in {**own, **found}:
        shapes = [tuple(of[name].shape) if name in of else None for of in (own, found)]
        if shapes[0] != shapes[1]:
            rule = "build(config) makes the model that the weights are of, tensor for tensor"
            raise UserError(rule, f"{name}: {shapes[0]} built, {shapes[1]} {whose}", "build it as the program did")
        here, there = own[name].dtype, found[name].dtype
        if here != there and not (here.is_floating_point and there.is_floating_point):
            rule = "build(config) makes the model that the weights are of, with the same kinds of numbers"
            raise UserError(rule, f"{name}: {here} built, {there} {whose}", "build it as the program did")


def fill(model: nn.Module, found: dict[str, torch.Tensor], whose: str) -> None:
    """Load ``found`` into ``model``. Raises ``UserError`` as ``check_alike``."""
    check_alike(tensors_of(model), found, whose)
    model.load_state_dict(found, strict=False)  # names were compared; a module's extra state is build's


def check_file(path: Path) -> None:
    """Raise ``UserError`` where no model could be written to ``path``; for use before a model is chosen."""
    if path.is_dir() or not path.parent.is_dir():
        raise UserError("a model is written to a file in a folder that is there", path, "name another one")
