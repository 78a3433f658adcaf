"""The contract of a synchronisation strategy: when and how the replicas of a model come together.

``Sync`` is the contract. ``ActiveSync`` holds the strategy in use, which another one may replace between rounds.

A step's reduction also carries statistics: sums over the parts of a global batch, from which monitors read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch

from elastune.core.errors import UserError
from elastune.core.slots import BatchSlice
from elastune.core.sync_plan import SyncPlan, SyncSchedule
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.comm.reducer import Pair, Scalar, scalar
from elastune.parallel.mechanisms.base import Ready, Replica

STATISTICS = ("square", "weighted", "count", "loss", "sharpness", "trace", "elements", "counted")
"""The numbers that each part of a global batch adds to the step's sums, beside its gradients.

A part is a slot, or all samples of one worker. "square" and "weighted" are the squared norms of its mean gradient and
of that times weights, each times the part's weight. "count" is 1, and "loss" its weighted loss. "sharpness" and "trace"
are measurements (``Sync.record_statistic``). "elements" and "counted" are of losses that are means over elements: the
weighted number of elements per sample, and the weight (``Sync.count_elements``)."""
_COUNT, _LOSS = STATISTICS.index("count"), STATISTICS.index("loss")
_POWERS = {"loss": 1, "trace": 1, "sharpness": 1, "square": 2, "weighted": 2}  # of a factor of the loss
MIXED = 1e-3  # the share of a global batch whose losses differ in kind; less is rounding


class SlotTap(Protocol):
    """Sees the gradients of this worker's slots on their way into the sum (``train.proof.verification``)."""

    def ready(self, slot: int, put: Ready) -> Ready:
        """What takes the gradients of ``slot``: it passes each on to ``put``."""
        ...

    def fill(self, control: list[float]) -> None:
        """Put the numbers that are known only now into this worker's ``control``, which leaves next."""
        ...


class Sync(ABC):
    """One worker's side of a synchronisation strategy, over the replica that the worker is a part of.

    A step has one or more batch slices. For each slice: ``begin``, the user's forward pass through ``replica.model``,
    ``backward``. After the last slice come the user's optimizer step and ``after_step``. Between the slices of a step
    no parameter has a gradient. So a user who clips, steps or zeroes there changes nothing.

    A *round* is one step or several. It ends with an exchange that all workers complete, or that is done again. The
    exchange returns with the round complete, or raises ``GroupBroken`` with nothing applied. In the second case
    ``adopt_result`` completes the round with another worker's result, or ``abandon`` drops it. Training goes on after
    ``regroup``. A run with several models has one ``Sync`` for each model.

    Example (one step, as ``train.step`` calls it)::

        for share in sync.parts:
            sync.begin(share, starts_step=share is sync.parts[0])
            sync.backward(loss_of(sync.replica.model, share), share)
        sync.replica.optimizer.step()
        sync.after_step()

    Attributes:
        exact: The number of workers does not change the result.
        drifts: Buffers change on each worker by itself.
        all_contribute: ``control`` is summed over all workers, and not only over the workers that have samples.
        meets_after_step: The exchange comes after the round's last optimizer step, in ``after_step``, and not with the
            last ``backward``.
        plan: Its learners and rounds.
        parts: The slices that this worker runs in a step; set before the step.
        control: This worker's numbers for the exchange, of a fixed length; set before the step.
        totals: The sums of ``control`` over workers, on all workers after the round.
        statistics: The statistics of the round, on all workers.
        absent: The learners without which the round ended.
        wait_s: How long the last step waited for other workers.
        wants_statistics: Whether a monitor reads the statistics; on a GPU they cost a wait for the device.
        refuses_counts: Why summed gradients cannot be divided by a number that is known with the sums; "": they can.
        tap: Sees the gradients of each slot before they are summed; None: nobody does.
    """

    name: ClassVar[str]
    exact: bool
    drifts: ClassVar[bool]
    all_contribute: ClassVar[bool] = False
    meets_after_step: ClassVar[bool] = False
    refuses_counts: ClassVar[str] = ""
    plan: SyncPlan = SyncPlan()

    def __init__(self, replica: Replica, comms: Comms, control: int) -> None:
        self.replica = replica
        self.group = comms.group("data")
        self._comms, self._sent_before = comms, 0
        self.parts: Sequence[BatchSlice] = ()
        self.control = [0.0] * control
        self.totals = [0.0] * control
        self.statistics = StepStatistics({}, None)
        self.wants_statistics = True
        self.wait_s = 0.0
        self.absent: tuple[int, ...] = ()
        self._part = PartStatistics()
        self._measures = False
        self._weights: list[torch.Tensor] | None = None
        self._turn = 0
        self.tap: SlotTap | None = None

    @abstractmethod
    def begin(self, share: BatchSlice, *, starts_step: bool) -> None:
        """Prepare for the forward pass of ``share``."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, share: BatchSlice) -> None:
        """Add the gradient of ``loss``, the mean over the slice's samples.

        After the step's last slice the parameters have the gradient for the optimizer.
        """

    def add(self, loss: torch.Tensor, share: BatchSlice) -> None:
        """Add the gradient of ``loss``, one of several losses of the slice before its ``backward``.

        Raises ``UserError`` if workers hold parts of the model.
        """
        if not self.replica.has_all:
            fix = "add them up: session.backward(one + other)"
            raise UserError("losses that follow each other need the model whole on each worker", "a part of it", fix)
        self.replica.refuse_leftovers()
        if share.weight:
            self.replica.add(loss, share.weight)
            if self.wants_statistics:
                self._part.add_loss(loss, share.weight)

    def redo(self, loss: torch.Tensor, share: BatchSlice) -> list[torch.Tensor | None] | None:
        """Compute a pass of another worker's slot, between ``begin`` and the first pass of this worker's own.

        Nothing of it enters the step.

        Returns:
            The slot's gradients after its last pass, in the order in which ``tap`` sees them; None before.
        """
        raise NotImplementedError(f"{self.name} cannot compute the slot of another worker")

    def _redone(self, loss: torch.Tensor, share: BatchSlice) -> list[torch.Tensor | None] | None:
        """As ``redo``, where a pass needs no other worker."""
        replica = self.replica
        replica.refuse_leftovers()
        replica.accumulate(loss, share.weight)
        self._part.clear()
        gradients = [p.grad for p in replica.params]
        if share.ends_slot:
            for p in replica.params:
                p.grad = None
            replica.buffers.restore()
            return gradients
        replica.hide()
        return None

    def after_step(self) -> None:  # noqa: B027 - most strategies have nothing to do here
        """Called after the user's optimizer step; a strategy that ``meets_after_step`` has its exchange here."""

    # -- statistics ---------------------------------------------------------------------------------------------------

    def measure(self, on: bool, weights: list[torch.Tensor] | None = None, turn: int = 0) -> None:
        """Whether the next step computes gradients' norms.

        ``weights``: a factor for every parameter. ``turn``: see ``parallel.comm.reducer.BucketNorms``.
        """
        self._measures, self._weights, self._turn = on, weights, turn

    @property
    def sent_bytes(self) -> int:
        """How many bytes this worker's collectives have sent, in all groups since this object was made."""
        return self._sent_before + sum(group.sent_bytes for group in self._comms.formed)

    def count_on_from(self, before: Sync) -> None:
        """Count also the bytes of earlier groups of ``before``; this object takes its place over the same groups."""
        self._sent_before = before._sent_before

    def record_statistic(self, name: str, value: float) -> None:
        """Add a measured, weighted value of one of ``STATISTICS`` of the current slice, before its ``backward``."""
        self._part.record(name, value)

    def count_elements(self, elements: float, weight: float) -> None:
        """Count the elements that the loss of the current slice is a mean over, before its ``backward``.

        Args:
            elements: Their number per sample, times ``weight``.
            weight: The slice's weight.
        """
        self._part.record("elements", elements)
        self._part.record("counted", weight)

    def divide_by_counts(self) -> None:
        """After the sums: make a sum of losses times their elements the mean over all elements of the global batch.

        Gradients and statistics are divided by the mean number of elements per sample. It does nothing where no loss
        had a count, and where no element was counted: gradients and the loss are zero then.

        Raises:
            UserError: Where only a part of the losses had a count.
        """
        counted, elements = (self.statistics.parts.get(name, 0.0) for name in ("counted", "elements"))
        if not counted:
            return
        if abs(counted - 1.0) > MIXED:
            rule, value = "all losses of a global batch have a count, or none", f"{counted:.0%} of it has one"
            raise UserError(rule, value, "pass count= in each call, also where it is 0")
        if elements == 0:
            return
        self.replica.divide(elements)
        self.statistics = self.statistics.divided(elements)

    # -- when workers come and go -------------------------------------------------------------------------------------

    @abstractmethod
    def last_result(self) -> list[torch.Tensor]:
        """The complete result of the newest completed round: flat tensors on the group's wire device.

        Their shapes do not depend on the number of workers. They live until the next round completes.
        """

    @abstractmethod
    def result_room(self) -> list[torch.Tensor]:
        """Memory for another worker's ``last_result``."""

    @abstractmethod
    def adopt_result(self, result: Sequence[torch.Tensor]) -> None:
        """Complete the round with another worker's ``last_result``, exactly as if the exchange had succeeded here.

        For a worker that has contributed all its values and whose exchange raised ``GroupBroken``.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Drop the step that was begun last, the replica's part included."""

    @property
    def awaits_step(self) -> bool:
        """Whether other workers may have to wait until the user's optimizer step has applied this worker's sums.

        Until then this worker must take part in nothing with them.
        """
        return False

    def regroup(self, comms: Comms, over: Group | None = None) -> None:
        """Exchange with these workers from the next step on; the replica regroups as well.

        Args:
            comms: The new groups.
            over: The new workers, and after them the leaving workers that hand state over; None: no worker does.

        Raises:
            GroupBroken: Only if replicas lie on several workers, because all of ``over`` then move state.
            Unrecoverable: Likewise.
        """
        self._sent_before, self._comms = self.sent_bytes, comms
        self._sent_before -= sum(group.sent_bytes for group in comms.formed)  # some groups may stay the same
        self.group = comms.group("data")
        self.replica.regroup(comms)

    def close(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Let go of the replica: another strategy takes this one's place over it, between two rounds."""

    def hand_over(self, over: Group, members: int) -> None:  # noqa: B027 - most strategies have nothing to give
        """Give the state that this leaving worker alone holds to one of the first ``members`` of ``over``.

        The ``regroup`` of that worker expects it. Raises ``GroupBroken``.
        """

    # -- saved state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state that this strategy keeps from round to round, such as outer momenta; equal on all workers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``."""
        if state:
            raise ValueError(f"{self.name} keeps nothing from round to round, not {sorted(state)}")


# --- statistics -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepStatistics:
    """The statistics of one step; monitors read them.

    Attributes:
        parts: The sums over parts, by the names of ``STATISTICS``. norms: The squared norms of the summed gradient,
        plain and weighted; None if they were not measured. distance: How far apart learners were at the end of a round
        (``parallel.sync.rounds.distance``); None without learners. staleness: The mean age, in global batches, of
        values that learners took from others without waiting; None if
            no learner took any in this round.
    """

    parts: dict[str, float]
    norms: tuple[float, float] | None
    distance: float | None = None
    staleness: float | None = None

    def divided(self, factor: float) -> StepStatistics:
        """The statistics of a step whose losses, and so its gradients, were multiplied by ``factor``, without it."""
        parts = {name: value / factor ** _POWERS.get(name, 0) for name, value in self.parts.items()}
        norms = None if self.norms is None else (self.norms[0] / factor**2, self.norms[1] / factor**2)
        return replace(self, parts=parts, norms=norms)


def step_statistics(parts: Sequence[Scalar], norms: Pair | None, distance: float | None = None) -> StepStatistics:
    """Name the sums ``parts``, which are in the order of ``STATISTICS``."""
    named = {name: float(value) for name, value in zip(STATISTICS, parts, strict=True)}
    return StepStatistics(named, None if norms is None else (float(norms[0]), float(norms[1])), distance)


class PartStatistics:
    """The sums of ``STATISTICS`` over the parts that this worker has run since ``clear``."""

    def __init__(self) -> None:
        self.values: list[Scalar] = [0.0] * len(STATISTICS)

    def clear(self) -> None:
        """Set all sums to zero."""
        self.values = [0.0] * len(STATISTICS)

    def add(self, other: PartStatistics) -> None:
        """Add the sums of ``other``."""
        self.values = [a + b for a, b in zip(self.values, other.values, strict=True)]

    def tensor(self) -> torch.Tensor:
        """The values, in single precision, on the CPU."""
        return torch.tensor([float(value) for value in self.values], dtype=torch.float32)

    def record(self, name: str, value: float) -> None:
        """Add a measured value of the statistic ``name``, weighted already."""
        self.values[STATISTICS.index(name)] += value

    def add_loss(self, loss: torch.Tensor, weight: float) -> None:
        """Add the loss of a pass."""
        value = loss.item() if loss.device.type == "cpu" else scalar(loss.detach().reshape(()))
        self.values[_LOSS] += value * weight

    def add_norms(self, norms: Pair, weight: float) -> None:
        """Count a finished part of weight ``weight``; ``norms`` are the squared norms of its weighted gradient."""
        for place, norm in enumerate(norms):
            self.values[place] += norm / weight
        self.values[_COUNT] += 1.0


def squared_norms(params: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] | None) -> Pair:
    """The squared norms of the parameters' gradients, plain and times ``weights``; as those of a reducer."""
    pairs = [(p.grad, i) for i, p in enumerate(params) if p.grad is not None]
    if not pairs:
        return 0.0, 0.0
    grads = [(grad.coalesce().values() if grad.is_sparse else grad).float() for grad, _ in pairs]
    plain = scalar(torch.stack(torch._foreach_norm(grads)).square().sum())
    if weights is None:
        return plain, 0.0
    weighed = [(grad.to_dense() if grad.is_sparse else grad) * weights[i] for grad, i in pairs]
    return plain, scalar(torch.stack(torch._foreach_norm(weighed)).square().sum())


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
