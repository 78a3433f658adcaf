"""Sums over slots whose gradients leave block by block: no worker has the gradients of a whole model.

All workers go through a model's blocks in one order. When a backward pass has finished a block, each part of the
block's gradients goes to the worker that reduces it. That worker adds it to the sums of earlier passes, along the
canonical tree, to the same bits as ``parallel.comm.owned``. Slots are dealt in turn, so the slots that end in one pass
are neighbours, and few partial sums wait for others. The price: gradients travel once for each slot, and not once for
each worker. Buffers are reused, because a library returns large blocks to the system and new ones are slow to get.
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

MESSAGE = 4 << 20
"""Elements of one message, at most."""
IN_FLIGHT_BYTES = 16 << 20
"""Bytes that a worker sends and receives at one time; a single message may be larger."""
Parts = tuple[Sequence[Segment], ...]
"""By batch rank: the segments that it adds up."""


class StreamedReducer:
    """Sums gradients over the batch group, block by block. ``regroup`` comes first.

    ``blocks``: the parameter blocks whose gradients leave together.

    A step begins with ``begin``. Each pass has ``begin_pass``, ``put`` of every parameter block (if a slot of this
    worker ends in the pass), and ``leave`` of every block. The step ends with ``launch``, ``combine`` and ``wait``. If
    one of these calls raises ``GroupBroken``, call ``drain`` before the next ``begin`` or ``regroup``.
    ``OwnedReducer`` has the same calls.
    """

    def __init__(self, blocks: Sequence[Sequence[int]]) -> None:
        self._blocks = blocks
        self.group, self._device = Group(), torch.device("cpu")
        self.measures = False
        self._ending: Sequence[int] = ()
        self._gradients: dict[int, torch.Tensor | None] = {}
        self._squares: dict[int, float] = {}
        self._pending: deque[_Pending] = deque()
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
        """Sum on ``group`` from the next step on, over ``num_slots`` slots; ``plans`` give each part its reducer."""
        self.drain()
        self.group, self._plans, self._split = group, plans, split
        self._device, self._num_slots = device, num_slots
        rank = group.rank
        self._held_of = [reducer for reducer in range(group.size) if rank in owners[reducer]]
        self._others = [owner for owner in owners[rank] if owner != rank]
        # True: no worker owns a sum that another worker adds up.
        self._keeps = all(part_owners == (reducer,) for reducer, part_owners in enumerate(owners))
        self._held: dict[int, list[Segment]] = {}
        # The own part and the copied parts have separate memory, because they are updated one after the other.
        for reducers in ([rank], [reducer for reducer in self._held_of if reducer != rank]):
            for segment in joined([s for plan in plans for reducer in reducers for s in plan.parts[reducer]]):
                self._held.setdefault(segment.param_block, []).append(segment)
        self._adds_on = device if group.size == 1 else group.wire
        self._parts = [list(_parts(frozenset(block), plans, MESSAGE // group.size)) for block in self._blocks]
        self._sums: dict[Segment, torch.Tensor] = {}
        self._renew()
        self.begin()

    def _renew(self) -> None:
        """Take other memory: a library may still use the memory of unfinished exchanges."""
        self._pending.clear()
        self._buffers, self._wire_buffers = BufferPool(self._device), BufferPool(self.group.wire)

    def begin(self) -> None:
        """A step begins: forget the last one."""
        self._messages = [[self._message(parts) for parts in of_block] for of_block in self._parts]
        self._gradients = {}

    def _message(self, parts: Parts) -> _Message:
        param_block = next(segment.param_block for part in parts for segment in part)
        dtype: torch.dtype = getattr(torch, self._split.param_blocks[param_block].dtype)
        segments = parts[self.group.rank]
        home = self._view(segments[0], dtype) if len(segments) == 1 and self._adds_on == self._device else None
        return _Message(parts, dtype, TreeSum(self._num_slots, torch.Tensor.add_), home)

    # -- a pass -------------------------------------------------------------------------------------------------------

    def begin_pass(self, ending: Sequence[int]) -> None:
        """A backward pass begins. ``ending``: by batch rank, the slot that ends in it; -1: none."""
        self._ending = ending[: self.group.size]

    def begin_slot(self, slot: int, *, last: bool) -> None:
        """The next ``put`` calls belong to another slot; ``begin_pass`` has already given its number."""
        self._squares = {}

    def put(self, param_block: int, gradient: torch.Tensor | None) -> None:
        """Keep the gradient of ``param_block``, for the slot that ends in this pass, until its block leaves."""
        if self.measures:
            self._squares[param_block] = 0.0 if gradient is None else square(gradient)
        self._gradients[param_block] = gradient

    def slot_square(self) -> float:
        """The squared norm of the gradients that were ``put`` in this pass, where ``measures`` is true."""
        return fsum(self._squares.values())

    def leave(self, block: int) -> None:
        """Send the gradients of ``block``, which this pass has finished. All workers call this in one order, 0 last."""
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
        sent = _one_piece(segments, flat)
        room = None
        if sent is None:
            sent = room = self._buffers.take(sum(segment.size for segment in segments), message.dtype)
            self._collect(segments, flat, room)
        slots, size = [slot for slot in ending if slot >= 0], message.size(group.rank)

        def arrive(received: torch.Tensor) -> None:
            message.add(slots, received.view(len(slots), size))
            if room is not None:
                self._buffers.give(room)

        if group.size == 1:
            arrive(sent)
            return
        sizes = [message.size(reducer) if ends else 0 for reducer in range(group.size)]
        self._start(sent, sizes, [size if slot >= 0 else 0 for slot in ending], arrive)

    @staticmethod
    def _collect(segments: Sequence[Segment], flat: Mapping[int, torch.Tensor], room: torch.Tensor) -> None:
        """Copy the gradients of ``segments`` into ``room``, one behind the other."""
        for segment, place in zip(segments, room.split([segment.size for segment in segments]), strict=True):
            if segment.param_block in flat:
                place.copy_(flat[segment.param_block][segment.start : segment.stop])
            else:
                place.zero_()

    # -- the end of a step --------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Wait for the gradients in flight, after the last ``put``."""
        self._settle(0)

    def combine(self) -> None:
        """Complete this worker's sums, and start to send them to their other owners."""
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
        """Write ``values``, sums that this worker owns, into their memory."""
        for segment, part in zip(segments, values.split([segment.size for segment in segments]), strict=True):
            place = self._view(segment, values.dtype)
            if place.data_ptr() != part.data_ptr():
                place.copy_(part)

    def _view(self, segment: Segment, dtype: torch.dtype) -> torch.Tensor:
        """The memory of the sums of ``segment``."""
        place = next(s for s in self._held[segment.param_block] if s.start <= segment.start < s.stop)
        if place not in self._sums:
            self._sums[place] = torch.empty(place.size, dtype=dtype, device=self._device)
        return self._sums[place][segment.start - place.start : segment.stop - place.start]

    def squares(self) -> torch.Tensor:
        """The squared norm of each unit that this worker adds up, in order of the plans; float64, on the CPU."""
        rank, param_blocks = self.group.rank, self._split.param_blocks
        segments = [segment for plan in self._plans for segment in plan.parts[rank]]
        return unit_squares([self._view(s, getattr(torch, param_blocks[s.param_block].dtype)) for s in segments])

    def wait(self) -> None:
        """Wait until all sums that this worker owns have arrived."""
        self._settle(0)

    @property
    def held(self) -> list[torch.Tensor]:
        """All sums that this worker owns."""
        return list(self._sums.values())

    def sums(self) -> list[tuple[Segment, torch.Tensor]]:
        """The same sums by segment of a parameter block; adjoining segments are joined."""
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
        room = self._wire_buffers.take(size, data.dtype)
        self._pending.append(_Pending(group.all_to_all(room, sent, out_sizes, sizes), room, sent, arrive))

    def _settle(self, most: int) -> None:
        """Wait until no more than ``most`` bytes are in flight."""
        while sum(exchange.room.nbytes + exchange.sent.nbytes for exchange in self._pending) > most or (
            most == 0 and self._pending
        ):
            first = self._pending.popleft()
            first.work.wait()
            first.arrive(first.room)
            self._wire_buffers.give(first.room)

    def drain(self) -> None:
        """Make sure that no operation of a broken step changes any memory any more."""
        self.group.drain()
        self._renew()
        self._gradients = {}


@dataclass
class _Message:
    """Some of a block's gradients, and the sum of the part that this worker adds up.

    ``home``: the memory in which that sum ends, if it is one piece; None after the first sum was written there.
    """

    parts: Parts
    dtype: torch.dtype
    sum: TreeSum[torch.Tensor]
    home: torch.Tensor | None = None

    def size(self, reducer: int) -> int:
        """Elements that ``reducer`` adds up."""
        return sum(segment.size for segment in self.parts[reducer])

    def add(self, slots: Sequence[int], rows: torch.Tensor) -> None:
        """Add the values of ``slots``, one row for each; this may change ``rows``, and the caller may reuse them."""
        for slot, row in zip(slots, rows.unbind(0), strict=True):
            self.sum.put(slot, row)
        memory = rows.untyped_storage().data_ptr()
        self.sum.change(lambda value: self._kept(value) if value.untyped_storage().data_ptr() == memory else value)

    def _kept(self, value: torch.Tensor) -> torch.Tensor:
        home, self.home = self.home, None
        return value.clone() if home is None else home.copy_(value)


@dataclass(frozen=True)
class _Pending:
    """One exchange: ``arrive`` takes the values that it receives in ``room``. ``sent`` lives as long as ``work``."""

    work: Work
    room: torch.Tensor
    sent: torch.Tensor
    arrive: Callable[[torch.Tensor], None]


class BufferPool:
    """Flat memory of one device, used again and again. It keeps as much as was in use at one time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Tensor] = []  # bytes, from small to large

    def take(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of ``size`` undefined elements; return it with ``give``."""
        needed = size * dtype.itemsize
        fitting = next((i for i, buffer in enumerate(self._free) if len(buffer) >= needed), None)
        if fitting is not None:
            buffer = self._free.pop(fitting)
        else:
            if self._free:  # a larger buffer takes the place of the largest one
                self._free.pop()
            buffer = torch.empty(needed, dtype=torch.uint8, device=self._device)
        return buffer[:needed].view(dtype)

    def give(self, room: torch.Tensor) -> None:
        """Take back ``room``, a result of ``take`` that is not used any more."""
        whole = torch.empty(0, dtype=torch.uint8, device=self._device).set_(room.untyped_storage())
        self._free.append(whole)
        self._free.sort(key=len)


def _one_piece(segments: Sequence[Segment], flat: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    """The gradient of ``segments``, in its own memory, if they adjoin in one parameter block; else None."""
    adjoin = all(a.param_block == b.param_block and a.stop == b.start for a, b in pairwise(segments))
    if not segments or not adjoin or segments[0].param_block not in flat:
        return None
    return flat[segments[0].param_block][segments[0].start : segments[-1].stop]


def _parts(param_blocks: frozenset[int], plans: Sequence[BucketPlan], most: int) -> Iterator[Parts]:
    """The parts of ``plans`` in ``param_blocks``, in messages of at most ``most`` elements for each worker."""
    for plan in plans:
        runs = [
            list(_runs([segment for segment in part if segment.param_block in param_blocks], most))
            for part in plan.parts
        ]
        yield from zip_longest(*runs, fillvalue=())


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
