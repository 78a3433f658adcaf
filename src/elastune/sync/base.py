"""The contract of a synchronisation strategy: when and how the replicas of a model come together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch

from elastune.comm.comms import Comms
from elastune.comm.group import Group
from elastune.core.batch_slices import BatchSlice
from elastune.mechanisms.base import Replica
from elastune.sync.statistics import PartStatistics, StepStatistics


class Sync(ABC):
    """One worker's side of a strategy, over the replica that the worker is a part of.

    A step is one or more batch slices; for each: ``begin``, the user's forward pass through ``replica.model``,
    ``backward``; after the last the user's optimizer step, then ``after_step``. Between the slices of a step no
    parameter has a gradient, so that whatever the user does with gradients there (clip, step, zero) does nothing.

    A *round* of ``steps_in_round`` steps ends with an exchange that all workers complete, or that is done again: it
    returns with the round complete, or raises ``GroupBroken`` with nothing applied. The round is then completed by
    ``adopt_result`` with what another worker has of it, or dropped by ``abandon``; training goes on after ``regroup``.
    A run with several models has a ``Sync`` for each of them.

    ``exact``: how many workers there are does not show in the result. ``agreement``: decisions travel in the exchange
    (``control``), or have to go by the coordinator, because no exchange reaches everyone. ``drifts``: buffers move at
    each worker by itself.

    ``parts``, set before a step, are the slices that this worker runs in it.
    ``control``, set before a step, of the length that was told at the beginning, is summed over the workers that have
    samples (where ``all_contribute``, over all); ``totals``, those sums, are known to all after the round, and so are
    its ``statistics``. ``wait_s``: how long the last step waited for others. ``wants_statistics``: whether anybody
    reads them; on a GPU they cost a wait for the device.
    """

    name: ClassVar[str]
    exact: ClassVar[bool]
    drifts: ClassVar[bool]
    agreement: ClassVar[Literal["in_reduction", "by_coordinator"]]
    steps_in_round: int = 1
    all_contribute: ClassVar[bool] = False

    def __init__(self, replica: Replica, comms: Comms, control: int) -> None:
        self.replica = replica
        self.group = comms.group("data")
        self.parts: Sequence[BatchSlice] = ()
        self.control = [0.0] * control
        self.totals = [0.0] * control
        self.statistics = StepStatistics({}, None)
        self.wants_statistics = True
        self.wait_s = 0.0
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

    def after_step(self) -> None:  # noqa: B027 - most strategies have nothing to do here
        """The user's optimizer step is done: strategies that average parameters do it here."""

    # -- what rides along ---------------------------------------------------------------------------------------------

    def measure(self, on: bool, weights: list[torch.Tensor] | None = None, turn: int = 0) -> None:
        """Whether the next step takes gradients' norms; ``weights``: a factor for every parameter; ``turn``: which
        blocks of large ones are looked at (``comm.reducer.BucketNorms``).
        """
        self._measures, self._weights, self._turn = on, weights, turn

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
        self.group = comms.group("data")
        self.replica.regroup(comms)

    # -- what is saved ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What this strategy keeps from round to round (outer momenta, centre weights); equal on all workers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``."""
        if state:
            raise ValueError(f"{self.name} keeps nothing from round to round, not {sorted(state)}")
