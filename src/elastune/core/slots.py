"""Slots: equal logical shares of a global batch, the tree that sums over them, and which samples a worker runs.

A slot's work depends on the slot alone, never on the worker that does it. Sums over slots follow ONE fixed binary
tree over slot indices, so that a floating-point sum does not depend on which worker computed which slot.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Generic, Literal, TypeVar

from elastune.core.errors import UserError
from elastune.core.fields import Notation

T = TypeVar("T")
MOST_EXACT_WORKERS = 4_096
"""The most workers that ``exact`` mode sums over: buffers have room for the padding of so many."""
Mode = Literal["exact", "fast"]
"""How a worker runs its slots: one by one, with equal bits, or in one pass, equal to float tolerance."""


def cut(total: int, parts: int) -> list[range]:
    """Return ``range(total)`` cut into ``parts`` contiguous ranges whose sizes differ by at most one; some may be
    empty.

    Example:
        >>> cut(8, 3)
        [range(0, 2), range(2, 5), range(5, 8)]
    """
    if total < 0 or parts < 1:
        raise ValueError(f"cut needs total >= 0 and parts >= 1, not {total} and {parts}")
    edges = [total * k // parts for k in range(parts + 1)]
    return [range(lo, hi) for lo, hi in pairwise(edges)]


def dealt(total: int, parts: int) -> list[range]:
    """Return ``range(total)`` dealt out in turn, so that all parts have neighbouring numbers at one time."""
    if total < 0 or parts < 1:
        raise ValueError(f"dealt needs total >= 0 and parts >= 1, not {total} and {parts}")
    return [range(first, total, parts) for first in range(parts)]


Deal = Callable[[int, int], list[range]]
"""The slots of each worker: ``cut`` or ``dealt``."""


def middle(node: range) -> int:
    """Return where the canonical tree divides ``node``: the largest power of two below its length."""
    return node.start + (1 << (len(node) - 1).bit_length() - 1)


def subtrees(run: Collection[int], num_slots: int) -> list[range]:
    """Return the maximal nodes of the canonical tree that lie inside ``run``, in slot order.

    The time grows with the nodes and the depth of the tree, not with the slots: thousands of workers each ask.
    """
    ranges: list[range] = []
    slots = run if isinstance(run, range) else sorted(run)

    def visit(node: range) -> None:
        inside = bisect_left(slots, node.stop) - bisect_left(slots, node.start)
        if inside == 0:
            return
        if inside == len(node):
            ranges.append(node)
            return
        mid = middle(node)
        visit(range(node.start, mid))
        visit(range(mid, node.stop))

    visit(range(num_slots))
    return ranges


def tree_sum(parts: Sequence[tuple[range, T]], num_slots: int, add: Callable[[T, T], T]) -> T:
    """Return the sum of ``parts`` in canonical order. They are pairs of tree node and value, and tile all slots."""
    return node_sum(parts, range(num_slots), add)


def node_sum(parts: Sequence[tuple[range, T]], top: range, add: Callable[[T, T], T]) -> T:
    """Return the sum of those ``parts`` that tile the node ``top``, in canonical order. Parts are pairs of tree node
    and value.
    """
    values = {(node.start, node.stop): value for node, value in parts}

    def value_of(node: range) -> T:
        known = values.get((node.start, node.stop))
        if known is not None:
            return known
        if len(node) < 2:
            raise ValueError(f"no value for slot {node.start}")
        mid = middle(node)
        return add(value_of(range(node.start, mid)), value_of(range(mid, node.stop)))

    return value_of(top)


class Fold(Generic[T]):
    """Adds up slot values as they come, in slot order, keeping no more partial sums than the tree is deep.

    ``add(a, b)`` may reuse ``a`` for its result. Once every slot of ``run`` was pushed, ``parts`` holds the sums of the
    run's maximal canonical subtrees, in slot order.
    """

    def __init__(self, run: range, num_slots: int, add: Callable[[T, T], T]) -> None:
        self.parts: list[tuple[range, T]] = []
        self._add = add
        self._parent_of_right: dict[tuple[int, int], range] = {}
        for node in subtrees(run, num_slots):
            self._index(node)

    def _index(self, node: range) -> None:
        if len(node) > 1:
            mid = middle(node)
            self._parent_of_right[(mid, node.stop)] = node
            self._index(range(node.start, mid))
            self._index(range(mid, node.stop))

    def push(self, slot: int, value: T) -> None:
        """Add the value of ``slot``, the next slot of the run."""
        node = range(slot, slot + 1)
        while (parent := self._parent_of_right.get((node.start, node.stop))) is not None:
            value = self._add(self.parts.pop()[1], value)
            node = parent
        self.parts.append((node, value))


class TreeSum(Generic[T]):
    """Adds up slot values that come in any order, each as soon as the canonical tree lets it.

    ``add(a, b)`` may reuse ``a`` for its result. Where slots come in about their order, there are at most as many
    partial sums as the tree has levels.
    """

    def __init__(self, num_slots: int, add: Callable[[T, T], T]) -> None:
        self._num_slots = num_slots
        self._add = add
        self._values: dict[range, T] = {}

    def __len__(self) -> int:
        """How many sums wait for others."""
        return len(self._values)

    def put(self, slot: int, value: T) -> None:
        """Add the value of ``slot``."""
        above = range(self._num_slots)
        path: list[tuple[range, range]] = []
        while len(above) > 1:
            mid = middle(above)
            halves = range(above.start, mid), range(mid, above.stop)
            path.append((above, halves[slot < mid]))
            above = halves[slot >= mid]
        node = above
        for parent, other in reversed(path):
            if other not in self._values:
                break
            beside = self._values.pop(other)
            value = self._add(value, beside) if node.start < other.start else self._add(beside, value)
            node = parent
        self._values[node] = value

    def change(self, change: Callable[[T], T]) -> None:
        """Replace every partial sum by an equal one."""
        self._values = {node: change(value) for node, value in self._values.items()}

    def total(self, zero: Callable[[], T]) -> T:
        """Return the sum over all slots, with ``zero()`` for each missing one, and drop all values."""

        def value_of(node: range) -> T:
            if node in self._values:
                return self._values.pop(node)
            if len(node) < 2:
                return zero()
            mid = middle(node)
            return self._add(value_of(range(node.start, mid)), value_of(range(mid, node.stop)))

        return value_of(range(self._num_slots))


# The cost of running slots one by one, as ``exact`` mode does, over plain PyTorch's single pass.
MEASURED_SLOT_COST: Mapping[int, tuple[float, float]] = MappingProxyType(
    {1: (1.0, 1.0), 2: (1.0, 1.1), 4: (1.1, 1.3), 8: (1.3, 1.65)}
)
"""CPU time of a step in ``exact`` mode over that of plain PyTorch, by slots a worker: the least and the most of a LeNet
(batch 64), a ResNet-18 and a small GPT (batch 32), one thread. From ``benchmarks/results/slots.json``."""
SHOWN_FROM = 1.15


def slot_cost(num_slots: int, workers: int) -> tuple[float, float]:
    """Return the least and the most CPU time of the busiest of ``workers``, as a multiple of plain PyTorch's.

    A count between two measured ones takes the figures of the next larger one. Beyond the largest count the figures are
    lower bounds.
    """
    most = -(-num_slots // workers)
    return MEASURED_SLOT_COST[next((count for count in MEASURED_SLOT_COST if count >= most), max(MEASURED_SLOT_COST))]


def slot_cost_text(num_slots: int, workers: int) -> str:
    """Return the cost in words, with cheaper settings; "" where the cost is small."""
    low, high = slot_cost(num_slots, workers)
    if high < SHOWN_FROM:
        return ""
    on = "1 worker" if workers == 1 else f"{workers} workers"
    more = "at least " if -(-num_slots // workers) > max(MEASURED_SLOT_COST) else "about "
    text = f"{num_slots} slots on {on}: {more}{low:g} to {high:g} x the CPU time of plain PyTorch, by small passes"
    return f"{text} (measured on a LeNet, a ResNet-18 and a small GPT, not here); --mode fast or fewer slots: less"


# Which samples of a global batch a worker runs, and in which passes: arithmetic over slots.


@dataclass(frozen=True)
class BatchSlice:
    """One forward and backward pass of one worker.

    Attributes:
        slot: The slot that the pass belongs to; in ``fast`` mode the first slot of the worker's run.
        samples: The samples of the pass, as offsets into the global batch.
        batch: The number of samples of its global batch.
        weight: The part of the global batch that the pass stands for. Weights over all workers add up to 1. A worker
            without samples runs a copy of another pass with weight 0, so that every worker takes every step.
        ends_slot: This is the last pass of its slot.
        ends_step: This is the last pass of the worker's step.
        ending: By worker, the slot that ends in this pass; -1 for none. Empty unless all workers make equally many
            passes.
        learner: The learner that the pass trains (``core.sync_plan``). The weights of a learner add up to 1 over each
            of its own steps.
        counts: The part of the round that these samples are.
        ends_update: The learner's own optimizer step follows.
        ends_local_step: The optimizer step that follows is the last one of this worker's learners.
        together: Where workers of a replica run different slots (``apart``): what all of them run in this pass, by
            their place along the tensor axis.
    """

    samples: range
    slot: int
    weight: float
    ends_slot: bool
    ends_step: bool
    ending: tuple[int, ...] = ()
    learner: int = 0
    counts: float = 1.0
    ends_update: bool = False
    ends_local_step: bool = False
    batch: int = 0
    together: tuple[BatchSlice, ...] = ()


def shares(
    batch: int,
    num_slots: int,
    workers: int,
    rank: int,
    mode: Mode,
    micro_batch: int | None,
    least: int = 1,
    *,
    even: bool = False,
    in_turn: bool = False,
) -> list[BatchSlice]:
    """Return the passes of worker ``rank`` over a global batch, in order.

    Args:
        batch: The samples of the global batch.
        num_slots: The slots that the batch is cut into.
        workers: The number of workers.
        rank: The worker whose passes are wanted.
        mode: ``exact`` makes one pass for each slot. ``fast`` makes one pass for all slots of the worker.
        micro_batch: The most samples of a pass; larger passes are split.
        least: The fewest samples of a pass, as far as the batch has as many (``samples_of_slots``) and ``micro_batch``
            allows it. It holds for copies, too.
        even: All workers make as many passes as the worker with the most. The additional passes come first and are
            copies without weight.
        in_turn: In ``exact`` mode slots are dealt out in turn, so that in each pass workers end neighbouring slots.
    """
    deal = dealt if in_turn and mode == "exact" else cut
    everyone = _portions(samples_of_slots(batch, num_slots, workers, mode, least), workers, mode)
    plans = [_passes(batch, everyone, run, micro_batch) for run in deal(num_slots, workers)]
    if not even:
        return plans[rank]
    most = max(map(len, plans))
    plans = [
        [replace(slices[0], weight=0.0, ends_slot=True, ends_step=False)] * (most - len(slices)) + slices
        for slices in plans
    ]
    ending = [
        tuple(each.slot if each.weight and each.ends_slot else -1 for each in passes)
        for passes in zip(*plans, strict=True)
    ]
    return [replace(slices, ending=ends) for slices, ends in zip(plans[rank], ending, strict=True)]


def apart(passes: Sequence[BatchSlice], workers: int, place: int) -> list[BatchSlice]:
    """Return the ``passes`` of a replica that worker ``place`` of its ``workers`` runs.

    Each pass must be a whole slot. Passes are dealt out in turn, so that workers run neighbouring slots at one time.
    All workers make equally many passes: a worker without a pass runs a copy of the first one, without weight.

    Raises:
        UserError: Where a slot has several passes.
    """
    if not all(each.ends_slot for each in passes):
        rule = "workers that run slots of a replica apart take each slot in one pass"
        raise UserError(rule, "a smaller micro-batch", "leave --micro-batch out, or use more --slots")
    slices = []
    for start in range(0, len(passes), workers):
        ends = start + workers >= len(passes)
        row = [replace(each, ends_step=False) for each in passes[start : start + workers]]
        row += [replace(passes[0], weight=0.0, ends_step=False)] * (workers - len(row))
        slices.append(replace(row[place], ends_step=ends, together=tuple(row)))
    return slices


def slices_of_round(
    batches: Sequence[int],
    num_slots: int,
    learners: int,
    carried: range,
    mode: Mode,
    micro_batch: int | None,
    least: int = 1,
) -> list[BatchSlice]:
    """Return the passes of a worker that trains the learners ``carried``, over a round of global ``batches``.

    A learner gets the samples of each batch that worker ``learner`` of ``learners`` would get. A learner without
    samples runs a copy of another pass with weight 0, and its own optimizer step then finds no gradient. ``samples``
    count from the first sample of the round.
    """
    total, start = sum(batches), 0
    slices: list[BatchSlice] = []
    for batch in batches:
        for learner in carried:
            passes = shares(batch, num_slots, learners, learner, mode, micro_batch, least)
            samples = sum(len(each.samples) for each in passes if each.weight)
            slices += [
                replace(
                    each,
                    samples=range(start + each.samples.start, start + each.samples.stop),
                    weight=len(each.samples) / samples if samples else 0.0,
                    learner=learner,
                    counts=samples / total,
                    ends_step=False,
                    ends_update=each.ends_step,
                    ends_local_step=each.ends_step and learner == carried[-1],
                )
                for each in passes
            ]
        start += batch
    return [*slices[:-1], replace(slices[-1], ends_step=True)]


def places_of_learner(
    batches: Sequence[int], num_slots: int, learners: int, learner: int, mode: Mode, least: int = 1
) -> list[range]:
    """Return the samples of one learner in a round of global ``batches``, in order, counted from the round's first
    sample.
    """
    slices = slices_of_round(batches, num_slots, learners, range(learner, learner + 1), mode, None, least)
    ranges: list[range] = []
    for samples in (each.samples for each in slices if each.weight):
        if ranges and ranges[-1].stop == samples.start:
            ranges[-1] = range(ranges[-1].start, samples.stop)
        else:
            ranges.append(samples)
    return ranges


def _passes(batch: int, everyone: list[tuple[int, range]], run: range, micro_batch: int | None) -> list[BatchSlice]:
    """The passes of the worker that has the slots ``run``. ``everyone``: the portions of all workers."""
    scale = 1.0
    portions = [(slot, samples) for slot, samples in everyone if slot in run and samples]
    if not portions:
        portions, scale = [max(everyone, key=lambda portion: len(portion[1]))], 0.0
    passes = [(slot, piece) for slot, samples in portions for piece in _pieces(samples, micro_batch)]
    return [
        BatchSlice(
            samples=piece,
            slot=slot,
            weight=scale * len(piece) / batch,
            ends_slot=i + 1 == len(passes) or passes[i + 1][0] != slot,
            ends_step=i + 1 == len(passes),
            batch=batch,
        )
        for i, (slot, piece) in enumerate(passes)
    ]


def _pieces(samples: range, micro_batch: int | None) -> Iterator[range]:
    for piece in cut(len(samples), 1 if micro_batch is None else -(-len(samples) // micro_batch)):
        yield samples[piece.start : piece.stop]


def _portions(slots: list[range], workers: int, mode: Mode) -> list[tuple[int, range]]:
    """The portions of all workers, in order: a slot and its samples; in ``fast`` mode a worker's first slot and all its
    samples.
    """
    runs = cut(len(slots), len(slots) if mode == "exact" else workers)
    return [(run.start, range(slots[run.start].start, slots[run.stop - 1].stop)) for run in runs if run]


def samples_of_slots(batch: int, num_slots: int, workers: int, mode: Mode, least: int) -> list[range]:
    """Return the samples of a global batch that each slot has.

    A pass is a slot in ``exact`` mode, and all slots of a worker in ``fast`` mode. Where a pass would get some samples
    but fewer than ``least``, the batch is spread over fewer slots. In ``exact`` mode that does not depend on the number
    of workers. A batch of fewer than ``least`` samples belongs to one slot.
    """
    slots = cut(batch, num_slots)
    if not any(0 < len(samples) < least for _, samples in _portions(slots, workers, mode)):
        return slots
    filled = max(1, batch // least)
    edges = [batch * (filled * slot // num_slots) // filled for slot in range(num_slots + 1)]
    return [range(low, high) for low, high in pairwise(edges)]


def contributors(batch: int, num_slots: int, workers: int, mode: Mode, least: int = 1) -> int:
    """Return how many of ``workers`` have a sample of a global batch of ``batch`` samples; see ``shares``."""
    slots = samples_of_slots(batch, num_slots, workers, mode, least)
    return sum(any(slots[slot] for slot in run) for run in cut(num_slots, workers))


# How often slots are computed by a second worker, too (``core.plan.verification``).

VERIFY_OPTION = "--verify"
VERIFY_NOTATION = "every=STEPS[,slots=N]"
VERIFY_FIX = "such as every=25 or every=25,slots=2"
MOST_EVERY, MOST_VERIFIED = 10**6, 64
ROLES = 3  # the worker that has the slot, a second one, and a third one that decides
CHUNKS, CHUNK_BITS = 4, 16  # numbers below 2**16 are exact in single precision, and in bf16's sums on the wire
PLACE = 1 + CHUNKS  # the numbers of one digest: 1, and its four parts
_PAIR = re.compile(r"(every|slots)=([0-9]{1,7})")


def _check(text: str, _option: str) -> str:
    VerifyPlan.parse(text)
    return text


VERIFY = Notation(VERIFY_NOTATION, _check, lambda text: text)
"""How a command line writes the plan."""


@dataclass(frozen=True)
class VerifyPlan:
    """How often slots are computed twice.

    Attributes:
        every: Each step whose number is a multiple of this is verified.
        slots: How many of its slots are computed by a second worker.

    Example:
        >>> VerifyPlan.parse("every=25")
        VerifyPlan(every=25, slots=1)
    """

    every: int
    slots: int = 1

    @classmethod
    def parse(cls, text: str) -> VerifyPlan:
        """Return the plan of a text such as "every=25,slots=2". Raises ``UserError`` for another text."""
        values: dict[str, int] = {}
        for part in text.split(","):
            match = _PAIR.fullmatch(part.strip())
            if match is None or match[1] in values:
                raise UserError(f"{VERIFY_OPTION} must be {VERIFY_NOTATION}", repr(text)[:100], VERIFY_FIX)
            values[match[1]] = int(match[2])
        every, slots = values.get("every", 0), values.get("slots", 1)
        if not 1 <= every <= MOST_EVERY or not 1 <= slots <= MOST_VERIFIED:
            rule = f"{VERIFY_OPTION} has every from 1 to {MOST_EVERY:,} and slots from 1 to {MOST_VERIFIED}"
            raise UserError(rule, repr(text)[:100], VERIFY_FIX)
        return cls(every, slots)

    def __str__(self) -> str:
        return f"every={self.every}" + (f",slots={self.slots}" if self.slots > 1 else "")

    @property
    def numbers(self) -> int:
        """How many numbers of the control vector hold digests."""
        return self.slots * ROLES * PLACE
