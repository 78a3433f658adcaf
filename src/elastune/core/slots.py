"""Slots: equal logical shares of a global batch, the canonical tree that sums over them, and what slots cost.

A slot's work depends on the slot alone, never on the worker that does it. Sums over slots follow ONE fixed binary
tree over slot indices, so that a floating-point sum does not depend on which worker computed which slot.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Generic, TypeVar

# Slots: equal logical shares of a global batch, and the canonical tree that sums over them.
#
# A slot's work depends on the slot alone, never on the worker that does it. Sums over slots follow ONE fixed binary
# tree over slot indices, so that a floating-point sum does not depend on who computed which slot. Pure: no torch here.

T = TypeVar("T")


def cut(total: int, parts: int) -> list[range]:
    """``range(total)`` cut into ``parts`` contiguous ranges whose sizes differ by at most one (some may be empty)."""
    if total < 0 or parts < 1:
        raise ValueError(f"cut needs total >= 0 and parts >= 1, not {total} and {parts}")
    edges = [total * k // parts for k in range(parts + 1)]
    return [range(lo, hi) for lo, hi in pairwise(edges)]


def dealt(total: int, parts: int) -> list[range]:
    """``range(total)`` dealt out in turn, as cards are: what the parts have at one time lies side by side."""
    if total < 0 or parts < 1:
        raise ValueError(f"dealt needs total >= 0 and parts >= 1, not {total} and {parts}")
    return [range(first, total, parts) for first in range(parts)]


Deal = Callable[[int, int], list[range]]
"""Which slots each worker has: ``cut`` or ``dealt``."""


def middle(node: range) -> int:
    """Where the canonical tree divides ``node`` (two or more slots): the largest power of two below its length."""
    return node.start + (1 << (len(node) - 1).bit_length() - 1)


def subtrees(run: Container[int], num_slots: int) -> list[range]:
    """The maximal nodes of the canonical tree over ``num_slots`` slots that lie inside ``run``, in slot order."""
    found: list[range] = []

    def visit(node: range) -> None:
        inside = sum(slot in run for slot in node)
        if inside == 0:
            return
        if inside == len(node):
            found.append(node)
            return
        mid = middle(node)
        visit(range(node.start, mid))
        visit(range(mid, node.stop))

    visit(range(num_slots))
    return found


def tree_sum(parts: Sequence[tuple[range, T]], num_slots: int, add: Callable[[T, T], T]) -> T:
    """Sum of ``parts``, (tree node, value) pairs that tile all slots, in canonical order."""
    return node_sum(parts, range(num_slots), add)


def node_sum(parts: Sequence[tuple[range, T]], top: range, add: Callable[[T, T], T]) -> T:
    """Sum of those of ``parts``, (tree node, value) pairs, that tile the node ``top``, in canonical order."""
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

    ``add(a, b)`` may reuse ``a`` for its result. Of slots that come in about their order no more partial sums are kept
    than the tree is deep.
    """

    def __init__(self, num_slots: int, add: Callable[[T, T], T]) -> None:
        self._num_slots = num_slots
        self._add = add
        self._values: dict[range, T] = {}

    def __len__(self) -> int:
        """How many sums wait for others."""
        return len(self._values)

    def put(self, slot: int, value: T) -> None:
        """The value of ``slot``."""
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
        """Replace every sum that waits for others by an equal one."""
        self._values = {node: change(value) for node, value in self._values.items()}

    def total(self, zero: Callable[[], T]) -> T:
        """The sum over all slots, of which each that did not come is ``zero()``. What was put is gone."""

        def value_of(node: range) -> T:
            if node in self._values:
                return self._values.pop(node)
            if len(node) < 2:
                return zero()
            mid = middle(node)
            return self._add(value_of(range(node.start, mid)), value_of(range(mid, node.stop)))

        return value_of(range(self._num_slots))


# What it costs a worker to run its slots one by one, as ``exact`` mode does, over plain PyTorch's one pass.

MEASURED_SLOT_COST: Mapping[int, tuple[float, float]] = MappingProxyType(
    {1: (1.0, 1.0), 2: (1.0, 1.1), 4: (1.1, 1.3), 8: (1.3, 1.65)}
)
"""CPU time of a step in ``exact`` mode over that of plain PyTorch, by slots a worker: the least and the most of a LeNet
(batch 64), a ResNet-18 and a small GPT (batch 32), one thread. From ``benchmarks/results/slots.json``."""
SHOWN_FROM = 1.15


def slot_cost(num_slots: int, workers: int) -> tuple[float, float]:
    """The least and the most that the busiest of ``workers`` takes, as a multiple of plain PyTorch's CPU time.

    Between counts that were measured it is the next larger one's; beyond the largest, that one's: more than that.
    """
    most = -(-num_slots // workers)
    return MEASURED_SLOT_COST[next((count for count in MEASURED_SLOT_COST if count >= most), max(MEASURED_SLOT_COST))]


def slot_cost_text(num_slots: int, workers: int) -> str:
    """In words, with what costs less; empty where it costs about nothing."""
    low, high = slot_cost(num_slots, workers)
    if high < SHOWN_FROM:
        return ""
    on = "1 worker" if workers == 1 else f"{workers} workers"
    more = "at least " if -(-num_slots // workers) > max(MEASURED_SLOT_COST) else "about "
    told = f"{num_slots} slots on {on}: {more}{low:g} to {high:g} x the CPU time of plain PyTorch, by small passes"
    return f"{told} (measured on a LeNet, a ResNet-18 and a small GPT, not here); --mode fast or fewer slots: less"
