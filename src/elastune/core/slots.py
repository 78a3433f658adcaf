"""Slots: equal logical shares of a global batch, the canonical tree that sums over them, and what slots cost.

A slot's work depends on the slot alone, never on the worker that does it. Sums over slots follow ONE fixed binary
tree over slot indices, so that a floating-point sum does not depend on which worker computed which slot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Generic, TypeVar

T = TypeVar("T")
MOST_EXACT_WORKERS = 4_096
"""The most workers, and the most slots, that ``exact`` mode sums: buffers have room for the padding of so many."""


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
