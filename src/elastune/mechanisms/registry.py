"""Mechanisms by name."""

from __future__ import annotations

from torch import nn

from elastune.comm.group import Group
from elastune.core.errors import UserError
from elastune.core.run import Means
from elastune.mechanisms.base import Replica
from elastune.mechanisms.exact import ExactReplica
from elastune.mechanisms.fast import FastReplica

MECHANISMS = ("ddp",)


def prepare(module: nn.Module, means: Means, group: Group, *, control: int = 0, elastic: bool = False) -> Replica:
    """A replica of ``module`` as ``means`` ask. All workers must hold equal parameters already.

    ``control``: how many numbers each worker adds to a step's reduction beside gradients. ``elastic``: the group may
    change or break, and a step's result may be asked for by another worker.
    """
    if means.mechanism not in MECHANISMS:
        raise UserError("mechanism must be known", means.mechanism, f"use one of {', '.join(MECHANISMS)}")
    if not any(p.requires_grad for p in module.parameters()):
        raise UserError("a model must have parameters to train", type(module).__name__, "check requires_grad")
    if means.mode == "exact":
        return ExactReplica(module, group, means.num_slots, control, elastic=elastic)
    return FastReplica(module, group, control, elastic=elastic)
