"""Sums of many tensors over workers, in buckets that leave while the backward pass still runs.

``Bucket`` and ``Reducer`` are the contract of all such sums. ``FlatReducer`` is the plain one: one all-reduce a
bucket, in whatever order the backend adds. Tensors of a GPU cross the host's memory where workers meet over gloo.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch

from elastune.parallel.comm.group import Group, Work
from elastune.parallel.comm.relay import Relay

# [staging] A GPU's tensors on their way through the host's memory, where workers meet over gloo.


def room(numel: int, dtype: torch.dtype, device: torch.device, comes_from: torch.device) -> torch.Tensor:
    """Zeros on ``device``; page-locked where a GPU copies to and from it: several times as fast, and asynchronous."""
    pinned = device.type == "cpu" and comes_from.type == "cuda"
    # Written to at once: the system gives memory at the first touch, which is not to fall into a step.
    return torch.empty(numel, dtype=dtype, device=device, pin_memory=pinned).zero_()


class DeviceCopy:
    """``data`` on its way to ``target``, on another device where they differ. Until ``wait`` it may not be there yet.

    A GPU goes on with what it was asked before, such as the backward pass, and copies when it has come to that.
    """

    def __init__(self, data: torch.Tensor, target: torch.Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        target.copy_(data, non_blocking=True)
        if data.device.type == "cuda" and target.is_pinned():
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(data.device))

    def wait(self) -> None:
        """Until all of it is there."""
        if self._arrived is not None:
            self._arrived.synchronize()


def outbox(data: torch.Tensor, wire: torch.device) -> torch.Tensor:
    """Room on ``wire`` for ``data``. Never what an earlier step has sent: a library may still read that."""
    return torch.empty(data.shape, dtype=data.dtype, device=wire, pin_memory=data.is_cuda and wire.type == "cpu")


# [reducer] Sums of many tensors over workers, in buckets that leave while the backward pass still runs.

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 16 << 20
BLOCK = 1 << 16  # elements that norms look at in one go
TURNS = 4
Scalar = float | torch.Tensor
Pair = tuple[Scalar, Scalar]
SLACK = 1024  # elements: buffers have room for the padding that any sensible number of workers asks for


class Bucket(ABC):
    """Some of the summed tensors as one flat vector.

    ``hold``: the sums of a completed step stay as they are until the next one completes, whatever happens to what is
    given out and whatever a step that fails has received by then.
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
        self._given = torch.zeros(self._numel, dtype=self._dtype, device=self._device) if hold else None

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
        """What this step has received may still change: put other memory in its place."""
        self._sets[self._turn] = self._room(self._group.wire)

    @abstractmethod
    def put(self, index: int, value: torch.Tensor | None) -> bool:
        """Member ``index`` of the current slot (None: zero). True once the slot is complete here."""

    @property
    @abstractmethod
    def here(self) -> torch.Tensor:
        """The current slot's values, as far as they are in; flat."""

    @abstractmethod
    def end_slot(self, slot: int) -> None:
        """Every member of ``slot`` is in."""

    @abstractmethod
    def launch(self) -> None:
        """All of this worker is in: start to reduce, or to copy what is elsewhere to the wire's device."""

    def depart(self) -> None:  # noqa: B027 - most have nothing left to do
        """Start to reduce what ``launch`` has only begun to copy."""

    rounds: int = 1
    """How often ``combine`` has to be called."""
    combined: int = 0
    """How often it was in this step, counted where there are several rounds."""

    @property
    def climbs_early(self) -> bool:
        """Whether ``combine`` may be called once as soon as the next bucket has left: it waits for neighbours only."""
        return False

    @abstractmethod
    def combine(self) -> None:
        """Wait for what is under way and start what comes next, where a reduction goes in several legs."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the sums are in the set of this turn."""

    def settle(self) -> bool:
        """Give up what is under way beside the group's collectives. False where its memory must never be used again."""
        return True

    def give(self) -> dict[int, torch.Tensor]:
        """The sums by member, as views that live until the next step."""
        sums = self._sums()
        if self.norms is not None:
            self.norms.of_sums(sums)
        return self._cut(sums)

    def _sums(self) -> torch.Tensor:
        sums = self._sets[self._turn][: self._numel]
        if self._staged:  # what comes next on the device comes after this copy, the next step's own copies too
            return sums.to(self._device, non_blocking=True)
        return sums if self._given is None else self._given.copy_(sums)

    def complete(self) -> None:
        """What this turn's set holds is the newest result: the next step goes to the other."""
        self._turn = (self._turn + 1) % len(self._sets)

    def last_result(self) -> torch.Tensor:
        """The newest result."""
        return self._sets[self._turn - 1][: self._numel]

    def adopt(self, result: torch.Tensor) -> None:
        """``result`` is what this step's reduction would have given."""
        self._sets[self._turn][: self._numel].copy_(result)

    def numel_of(self, count: int) -> int:
        """How many values the first ``count`` members have."""
        return sum(self._sizes[:count])

    def _cut(self, flat: torch.Tensor) -> dict[int, torch.Tensor]:
        pieces = torch.split(flat[: self._numel], self._sizes)
        return {i: piece.view(shape) for i, piece, shape in zip(self.members, pieces, self._shapes, strict=True)}


def scalar(value: torch.Tensor) -> Scalar:
    """A number where it can be had without waiting for a device."""
    return float(value) if value.device.type == "cpu" else value.float()


def _total(pairs: list[Pair]) -> Pair:
    return sum(plain for plain, _ in pairs), sum(weighed for _, weighed in pairs)


def _square_together(blocks: list[torch.Tensor]) -> torch.Tensor:
    """The squared norm of all ``blocks``, in a few kernels, however many there are."""
    return torch.stack(torch._foreach_norm(blocks)).square_().sum()


class HasSlot(Protocol):
    """A bucket of any kind."""

    @property
    def here(self) -> torch.Tensor:
        """The current slot's values, flat."""
        ...


class BucketNorms:
    """Squared norms of a bucket's gradients, its first ``numel`` values: of one slot's, and of the sums.

    ``weights``: factors on the gradients; the second of each pair of norms is then that of their products. Of many
    values every fourth block is looked at, and stands for four; ``turn`` says which, so that four readings in turn look
    at each once. What is compared within one reading is of the same blocks.
    """

    def __init__(self, numel: int, weights: torch.Tensor | None, turn: int) -> None:
        self._numel = numel
        self._weights = weights
        self.turn = turn
        self._slot: Pair | None = None
        self.sums: Pair = (0.0, 0.0)

    def of_slot(self, bucket: HasSlot) -> Pair:
        """Of one slot's gradients: taken when they are all in ``bucket``, and told again while the slot lasts."""
        if self._slot is None:
            self._slot = self._squares(bucket.here)
        return self._slot

    def end_slot(self) -> None:
        """The next slot's gradients are others."""
        self._slot = None

    def of_sums(self, values: torch.Tensor) -> None:
        """The sums are in."""
        self.sums = self._squares(values)

    def _squares(self, values: torch.Tensor) -> Pair:
        values = values[: self._numel]
        if values.dtype not in (torch.float32, torch.float64):
            values = values.float()
        plain = self._looked_at(values)
        if self._weights is None:
            return self._square(plain), 0.0
        weights = self._looked_at(self._weights)
        return self._square(plain), self._square(list(torch._foreach_mul(plain, weights)))

    def _looked_at(self, values: torch.Tensor) -> list[torch.Tensor]:
        if self._numel < TURNS * BLOCK:
            return [values]
        return list(values.split(BLOCK)[self.turn % TURNS :: TURNS])

    def _square(self, blocks: list[torch.Tensor]) -> Scalar:
        total: Scalar = 0.0
        if blocks[0].device.type == "cpu":
            for block in blocks:
                total += scalar(torch.dot(block, block))
        else:  # a call to a GPU takes longer than a block
            total = _square_together(blocks)
        return total if self._numel < TURNS * BLOCK else TURNS * total


B = TypeVar("B", bound=Bucket)


class Reducer(Generic[B]):
    """Sums a list of tensors over workers.

    The first ``gradients`` of them are gradients, whose norms can be had beside.

    A step: ``begin``; for each slot of this worker ``begin_slot`` and ``put`` every tensor once; at last ``finish``.
    A step whose ``put`` or ``finish`` raised ``GroupBroken`` is completed by ``adopt``, or begun again by ``begin``.
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
        """Start a step. No collective of an earlier one may be under way (``drain``)."""
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
        """Whether norms are taken in the next step; ``weights`` and ``turn``: see ``BucketNorms``."""
        weighs = weights is not None
        if (on, weighs) == self._measures and not weighs:
            for bucket in self._buckets:
                if bucket.norms is not None:
                    bucket.norms.turn = turn
            return
        self._measures = on, weighs
        for bucket in self._buckets:
            own = [i for i in bucket.members if i < self._gradients]
            flat = None if weights is None or not own else torch.cat([weights[i].reshape(-1) for i in own])
            bucket.norms = BucketNorms(bucket.numel_of(len(own)), flat, turn) if on and own else None

    def slot_norms(self) -> Pair:
        """The squared norms of the gradients that were ``put`` for the current slot, and of these times weights."""
        return _total([bucket.norms.of_slot(bucket) for bucket in self._buckets if bucket.norms is not None])

    def norms(self) -> Pair:
        """The squared norms of the newest sums."""
        return _total([bucket.norms.sums for bucket in self._buckets if bucket.norms is not None])

    def put(self, index: int, value: torch.Tensor | None) -> None:
        """Tensor ``index`` of the current slot; it is copied. Starts the reduction of whatever became complete."""
        bucket = self._bucket_of[index]
        if bucket.put(index, value):
            if bucket.norms is not None:
                bucket.norms.of_slot(bucket)
            bucket.end_slot(self._slot)
            if self._last:
                self._launch_in_order(bucket)

    def _launch_in_order(self, ready: B) -> None:
        """Every worker must start its collectives in the same order, whatever order its gradients came in."""
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
        """This worker has no more to put."""
        for bucket in self._buckets:
            if not bucket.launched:
                bucket.launch()

    @property
    def legs(self) -> int:
        """How many legs of a step follow the first; see ``advance``. The same on all workers of the group."""
        return max((bucket.rounds for bucket in self._buckets), default=0)

    def advance(self, legs: int = 0) -> None:
        """See that all which this worker has put has left, and that ``legs`` of the legs that follow are begun.

        For sums that travel while training goes on: each leg waits for the one before it, so all workers have to call
        this alike, at places that lie as far apart as a leg takes. ``finish`` begins what is left.
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
        """The sums over all workers, on every worker. The views live until the next step."""
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

        They live until the next step completes, in a reducer that holds and has reduced among several workers.
        """
        if self.group.size == 1:
            raise RuntimeError("a lone worker has no result for others")
        return [bucket.last_result() for bucket in self._buckets]

    def result_room(self) -> list[torch.Tensor]:
        """Room for another worker's ``last_result``."""
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
        """See that nothing of a step that broke changes any buffer any more."""
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
    """Members of each bucket: runs of equal dtype and device, the first small so that sending starts early.

    ``bucket_bytes``: a bucket is full with so many; None: with ``BUCKET_BYTES``.
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


# [flat] Sums over workers in whatever order comes: one all-reduce a bucket, or by the routes of a topology.


class FlatBucket(Bucket):
    """One all-reduce of what this worker ``put``."""

    def __init__(self, members: list[int], like: Sequence[torch.Tensor], group: Group, *, hold: bool) -> None:
        super().__init__(members, like, group, hold=hold)
        # What lies on another device than the wire's is gathered there first.
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

    def put(self, index: int, value: torch.Tensor | None) -> bool:
        view = self._views[index]
        self._missing.remove(index)
        if value is None:
            view.zero_()
        else:
            view.copy_(value)
        return not self._missing

    @property
    def here(self) -> torch.Tensor:
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
        """An all-reduce goes all the way by itself."""

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()


class FlatReducer(Reducer[FlatBucket]):
    """Sums what each worker ``put``, once a step. See ``Reducer`` and ``Bucket``."""

    def __init__(
        self,
        like: Sequence[torch.Tensor],
        group: Group,
        gradients: int = 0,
        *,
        hold: bool = False,
        bucket_bytes: int | None = None,
    ) -> None:
        members = plan(like, bucket_bytes)
        super().__init__([FlatBucket(each, like, group, hold=hold) for each in members], group, gradients)
