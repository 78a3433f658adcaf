"""Sums over slots whose gradients leave block by block: no worker has the gradients of a whole model.

All workers go through a model's blocks in one order. When a backward pass has finished a block, each part of the
block's gradients goes to the worker that reduces it. That worker adds it to what earlier passes brought, along the
canonical tree, to the same bits as ``comm.owned``. Slots are dealt in turn, so few partial sums wait for others.
The price: gradients travel once a slot, not once a worker. Buffers are reused, because new ones are slow to get.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, zip_longest
from math import fsum

import torch

from elastune.core.layout import BucketPlan, Segment, Split, joined
from elastune.core.slots import TreeSum
from elastune.parallel.comm.group import Group, Work
from elastune.parallel.comm.norms import unit_squares
from elastune.parallel.comm.owned import Owners, square

# [rooms] Memory for what travels, used again: a library gives large blocks back to the system, and asking anew is slow.


class BufferPool:
    """Flat memory of one device. As much is kept as was in use at one time; what was given back goes out again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Tensor] = []  # bytes, from small to large

    def take(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for ``size`` elements of undefined values."""
        wanted = size * dtype.itemsize
        fitting = next((i for i, each in enumerate(self._free) if len(each) >= wanted), None)
        if fitting is not None:
            found = self._free.pop(fitting)
        else:
            if self._free:  # a larger one in its place
                self._free.pop()
            found = torch.empty(wanted, dtype=torch.uint8, device=self._device)
        return found[:wanted].view(dtype)

    def give(self, room: torch.Tensor) -> None:
        """``room``, which ``take`` has given, is used no more."""
        whole = torch.empty(0, dtype=torch.uint8, device=self._device).set_(room.untyped_storage())
        self._free.append(whole)
        self._free.sort(key=len)


# [streamed] Sums over slots whose gradients leave block by block, in each pass: nobody has the gradients of a whole model.
#
# All workers go through a model's blocks in one order. When a backward pass is through with one, each part of its
# gradients goes to the worker that adds it up, which adds what this pass brings to what earlier ones have brought, along
# the canonical tree, to the bits that ``comm.owned`` comes to. Slots are dealt out in turn, so that those that end in one
# pass lie side by side: few partial sums wait for others. The price: gradients travel once a slot, not once a worker.

MESSAGE = 4 << 20
"""Elements that travel as one, at most."""
IN_FLIGHT_BYTES = 16 << 20
"""What a worker sends and receives at one time; a single message may be more."""
Parts = tuple[Sequence[Segment], ...]
"""By batch rank: the segments that it adds up."""


@dataclass
class _Message:
    """Some of a block's gradients, and the sum of those that this worker adds up.

    ``home``: where that sum belongs, while nothing is there and it is one piece of memory.
    """

    parts: Parts
    dtype: torch.dtype
    sum: TreeSum[torch.Tensor]
    home: torch.Tensor | None = None

    def size(self, reducer: int) -> int:
        """Elements that ``reducer`` adds up."""
        return sum(segment.size for segment in self.parts[reducer])

    def add(self, slots: Sequence[int], rows: torch.Tensor) -> None:
        """What ``slots`` bring, a row each; ``rows`` may change after this, and be changed by it."""
        for slot, row in zip(slots, rows.unbind(0), strict=True):
            self.sum.put(slot, row)
        memory = rows.untyped_storage().data_ptr()
        self.sum.change(lambda value: self._kept(value) if value.untyped_storage().data_ptr() == memory else value)

    def _kept(self, value: torch.Tensor) -> torch.Tensor:
        home, self.home = self.home, None
        return value.clone() if home is None else home.copy_(value)


@dataclass(frozen=True)
class _UnderWay:
    """What is to ``arrive`` in ``room``. ``sent`` is kept as long as it may be read."""

    work: Work
    room: torch.Tensor
    sent: torch.Tensor
    arrive: Callable[[torch.Tensor], None]


class StreamedReducer:
    """Sums gradients over the batch group. ``blocks``: the leaves whose gradients leave together.

    A step: ``begin``; for each pass ``begin_pass``, ``put`` of every leaf where this worker ends a slot in it, and
    ``leave`` of every block; then ``launch``, ``combine``, ``wait``. Where one of them raises ``GroupBroken`` there
    must be a ``drain`` before the next ``begin`` or ``regroup``.
    """

    def __init__(self, blocks: Sequence[Sequence[int]]) -> None:
        self._blocks = blocks
        self.group, self._device = Group(), torch.device("cpu")
        self.measures = False
        self._ending: Sequence[int] = ()
        self._gradients: dict[int, torch.Tensor | None] = {}
        self._squares: dict[int, float] = {}
        self._under_way: deque[_UnderWay] = deque()
        self._renew()

    def regroup(
        self,
        plans: Sequence[BucketPlan],
        split: Split,
        device: torch.device,
        group: Group,
        num_slots: int,
        owners: Owners,
    ) -> None:
        """Sum on ``group`` from the next step on, over ``num_slots`` slots; ``plans`` say who adds up what."""
        self.drain()
        self.group, self._plans, self._split = group, plans, split
        self._device, self._num_slots = device, num_slots
        rank = group.rank
        self._held_of = [reducer for reducer in range(group.size) if rank in owners[reducer]]
        self._others = [owner for owner in owners[rank] if owner != rank]
        self._keeps = all(
            each == (reducer,) for reducer, each in enumerate(owners)
        )  # nobody holds what another adds up
        self._held: dict[int, list[Segment]] = {}
        for reducers in (
            [rank],
            [reducer for reducer in self._held_of if reducer != rank],
        ):  # updated one after the other
            for segment in joined([s for plan in plans for reducer in reducers for s in plan.parts[reducer]]):
                self._held.setdefault(segment.param_block, []).append(segment)
        self._adds_on = device if group.size == 1 else group.wire
        self._parts = [list(_parts(frozenset(block), plans, MESSAGE // group.size)) for block in self._blocks]
        self._sums: dict[Segment, torch.Tensor] = {}
        self._renew()
        self.begin()

    def _renew(self) -> None:
        """A library may still use the memory of what was under way: take other memory."""
        self._under_way.clear()
        self._rooms, self._wire_rooms = BufferPool(self._device), BufferPool(self.group.wire)

    def begin(self) -> None:
        """A step begins: forget the last one."""
        self._messages = [[self._message(parts) for parts in of_block] for of_block in self._parts]
        self._gradients = {}

    def _message(self, parts: Parts) -> _Message:
        param_block = next(segment.param_block for part in parts for segment in part)
        dtype: torch.dtype = getattr(torch, self._split.param_blocks[param_block].dtype)
        own = parts[self.group.rank]
        home = self._view(own[0], dtype) if len(own) == 1 and self._adds_on == self._device else None
        return _Message(parts, dtype, TreeSum(self._num_slots, torch.Tensor.add_), home)

    # -- a pass -------------------------------------------------------------------------------------------------------

    def begin_pass(self, ending: Sequence[int]) -> None:
        """A backward pass comes, in which these slots end, by batch rank; -1: none does there."""
        self._ending = ending[: self.group.size]

    def begin_slot(self, slot: int, *, last: bool) -> None:
        """What is ``put`` from here on is of another slot. Which, and that it is the last, the others know."""
        self._squares = {}

    def put(self, param_block: int, gradient: torch.Tensor | None) -> None:
        """The gradient of ``param_block`` for the slot that ends here in this pass; it is kept until its block leaves."""
        if self.measures:
            self._squares[param_block] = 0.0 if gradient is None else square(gradient)
        self._gradients[param_block] = gradient

    def slot_square(self) -> float:
        """The squared norm of the gradients that were ``put`` in this pass, where ``measures`` is true."""
        return fsum(self._squares.values())

    def leave(self, block: int) -> None:
        """This pass is through with ``block``: its gradients leave. All workers call this in one order, 0 last."""
        flat = {}
        for param_block in self._blocks[block]:
            gradient = self._gradients.pop(param_block, None)
            if gradient is not None:
                flat[param_block] = gradient.reshape(-1)
        if any(slot >= 0 for slot in self._ending):
            for message in self._messages[block]:
                self._send(message, flat)
        if block == 0:
            self._settle(0)

    def _send(self, message: _Message, flat: Mapping[int, torch.Tensor]) -> None:
        group, ending = self.group, self._ending
        ends = ending[group.rank] >= 0
        segments = [segment for part in message.parts for segment in part] if ends else []
        mine = _one_piece(segments, flat)
        room = None
        if mine is None:
            mine = room = self._rooms.take(sum(segment.size for segment in segments), message.dtype)
            self._collect(segments, flat, room)
        slots, size = [slot for slot in ending if slot >= 0], message.size(group.rank)

        def arrive(received: torch.Tensor) -> None:
            message.add(slots, received.view(len(slots), size))
            if room is not None:
                self._rooms.give(room)

        if group.size == 1:
            arrive(mine)
            return
        sizes = [message.size(reducer) if ends else 0 for reducer in range(group.size)]
        self._start(mine, sizes, [size if slot >= 0 else 0 for slot in ending], arrive)

    @staticmethod
    def _collect(segments: Sequence[Segment], flat: Mapping[int, torch.Tensor], room: torch.Tensor) -> None:
        """The gradients of ``segments`` into ``room``, one behind the other."""
        for segment, place in zip(segments, room.split([segment.size for segment in segments]), strict=True):
            if segment.param_block in flat:
                place.copy_(flat[segment.param_block][segment.start : segment.stop])
            else:
                place.zero_()

    # -- the end of a step --------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """This worker has no more to put."""
        self._settle(0)

    def combine(self) -> None:
        """What this worker adds up is complete; it starts for its other holders."""
        rank = self.group.rank
        for message in (message for of_block in self._messages for message in of_block):
            total = message.sum.total(
                partial(torch.zeros, message.size(rank), dtype=message.dtype, device=self._adds_on)
            )
            self._write(message.parts[rank], total)
            if not self._keeps:
                self._copy(message, total)

    def _copy(self, message: _Message, total: torch.Tensor) -> None:
        workers, rank = range(self.group.size), self.group.rank
        sizes = [len(total) if worker in self._others else 0 for worker in workers]
        held = [reducer for reducer in self._held_of if reducer != rank]
        out_sizes = [message.size(reducer) if reducer in held else 0 for reducer in workers]

        def arrive(room: torch.Tensor) -> None:
            self._write([segment for reducer in held for segment in message.parts[reducer]], room)

        copies = total if len(self._others) == 1 else total.repeat(len(self._others))
        self._start(copies, sizes, out_sizes, arrive)

    def _write(self, segments: Sequence[Segment], values: torch.Tensor) -> None:
        """Sums that this worker holds are here."""
        for segment, part in zip(segments, values.split([segment.size for segment in segments]), strict=True):
            place = self._view(segment, values.dtype)
            if place.data_ptr() != part.data_ptr():
                place.copy_(part)

    def _view(self, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
        """Where the sums of ``segment`` lie."""
        place = next(s for s in self._held[segment.param_block] if s.start <= segment.start < s.stop)
        if place not in self._sums:
            self._sums[place] = torch.empty(place.size, dtype=dtype, device=self._device)
        return self._sums[place][segment.start - place.start : segment.stop - place.start]

    def squares(self) -> torch.Tensor:
        """The squared norm of each unit that this worker adds up, in order of the plans; float64, on the CPU."""
        rank, param_blocks = self.group.rank, self._split.param_blocks
        own = [segment for plan in self._plans for segment in plan.parts[rank]]
        return unit_squares([self._view(s, getattr(torch, param_blocks[s.param_block].dtype)) for s in own])

    def wait(self) -> None:
        """Until everything that this worker holds is here."""
        self._settle(0)

    @property
    def held(self) -> list[torch.Tensor]:
        """All sums that this worker holds."""
        return list(self._sums.values())

    def sums(self) -> list[tuple[Segment, torch.Tensor]]:
        """The same: segments of leaves, neighbours joined, each with its sums."""
        return list(self._sums.items())

    # -- on the wire --------------------------------------------------------------------------------------------------

    def _start(
        self,
        data: torch.Tensor,
        sizes: Sequence[int],
        out_sizes: Sequence[int],
        arrive: Callable[[torch.Tensor], None],
    ) -> None:
        group = self.group
        sent = data.to(group.wire)
        size = sum(out_sizes)
        self._settle(max(0, IN_FLIGHT_BYTES - sent.nbytes - size * data.itemsize))
        room = self._wire_rooms.take(size, data.dtype)
        self._under_way.append(_UnderWay(group.all_to_all(room, sent, out_sizes, sizes), room, sent, arrive))

    def _settle(self, most: int) -> None:
        """Wait until no more than ``most`` bytes are under way."""
        while sum(each.room.nbytes + each.sent.nbytes for each in self._under_way) > most or (
            most == 0 and self._under_way
        ):
            first = self._under_way.popleft()
            first.work.wait()
            first.arrive(first.room)
            self._wire_rooms.give(first.room)

    def drain(self) -> None:
        """See that nothing of a step that broke changes any memory any more."""
        self.group.drain()
        self._renew()
        self._gradients = {}


def _one_piece(segments: Sequence[Segment], flat: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    """The gradient of ``segments`` where they adjoin in one leaf: its own memory, which nobody else uses any more."""
    adjoin = all(a.param_block == b.param_block and a.stop == b.start for a, b in pairwise(segments))
    if not segments or not adjoin or segments[0].param_block not in flat:
        return None
    return flat[segments[0].param_block][segments[0].start : segments[-1].stop]


def _parts(param_blocks: frozenset[int], plans: Sequence[BucketPlan], most: int) -> Iterator[Parts]:
    """What ``plans`` have of ``param_blocks``, in messages of at most ``most`` elements for each worker."""
    for plan in plans:
        own = [
            list(_runs([segment for segment in part if segment.param_block in param_blocks], most))
            for part in plan.parts
        ]
        yield from zip_longest(*own, fillvalue=())


def _runs(segments: Sequence[Segment], most: int) -> Iterator[list[Segment]]:
    """``segments`` in runs of ``most`` elements; the last one may have fewer."""
    run: list[Segment] = []
    room = most
    for segment in segments:
        start = segment.start
        while start < segment.stop:
            stop = min(segment.stop, start + room)
            run.append(Segment(segment.param_block, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield run
                run, room = [], most
    if run:
        yield run
