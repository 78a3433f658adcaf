"""The choice of a synchronisation strategy for a run, and the strategy in use, which another one may replace.

``prepare`` attaches a model to its mechanism and returns its ``Sync``. ``active_sync`` wraps it in an ``ActiveSync``,
which can change the strategy between rounds.
"""

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
from elastune.parallel.sync.allreduce import (
    CompressedAllReduce,
    EngineReduce,
    ExactAllReduce,
    FastAllReduce,
    OrderedEngineReduce,
)
from elastune.parallel.sync.base import Sync
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


class ActiveSync:
    """The strategy in use over this worker's replica, and the change to another strategy.

    A change moves no state, because all learners are equal between rounds. They become one at the end of each round,
    and several again at the beginning of the next. A strategy's own state (an outer momentum) ends with it.

    Args:
        sync: The strategy with which a run begins.
        make: Makes the strategy of another plan over the same replica.
        check: Raises ``UserError`` for an impossible plan; see ``forbid``.

    Attributes:
        sync: The strategy in use.
        wanted: The plan that takes its place at the next boundary, and the reason; None: no change.
        scheduled: The step of the newest change that the run's schedule has made.

    Example::

        active = active_sync(prepare(model, optimizer, spec.execution, comms), spec, 0, elastic=False)
        active.want(SyncPlan.parse("diloco:learners=2,every=10"), "policy")
        active.switch(step)  # at the next boundary, on every worker
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
        """Raise ``UserError`` if ``plan`` is impossible for this run."""
        for rule in self._rules:
            rule(plan)

    def forbid(self, rule: Callable[[SyncPlan], object]) -> None:
        """Refuse, now and later, plans for which ``rule`` raises ``UserError``; checks the plan in use at once."""
        rule(self.sync.plan)
        if rule not in self._rules:
            self._rules.append(rule)

    def want(self, plan: SyncPlan, why: str) -> None:
        """Change to ``plan`` at the next boundary. Raises ``UserError`` if it is impossible."""
        self.check(plan)
        self.wanted = (plan, why) if plan != self.sync.plan else None

    @property
    def coming(self) -> str:
        """The plan from the next boundary on, as text: the wanted plan, or else the plan in use."""
        return str(self.sync.plan if self.wanted is None else self.wanted[0])

    def follow(self, schedule: SyncSchedule, step: int) -> None:
        """Want the plan of ``schedule`` after ``step`` steps, once for each of its changes."""
        due = schedule.due(step)
        if due is not None and due[0] > self.scheduled:
            self.scheduled = due[0]
            self.want(due[1], "schedule")

    def switch(self, step: int) -> tuple[SyncPlan, str]:
        """Change to the wanted plan after ``step`` steps, on every worker alike. Return the plan and the reason."""
        assert self.wanted is not None
        (plan, why), self.wanted = self.wanted, None
        self._before = step, self.sync
        self._become(plan)
        return plan, why

    def serving(self, step: int) -> Sync:
        """The strategy that completed step ``step``: another worker may still need its result."""
        return self._before[1] if self._before is not None and self._before[0] == step else self.sync

    def committed(self) -> None:
        """A step was completed by the strategy in use."""
        self._before = None

    def _become(self, plan: SyncPlan) -> None:
        before = self.sync
        if not (plan.in_rounds or before.plan.in_rounds):  # both plans are the same strategy: it keeps its state
            before.plan = plan
            return
        before.close()
        self.sync = self._make(plan)
        self.sync.count_on_from(before)
        if before.plan.strategy == plan.strategy and before.plan.in_rounds and plan.in_rounds:
            self.sync.load_state_dict(before.state_dict())  # copied: the old one serves its last result

    def state_dict(self) -> dict[str, Any]:
        """The state that another worker, or a checkpoint, needs to go on alike."""
        wanted = None if self.wanted is None else [str(self.wanted[0]), self.wanted[1]]
        state = {"plan": str(self.sync.plan), "wanted": wanted, "scheduled": self.scheduled}
        return {**state, "kept": self.sync.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state. Raises ``ValueError``, ``KeyError`` or ``UserError`` if ``state_dict`` cannot make it."""
        plan = SyncPlan.parse(str(state["plan"]))
        if plan != self.sync.plan:
            self.check(plan)
            self._become(plan)
        self.sync.load_state_dict(state["kept"])
        wanted, self.scheduled = state["wanted"], int(state["scheduled"])
        self.wanted = None if wanted is None else (SyncPlan.parse(str(wanted[0])), str(wanted[1]))
        self._before = None
