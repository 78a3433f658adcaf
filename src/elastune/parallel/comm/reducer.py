"""Sums of many tensors over workers, in buckets that leave while the backward pass still runs.

``Bucket`` and ``Reducer`` are the contract of all such sums. ``FlatReducer`` is the plain one: one all-reduce for each
bucket, in the backend's order of additions. If workers meet over gloo, tensors of a GPU cross the host's memory
(``DeviceCopy``).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch

from elastune.core.slots import MOST_EXACT_WORKERS
from elastune.parallel.comm.group import Group, Work
from elastune.parallel.comm.relay import Relay

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 16 << 20
SLACK = MOST_EXACT_WORKERS  # elements that buffers have in addition: padding to a multiple of the number of workers
BLOCK = 1 << 16  # elements that a norm reads at one time
TURNS = 4  # of large buckets one reading of norms takes every fourth block
Scalar = float | torch.Tensor
Pair = tuple[Scalar, Scalar]
"""Two squared norms: of a gradient, and of the gradient times weights."""


class Bucket(ABC):
    """Some of the summed tensors as one flat vector. A subclass defines how the vector is summed.

    A ``Reducer`` calls, in each step: ``begin``, ``put`` and ``end_slot`` for each slot, ``launch``, ``depart``,
    ``combine`` as often as ``rounds``, ``wait``, ``give``, and ``complete``.

    With ``hold`` the sums of a completed step stay until the next step completes. Neither changes to the returned
    sums nor a failed step can change them.
    """

    def __init__(self, members: list[int], like: Sequence[torch.Tensor], group: Group, *, hold: bool) -> None:
        self.members = members
        self.launched = False
        self.norms: BucketNorms | None = None  # of this bucket's gradients, while they are measured
        self._group = group
        self._shapes = [like[i].shape for i in members]
        self._sizes = [like[i].numel() for i in members]
        self._numel = sum(self._sizes)
        self._dtype, self._device = like[members[0]].dtype, like[members[0]].device
        self._missing: set[int] = set()
        self._sets = [self._room(group.wire) for _ in range(2 if hold else 1)]
        self._turn = 0
        self._output = torch.zeros(self._numel, dtype=self._dtype, device=self._device) if hold else None

    def _room(self, device: torch.device) -> torch.Tensor:
        return room(self._numel + SLACK, self._dtype, device, self._device)

    @property
    def _staged(self) -> bool:
        return self._device != self._group.wire

    @abstractmethod
    def begin(self) -> None:
        """Forget the last step."""

    @abstractmethod
    def regroup(self, group: Group) -> None:
        """Reduce on ``group`` from the next step on."""

    def renew(self) -> None:
        """Take other memory for the sums of this step: the memory of a broken step may still change."""
        self._sets[self._turn] = self._room(self._group.wire)

    @abstractmethod
    def put(self, index: int, value: torch.Tensor | None, *, owned: bool = False) -> bool:
        """Member ``index`` of the current slot (None: zero). True once the slot is complete in this bucket.

        ``value`` must stay as it is until then. ``owned``: nobody else will use it, so that it need not be copied.
        """

    @property
    @abstractmethod
    def slot_values(self) -> torch.Tensor:
        """The current slot's values, as far as they have arrived; flat."""

    @abstractmethod
    def end_slot(self, slot: int) -> None:
        """Every member of ``slot`` has arrived."""

    @abstractmethod
    def launch(self) -> None:
        """All values of this worker have arrived: start to reduce, or first to copy them to the wire's device."""

    def depart(self) -> None:  # noqa: B027 - most have nothing left to do
        """Start to reduce the values that ``launch`` has only begun to copy."""

    rounds: int = 1
    """How many calls of ``combine`` a step needs."""
    combined: int = 0
    """How many calls this step has had; only counted if it needs several."""

    @property
    def climbs_early(self) -> bool:
        """Whether the first ``combine`` may come as soon as the next bucket has left: it waits for this host only."""
        return False

    @abstractmethod
    def combine(self) -> None:
        """Wait for the running leg and start the next one, if a reduction has several legs."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the sums are in the set of this turn."""

    def settle(self) -> bool:
        """Give up operations beside the group's collectives. False if their memory must never be used again."""
        return True

    def give(self) -> dict[int, torch.Tensor]:
        """The sums by member, as views that live until the next step."""
        sums = self._sums()
        if self.norms is not None:
            self.norms.of_sums(sums)
        return self._cut(sums)

    def _sums(self) -> torch.Tensor:
        sums = self._sets[self._turn][: self._numel]
        if self._staged:  # later operations of the device run after this copy, also the next step's copies
            return sums.to(self._device, non_blocking=True)
        return sums if self._output is None else self._output.copy_(sums)

    def complete(self) -> None:
        """This turn's set becomes the newest result: the next step uses the other set."""
        self._turn = (self._turn + 1) % len(self._sets)

    def last_result(self) -> torch.Tensor:
        """The newest result."""
        return self._sets[self._turn - 1][: self._numel]

    def adopt(self, result: torch.Tensor) -> None:
        """Take ``result`` as the sums of this step's reduction."""
        self._sets[self._turn][: self._numel].copy_(result)

    def numel_of(self, count: int) -> int:
        """How many values the first ``count`` members have."""
        return sum(self._sizes[:count])

    def _cut(self, flat: torch.Tensor) -> dict[int, torch.Tensor]:
        pieces = torch.split(flat[: self._numel], self._sizes)
        return {i: piece.view(shape) for i, piece, shape in zip(self.members, pieces, self._shapes, strict=True)}


B = TypeVar("B", bound=Bucket)


class Reducer(Generic[B]):
    """Sums a list of tensors over workers, in buckets.

    The first ``gradients`` tensors are gradients; ``measure`` switches on their norms.

    A step: ``begin``; for each slot of this worker ``begin_slot`` and ``put`` of every tensor once; at last ``finish``.
    If ``put`` or ``finish`` raised ``GroupBroken``, complete the step by ``adopt``, or start it again by ``begin``.

    Example::

        reducer = FlatReducer([weight, bias], group)
        reducer.begin()
        reducer.begin_slot(0, last=True)
        reducer.put(0, weight.grad)
        reducer.put(1, bias.grad)
        weight_sum, bias_sum = reducer.finish()
    """

    def __init__(self, buckets: list[B], group: Group, gradients: int = 0) -> None:
        self.group = group
        self._gradients = gradients
        self._measures = False, False
        self._buckets = buckets
        self._bucket_of = {i: bucket for bucket in buckets for i in bucket.members}
        self._slot, self._last = 0, True
        self._ready: set[int] = set()
        self._renewed: Group | None = None
        self._departed, self._legs = False, 0
        self.wait_s = 0.0

    def begin(self) -> None:
        """Start a step. No collective of an earlier step may be unfinished; see ``drain``."""
        self._ready = set()
        self._departed, self._legs = False, 0
        for bucket in self._buckets:
            bucket.begin()
            if bucket.norms is not None:
                bucket.norms.end_slot()

    def begin_slot(self, slot: int, *, last: bool) -> None:
        """The next ``put`` calls belong to ``slot``; ``last``: this worker's last slot of the step."""
        self._slot, self._last = slot, last
        for bucket in self._buckets:
            if bucket.norms is not None:
                bucket.norms.end_slot()

    def measure(self, on: bool, weights: Sequence[torch.Tensor] | None = None, turn: int = 0) -> None:
        """Whether the next step computes norms; ``weights`` and ``turn``: see ``BucketNorms``."""
        weighs = weights is not None
        if (on, weighs) == self._measures and not weighs:
            for bucket in self._buckets:
                if bucket.norms is not None:
                    bucket.norms.turn = turn
            return
        self._measures = on, weighs
        for bucket in self._buckets:
            gradients = [i for i in bucket.members if i < self._gradients]
            flat = None if weights is None or not gradients else torch.cat([weights[i].reshape(-1) for i in gradients])
            bucket.norms = BucketNorms(bucket.numel_of(len(gradients)), flat, turn) if on and gradients else None

    def slot_norms(self) -> Pair:
        """The squared norms of the current slot's gradients, plain and times weights."""
        return _total([bucket.norms.of_slot(bucket) for bucket in self._buckets if bucket.norms is not None])

    def norms(self) -> Pair:
        """The squared norms of the newest sums."""
        return _total([bucket.norms.sums for bucket in self._buckets if bucket.norms is not None])

    def put(self, index: int, value: torch.Tensor | None, *, owned: bool = False) -> None:
        """Take tensor ``index`` of the current slot; start the reduction of each bucket that becomes complete.

        See ``Bucket.put``.
        """
        bucket = self._bucket_of[index]
        if bucket.put(index, value, owned=owned):
            if bucket.norms is not None:
                bucket.norms.of_slot(bucket)
            bucket.end_slot(self._slot)
            if self._last:
                self._launch_in_order(bucket)

    def _launch_in_order(self, ready: B) -> None:
        """Launch ready buckets in bucket order: all workers must start their collectives in the same order."""
        self._ready.add(id(ready))
        before: B | None = None
        for bucket in self._buckets:
            if not bucket.launched:
                if id(bucket) not in self._ready:
                    return
                bucket.launch()
                if before is not None and before.climbs_early and not before.combined:
                    before.combine()
            before = bucket

    def launch(self) -> None:
        """Launch the remaining buckets, after the last ``put``."""
        for bucket in self._buckets:
            if not bucket.launched:
                bucket.launch()

    @property
    def legs(self) -> int:
        """How many legs of a step follow the first one; see ``advance``. The same on all workers of the group."""
        return max((bucket.rounds for bucket in self._buckets), default=0)

    def advance(self, legs: int = 0) -> None:
        """Send this worker's values, and begin the next legs until ``legs`` of them have begun.

        For sums that travel while training goes on. Each leg waits for the leg before it, so all workers must call
        this alike, at times that are one leg apart. ``finish`` begins the remaining legs.
        """
        self.launch()
        if not self._departed:
            self._departed = True
            for bucket in self._buckets:
                bucket.depart()
        while self._legs < legs:
            for bucket in self._buckets:
                if bucket.combined <= self._legs < bucket.rounds:
                    bucket.combine()
            self._legs += 1

    def finish(self) -> list[torch.Tensor]:
        """Return the sums over all workers, on every worker. The views live until the next step.

        Raises:
            GroupBroken: If the group ends first; see ``adopt``.
        """
        started = time.perf_counter()
        self.advance(self.legs)
        sums: dict[int, torch.Tensor] = {}
        for bucket in self._buckets:
            bucket.wait()
            sums |= bucket.give()
        self.wait_s = time.perf_counter() - started
        return self._completed(sums)

    def last_result(self) -> list[torch.Tensor]:
        """The sums of the newest completed step, flat and on the wire's device, whatever the number of workers.

        They live until the next step completes. The reducer must ``hold`` and have reduced among several workers.
        """
        if self.group.size == 1:
            raise RuntimeError("a lone worker has no result for others")
        return [bucket.last_result() for bucket in self._buckets]

    def result_room(self) -> list[torch.Tensor]:
        """Memory for another worker's ``last_result``."""
        return [torch.empty_like(bucket.last_result()) for bucket in self._buckets]

    def adopt(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Finish the step with another worker's ``last_result``, as if its reduction had succeeded here."""
        self.drain()
        for bucket, result in zip(self._buckets, results, strict=True):
            bucket.adopt(result)
        return self._completed({i: view for bucket in self._buckets for i, view in bucket.give().items()})

    def _completed(self, sums: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        for bucket in self._buckets:
            bucket.complete()
        return [sums[i] for i in range(len(sums))]

    def drain(self) -> None:
        """Make sure that no operation of a broken step changes any buffer any more."""
        settled = [bucket.settle() for bucket in self._buckets]
        if not (self.group.drain() and all(settled)) and self._renewed is not self.group:
            self._renewed = self.group
            for bucket in self._buckets:
                bucket.renew()

    def regroup(self, group: Group) -> None:
        """Reduce on ``group`` from the next step on."""
        self.drain()
        self.group = group
        for bucket in self._buckets:
            bucket.regroup(group)


def plan(like: Sequence[torch.Tensor], bucket_bytes: int | None = None) -> list[list[int]]:
    """Divide tensors into buckets: runs of equal dtype and device; the first is small, so that sending starts early.

    Args:
        like: The tensors.
        bucket_bytes: The size of a full bucket; None: ``BUCKET_BYTES``.

    Returns:
        The places in ``like`` of each bucket's members.
    """
    full = BUCKET_BYTES if bucket_bytes is None else bucket_bytes
    buckets: list[list[int]] = []
    room = 0
    for i, tensor in enumerate(like):
        first = like[buckets[-1][0]] if buckets else None
        if first is None or room <= 0 or (first.dtype, first.device) != (tensor.dtype, tensor.device):
            room = full if buckets else min(full, FIRST_BUCKET_BYTES)
            buckets.append([])
        buckets[-1].append(i)
        room -= tensor.numel() * tensor.element_size()
    return buckets


# --- sums in any order ------------------------------------------------------------------------------------------------


class FlatBucket(Bucket):
    """One all-reduce of this worker's values, or one sum along the routes of a topology."""

    def __init__(self, members: list[int], like: Sequence[torch.Tensor], group: Group, *, hold: bool) -> None:
        super().__init__(members, like, group, hold=hold)
        # Tensors on another device than the wire's are first gathered on their own device.
        self._gathered = self._room(self._device) if self._staged else None
        self._views: dict[int, torch.Tensor] = {}
        self._work: Work | Relay | None = None
        self._relay = self._relay_of(group)

    def begin(self) -> None:
        self._missing = set(self.members)
        self.launched = False
        self._views = self._cut(self._sets[self._turn] if self._gathered is None else self._gathered)

    def regroup(self, group: Group) -> None:
        self._group = group
        self._relay = self._relay_of(group)

    def _relay_of(self, group: Group) -> Relay | None:
        routed = group.size > 1 and bool(group.routes)
        return Relay(group, self._sets[0][: self._numel], self.members[0]) if routed else None

    def settle(self) -> bool:
        return self._relay is None or self._relay.settle()

    def put(self, index: int, value: torch.Tensor | None, *, owned: bool = False) -> bool:
        view = self._views[index]
        self._missing.remove(index)
        if value is None:
            view.zero_()
        else:
            view.copy_(value)
        return not self._missing

    @property
    def slot_values(self) -> torch.Tensor:
        return (self._sets[self._turn] if self._gathered is None else self._gathered)[: self._numel]

    def end_slot(self, slot: int) -> None:
        assert not self._missing

    def launch(self) -> None:
        self.launched = True
        data = self._sets[self._turn][: self._numel]
        if self._gathered is not None:
            data.copy_(self._gathered[: self._numel])
        if self._relay is None:
            self._work = self._group.all_reduce(data)
        else:
            self._relay.start([data], data)
            self._work = self._relay

    def combine(self) -> None:
        """Do nothing: an all-reduce has one leg."""

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()


class FlatReducer(Reducer[FlatBucket]):
    """Sums the values of each worker once a step, in the backend's order. See ``Reducer`` and ``Bucket``."""

    def __init__(
        self,
        like: Sequence[torch.Tensor],
        group: Group,
        gradients: int = 0,
        *,
        hold: bool = False,
        bucket_bytes: int | None = None,
    ) -> None:
        buckets = [FlatBucket(members, like, group, hold=hold) for members in plan(like, bucket_bytes)]
        super().__init__(buckets, group, gradients)


# --- norms of gradients -----------------------------------------------------------------------------------------------


class BucketNorms:
    """Squared norms of a bucket's gradients, its first ``numel`` values: of one slot's, and of the sums.

    In a large bucket the norm reads every fourth block and multiplies by four. ``turn`` selects the blocks, so four
    readings with different turns read each block once. All norms of one reading are of the same blocks.

    Args:
        numel: How many values of the bucket are gradients.
        weights: Factors on the gradients, for the second norm of each pair.
        turn: Selects the blocks.
    """

    def __init__(self, numel: int, weights: torch.Tensor | None, turn: int) -> None:
        self._numel = numel
        self._weights = weights
        self.turn = turn
        self._slot: Pair | None = None
        self.sums: Pair = (0.0, 0.0)

    def of_slot(self, bucket: HasSlot) -> Pair:
        """The norms of one slot's gradients: computed once ``bucket`` has them all, then kept until ``end_slot``."""
        if self._slot is None:
            self._slot = self._squares(bucket.slot_values)
        return self._slot

    def end_slot(self) -> None:
        """Forget the norms of this slot."""
        self._slot = None

    def of_sums(self, values: torch.Tensor) -> None:
        """Compute the norms of the sums."""
        self.sums = self._squares(values)

    def _squares(self, values: torch.Tensor) -> Pair:
        values = values[: self._numel]
        if values.dtype not in (torch.float32, torch.float64):
            values = values.float()
        plain = self._sampled(values)
        if self._weights is None:
            return self._square(plain), 0.0
        weights = self._sampled(self._weights)
        return self._square(plain), self._square(list(torch._foreach_mul(plain, weights)))

    def _sampled(self, values: torch.Tensor) -> list[torch.Tensor]:
        if self._numel < TURNS * BLOCK:
            return [values]
        return list(values.split(BLOCK)[self.turn % TURNS :: TURNS])

    def _square(self, blocks: list[torch.Tensor]) -> Scalar:
        total: Scalar = 0.0
        if blocks[0].device.type == "cpu":
            for block in blocks:
                total += scalar(torch.dot(block, block))
        else:  # a call to a GPU takes longer than the norm of one block
            total = _square_together(blocks)
        return total if self._numel < TURNS * BLOCK else TURNS * total


class HasSlot(Protocol):
    """An object that has the current slot's values, such as a bucket."""

    @property
    def slot_values(self) -> torch.Tensor:
        """The current slot's values, flat."""
        ...


def scalar(value: torch.Tensor) -> Scalar:
    """``value`` as a number if that needs no wait for a device."""
    return float(value) if value.device.type == "cpu" else value.float()


def _total(pairs: list[Pair]) -> Pair:
    return sum(plain for plain, _ in pairs), sum(weighed for _, weighed in pairs)


def _square_together(blocks: list[torch.Tensor]) -> torch.Tensor:
    """The squared norm of all ``blocks``, in a few kernels, however many there are."""
    return torch.stack(torch._foreach_norm(blocks)).square_().sum()


# --- between a device and the host's memory ---------------------------------------------------------------------------


class DeviceCopy:
    """A copy of ``data`` to ``target``, which may be on another device; it is complete after ``wait``.

    A GPU first finishes the work that was queued before, such as the backward pass, and then copies.
    """

    def __init__(self, data: torch.Tensor, target: torch.Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        target.copy_(data, non_blocking=True)
        if data.device.type == "cuda" and target.is_pinned():
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(data.device))

    def wait(self) -> None:
        """Wait until the copy is complete."""
        if self._arrived is not None:
            self._arrived.synchronize()


def room(numel: int, dtype: torch.dtype, device: torch.device, comes_from: torch.device) -> torch.Tensor:
    """Zeros on ``device``; page-locked if a GPU copies to and from it: several times as fast, and asynchronous."""
    pinned = device.type == "cpu" and comes_from.type == "cuda"
    # Written at once: the system allocates memory at the first touch, which must not slow down a step.
    return torch.empty(numel, dtype=dtype, device=device, pin_memory=pinned).zero_()


def outbox(data: torch.Tensor, wire: torch.device) -> torch.Tensor:
    """New memory on ``wire`` for ``data``. Memory that an earlier step has sent is not reused: it may still be read."""
    return torch.empty(data.shape, dtype=data.dtype, device=wire, pin_memory=data.is_cuda and wire.type == "cpu")
