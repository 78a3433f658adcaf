"""State and results from one worker to another, and what a worker's training provides for that (``StateOwner``)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from elastune.core.layout import Unrecoverable
from elastune.elastic.wire.view import View
from elastune.elastic.worker.reconcile import OpenRound
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.process_groups import Comms

LOG = logging.getLogger(__name__)

Packed = tuple[bytes, list[torch.Tensor]]
"""A state: a description (JSON), and its tensors on the CPU in the order that the description names."""

SMALL_BYTES = 1 << 20  # smaller tensors of equal dtype travel together
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16),
    *(torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
)


class StateOwner(Protocol):
    """One worker's training, as its group uses it: it provides results for other workers, and the state for joiners."""

    @property
    def step(self) -> int:
        """Completed steps, with a step whose sum is here and not applied yet."""
        ...

    @property
    def unrepeatable(self) -> bool:
        """Whether since its last step it has done something that it cannot repeat without the same workers."""
        ...

    @property
    def reducing(self) -> bool:
        """Whether it waits for a step's reduction; if not, the newest operation is a gather."""
        ...

    @property
    def round_steps(self) -> int:
        """The number of steps in the newest round that this worker has completed."""
        ...

    @property
    def open_round(self) -> OpenRound:
        """The round that it has begun and not completed, if that round can end without some of its learners."""
        ...

    @property
    def snapshot_step(self) -> int:
        """The step of the snapshot in memory; -1 if it has none."""
        ...

    def regroup(self, comms: Comms, over: Group | None) -> None:
        """Reduce on ``comms`` from now on, and move the pieces of the state to the workers that are to hold them.

        ``over`` is the group of these workers and of those that leave; None if none leaves. Raises ``Unrecoverable`` on
        every worker if a piece of the state is lost.
        """
        ...

    def climb(self, comms: Comms) -> None:
        """Reduce on ``comms``, the same workers, from the next step on, by the levels that their group has now."""
        ...

    def hand_over(self, group: Group, view: View) -> None:
        """Send the pieces of a worker that leaves to the members of ``view``, who are the first ranks of ``group``."""
        ...

    def place_snapshot(self, comms: Comms) -> None:
        """Move the snapshots' pieces to the workers of ``comms`` that are to hold them.

        Raises ``Unrecoverable`` as ``regroup``.
        """
        ...

    def record_lost_state(self, error: Unrecoverable) -> None:
        """Record that state was lost."""
        ...

    def last_result(self) -> list[torch.Tensor]:
        """The complete result of the newest completed step."""
        ...

    def result_room(self) -> list[torch.Tensor]:
        """Tensors to receive such a result in."""
        ...

    def adopt_result(self, result: list[torch.Tensor]) -> None:
        """Complete the open step with the result of another worker."""
        ...

    def pack(self) -> Packed:
        """The state at this step boundary."""
        ...

    def unpack(self, packed: Packed) -> None:
        """Take over a state."""
        ...

    def snapshot(self) -> Packed:
        """The snapshot in memory."""
        ...

    def keep_snapshot(self, packed: Packed) -> None:
        """Hold this snapshot in place of its own."""
        ...


# --- sending state over a group ---


def send_floats(group: Group, to: int, values: Sequence[float]) -> None:
    """Send numbers to rank ``to``; ``receive_floats`` takes them."""
    group.send(torch.tensor([len(values)], dtype=torch.int64), to)
    if values:
        group.send(torch.tensor(values, dtype=torch.float64), to)


def receive_floats(group: Group, source: int) -> list[float]:
    """Receive the numbers that ``source`` sends by ``send_floats``."""
    count = torch.zeros(1, dtype=torch.int64)
    group.receive(count, source)
    values = torch.zeros(int(count), dtype=torch.float64)
    if len(values):
        group.receive(values, source)
    return [float(value) for value in values.tolist()]


def send_packed(group: Group, to: int, packed: Packed) -> None:
    """Send a state to rank ``to``. Small tensors of equal dtype travel together; large ones are not copied."""
    header, tensors = packed
    text = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    shapes = [[DTYPES.index(t.dtype), t.dim(), *t.shape] for t in tensors]
    send_floats(group, to, [len(text), *(float(x) for shape in shapes for x in shape)])
    group.send(text, to)
    for batch in _batches([(t.dtype, t.numel() * t.element_size()) for t in tensors]):
        parts = [tensors[i].detach().cpu().contiguous().reshape(-1) for i in batch]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        if flat.numel():
            group.send(flat.view(torch.uint8), to)
    LOG.info("sent a state of %d bytes to rank %d", sum(t.numel() * t.element_size() for t in tensors), to)


def receive_packed(group: Group, source: int) -> Packed:
    """Receive the state that ``source`` sends by ``send_packed``."""
    size, *numbers = (int(x) for x in receive_floats(group, source))
    text = torch.zeros(size, dtype=torch.uint8)
    group.receive(text, source)
    kinds: list[tuple[torch.dtype, list[int]]] = []
    at = 0
    while at < len(numbers):
        dims = numbers[at + 1]
        kinds.append((DTYPES[numbers[at]], numbers[at + 2 : at + 2 + dims]))
        at += 2 + dims
    tensors: dict[int, torch.Tensor] = {}
    sizes = [(dtype, torch.Size(shape).numel() * dtype.itemsize) for dtype, shape in kinds]
    for batch in _batches(sizes):
        flat = torch.empty(sum(sizes[i][1] for i in batch), dtype=torch.uint8)
        if flat.numel():
            group.receive(flat, source)
        start = 0
        for i in batch:
            dtype, shape = kinds[i]
            piece = flat[start : start + sizes[i][1]]
            # A tensor of wider elements needs an aligned start: the pieces of a joint message are copied out.
            tensors[i] = (piece if len(batch) == 1 else piece.clone()).view(dtype).view(shape)
            start += sizes[i][1]
    LOG.info("received a state of %d bytes from rank %d", sum(size for _, size in sizes), source)
    return bytes(text.numpy()), [tensors[i] for i in range(len(kinds))]


def _batches(sizes: Sequence[tuple[torch.dtype, int]]) -> list[list[int]]:
    """The indices that travel in each message: a large tensor by itself, small ones of equal dtype together."""
    batches: list[list[int]] = []
    open_batch: dict[torch.dtype, tuple[list[int], int]] = {}
    for i, (dtype, size) in enumerate(sizes):
        batch, filled = open_batch.get(dtype, ([], 0))
        if size >= SMALL_BYTES:
            batches.append([i])
        elif batch and filled + size <= SMALL_BYTES:
            batch.append(i)
            open_batch[dtype] = (batch, filled + size)
        else:
            batch = [i]
            batches.append(batch)
            open_batch[dtype] = (batch, size)
    return batches
