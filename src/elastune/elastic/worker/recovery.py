"""How members of a new view go on: they compare how far all are, decide the same, and pass on their state.

A round's learners are distributed over the members of the view in which its first worker began it. Where members are
lost, the others go on with their own learners as long as a quorum is left. The view in which the round ends decides
who is in its mean, so the mean is the same everywhere.

``reconcile`` decides and is pure. ``send_packed`` and ``receive_packed`` pass state on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from elastune.core.layout import Unrecoverable
from elastune.core.slots import cut
from elastune.elastic.coordinator.machine import ProtocolViolation
from elastune.elastic.wire.view import View
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.process_groups import Comms

LOG = logging.getLogger(__name__)

# The decision: each member compares how far all are, and all come to the same plan.


@dataclass(frozen=True)
class OpenRound:
    """A round that a worker has begun and not completed; it can end once ``quorum`` of its ``learners`` are present.

    ``assignment_view`` is the view that distributes the learners; 0: no round is open that can end without some of
    them.
    """

    assignment_view: int = 0
    learners: int = 0
    quorum: int = 0


NO_ROUND = OpenRound()
OldRanks = Callable[[int], Sequence[int | None]]
"""Takes the number of an earlier view; returns the rank in it of each member of the new view, or None, by new rank."""


@dataclass(frozen=True)
class RecoveryPlan:
    """What every member has to do to go on. Workers are named by their ranks in the new view.

    Attributes:
        rewind_to: All members go back to the snapshot of this step; -1: none holds a snapshot, so all begin at the
            newest checkpoint or at the start; None: no member goes back.
        rewind_source: The rank that sends its snapshot to the ranks that lack it.
        rewind_lacking: The ranks that lack the snapshot.
        result_source: The rank that sends the newest operation's result to the ``lagging`` ranks.
        lagging: The ranks that lack that result.
        state_source: The rank that sends each joiner the state, in this order: a member, or a joiner that has it
            already.
        step: Completed steps after all that, and so the first step of the view; 0 if ``rewind_to`` is -1 (the caller
            finds the step of the checkpoint).
        rewinds: How often all members were rewound then.
        assignment_view: The view that distributes the learners of the open round that goes on; 0: none goes on.
    """

    rewind_to: int | None
    rewind_source: int | None
    rewind_lacking: tuple[int, ...]
    result_source: int | None
    lagging: tuple[int, ...]
    state_source: dict[int, int]
    step: int
    rewinds: int
    assignment_view: int = 0


def reconcile(
    rows: Sequence[MemberStatus],
    hosts: Sequence[str] = (),
    goes_on: Callable[[Sequence[OpenRound]], int] = lambda rounds: 0,
) -> RecoveryPlan:
    """Decide how the members of a new view go on. The decision is the same on every member.

    Args:
        rows: The status of each member, by rank.
        hosts: The host of each member, by rank; empty if all run on one host.
        goes_on: Decides about the open rounds of the furthest members; see the function ``goes_on``.

    Raises:
        ProtocolViolation: The statuses contradict each other: a worker has a bug.
    """
    owners = [rank for rank, row in enumerate(rows) if not row.joins]
    joiners = [rank for rank, row in enumerate(rows) if row.joins]
    if not owners:
        raise ProtocolViolation(f"nobody holds the state: {list(rows)}")
    newest = max(rows[rank].completed for rank in owners)
    furthest = [rank for rank in owners if rows[rank].completed == newest]
    lagging = tuple(rank for rank in owners if rows[rank].completed < newest)
    rewinds = {rows[rank].rewinds for rank in owners}
    # A member that lacks the newest operation has contributed to it, so its evaluations are in that result. Only what
    # the furthest members have evaluated since their last step can lack a lost worker's part. Once a member has
    # completed the last operation of all, no evaluation is still to be gathered.
    open_ended = not any(rows[rank].done for rank in owners)
    # A round that goes on is not repeated.
    assignment_view = goes_on([rows[rank].open for rank in furthest])
    redone = [
        rows[rank] for rank in furthest if not assignment_view or rows[rank].open.assignment_view != assignment_view
    ]
    spoilt = open_ended and any(rows[rank].lost for rank in owners) and any(row.unrepeatable for row in redone)
    # Some members were rewound in a view that broke before the other members were rewound.
    unfinished = len(rewinds) > 1
    if joiners and (lagging or spoilt or unfinished):
        raise ProtocolViolation(f"a worker joins before the members have reconciled: {list(rows)}")
    if spoilt or unfinished:
        return _rewound(rows, owners, max(rewinds) + 1)
    step = _common_step(rows, furthest, lagging)
    return RecoveryPlan(
        rewind_to=None,
        rewind_source=None,
        rewind_lacking=(),
        result_source=furthest[0] if lagging else None,
        lagging=lagging,
        state_source=_sources(owners, joiners, hosts),
        step=step,
        rewinds=max(rewinds),
        assignment_view=assignment_view,
    )


def _sources(owners: Sequence[int], joiners: Sequence[int], hosts: Sequence[str]) -> dict[int, int]:
    """The rank that sends each joiner the state, in this order.

    The state travels once to each host that lacks it. There each worker that has it passes it on to two others.
    """
    if not hosts:
        return {joiner: owners[i % len(owners)] for i, joiner in enumerate(joiners)}
    by_host: dict[str, list[int]] = {}
    for rank in owners:
        by_host.setdefault(hosts[rank], []).append(rank)
    nth = [(place, rank) for ranks in by_host.values() for place, rank in enumerate(ranks)]
    spread = [rank for _, rank in sorted(nth)]  # one rank of each host, before the second rank of any host
    served: dict[str, int] = {}
    sources: dict[int, int] = {}
    for joiner in joiners:
        local, count = by_host.setdefault(hosts[joiner], []), served.get(hosts[joiner], 0)
        if local:
            sources[joiner], served[hosts[joiner]] = local[count // 2], count + 1
        else:
            sources[joiner] = spread[(len(by_host) - 1) % len(spread)]
        local.append(joiner)
    return sources


def _rewound(rows: Sequence[MemberStatus], owners: Sequence[int], rewinds: int) -> RecoveryPlan:
    newest = max(rows[rank].snapshot for rank in owners)
    holders = [rank for rank in owners if rows[rank].snapshot == newest]
    has_snapshot = newest >= 0
    return RecoveryPlan(
        rewind_to=newest if has_snapshot else -1,
        rewind_source=holders[0] if has_snapshot else None,
        rewind_lacking=tuple(rank for rank in owners if rank not in holders),
        result_source=None,
        lagging=(),
        state_source={},
        step=max(newest, 0),
        rewinds=rewinds,
    )


def _common_step(rows: Sequence[MemberStatus], furthest: Sequence[int], lagging: Sequence[int]) -> int:
    """The step of the furthest ranks. All ranks have it once they have the newest operation, a step or a round."""
    steps = {rows[rank].step for rank in furthest}
    step = max(steps)
    possible = {step, *(step - rows[rank].round_steps for rank in furthest)}
    if len(steps) > 1 or any(rows[rank].step not in possible for rank in lagging):
        raise ProtocolViolation(f"members that completed the same took different steps: {list(rows)}")
    if any(rows[rank].completed < rows[furthest[0]].completed - 1 for rank in lagging):
        raise ProtocolViolation(f"members differ by more than one operation: {list(rows)}")
    return step


@dataclass(frozen=True)
class MemberStatus:
    """How far one member is: its row in the table that all members gather. It holds numbers only.

    Attributes:
        completed: How many operations have a result that this worker holds or has used.
        step: Completed steps.
        unrepeatable: Since its last step it has evaluated something that a lost worker may have had a part of.
        lost: Since the last reconciliation a member went without leaving, or an operation broke that cannot be
            repeated.
        snapshot: The step of its in-memory snapshot; -1: it has none.
        rewinds: How often it was rewound.
        joins: It holds no state.
        done: It has completed the last operation of all.
        round_steps: How many steps its newest operation added: 1 for a step, more for a round, or for a checkpoint that
            was loaded after a gather.
        open: The round that it has begun and not completed.
    """

    completed: int
    step: int
    unrepeatable: bool
    lost: bool
    snapshot: int
    rewinds: int
    joins: bool
    done: bool = False
    round_steps: int = 1
    open: OpenRound = NO_ROUND


def goes_on(rounds: Sequence[OpenRound], dealt: OldRanks, size_of: Callable[[int], int]) -> int:
    """The number of the view that distributes the learners of the open round, if that round goes on; else 0.

    Args:
        rounds: The open rounds of all members that have completed the newest operation.
        dealt: Returns the ranks of the new view's members in an earlier view.
        size_of: Returns the number of members of an earlier view.
    """
    newest = max(rounds, key=lambda each: each.assignment_view, default=NO_ROUND)
    if not newest.assignment_view:
        return 0
    shares = cut(newest.learners, size_of(newest.assignment_view))
    present = sum(len(shares[seat]) for seat in dealt(newest.assignment_view) if seat is not None)
    return newest.assignment_view if present >= newest.quorum > 0 else 0


# State and results from one worker to another, and what a worker's training provides for that (``StateOwner``).

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
