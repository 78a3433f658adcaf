"""Sums over slots in canonical order: the same bits for any number of workers, at the bandwidth of a ring.

Every worker adds up its own slots along the canonical tree (``SlotSums``). Chunk c of every worker's subtree sums
then goes to worker c (all-to-all). Worker c adds them in tree order and returns the result to all (all-gather).
This moves 2(W-1)/W of the data, as a ring all-reduce does, but in ONE order of additions.
Several workers on each of several hosts first sum within their host, then across hosts: less data crosses hosts.
The order of additions stays that of the tree, so levels and routes (``parallel.comm.relay``) do not change the bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import prod

import torch

from elastune.core.slots import MOST_EXACT_WORKERS, Deal, Fold, cut, node_sum, subtrees
from elastune.parallel.comm.group import Group, Work
from elastune.parallel.comm.reducer import Bucket, DeviceCopy, Reducer, outbox, plan
from elastune.parallel.comm.relay import Relay


class ExactBucket(Bucket):
    """One bucket that is summed in canonical order: in one exchange, by levels, or along the routes of a topology.

    The flat vector is padded with zeros to a multiple of the number of workers. ``deal`` gives each worker its slots;
    ``first`` is added to the number of the bucket's relay, so that several reducers of one group differ.
    """

    def __init__(
        self,
        members: list[int],
        like: Sequence[torch.Tensor],
        num_slots: int,
        group: Group,
        deal: Deal = cut,
        *,
        hold: bool,
        first: int = 0,
    ) -> None:
        super().__init__(members, like, group, hold=hold)
        self._num_slots, self._deal, self._first = num_slots, deal, first
        self._slots = SlotSums(lambda: self._room(self._device), self._cut)
        self._buffer = self._room(group.wire) if hold else torch.zeros(0, dtype=self._dtype, device=group.wire)
        self.regroup(group)

    def renew(self) -> None:
        super().renew()
        self._slots.forget()
        self._buffer = torch.zeros_like(self._buffer)
        self._cut_buffer()

    def regroup(self, group: Group) -> None:
        self._group = group
        runs = self._deal(self._num_slots, group.size)
        self._run = runs[group.rank]
        self._length = -(-self._numel // group.size) * group.size
        if group.size > MOST_EXACT_WORKERS:
            raise ValueError(f"exact sums are over at most {MOST_EXACT_WORKERS} workers, not {group.size}")
        routed = group.size > 1 and bool(group.routes)
        self._levels = (group.levels or (group,)) if group.size > 1 and not routed else ()
        sizes = [level.size for level in self._levels]
        self._legs = climb(runs, self._num_slots, sizes, group.rank, self._length) if sizes else []
        like = self._sets[0][: self._numel]
        self._relay = Relay(group, like, self._first + self.members[0], runs, self._num_slots) if routed else None
        self.rounds = max(1, 2 * len(sizes) - 1)
        arriving = [len(leg.nodes) * leg.piece for leg in self._legs]
        gathered = [leg.piece for leg in self._legs[:-1]]  # returned by the levels above
        needed = sum(arriving) + sum(gathered)
        if self._buffer.numel() < needed:
            self._buffer = self._buffer.new_zeros(needed)
        self._arriving, self._gathered = arriving, gathered
        self._cut_buffer()
        self.begin()

    def _cut_buffer(self) -> None:
        sizes = [*self._arriving, *self._gathered]
        pieces = self._buffer[: sum(sizes)].split(sizes) if sizes else ()
        self._received, self._returned = pieces[: len(self._arriving)], pieces[len(self._arriving) :]

    def begin(self) -> None:
        self._slots.begin(self._run, self._num_slots, self.members)
        self._work: Work | None = None
        self.combined = 0
        self._sent: list[torch.Tensor] = []  # a library may read them until the step is over
        self.launched = False

    def put(self, index: int, value: torch.Tensor | None, *, owned: bool = False) -> bool:
        return self._slots.put(index, value, owned=owned)

    @property
    def slot_values(self) -> torch.Tensor:
        return self._slots.slot_values[: self._numel]

    def end_slot(self, slot: int) -> None:
        self._slots.end_slot(slot)

    def launch(self) -> None:
        """Send every piece to the worker that gathers it."""
        self.launched = True
        if self._relay is not None:
            parts = [value[: self._numel] for value in self._slots.parts()]
            if not self._staged:
                self._relay.start(parts, self._sets[self._turn][: self._numel])
            elif parts:
                self._sent.append(outbox(stacked := torch.stack(parts), self._group.wire))
                self._crossing = DeviceCopy(stacked, self._sent[-1])
            return
        if not self._legs:
            return
        sent = self._laid_out([value[: self._length] for value in self._slots.parts()], 0)
        if self._staged:
            self._sent.append(outbox(sent, self._group.wire))
            self._crossing = DeviceCopy(sent, self._sent[-1])
        else:
            self._sent.append(sent)
            self._climb(0)

    def depart(self) -> None:
        if self._relay is not None and self._staged:
            if self._sent:
                self._crossing.wait()
            parts = [part for sent in self._sent for part in sent.unbind(0)]
            self._relay.start(parts, self._sets[self._turn][: self._numel])
        elif self._staged and self._legs:
            self._crossing.wait()
            self._climb(0)

    @property
    def climbs_early(self) -> bool:
        return len(self._legs) > 1 and not self._staged

    def _laid_out(self, parts: list[torch.Tensor], level: int) -> torch.Tensor:
        """The sums of several nodes, piece by piece as the workers of level ``level`` gather them."""
        if len(parts) == 1:
            return parts[0]
        return torch.stack([part.view(self._levels[level].size, -1) for part in parts], dim=1).view(-1)

    def _climb(self, at: int) -> None:
        """Send the vector that was laid out last to the workers of level ``at``."""
        leg, level = self._legs[at], self._levels[at]
        sizes = [len(nodes) * leg.piece for nodes in leg.bring]
        sent_sizes = [sizes[level.rank]] * level.size
        self._work = level.all_to_all(self._received[at], self._sent[-1], sizes, sent_sizes)

    def combine(self) -> None:
        """Add this worker's piece in tree order, and send the sums on: up, and from the top back to all."""
        if not self._legs:
            return
        assert self._work is not None
        self._work.wait()
        top, at = len(self._legs) - 1, self.combined
        self.combined += 1
        if at > top:
            self._descend(2 * top - at, self._returned[2 * top - at])
            return
        leg = self._legs[at]
        rows = list(zip(leg.nodes, self._received[at].view(len(leg.nodes), leg.piece).unbind(0), strict=True))
        sums = [node_sum([row for row in rows if row[0].start in node], node, _add) for node in leg.sums]
        if at == top:
            self._descend(top, sums[0])
        else:
            self._sent.append(self._laid_out(sums, at + 1))
            self._climb(at + 1)

    def _descend(self, at: int, piece: torch.Tensor) -> None:
        """Start to return the sums of this worker's piece to the workers of level ``at``."""
        room = self._sets[self._turn][: self._length] if at == 0 else self._returned[at - 1]
        self._work = self._levels[at].all_gather(room, piece)

    def settle(self) -> bool:
        return self._relay is None or self._relay.settle()

    def wait(self) -> None:
        if self._relay is not None:
            self._relay.wait()
        elif self._group.size > 1:
            assert self._work is not None
            self._work.wait()

    def give(self) -> dict[int, torch.Tensor]:
        if self._group.size > 1:
            return super().give()
        if self.norms is not None:
            (total,) = self._slots.parts()
            self.norms.of_sums(total[: self._numel])
        return self._slots.total()


class ExactReducer(Reducer[ExactBucket]):
    """Sums a list of tensors over the slots of all workers, with the same bits for any number of workers.

    See ``Reducer`` for the calls of a step. Slots without samples are left out: they count as zero.

    Args:
        like: Gives shapes, dtypes and devices, in about the order in which ``put`` brings the tensors.
        num_slots: The slots of a step, over all workers.
        group: The workers.
        gradients: How many of the first tensors are gradients.
        hold: Keep the newest sums for another worker; see ``Bucket``.
        deal: Which slots each worker has.
        lane: Differs between reducers of equal tensors whose sums run at the same time.
        bucket_bytes: The size of a bucket; see ``plan``.

    Example::

        reducer = ExactReducer([torch.zeros(8)], num_slots=4, group=group)
        reducer.begin_with({0: [gradient_of_slot_0], 1: [gradient_of_slot_1]})
        (total,) = reducer.finish()
    """

    def __init__(
        self,
        like: Sequence[torch.Tensor],
        num_slots: int,
        group: Group,
        gradients: int = 0,
        *,
        hold: bool = False,
        deal: Deal = cut,
        lane: int = 0,
        bucket_bytes: int | None = None,
    ) -> None:
        first, members = lane * len(like), plan(like, bucket_bytes)
        buckets = [
            ExactBucket(bucket_members, like, num_slots, group, deal, hold=hold, first=first)
            for bucket_members in members
        ]
        super().__init__(buckets, group, gradients)

    def begin_with(self, slots: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Start a step, and put all values of this worker, by slot."""
        self.begin()
        for slot, values in sorted(slots.items()):
            self.begin_slot(slot, last=slot == max(slots))
            for place, value in enumerate(values):
                self.put(place, value)


# --- a worker's slots -------------------------------------------------------------------------------------------------


@dataclass
class _NodeSum:
    """The sum of a node of the canonical tree: a tensor of each member; ``flat``: memory that some of them lie in."""

    values: list[torch.Tensor]
    flat: torch.Tensor | None


class SlotSums:
    """One worker's slots, added up along the canonical tree while their values arrive.

    Each slot is made of members that arrive in any order. Members that nobody else uses are kept and added to as they
    are. The others are copied into flat vectors, all members of a slot at once. The memory of these is used again.

    Args:
        room: Makes an empty vector for one slot.
        views: Cuts a vector into its members.
    """

    def __init__(
        self, room: Callable[[], torch.Tensor], views: Callable[[torch.Tensor], Mapping[int, torch.Tensor]]
    ) -> None:
        self._make_room = room
        self._cut = views
        self._pool: list[torch.Tensor] = []
        self._views_of: dict[int, Mapping[int, torch.Tensor]] = {}  # by data pointer: every slot needs them again
        self._in_use: list[torch.Tensor] = []  # go back to the pool when a step begins
        self._members: tuple[int, ...] = ()
        self._missing: set[int] = set()
        self._zero: set[int] = set()
        self._copied: dict[int, torch.Tensor] = {}
        self._owned: dict[int, torch.Tensor] = {}
        self._filled: torch.Tensor | None = None  # the current slot's vector, if it has been looked at

    def begin(self, run: range, num_slots: int, members: Sequence[int]) -> None:
        """A step begins, of which this worker has the slots ``run``; the rest of an earlier step is dropped."""
        self._pool.extend(self._in_use)
        self._in_use = []
        self._run = run
        self._fold: Fold[_NodeSum] = Fold(run, num_slots, self._merge)
        self._next_slot = run.start
        self._members = tuple(members)
        self._begin_slot()

    def forget(self) -> None:
        """Never use this memory again: a library may still write to it or read from it."""
        self._pool, self._in_use, self._views_of = [], [], {}

    def put(self, member: int, value: torch.Tensor | None, *, owned: bool = False) -> bool:
        """Bring member ``member`` of the current slot (None: zero). True once the slot is complete.

        Args:
            member: The place of the member.
            value: Its values, which must stay as they are until the slot has ended.
            owned: Nobody else reads or changes ``value`` any more, so that it need not be copied.
        """
        self._missing.remove(member)
        if value is not None:
            self._zero.remove(member)
            (self._owned if owned else self._copied)[member] = value
        return not self._missing

    @property
    def slot_values(self) -> torch.Tensor:
        """The current slot's values, as far as they have arrived; flat. From then on none of these is owned."""
        if self._filled is None:
            self._filled = self._blank()
        self._copied |= self._owned
        self._owned = {}
        self._copy_into(self._filled)
        return self._filled

    def end_slot(self, slot: int) -> None:
        """Every member of ``slot`` has arrived; slots that were left out before it count as zero."""
        assert not self._missing
        self._skip_to(slot)
        self._fold.push(slot, self._collect())
        self._next_slot = slot + self._run.step
        self._begin_slot()

    def parts(self) -> list[torch.Tensor]:
        """The sums of the maximal subtrees of this worker's slots, flat and in order; after the last ``put``."""
        self._skip_to(self._run.stop)
        return [self._flat(node) for _, node in self._fold.parts]

    def total(self) -> dict[int, torch.Tensor]:
        """The sum of each member, where this worker has all slots; after the last ``put``."""
        self._skip_to(self._run.stop)
        ((_, node),) = self._fold.parts
        return dict(zip(self._members, node.values, strict=True))

    def _begin_slot(self) -> None:
        self._missing = set(self._members)
        self._zero = set(self._members)  # until a value arrives
        self._copied.clear()
        self._owned = {}
        self._filled = None

    def _copy_into(self, flat: torch.Tensor) -> None:
        """Copy what has arrived and is not owned, all at once."""
        if self._copied:
            views = self._views_of[flat.data_ptr()]
            torch._foreach_copy_([views[member] for member in self._copied], [*self._copied.values()])
            self._copied.clear()

    def _collect(self) -> _NodeSum:
        """The values of the current slot."""
        if len(self._owned) == len(self._members):
            return _NodeSum([self._owned[member] for member in self._members], None)
        flat = self._blank() if self._filled is None else self._filled
        views = self._views_of[flat.data_ptr()]
        for member in self._zero:
            views[member].zero_()
        self._copy_into(flat)
        return _NodeSum([self._owned.get(member, views[member]) for member in self._members], flat)

    def _flat(self, node: _NodeSum) -> torch.Tensor:
        """The sum ``node`` as one vector, from now on without tensors beside it."""
        if node.flat is None:
            node.flat = self._blank()
        views = [*map(self._views_of[node.flat.data_ptr()].__getitem__, self._members)]
        apart = [(view, value) for view, value in zip(views, node.values, strict=True) if value is not view]
        if apart:
            torch._foreach_copy_([view for view, _ in apart], [value for _, value in apart])
        node.values = views
        return node.flat

    def _skip_to(self, slot: int) -> None:
        for empty in range(self._next_slot, slot, self._run.step):
            flat = self._blank().zero_()
            views = self._views_of[flat.data_ptr()]
            self._fold.push(empty, _NodeSum([views[member] for member in self._members], flat))
            self._next_slot = empty + self._run.step

    def _blank(self) -> torch.Tensor:
        if self._pool:
            blank = self._pool.pop()
        else:
            blank = self._make_room()
            self._views_of[blank.data_ptr()] = self._cut(blank)
        self._in_use.append(blank)
        return blank

    def _merge(self, a: _NodeSum, b: _NodeSum) -> _NodeSum:
        if all(value.is_contiguous() for value in (*a.values, *b.values)):
            torch._foreach_add_(a.values, b.values)
        else:
            for value, other in zip(a.values, b.values, strict=True):
                value.add_(other)
        if b.flat is not None:
            self._in_use = [t for t in self._in_use if t is not b.flat]
            self._pool.append(b.flat)
        return a


def _add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.add_(b)


# --- levels: first within hosts, then across hosts --------------------------------------------------------------------


@dataclass(frozen=True)
class LevelLeg:
    """One level of a hierarchical sum, as one worker sees it.

    At each level the workers of a group exchange the pieces of a bucket. Each worker receives one piece from all, and
    adds the nodes of the canonical tree within the group's slots. Only these sums go to the next level. With one level
    every worker sends to every other worker.

    Attributes:
        piece: How many elements of a bucket each worker of this level's group gathers.
        bring: By rank in that group, the nodes of the tree whose sums that worker brings.
        sums: The nodes whose sums each worker of the group has afterwards.
    """

    piece: int
    bring: tuple[tuple[range, ...], ...]
    sums: tuple[range, ...]

    @property
    def nodes(self) -> list[range]:
        """All nodes that arrive, by the rank of the worker that brings them."""
        return [node for brought in self.bring for node in brought]


def climb(runs: Sequence[range], num_slots: int, sizes: Sequence[int], rank: int, length: int) -> list[LevelLeg]:
    """The legs of worker ``rank``, one for each level.

    Args:
        runs: The slots of each worker, by rank.
        num_slots: The number of all slots.
        sizes: The sizes of the levels, the innermost first.
        rank: The worker.
        length: The elements of a bucket, a multiple of the number of workers.
    """
    if prod(sizes) != len(runs) or length % len(runs):
        raise ValueError(f"levels of {tuple(sizes)} do not fit {len(runs)} workers and {length} elements")
    legs = []
    for size, (bring, sums) in zip(sizes, _nodes_of_levels(tuple(runs), num_slots, tuple(sizes), rank), strict=True):
        length //= size
        legs.append(LevelLeg(length, bring, sums))
    return legs


@lru_cache(maxsize=16)
def _nodes_of_levels(
    runs: tuple[range, ...], num_slots: int, sizes: tuple[int, ...], rank: int
) -> list[tuple[tuple[tuple[range, ...], ...], tuple[range, ...]]]:
    """What each level's workers bring, and what they have afterwards. All buckets of a group ask for the same."""

    def nodes(first: int, count: int) -> tuple[range, ...]:
        """The nodes that ``count`` workers have together, from ``first`` on."""
        return tuple(subtrees({slot for run in runs[first : first + count] for slot in run}, num_slots))

    levels, stride = [], 1
    for size, meets in zip(sizes, level_ranks(sizes, rank), strict=True):
        below = [other - other % stride for other in meets]  # the first worker whose slots ``other`` has added up
        levels.append((tuple(nodes(first, stride) for first in below), nodes(below[0], stride * size)))
        stride *= size
    return levels


def level_ranks(sizes: Sequence[int], rank: int) -> list[tuple[int, ...]]:
    """The ranks that ``rank`` meets at each level, itself included, in order."""
    levels, stride = [], 1
    for size in sizes:
        first = rank - rank // stride % size * stride
        levels.append(tuple(first + i * stride for i in range(size)))
        stride *= size
    return levels


def host_levels(hosts: Sequence[str]) -> tuple[int, ...]:
    """The sizes of the levels, the innermost first, of workers that run on ``hosts`` (by rank).

    ``(2, 3)``: two workers on each of three hosts. The result is empty if sums need only one level: one host, or one
    worker on each host. It is also empty if the hosts have unequal numbers of workers, or ranks are not in order of
    hosts.
    """
    runs = [(host, len(list(ranks))) for host, ranks in groupby(hosts)]
    sizes = {count for _, count in runs}
    if len({host for host, _ in runs}) != len(runs) or len(runs) < 2 or len(sizes) > 1 or sizes == {1}:
        return ()
    return sizes.pop(), len(runs)
