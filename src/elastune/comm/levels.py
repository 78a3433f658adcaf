"""The levels by which sums over slots climb: first among the workers of a host, then among hosts. Pure, but for groups.

Numbers travel least where few workers send them across. So each host first adds up what its own workers have: of
every piece of a bucket one of them gathers what the others bring, adds whatever nodes of the canonical tree lie within
the host's slots, and only their sums go to the other hosts. The order of additions stays that of the tree, so the bits
do, whatever the levels. One level is the plain case: everybody sends to everybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

from elastune.core.slots import subtrees


@dataclass(frozen=True)
class LevelLeg:
    """One level of a climb, as one worker sees it.

    Attributes:
        piece: How many elements of a bucket each worker of this level's group gathers.
        bring: By rank in that group, the nodes of the tree whose sums that worker brings.
        sums: The nodes whose sums each of them has afterwards.
    """

    piece: int
    bring: tuple[tuple[range, ...], ...]
    sums: tuple[range, ...]

    @property
    def nodes(self) -> list[range]:
        """All that arrive, by the rank of who brings them."""
        return [node for each in self.bring for node in each]


def host_levels(hosts: Sequence[str]) -> tuple[int, ...]:
    """The sizes of the levels, the innermost first, of workers that run on ``hosts``, by rank.

    ``(2, 3)``: two workers on each of three hosts. Empty where there is but one level: one host, one worker on each,
    hosts with unequal numbers, or ranks that do not go host by host.
    """
    runs = [(host, len(list(ranks))) for host, ranks in groupby(hosts)]
    sizes = {count for _, count in runs}
    if len({host for host, _ in runs}) != len(runs) or len(runs) < 2 or len(sizes) > 1 or sizes == {1}:
        return ()
    return sizes.pop(), len(runs)


def level_ranks(sizes: Sequence[int], rank: int) -> list[tuple[int, ...]]:
    """At each level the ranks that ``rank`` meets there, itself included, in order."""
    found, stride = [], 1
    for size in sizes:
        first = rank - rank // stride % size * stride
        found.append(tuple(first + i * stride for i in range(size)))
        stride *= size
    return found


def climb(runs: Sequence[range], num_slots: int, sizes: Sequence[int], rank: int, length: int) -> list[LevelLeg]:
    """The legs of worker ``rank``, of whose kind there are as many as ``runs``: the slots that each has.

    ``sizes``: of the levels; ``length``: of a bucket, a multiple of the workers' number.
    """
    if prod(sizes) != len(runs) or length % len(runs):
        raise ValueError(f"levels of {tuple(sizes)} do not fit {len(runs)} workers and {length} elements")

    def nodes(first: int, count: int) -> tuple[range, ...]:
        """What the workers ``first`` and so many from it on have together."""
        return tuple(subtrees({slot for run in runs[first : first + count] for slot in run}, num_slots))

    legs, stride = [], 1
    for size, meets in zip(sizes, level_ranks(sizes, rank), strict=True):
        length //= size
        below = [other - other % stride for other in meets]  # the first of those whose slots ``other`` speaks for
        legs.append(LevelLeg(length, tuple(nodes(first, stride) for first in below), nodes(below[0], stride * size)))
        stride *= size
    return legs
