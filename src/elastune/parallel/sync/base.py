"""The contract of a synchronisation strategy: when and how the replicas of a model come together.

A step's reduction also carries statistics: sums over the parts of a global batch, from which monitors read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from elastune.core.batch_slices import BatchSlice
from elastune.core.errors import UserError
from elastune.core.sync_plan import SyncPlan
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.comm.reducer import Pair, Scalar, scalar
from elastune.parallel.mechanisms.base import Replica

# [statistics] What a step's reduction tells beside gradients: sums over the parts of a global batch, from which monitors read.

STATISTICS = ("square", "weighted", "count", "loss", "sharpness", "trace")
"""What each part of a global batch (a slot, or what a worker runs) adds to the step's sums, beside its gradients: the
squared norm of its mean gradient and of that times weights, each times the part's weight; 1; its weighted loss; and
what was measured of it (``Sync.record_statistic``)."""
_COUNT, _LOSS = STATISTICS.index("count"), STATISTICS.index("loss")


@dataclass(frozen=True)
class StepStatistics:
    """A step's: sums over parts (``STATISTICS``), and the squared norms of the summed gradient, plain and weighted.

    ``distance``: how far apart learners were where a round ended (``sync.distance``); None where there are none.
    ``staleness``: how many global batches old on average what learners took of others without waiting was, in a round;
    None where nobody took anything so.
    """

    parts: dict[str, float]
    norms: tuple[float, float] | None
    distance: float | None = None
    staleness: float | None = None


def step_statistics(parts: Sequence[Scalar], norms: Pair | None, distance: float | None = None) -> StepStatistics:
    """From the sums, in the order of ``STATISTICS``."""
    named = {name: float(value) for name, value in zip(STATISTICS, parts, strict=True)}
    return StepStatistics(named, None if norms is None else (float(norms[0]), float(norms[1])), distance)


class PartStatistics:
    """What this worker has to say of the parts that it has run since ``clear``."""

    def __init__(self) -> None:
        self.values: list[Scalar] = [0.0] * len(STATISTICS)

    def clear(self) -> None:
        """Nothing yet."""
        self.values = [0.0] * len(STATISTICS)

    def add(self, other: PartStatistics) -> None:
        """All that ``other`` has."""
        self.values = [own + value for own, value in zip(self.values, other.values, strict=True)]

    def tensor(self) -> torch.Tensor:
        """The values, in single precision, on the CPU."""
        return torch.tensor([float(value) for value in self.values], dtype=torch.float32)

    def record(self, name: str, value: float) -> None:
        """One of ``STATISTICS`` that was measured, weighted already."""
        self.values[STATISTICS.index(name)] += value

    def add_loss(self, loss: torch.Tensor, weight: float) -> None:
        """The loss of a pass."""
        value = loss.item() if loss.device.type == "cpu" else scalar(loss.detach().reshape(()))
        self.values[_LOSS] += value * weight

    def add_norms(self, norms: Pair, weight: float) -> None:
        """A part of weight ``weight`` is done: ``norms`` are those of its weighted gradient."""
        for place, norm in enumerate(norms):
            self.values[place] += norm / weight
        self.values[_COUNT] += 1.0


def squared_norms(params: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] | None) -> Pair:
    """The squared norms of what the parameters have for gradients, and of these times ``weights``; as a reducer's."""
    pairs = [(p.grad, i) for i, p in enumerate(params) if p.grad is not None]
    if not pairs:
        return 0.0, 0.0
    grads = [(grad.coalesce().values() if grad.is_sparse else grad).float() for grad, _ in pairs]
    plain = scalar(torch.stack(torch._foreach_norm(grads)).square().sum())
    if weights is None:
        return plain, 0.0
    weighed = [(grad.to_dense() if grad.is_sparse else grad) * weights[i] for grad, i in pairs]
    return plain, scalar(torch.stack(torch._foreach_norm(weighed)).square().sum())


# [base] The contract of a synchronisation strategy: when and how the replicas of a model come together.


class Sync(ABC):
    """One worker's side of a strategy, over the replica that the worker is a part of.

    A step is one or more batch slices; for each: ``begin``, the user's forward pass through ``replica.model``,
    ``backward``; after the last the user's optimizer step, then ``after_step``. Between the slices of a step no
    parameter has a gradient, so that whatever the user does with gradients there (clip, step, zero) does nothing.

    A *round*, one step or several, ends with an exchange that all workers complete, or that is done again: it
    returns with the round complete, or raises ``GroupBroken`` with nothing applied. The round is then completed by
    ``adopt_result`` with what another worker has of it, or dropped by ``abandon``; training goes on after ``regroup``.
    A run with several models has a ``Sync`` for each of them.

    ``plan``: its learners and rounds. ``meets_after_step``: the exchange comes after the round's last optimizer step,
    in ``after_step``, and not with the last ``backward``. ``exact``: how many workers there are does not show in the
    result. ``drifts``: buffers move at each worker by itself.

    ``parts``, set before a step, are the slices that this worker runs in it.
    ``control``, set before a step, of the length that was told at the beginning, is summed over the workers that have
    samples (where ``all_contribute``, over all); ``totals``, those sums, are known to all after the round, and so are
    its ``statistics`` and the learners that it ended without (``absent``). ``wait_s``: how long the last step waited
    for others. ``wants_statistics``: whether anybody reads them; on a GPU they cost a wait for the device.
    """

    name: ClassVar[str]
    exact: bool
    drifts: ClassVar[bool]
    all_contribute: ClassVar[bool] = False
    meets_after_step: ClassVar[bool] = False
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

    @abstractmethod
    def begin(self, share: BatchSlice, *, starts_step: bool) -> None:
        """Prepare for the forward pass of ``share``."""

    @abstractmethod
    def backward(self, loss: torch.Tensor, share: BatchSlice) -> None:
        """Add the gradient of ``loss``, the mean over the slice's samples. After the step's last slice the parameters
        have the gradient that the optimizer is to use.
        """

    def add(self, loss: torch.Tensor, share: BatchSlice) -> None:
        """Add the gradient of ``loss``, one of several of the slice whose ``backward`` is still to come.

        Raises ``UserError`` where workers hold parts of the model.
        """
        if not self.replica.has_all:
            fix = "add them up: session.backward(one + other)"
            raise UserError("losses that follow each other need the model whole on each worker", "a part of it", fix)
        self.replica.refuse_leftovers()
        if share.weight:
            self.replica.add(loss, share.weight)
            if self.wants_statistics:
                self._part.add_loss(loss, share.weight)

    def after_step(self) -> None:  # noqa: B027 - most strategies have nothing to do here
        """The user's optimizer step is done: a strategy that ``meets_after_step`` has its exchange here."""

    # -- what rides along ---------------------------------------------------------------------------------------------

    def measure(self, on: bool, weights: list[torch.Tensor] | None = None, turn: int = 0) -> None:
        """Whether the next step takes gradients' norms; ``weights``: a factor for every parameter; ``turn``: which
        blocks of large ones are looked at (``comm.reducer.BucketNorms``).
        """
        self._measures, self._weights, self._turn = on, weights, turn

    @property
    def sent_bytes(self) -> int:
        """How many bytes this worker's collectives have sent, in all groups since this was made; see ``comm.group``."""
        return self._sent_before + sum(group.sent_bytes for group in self._comms.formed)

    def count_on_from(self, before: Sync) -> None:
        """Count the bytes that ``before``, whose place this takes over the same groups, has sent in earlier ones."""
        self._sent_before = before._sent_before

    def record_statistic(self, name: str, value: float) -> None:
        """One of ``STATISTICS`` that was measured of the current slice, weighted; before its ``backward``."""
        self._part.record(name, value)

    # -- when workers come and go -------------------------------------------------------------------------------------

    @abstractmethod
    def last_result(self) -> list[torch.Tensor]:
        """The complete result of the newest completed round: flat tensors on the group's wire device, whose shapes do
        not depend on the number of workers. They live until the next round completes.
        """

    @abstractmethod
    def result_room(self) -> list[torch.Tensor]:
        """Room for another worker's ``last_result``."""

    @abstractmethod
    def adopt_result(self, result: Sequence[torch.Tensor]) -> None:
        """Complete the round by another worker's ``last_result``, exactly as if the exchange had succeeded here.

        For a worker that contributed all it had: its exchange raised ``GroupBroken``.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Drop the step that was begun last, the replica's part included."""

    @property
    def awaits_step(self) -> bool:
        """Whether others may have to wait until the user's optimizer step has applied what this worker has: until then
        it must not do anything with them."""
        return False

    def regroup(self, comms: Comms, over: Group | None = None) -> None:
        """Exchange with these workers from the next step on; the replica is told as well.

        ``over``: those, and behind them such as leave and have state to hand over; None: none do. Where replicas lie on
        several workers, all of ``over`` move state, so this raises ``GroupBroken`` and ``Unrecoverable``.
        """
        self._sent_before, self._comms = self.sent_bytes, comms
        self._sent_before -= sum(group.sent_bytes for group in comms.formed)  # the same ones, perhaps
        self.group = comms.group("data")
        self.replica.regroup(comms)

    def close(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Another strategy takes this one's place over the same replica, between two rounds."""

    def hand_over(self, over: Group, members: int) -> None:  # noqa: B027 - most strategies have nothing to give
        """This worker leaves: give what it alone holds to one of the first ``members`` of ``over``, whose ``regroup``
        expects it. Raises ``GroupBroken``.
        """

    # -- what is saved ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What this strategy keeps from round to round (outer momenta, centre weights); equal on all workers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``."""
        if state:
            raise ValueError(f"{self.name} keeps nothing from round to round, not {sorted(state)}")
