"""Synchronisation strategies by what a run asks for."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from elastune.comm.comms import Comms
from elastune.core.errors import UserError
from elastune.core.run import Means, RunSpec
from elastune.core.sync_check import check_strategy
from elastune.core.sync_plan import SyncPlan
from elastune.mechanisms.base import Replica
from elastune.mechanisms.engine import EngineReplica, SlotEngine
from elastune.mechanisms.owned.replica import OwnedReplica
from elastune.mechanisms.registry import mechanism_for
from elastune.sync.allreduce import ExactAllReduce, FastAllReduce
from elastune.sync.base import Sync
from elastune.sync.compressed import CompressedAllReduce
from elastune.sync.engine import EngineReduce, OrderedEngineReduce
from elastune.sync.in_use import SyncInUse
from elastune.sync.owned import OwnedAllReduce
from elastune.sync.rounds import RoundSync
from elastune.sync.sending import check_rounding
from elastune.sync.strategies import check_model


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    means: Means,
    comms: Comms,
    plan: SyncPlan | None = None,
    *,
    control: int = 0,
    elastic: bool = False,
    seed: int = 0,
) -> Sync:
    """This worker's part of a replica of ``model``, and its side of the strategy, as ``means`` ask.

    All workers must hold equal parameters already. ``plan``: how replicas agree; None: by all-reduce. ``control``: how
    many numbers each worker adds to an exchange beside gradients. ``elastic``: the group may change or break, and a
    result may be asked for by another worker. ``seed``: of the run.
    """
    mechanism = mechanism_for(means)
    _refuse_untrainable(model)
    if means.copies is None:
        means = replace(means, copies=2 if elastic else 1)
    if plan is not None:
        check_optimizer(plan, optimizer)
    replica = mechanism.attach(model, optimizer, comms, means)
    return sync_of(replica, comms, means, plan, control=control, elastic=elastic, seed=seed)


def refuse_unfit(model: nn.Module, optimizer: torch.optim.Optimizer, means: Means) -> None:
    """Raise the ``UserError`` that ``prepare`` would raise on every worker. Nobody uses ``model`` afterwards."""
    mechanism = mechanism_for(means)
    _refuse_untrainable(model)
    mechanism.examine(model, optimizer, means)


def _refuse_untrainable(model: nn.Module) -> None:
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError("a model must have parameters to train", type(model).__name__, "check requires_grad")


def in_use(sync: Sync, spec: RunSpec, control: int, *, elastic: bool) -> SyncInUse:
    """``sync``, which ``prepare`` made for ``spec``, as what another strategy may take the place of."""
    replica, means = sync.replica, spec.means

    def make(plan: SyncPlan) -> Sync:
        return sync_of(replica, replica.comms, means, plan, control=control, elastic=elastic, seed=spec.seed)

    def check(plan: SyncPlan) -> None:
        check_strategy(plan, spec)
        check_optimizer(plan, replica.optimizer)
        check_model(plan, replica.params)
        plan.check_quorum(elastic=elastic)

    return SyncInUse(sync, make, check)


def check_optimizer(plan: SyncPlan, optimizer: torch.optim.Optimizer) -> None:
    """Raise ``UserError`` where learners cannot have it."""
    if plan.in_rounds and isinstance(optimizer, torch.optim.LBFGS):
        raise UserError("a learner's optimizer evaluates a batch once", "LBFGS", "use --sync allreduce")
    check_rounding(plan, optimizer)


def sync_of(
    replica: Replica,
    comms: Comms,
    means: Means,
    plan: SyncPlan | None = None,
    *,
    control: int = 0,
    elastic: bool = False,
    seed: int = 0,
) -> Sync:
    """The strategy of ``plan`` that ``means`` ask for, over ``replica``; see ``prepare``."""
    if plan is not None and plan.in_rounds:
        return RoundSync(replica, comms, plan, means.num_slots, control, mode=means.mode, elastic=elastic, seed=seed)
    sync = _every_step(replica, comms, means, control, elastic=elastic)
    sync.plan = plan or SyncPlan()  # which may be a parameter server without staleness
    return sync


def _every_step(replica: Replica, comms: Comms, means: Means, control: int, *, elastic: bool) -> Sync:
    if isinstance(replica, SlotEngine):
        return OrderedEngineReduce(replica, comms, means.num_slots, control)
    if isinstance(replica, EngineReplica):
        return EngineReduce(replica, comms, control)
    if isinstance(replica, OwnedReplica):
        return OwnedAllReduce(replica, comms, means.num_slots, control, mode=means.mode, elastic=elastic)
    if means.mode == "exact":
        slots, size = means.num_slots, means.bucket_bytes
        return ExactAllReduce(replica, comms, slots, control, elastic=elastic, bucket_bytes=size)
    if means.compression is not None:
        return CompressedAllReduce(replica, comms, means.compression, control, elastic=elastic)
    return FastAllReduce(replica, comms, control, elastic=elastic, bucket_bytes=means.bucket_bytes)
