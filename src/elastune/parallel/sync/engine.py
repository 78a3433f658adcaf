"""Engines of other packages reduce gradients by themselves; one small sum carries all other values of a step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

import torch

from elastune.core.batch_slices import BatchSlice
from elastune.parallel.comm.exact import ExactReducer
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.mechanisms.engine import EngineReplica, SlotEngine
from elastune.parallel.sync.base import STATISTICS, Sync, step_statistics


class EngineReduce(Sync):
    """The strategy of an engine that reduces gradients itself.

    After the engine's last backward pass of a step, one all-reduce sums the control vector and statistics. The workers
    of a run stay the same: a broken reduction ends the run. Buffers change on each worker by itself.
    """

    name: ClassVar[str] = "engine"
    exact: bool = False
    drifts: ClassVar[bool] = True
    refuses_counts: ClassVar[str] = "a mechanism whose engine keeps the sums to itself"
    replica: EngineReplica

    def __init__(self, replica: EngineReplica, comms: Comms, control: int = 0) -> None:
        super().__init__(replica, comms, control)
        self.group = comms.everyone
        self._weight = 0.0

    def begin(self, share: BatchSlice, *, starts_step: bool) -> None:
        if starts_step:
            self._weight = 0.0
            self._part.clear()
            self.replica.begin_step()

    def backward(self, loss: torch.Tensor, share: BatchSlice) -> None:
        self.replica.refuse_leftovers()
        self._weight += share.weight
        if self.wants_statistics and share.weight:
            self._part.add_loss(loss, share.weight)
        self.replica.run(loss, share)
        if not share.ends_step:
            self.replica.hide()
            return
        control = self.control if self._weight else [0.0] * len(self.control)
        tail = torch.tensor([*control, *map(float, self._part.values)], device=self.group.wire)
        started = time.monotonic()
        self.group.all_reduce(tail).wait()
        self.wait_s = time.monotonic() - started
        self._take(tail)

    def _take(self, tail: torch.Tensor) -> None:
        """``tail`` is the sum over all workers."""
        sums = tail.tolist()
        self.totals = sums[: -len(STATISTICS)]
        self.statistics = step_statistics(sums[-len(STATISTICS) :], None)
        self.replica.reduced()

    def abandon(self) -> None:
        self.replica.abandon()

    def last_result(self) -> list[torch.Tensor]:
        raise RuntimeError("an engine's workers stay as they are")

    def result_room(self) -> list[torch.Tensor]:
        raise RuntimeError("an engine's workers stay as they are")

    def adopt_result(self, result: Sequence[torch.Tensor]) -> None:
        raise RuntimeError("an engine's workers stay as they are")


class OrderedEngineReduce(EngineReduce):
    """The strategy of an engine that sums slots in canonical order.

    Each slot runs by itself, on the buffers of the step's start. The engine does not know the buffers and the flags of
    used parameters, so these travel with the control vector.
    """

    exact: bool = True
    drifts: ClassVar[bool] = False
    replica: SlotEngine

    def __init__(self, replica: SlotEngine, comms: Comms, num_slots: int, control: int = 0) -> None:
        super().__init__(replica, comms, control)
        tail = torch.zeros(len(replica.params) + control + len(STATISTICS))
        self._reducer = ExactReducer([*replica.buffers.floats, tail], num_slots, self.group)
        self._slot_weight = 0.0
        replica.buffers.one_slot = num_slots == 1

    def begin(self, share: BatchSlice, *, starts_step: bool) -> None:
        super().begin(share, starts_step=starts_step)
        if starts_step:
            self._reducer.begin()
            self._slot_weight = 0.0
        elif self._slot_weight == 0.0:  # a new slot, not a further piece of one
            self.replica.buffers.restore()

    def backward(self, loss: torch.Tensor, share: BatchSlice) -> None:
        replica = self.replica
        replica.refuse_leftovers()
        replica.buffers.passed()
        self._slot_weight += share.weight
        if self.wants_statistics and share.weight:
            self._part.add_loss(loss, share.weight)
        replica.run(loss, share)
        if share.weight and share.ends_slot:
            self._end_slot(share)
        if share.ends_step:
            self._finish()

    def _end_slot(self, share: BatchSlice) -> None:
        control = self.control if share.ends_step else [0.0] * len(self.control)
        tail = torch.tensor([*map(float, self.replica.used), *control, *map(float, self._part.values)])
        self._reducer.begin_slot(share.slot, last=share.ends_step)
        for place, value in enumerate([*self.replica.buffers.moves(self._slot_weight), tail]):
            self._reducer.put(place, value)
        self._slot_weight = 0.0
        self._part.clear()

    def _finish(self) -> None:
        started = time.monotonic()
        *moved, tail = self._reducer.finish()
        used = [flag > 0 for flag in tail[: len(self.replica.params)].tolist()]
        self.replica.settle(used)
        self.wait_s = time.monotonic() - started
        self.replica.buffers.move(moved)
        self._take(tail[len(used) :])
