"""Synchronous SGD: after every step all replicas have the gradient of the mean loss over the global batch.

``ExactAllReduce`` sums in canonical order, ``FastAllReduce`` in the fastest order, ``CompressedAllReduce`` sums
compressed gradients. ``EngineReduce`` leaves the gradients to another package's engine.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from elastune.core.communication import Compression
from elastune.core.errors import UserError
from elastune.core.slots import BatchSlice
from elastune.parallel.comm.compressed import CompressedReducer
from elastune.parallel.comm.exact import ExactReducer
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.comm.reducer import FlatBucket, FlatReducer, Pair, Reducer
from elastune.parallel.mechanisms.base import Replica
from elastune.parallel.mechanisms.engine import EngineReplica, SlotEngine
from elastune.parallel.sync.base import STATISTICS, Sync, squared_norms, step_statistics

FACTORS = "factors"
"""The key of PowerSGD's factors in a state dict."""


class AllReduce(Sync):
    """The base of all-reduce strategies: gradients fill buckets during the backward pass, and full buckets leave.

    Gradients arrive in about the reverse order of definition. The last bucket also carries the values that are known
    last: the buffers, and the *tail*, which has the flags of used parameters, control and statistics.
    """

    name: ClassVar[str] = "allreduce"
    _reducer: Reducer[Any] | None

    def __init__(self, replica: Replica, comms: Comms, control: int) -> None:
        super().__init__(replica, comms, control)
        self._params = replica.params
        self._last = len(self._params) - 1
        self._used = [0.0] * len(self._params)
        numbers = len(self._params) + control + len(STATISTICS)
        self._tail = torch.zeros(numbers, dtype=torch.float32, device=self._params[0].device)

    def _like(self, buffers: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The reduced tensors, in the reducer's order."""
        return [t.detach() for t in (*reversed(self._params), *buffers, self._tail)]

    def begin(self, share: BatchSlice, *, starts_step: bool) -> None:
        if starts_step:
            self.replica.begin_step()
            self._part.clear()
            if self._reducer is not None and self._exchanges:
                self._reducer.begin()
                weights = self._weights and list(reversed(self._weights))
                self._reducer.measure(self._measures, weights, self._turn)

    @property
    def _exchanges(self) -> bool:
        """Whether gradients go through the reducer."""
        return True

    def abandon(self) -> None:
        if self._reducer is not None:
            self._reducer.drain()
        self.replica.abandon()

    def regroup(self, comms: Comms, over: Group | None = None) -> None:
        super().regroup(comms, over)
        if self._reducer is not None:
            self._reducer.regroup(self.group)

    def last_result(self) -> list[torch.Tensor]:
        return self._elastic_reducer().last_result()

    def result_room(self) -> list[torch.Tensor]:
        return self._elastic_reducer().result_room()

    def adopt_result(self, result: Sequence[torch.Tensor]) -> None:
        self._adopt_sums(self._elastic_reducer().adopt(result))

    def _elastic_reducer(self) -> Reducer[Any]:
        if self._reducer is None:
            raise RuntimeError("this replica was not prepared for workers that come and go")
        return self._reducer

    # -- to the reducer and back --------------------------------------------------------------------------------------

    def _begin_part(self) -> None:
        """Begin a part of the batch: no parameter has a gradient from it yet."""
        self._used = [0.0] * len(self._params)

    def _put(self, i: int, gradient: torch.Tensor | None) -> None:
        assert self._reducer is not None
        owned = False
        if gradient is not None:
            self._used[i] = 1.0
            if gradient.is_sparse:
                gradient = self._dense(gradient)
            # A graph of a GPU writes every pass's gradients to the same memory, so those are copied.
            owned = gradient.device.type == "cpu"
        self._reducer.put(self._last - i, None if gradient is None else gradient.detach(), owned=owned)

    @abstractmethod
    def _dense(self, gradient: torch.Tensor) -> torch.Tensor:
        """A sparse gradient in the form that the reducer takes."""

    def _put_rest(self, moved: Iterable[torch.Tensor], *, with_control: bool) -> None:
        """Put the buffers and the tail, after all gradients."""
        assert self._reducer is not None
        control = self.control if with_control else [0.0] * len(self.control)
        values = self._part.values
        if all(isinstance(value, float) for value in values):
            self._tail.copy_(torch.tensor(self._used + control + values))
        else:
            self._tail[: -len(STATISTICS)] = torch.tensor(self._used + control)
            self._tail[-len(STATISTICS) :] = torch.stack([torch.as_tensor(x, device=self._tail.device) for x in values])
        for place, value in enumerate([*moved, self._tail], len(self._params)):
            self._reducer.put(place, value)

    def _finish(self) -> None:
        assert self._reducer is not None
        sums = self._reducer.finish()
        self.wait_s = self._reducer.wait_s
        self._adopt_sums(sums)

    def _adopt_sums(self, sums: Sequence[torch.Tensor]) -> None:
        """Give its gradient to every parameter that any worker has used."""
        assert self._reducer is not None
        count, tail = len(self._params), sums[-1].tolist()
        self.totals = tail[count : -len(STATISTICS)]
        norms = self._reducer.norms() if self._measures else None
        self.statistics = step_statistics(tail[-len(STATISTICS) :], norms)
        self.replica.adopt([sums[self._last - i] if tail[i] > 0 else None for i in range(count)])
        self._move_buffers(sums[count:-1])

    def _move_buffers(self, moved: Sequence[torch.Tensor]) -> None:
        """Apply the sums of the buffers, the ``moved`` of ``_put_rest``."""

    def _alone(self, loss: torch.Tensor, share: BatchSlice) -> None:
        """Run a slice where no other worker has one: gradients stay where autograd leaves them."""
        norms: Pair | None = None
        if not share.weight:  # a copy, of a learner without samples: its optimizer's step finds no gradient
            self.replica.buffers.restore()
        elif self._measures:  # every slice is a part of its own
            norms = self._accumulate_apart(loss, share.weight)
        else:
            self.replica.accumulate(loss, share.weight)
        if share.weight:
            self._add_part(loss, share.weight, norms)
        if not share.ends_step:
            self.replica.hide()
            return
        self.totals = list(self.control)
        whole = squared_norms(self._params, self._weights) if self._measures else None
        self.statistics = step_statistics(self._part.values, whole)
        self._part.clear()  # an optimizer may evaluate the whole batch again and again

    def _accumulate_apart(self, loss: torch.Tensor, weight: float) -> Pair:
        """Run a pass that is a part of its own; return the squared norms of its gradient."""
        self.replica.run_apart(loss, weight)
        norms = squared_norms(self._params, self._weights)
        self.replica.join_earlier()
        return norms

    def _add_part(self, loss: torch.Tensor, weight: float, norms: Pair | None = None) -> None:
        if self.wants_statistics:
            self._part.add_loss(loss, weight)
        if norms is not None:
            self._part.add_norms(norms, weight)


class ExactAllReduce(AllReduce):
    """Synchronous SGD whose sums follow the canonical tree over slots.

    The weights do not depend on how many workers the run has now or had before. Every slot runs by itself, on the
    buffers of the step's start: BatchNorm normalises over a slot's own samples. The one slot of a lone worker is a
    plain step, without copies and sums.
    """

    exact: bool = True
    drifts: ClassVar[bool] = False

    def __init__(
        self,
        replica: Replica,
        comms: Comms,
        num_slots: int,
        control: int = 0,
        *,
        elastic: bool = False,
        bucket_bytes: int | None = None,
    ) -> None:
        super().__init__(replica, comms, control)
        self._one_slot = replica.buffers.one_slot = num_slots == 1
        like = self._like(replica.buffers.floats)
        self._reducer: ExactReducer = ExactReducer(
            like, num_slots, self.group, len(self._params), hold=elastic, bucket_bytes=bucket_bytes
        )
        self._slot_weight = 0.0

    @property
    def _exchanges(self) -> bool:
        return not self._one_slot or self._comms.everyone.size > 1

    def begin(self, share: BatchSlice, *, starts_step: bool) -> None:
        super().begin(share, starts_step=starts_step)
        if starts_step:
            self._slot_weight = 0.0
        elif self._slot_weight == 0.0:  # a new slot, not a further piece of one
            self.replica.buffers.restore()

    def backward(self, loss: torch.Tensor, share: BatchSlice) -> None:
        self.replica.refuse_leftovers()
        self.replica.buffers.passed()
        self._slot_weight += share.weight
        if not self._exchanges:
            self._alone(loss, share)
            if share.ends_step:
                self.replica.buffers.settle_counters()
            return
        if share.weight:
            self._slot_loss(loss, share)
        if share.ends_step:
            self._finish()

    def redo(self, loss: torch.Tensor, share: BatchSlice) -> list[torch.Tensor | None] | None:
        self._slot_weight = 0.0 if share.ends_slot else self._slot_weight + share.weight
        return self._redone(loss, share)

    def _slot_loss(self, loss: torch.Tensor, share: BatchSlice) -> None:
        replica, norms = self.replica, None
        put = self._put if self.tap is None else self.tap.ready(share.slot, self._put)
        if share.ends_slot:
            self._reducer.begin_slot(share.slot, last=share.ends_step)
            self._begin_part()
        if self._measures and self._one_slot:  # each pass is a part
            norms = self._accumulate_apart(loss, share.weight)
            if share.ends_slot:
                replica.deliver(put)
        elif share.ends_slot:
            replica.stream(loss, share.weight, put)
        else:
            replica.accumulate(loss, share.weight)
        self._add_part(loss, share.weight, norms)
        if share.ends_slot:
            self._end_slot(share)
        else:
            replica.hide()

    def _end_slot(self, share: BatchSlice) -> None:
        if self._measures and not self._one_slot:
            self._part.add_norms(self._reducer.slot_norms(), self._slot_weight)
        if share.ends_step and self.tap is not None:
            self.tap.fill(self.control)
        self._put_rest(self.replica.buffers.moves(self._slot_weight), with_control=share.ends_step)
        self._slot_weight = 0.0
        self._part.clear()

    def _dense(self, gradient: torch.Tensor) -> torch.Tensor:
        raise UserError("exact mode sums dense gradients", "a sparse gradient", "use sparse=False or --mode fast")

    def _move_buffers(self, moved: Sequence[torch.Tensor]) -> None:
        self.replica.buffers.move(moved)


class FastAllReduce(AllReduce):
    """Synchronous SGD that runs a worker's part of a batch as one pass, and sums in the backend's order.

    For models without dropout and BatchNorm the result equals ``ExactAllReduce`` up to rounding. BatchNorm normalises
    over the samples of one worker's pass, so buffers drift apart. This is what torch's DistributedDataParallel does,
    overlap included, but on a group that may change. (A DDP over a group of one worker, with a hook that reduces, does
    not work. It rebuilds its buckets after the first backward pass in the order of this worker's gradients, and the
    orders of several workers may differ.)
    """

    exact: bool = False
    drifts: ClassVar[bool] = True

    def __init__(
        self,
        replica: Replica,
        comms: Comms,
        control: int = 0,
        *,
        elastic: bool = False,
        bucket_bytes: int | None = None,
    ) -> None:
        super().__init__(replica, comms, control)
        self._bucket_bytes = bucket_bytes
        self._weight = 0.0
        self._reducer: Reducer[FlatBucket] | None = None
        if elastic or self.group.size > 1:
            self._reducer = self._make_reducer(hold=elastic)

    @property
    def _exchanges(self) -> bool:
        return self.group.size > 1

    def _make_reducer(self, *, hold: bool) -> Reducer[FlatBucket]:
        gradients, size = len(self._params), self._bucket_bytes
        return FlatReducer(self._like(()), self.group, gradients, hold=hold, bucket_bytes=size)

    def begin(self, share: BatchSlice, *, starts_step: bool) -> None:
        super().begin(share, starts_step=starts_step)
        if starts_step:
            self._weight = 0.0

    def backward(self, loss: torch.Tensor, share: BatchSlice) -> None:
        self.replica.refuse_leftovers()
        self._weight += share.weight
        if self._reducer is not None and self._exchanges:
            self._with_others(self._reducer, loss, share)
        else:
            self._alone(loss, share)

    def _with_others(self, reducer: Reducer[FlatBucket], loss: torch.Tensor, share: BatchSlice) -> None:
        """All slices that this worker runs in a step are one part."""
        replica = self.replica
        if share.weight:
            self._add_part(loss, share.weight)
        if not share.ends_step:
            replica.accumulate(loss, share.weight)
            replica.hide()
            return
        self._begin_part()
        if share.weight:
            replica.stream(loss, share.weight, self._put)
        else:
            replica.deliver(self._put)
        if self._measures and share.weight:
            self._part.add_norms(reducer.slot_norms(), self._weight)
        self._put_rest((), with_control=share.weight > 0)
        self._finish()

    def _dense(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to_dense()


class CompressedAllReduce(FastAllReduce):
    """As ``FastAllReduce``, but gradients travel through ``compression``.

    Compression may leave a residual on each worker (``parallel.comm.compressed.ResidualBucket``). When a
    worker leaves, a staying worker takes its residual over. A worker that is alone sends nothing, so it adds its
    residual to its gradient. When a worker dies, its residual is lost. All residuals are lost when training begins
    again from a snapshot or a checkpoint.
    """

    refuses_counts: ClassVar[str] = "compressed gradients, whose residuals are of steps with other counts"

    def __init__(
        self, replica: Replica, comms: Comms, compression: Compression, control: int = 0, *, elastic: bool = False
    ) -> None:
        self._compression = compression
        super().__init__(replica, comms, control, elastic=elastic)

    def _make_reducer(self, *, hold: bool) -> Reducer[FlatBucket]:
        return CompressedReducer(self._like(()), self.group, len(self._params), self._compression, hold=hold)

    @property
    def _compressed(self) -> CompressedReducer | None:
        assert self._reducer is None or isinstance(self._reducer, CompressedReducer)
        return self._reducer

    def _put(self, i: int, gradient: torch.Tensor | None) -> None:
        super()._put(i, gradient)
        reducer = self._compressed
        if gradient is None and reducer is not None and reducer.owes(self._last - i):
            self._used[i] = 1.0  # by an earlier step

    def _alone(self, loss: torch.Tensor, share: BatchSlice) -> None:
        super()._alone(loss, share)
        reducer = self._compressed
        if reducer is None or not share.ends_step:
            return
        for place, owed in reducer.pay().items():
            param = self._params[self._last - place]
            if param.grad is not None:
                param.grad.add_(owed)
            elif owed.any():
                param.grad = torch.empty_like(param).copy_(owed)

    # -- when workers come and go -------------------------------------------------------------------------------------

    def hand_over(self, over: Group, members: int) -> None:
        reducer = self._compressed
        assert reducer is not None
        for tensor in reducer.owed:
            over.send(tensor, (over.rank - members) % members)

    def regroup(self, comms: Comms, over: Group | None = None) -> None:
        super().regroup(comms, over)
        reducer = self._compressed
        if over is None or reducer is None:
            return
        members, received = comms.everyone.size, []
        for leaver in range(members + comms.rank, over.size, members):
            residuals = [torch.empty_like(tensor) for tensor in reducer.owed]
            for tensor in residuals:
                over.receive(tensor, leaver)
            received.append(residuals)
        for residuals in received:  # after the loop above: take over all of them, or none
            reducer.owe(residuals)

    # -- saved state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        factors = {} if self._compressed is None else self._compressed.factors
        return {FACTORS: factors} if factors else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._compressed is not None and state:
            self._compressed.set_factors(state[FACTORS])


# Engines of other packages reduce gradients by themselves; one small sum carries all other values of a step.


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
