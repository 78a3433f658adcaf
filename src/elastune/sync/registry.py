"""Synchronisation strategies by what a run asks for."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from elastune.comm.comms import Comms
from elastune.core.errors import UserError
from elastune.core.run import Means
from elastune.mechanisms.base import Replica
from elastune.mechanisms.engine import EngineReplica, SlotEngine
from elastune.mechanisms.owned.replica import OwnedReplica
from elastune.mechanisms.registry import mechanism_for
from elastune.sync.allreduce import ExactAllReduce, FastAllReduce
from elastune.sync.base import Sync
from elastune.sync.engine import EngineReduce, OrderedEngineReduce
from elastune.sync.owned import OwnedAllReduce


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    means: Means,
    comms: Comms,
    *,
    control: int = 0,
    elastic: bool = False,
) -> Sync:
    """This worker's part of a replica of ``model``, and its side of the strategy, as ``means`` ask.

    All workers must hold equal parameters already. ``control``: how many numbers each worker adds to an exchange beside
    gradients. ``elastic``: the group may change or break, and a result may be asked for by another worker.
    """
    mechanism = mechanism_for(means)
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError("a model must have parameters to train", type(model).__name__, "check requires_grad")
    if means.copies is None:
        means = replace(means, copies=2 if elastic else 1)
    return sync_of(mechanism.attach(model, optimizer, comms, means), comms, means, control=control, elastic=elastic)


def sync_of(replica: Replica, comms: Comms, means: Means, *, control: int = 0, elastic: bool = False) -> Sync:
    """The strategy that ``means`` ask for, over ``replica``; see ``prepare``."""
    if isinstance(replica, SlotEngine):
        return OrderedEngineReduce(replica, comms, means.num_slots, control)
    if isinstance(replica, EngineReplica):
        return EngineReduce(replica, comms, control)
    if isinstance(replica, OwnedReplica):
        return OwnedAllReduce(replica, comms, means.num_slots, control, mode=means.mode, elastic=elastic)
    if means.mode == "exact":
        return ExactAllReduce(replica, comms, means.num_slots, control, elastic=elastic)
    return FastAllReduce(replica, comms, control, elastic=elastic)
