"""Synchronisation strategies by what a run asks for, and the strategy in use, which another one may replace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.core.run import ExecutionSettings, RunSpec, check_strategy
from elastune.core.sync_plan import SyncPlan, SyncSchedule
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.mechanisms.base import Replica
from elastune.parallel.mechanisms.engine import EngineReplica, SlotEngine
from elastune.parallel.mechanisms.owned.replica import OwnedReplica
from elastune.parallel.mechanisms.registry import mechanism_for
from elastune.parallel.sync.allreduce import CompressedAllReduce, ExactAllReduce, FastAllReduce
from elastune.parallel.sync.base import Sync
from elastune.parallel.sync.engine import EngineReduce, OrderedEngineReduce
from elastune.parallel.sync.owned import OwnedAllReduce
from elastune.parallel.sync.rounds import RoundSync, check_model, check_rounding

# [in use] The strategy in use over one replica, and how another takes its place.


class ActiveSync:
    """How this worker's replica comes together with others', now and from the next change on.

    Between rounds all learners are equal, so a change moves nothing: many become one as each round ends, and one
    becomes many where the next begins. A strategy's own state (an outer momentum) ends with it.

    Args:
        sync: What a run begins with.
        make: The strategy of another plan over the same replica.
        check: Raises ``UserError`` for a plan that cannot be; see ``forbid``.

    Attributes:
        sync: The strategy in use.
        wanted: What is to take its place at the next boundary, if anything, and why.
        scheduled: The step of the newest change that the run's schedule has made.
    """

    def __init__(
        self, sync: Sync, make: Callable[[SyncPlan], Sync], check: Callable[[SyncPlan], object] = lambda plan: None
    ) -> None:
        self.sync = sync
        self.wanted: tuple[SyncPlan, str] | None = None
        self.scheduled = 0
        self._rules = [check]
        self._make = make
        self._before: tuple[int, Sync] | None = None

    def check(self, plan: SyncPlan) -> None:
        """Raise ``UserError`` where ``plan`` cannot be."""
        for rule in self._rules:
            rule(plan)

    def forbid(self, rule: Callable[[SyncPlan], object]) -> None:
        """Have no plan, now or later, for which ``rule`` raises ``UserError``; the one in use is asked at once."""
        rule(self.sync.plan)
        if rule not in self._rules:
            self._rules.append(rule)

    def want(self, plan: SyncPlan, why: str) -> None:
        """Have ``plan`` from the next boundary on. Raises ``UserError`` where it cannot be."""
        self.check(plan)
        self.wanted = (plan, why) if plan != self.sync.plan else None

    @property
    def coming(self) -> str:
        """The plan from the next boundary on, as text: what is wanted, or else what is in use."""
        return str(self.sync.plan if self.wanted is None else self.wanted[0])

    def follow(self, schedule: SyncSchedule, step: int) -> None:
        """Want what ``schedule`` has after ``step`` steps, once for each of its changes."""
        due = schedule.due(step)
        if due is not None and due[0] > self.scheduled:
            self.scheduled = due[0]
            self.want(due[1], "schedule")

    def switch(self, step: int) -> tuple[SyncPlan, str]:
        """Have what is wanted, after ``step`` steps; the same on every worker. Returns it, and why."""
        assert self.wanted is not None
        (plan, why), self.wanted = self.wanted, None
        self._before = step, self.sync
        self._become(plan)
        return plan, why

    def serving(self, step: int) -> Sync:
        """The strategy that brought ``step`` steps to their end: another worker may still need its result."""
        return self._before[1] if self._before is not None and self._before[0] == step else self.sync

    def committed(self) -> None:
        """A step was completed by the strategy in use."""
        self._before = None

    def _become(self, plan: SyncPlan) -> None:
        before = self.sync
        if not (plan.in_rounds or before.plan.in_rounds):  # one by two names: what it keeps is not lost
            before.plan = plan
            return
        before.close()
        self.sync = self._make(plan)
        self.sync.count_on_from(before)
        if before.plan.strategy == plan.strategy and before.plan.in_rounds and plan.in_rounds:
            self.sync.load_state_dict(before.state_dict())  # copied: who lacks the last round's result has it served

    def state_dict(self) -> dict[str, Any]:
        """All that another worker, or a checkpoint, needs to go on alike."""
        wanted = None if self.wanted is None else [str(self.wanted[0]), self.wanted[1]]
        told = {"plan": str(self.sync.plan), "wanted": wanted, "scheduled": self.scheduled}
        return {**told, "kept": self.sync.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it over. Raises ``ValueError``, ``KeyError`` or ``UserError`` for what ``state_dict`` cannot give."""
        plan = SyncPlan.parse(str(state["plan"]))
        if plan != self.sync.plan:
            self.check(plan)
            self._become(plan)
        self.sync.load_state_dict(state["kept"])
        wanted, self.scheduled = state["wanted"], int(state["scheduled"])
        self.wanted = None if wanted is None else (SyncPlan.parse(str(wanted[0])), str(wanted[1]))
        self._before = None


# [registry] Synchronisation strategies by what a run asks for.


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
    """This worker's part of a replica of ``model``, and its side of the strategy, as ``execution`` ask.

    All workers must hold equal parameters already. ``plan``: how replicas agree; None: by all-reduce. ``control``: how
    many numbers each worker adds to an exchange beside gradients. ``elastic``: the group may change or break, and a
    result may be asked for by another worker. ``seed``: of the run.
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
    """Raise the ``UserError`` that ``prepare`` would raise on every worker. Nobody uses ``model`` afterwards."""
    mechanism = mechanism_for(execution)
    _refuse_untrainable(model)
    mechanism.examine(model, optimizer, execution)


def _refuse_untrainable(model: nn.Module) -> None:
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError("a model must have parameters to train", type(model).__name__, "check requires_grad")


def active_sync(sync: Sync, spec: RunSpec, control: int, *, elastic: bool) -> ActiveSync:
    """``sync``, which ``prepare`` made for ``spec``, as what another strategy may take the place of."""
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
    """Raise ``UserError`` where learners cannot have it."""
    if plan.in_rounds and isinstance(optimizer, torch.optim.LBFGS):
        raise UserError("a learner's optimizer evaluates a batch once", "LBFGS", "use --sync allreduce")
    check_rounding(plan, optimizer)


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
    """The strategy of ``plan`` that ``execution`` ask for, over ``replica``; see ``prepare``."""
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
