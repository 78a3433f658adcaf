"""An optimizer's state by the names of parameters, as a checkpoint has it, and by torch's numbers of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn


def names_of(optimizer: torch.optim.Optimizer, module: nn.Module) -> list[str]:
    """The parameters' names in ``module``, by the numbers that ``optimizer.state_dict()`` gives them.

    One that is not the module's is "#" and its number.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [names.get(id(p), f"#{number}") for number, p in enumerate(params)]


def by_name(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A ``state_dict`` of an optimizer with ``names`` in place of numbers."""
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
    return {**state, "state": {names[number]: kept for number, kept in state["state"].items()}, "param_groups": groups}


def by_number(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The way back. Raises ``ValueError`` for a name that is not among ``names``."""
    numbers = {name: number for number, name in enumerate(names)}
    used = [*state["state"], *(name for group in state["param_groups"] for name in group["params"])]
    if unknown := [name for name in used if name not in numbers]:
        raise ValueError(f"it knows the parameter {unknown[0]}, and this one does not")
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]]
    return {**state, "state": {numbers[name]: kept for name, kept in state["state"].items()}, "param_groups": groups}
