"""All-reduce of replicas with owned state: sums go to their owners, and a commit barrier ends the step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

import torch

from elastune.core.errors import UserError
from elastune.core.slots import BatchSlice, Mode, cut, dealt
from elastune.parallel.comm.exact import ExactReducer
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.owned import CommitBarrier, OwnedReducer, RemoteOwnerSums
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.comm.streamed import StreamedReducer
from elastune.parallel.mechanisms.owned.replica import OwnedReplica
from elastune.parallel.mechanisms.owned.state import place
from elastune.parallel.sync.base import STATISTICS, PartStatistics, Sync, step_statistics

_KNOWN_TO_ONE = torch.tensor(
    [float(name in ("loss", "sharpness", "trace", "elements", "counted")) for name in STATISTICS]
)
"""1 for the statistics of a slot that only the worker with its samples knows."""


class OwnedAllReduce(Sync):
    """Synchronous SGD for replicas whose parameters and optimizer state have owners (``parallel.mechanisms.owned``).

    One worker adds up each part of the gradients, along the canonical tree, and sends the sum to the part's owners.

    In ``exact`` mode the sums are over slots, each on the buffers of the step's start: weights depend neither on the
    workers nor on the mesh. In ``fast`` mode all samples of one worker are one part, like a slot, and buffers drift.
    A step is committed when this worker has passed the commit barrier: then all owners have every sum.
    """

    name: ClassVar[str] = "owned"
    all_contribute: ClassVar[bool] = True
    replica: OwnedReplica

    def __init__(
        self,
        replica: OwnedReplica,
        comms: Comms,
        num_slots: int,
        control: int = 0,
        *,
        mode: Mode = "exact",
        elastic: bool = False,
    ) -> None:
        super().__init__(replica, comms, control)
        self.exact = mode == "exact"
        self.drifts = not self.exact  # type: ignore[misc]
        # Equal passes have collectives of their own, in a fixed order; then no bucket may leave early.
        self._leaves_early = not replica.equal_passes
        deal = dealt if replica.in_turn and self.exact else cut
        self._barrier = CommitBarrier(replica.split, control, len(STATISTICS), num_slots if self.exact else None, deal)
        self._reducer: OwnedReducer | StreamedReducer = OwnedReducer()
        if replica.blocks:
            self._reducer = StreamedReducer(replica.blocks)
            replica.on_block = self._reducer.leave
        self._moves: ExactReducer | None = None
        self._moved: list[torch.Tensor] = []
        replica.buffers.one_slot = num_slots == 1
        floats = replica.buffers.floats if self.exact else []
        if floats:
            like = [b.detach() for b in floats]
            self._moves = ExactReducer(like, num_slots, comms.batch, hold=elastic, deal=deal)
        self._enter(comms)
        self._begin()

    def _enter(self, comms: Comms) -> None:
        self.comms = comms
        self.group = comms.batch
        self._barrier.regroup(comms.everyone, comms.mesh)
        replica, store = self.replica, self.replica.store
        layout = replica.plans, replica.split, store.parameters[0].device
        self._reducer.regroup(*layout, comms.batch, self._barrier.num_slots, replica.held_by)
        self._remote_sums = RemoteOwnerSums(
            replica.remote_owners, replica.split, comms.everyone, store.parameters[0].device
        )
        self._computed = frozenset(store.computed)
        self._rank = comms.mesh.batch_rank(comms.rank)

    def _begin(self) -> None:
        self._weights_of: dict[int, float] = {}
        self._parts: dict[int, PartStatistics] = {}
        self._of_others: set[int] = set()
        self._used: set[int] = set()
        self._slot_ended = False

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin(self, share: BatchSlice, *, starts_step: bool) -> None:
        if starts_step:
            self._begin()
            self._part.clear()
            self.replica.begin_step(self.parts)
            self._reducer.measures = self._measures
            self._reducer.begin()
            if self._moves is not None:
                self._moves.begin()
        elif self.exact and self._slot_ended:  # a new slot, not a further piece of one
            self.replica.buffers.restore()
        self._slot_ended = share.ends_slot

    def redo(self, loss: torch.Tensor, share: BatchSlice) -> list[torch.Tensor | None] | None:
        self._slot_ended = share.ends_slot
        return self._redone(loss, share)

    def backward(self, loss: torch.Tensor, share: BatchSlice) -> None:
        replica, slot = self.replica, self._slot_of(share)
        replica.refuse_leftovers()
        if self.exact and replica.division.streams:
            replica.buffers.passed()
        if share.weight:
            self._weights_of[slot] = self._weights_of.get(slot, 0.0) + share.weight
            part = self._parts.setdefault(slot, PartStatistics())
            part.add(self._part)
            self._part.clear()
            if self.wants_statistics:
                part.add_loss(loss, share.weight)
        for other in share.together:  # the slices of other workers of this replica, whose gradients come here, too
            if other.weight and not (share.weight and other.slot == slot):
                self._weights_of[other.slot] = other.weight
                self._of_others.add(other.slot)
                self._parts[other.slot] = PartStatistics()
        self._reducer.begin_pass(self._ending(share))
        put = self._put if self.tap is None else self.tap.ready(share.slot, self._put)
        for done in replica.run(loss, share, self._begin_slot, put):
            if self.exact:
                replica.buffers.passed()  # a pipeline's stages have moved their buffers only now
            if done.weight and done.ends_slot:
                self._end_slot(done)
        if share.ends_step:
            self._finish()

    def _slot_of(self, share: BatchSlice) -> int:
        return share.slot if self.exact else self._rank

    def _ending(self, share: BatchSlice) -> Sequence[int]:
        """By batch rank: the slot that ends there in the pass of ``share``."""
        return share.ending if self.exact else [rank if slot >= 0 else -1 for rank, slot in enumerate(share.ending)]

    def _begin_slot(self, part: BatchSlice) -> None:
        self._reducer.begin_slot(self._slot_of(part), last=self._leaves_early and part.ends_step)

    def _put(self, place: int, gradient: torch.Tensor | None) -> None:
        param_block = self.replica.split.trained[place]
        if param_block not in self._computed:
            return
        if gradient is not None:
            self._used.add(param_block)
            if gradient.is_sparse:
                if self.exact:
                    fix = "use sparse=False or --mode fast"
                    raise UserError("exact mode sums dense gradients", "a sparse gradient", fix)
                gradient = gradient.to_dense()
        self._reducer.put(param_block, gradient)

    def _end_slot(self, part: BatchSlice) -> None:
        if self._measures:
            slot = self._slot_of(part)
            self._parts[slot].add_norms((self._reducer.slot_square(), 0.0), self._weights_of[slot])
        if self._moves is not None:
            self._moves.begin_slot(part.slot, last=self._leaves_early and part.ends_step)
            for place, moved in enumerate(self.replica.buffers.moves(self._weights_of[part.slot])):
                self._moves.put(place, moved)

    def _finish(self) -> None:
        started = time.perf_counter()
        if self.tap is not None:
            self.tap.fill(self.control)
        reducer = self._reducer
        reducer.launch()
        if self._moves is not None:
            self._moves.launch()
        reducer.combine()
        if self._moves is not None:
            self._moved = self._moves.finish()
        squares = reducer.squares()
        reducer.wait()
        self._remote_sums.exchange(reducer.sums())
        if self.replica.apart:
            self._share_known_to_one()
        statistics = {slot: part.tensor() for slot, part in self._parts.items()}
        self._barrier.wait_for_all(self.control, statistics, self._used, squares)
        self.wait_s = time.perf_counter() - started
        self._complete()

    def _share_known_to_one(self) -> None:
        """Send the statistics that only the worker of a slot knows (its loss) to all workers of the replica."""
        group, width = self.comms.group("tensor"), len(STATISTICS)
        if group.size == 1:
            return
        table = torch.zeros(self._barrier.num_slots, width)
        for slot, part in self._parts.items():
            if slot not in self._of_others:
                table[slot] = part.tensor() * _KNOWN_TO_ONE
        tables = torch.zeros(group.size * table.numel(), device=group.wire)
        group.all_gather(tables, table.view(-1).to(group.wire)).wait()
        sums = tables.cpu().view(group.size, *table.shape).sum(0)  # of one worker's values and zeros: exact
        for slot in self._of_others:
            self._parts[slot].values = (self._parts[slot].tensor() + sums[slot]).tolist()

    def _complete(self) -> None:
        """Apply the committed step, after the barrier."""
        barrier, replica = self._barrier, self.replica
        self.totals = barrier.control
        norms = (float(barrier.squares.sum()), 0.0) if self._measures else None
        self.statistics = step_statistics(barrier.statistics, norms)
        held, sums = [*self._reducer.held, *self._remote_sums.held], [*self._reducer.sums(), *self._remote_sums.sums()]
        replica.receive(sums, barrier.used, barrier.squares, lambda factor: _scale(held, factor))
        if self.exact:
            replica.buffers.move(self._moved)

    # -- when workers come and go -------------------------------------------------------------------------------------

    def last_result(self) -> list[torch.Tensor]:
        return [self._barrier.result]

    def result_room(self) -> list[torch.Tensor]:
        return [torch.empty_like(self._barrier.result)]

    def adopt_result(self, result: Sequence[torch.Tensor]) -> None:
        """As in the contract. This worker has entered the barrier, so all sums that it owns have arrived."""
        self._drain()
        (self._barrier.result,) = result
        self._complete()

    def abandon(self) -> None:
        self._drain()
        self.replica.abandon()

    def _drain(self) -> None:
        self._reducer.drain()
        self._remote_sums.drain()
        if self._moves is not None:
            self._moves.drain()

    @property
    def awaits_step(self) -> bool:
        return self.replica.reduced and not self.replica.applied

    def after_step(self) -> None:
        if self.replica.reduced:
            self.replica.settle()

    def regroup(self, comms: Comms, over: Group | None = None) -> None:
        """As in the contract, but later if this worker has a step's sums that it has not applied.

        It then stays in the old layout until it has applied them; then the state moves. The other workers have applied
        the same sums or will do so, and wait for this worker.
        """
        self._drain()
        if self.awaits_step:
            self.replica.arrive = lambda: self._arrive(comms, comms.everyone)
        else:
            self._arrive(comms, over or comms.everyone)

    def _arrive(self, comms: Comms, group: Group) -> None:
        place(self.replica, comms, group, exact=self.exact)
        self.replica.arrive = None
        self._enter(comms)
        if self._moves is not None:
            self._moves.regroup(comms.batch)


def _scale(sums: Sequence[torch.Tensor], factor: float) -> None:
    for total in sums:
        total.mul_(factor)
