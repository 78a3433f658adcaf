"""The choice of a synchronisation strategy for a run.

``prepare`` attaches a model to its mechanism and returns its ``Sync``. ``active_sync`` wraps it in an ``ActiveSync``,
which can change the strategy between rounds.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.core.run import ExecutionSettings, RunSpec, check_strategy
from elastune.core.sync_plan import SyncPlan
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.mechanisms.base import Replica
from elastune.parallel.mechanisms.engine import EngineReplica, SlotEngine
from elastune.parallel.mechanisms.owned.replica import OwnedReplica
from elastune.parallel.mechanisms.registry import mechanism_for
from elastune.parallel.sync.allreduce import (
    CompressedAllReduce,
    EngineReduce,
    ExactAllReduce,
    FastAllReduce,
    OrderedEngineReduce,
)
from elastune.parallel.sync.base import ActiveSync, Sync
from elastune.parallel.sync.owned import OwnedAllReduce
from elastune.parallel.sync.rounds import RoundSync, check_model, check_rounding


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    execution: ExecutionSettings,
    comms: Comms,
    plan: SyncPlan | None = None,
    *,
    control: int = 0,
    elastic: bool = False,
    seed: int = 0,
) -> Sync:
    """Attach ``model`` to the mechanism of ``execution``, and return this worker's side of the strategy.

    All workers must hold equal parameters already.

    Args:
        model: The user's model.
        optimizer: The user's optimizer.
        execution: The settings that choose mechanism and strategy.
        comms: This worker's groups.
        plan: How replicas agree; None: by all-reduce.
        control: How many numbers each worker adds to an exchange beside gradients.
        elastic: The group may change or break, and another worker may need a result.
        seed: The run's seed.

    Raises:
        UserError: If the model or the optimizer does not fit the settings.
    """
    mechanism = mechanism_for(execution)
    _refuse_untrainable(model)
    if execution.copies is None:
        execution = replace(execution, copies=2 if elastic else 1)
    if plan is not None:
        check_optimizer(plan, optimizer)
    replica = mechanism.attach(model, optimizer, comms, execution)
    return sync_of(replica, comms, execution, plan, control=control, elastic=elastic, seed=seed)


def refuse_unfit(model: nn.Module, optimizer: torch.optim.Optimizer, execution: ExecutionSettings) -> None:
    """Raise the ``UserError`` that ``prepare`` would raise on every worker; do not use ``model`` afterwards."""
    mechanism = mechanism_for(execution)
    _refuse_untrainable(model)
    mechanism.examine(model, optimizer, execution)


def sync_of(
    replica: Replica,
    comms: Comms,
    execution: ExecutionSettings,
    plan: SyncPlan | None = None,
    *,
    control: int = 0,
    elastic: bool = False,
    seed: int = 0,
) -> Sync:
    """The strategy of ``plan`` and ``execution`` over ``replica``; see ``prepare``."""
    if plan is not None and plan.in_rounds:
        return RoundSync(
            replica, comms, plan, execution.num_slots, control, mode=execution.mode, elastic=elastic, seed=seed
        )
    sync = _every_step(replica, comms, execution, control, elastic=elastic)
    sync.plan = plan or SyncPlan()  # which may be a parameter server without staleness
    return sync


def _every_step(replica: Replica, comms: Comms, execution: ExecutionSettings, control: int, *, elastic: bool) -> Sync:
    if isinstance(replica, SlotEngine):
        return OrderedEngineReduce(replica, comms, execution.num_slots, control)
    if isinstance(replica, EngineReplica):
        return EngineReduce(replica, comms, control)
    if isinstance(replica, OwnedReplica):
        return OwnedAllReduce(replica, comms, execution.num_slots, control, mode=execution.mode, elastic=elastic)
    if execution.mode == "exact":
        slots, size = execution.num_slots, execution.bucket_bytes
        return ExactAllReduce(replica, comms, slots, control, elastic=elastic, bucket_bytes=size)
    if execution.compression is not None:
        return CompressedAllReduce(replica, comms, execution.compression, control, elastic=elastic)
    return FastAllReduce(replica, comms, control, elastic=elastic, bucket_bytes=execution.bucket_bytes)


def active_sync(sync: Sync, spec: RunSpec, control: int, *, elastic: bool) -> ActiveSync:
    """Wrap ``sync``, which ``prepare`` made for ``spec``, so that another strategy may take its place."""
    replica, execution = sync.replica, spec.execution

    def make(plan: SyncPlan) -> Sync:
        return sync_of(replica, replica.comms, execution, plan, control=control, elastic=elastic, seed=spec.seed)

    def check(plan: SyncPlan) -> None:
        check_strategy(plan, spec)
        check_optimizer(plan, replica.optimizer)
        check_model(plan, replica.params)
        plan.check_quorum(elastic=elastic)

    return ActiveSync(sync, make, check)


def check_optimizer(plan: SyncPlan, optimizer: torch.optim.Optimizer) -> None:
    """Raise ``UserError`` if learners cannot use ``optimizer``."""
    if plan.in_rounds and isinstance(optimizer, torch.optim.LBFGS):
        raise UserError("a learner's optimizer evaluates a batch once", "LBFGS", "use --sync allreduce")
    check_rounding(plan, optimizer)


def _refuse_untrainable(model: nn.Module) -> None:
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError("a model must have parameters to train", type(model).__name__, "check requires_grad")
