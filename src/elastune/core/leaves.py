"""What a model is made of, whatever carries it: leaves, cut into units, and which worker computes with which of them.

A *leaf* is what a backward pass gives one gradient for: a parameter, or one virtual block of a parameter that the
tensor axis divides. Leaves are fixed for a run: they do not depend on the mesh, so nothing that is computed leaf by
leaf shows it. A leaf's state (its values, the optimizer's tensors of its shape) is flat, and is held in ranges of it
that begin at multiples of ``UNIT`` elements: whatever is computed unit by unit (a norm, an update) does not show who
held what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from elastune.core.layout import Box, volume
from elastune.core.mesh import Mesh
from elastune.core.slots import cut

UNIT = 4096
"""Elements. Kernels with a tail of their own (fused optimizers) see no range that begins or ends inside of a unit, but
at a leaf's end."""


@dataclass(frozen=True)
class Leaf:
    """One leaf.

    Attributes:
        name: Unique in the model: the parameter's name, with ``#2`` behind it for virtual block 2.
        tensor: The parameter's name in the user's model.
        box: Which part of the parameter it is, of the shape that plain PyTorch gives it.
        dtype: As ``str(torch.dtype)`` without "torch.": "float32".
        layer: Its place among the layers that a pipeline may be cut between, from 0.
        block: Which virtual block of the tensor axis it is in; None: every worker along that axis computes with it.
        trained: Whether it gets gradients.
        gathered: With which block of the model its values are brought together when that runs; None: they are there.
    """

    name: str
    tensor: str
    box: Box
    dtype: str = "float32"
    layer: int = 0
    block: int | None = None
    trained: bool = True
    gathered: int | None = None

    @property
    def size(self) -> int:
        """How many elements it has."""
        return volume(self.box)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of its values."""
        return tuple(stop - start for start, stop in self.box)

    @property
    def units(self) -> int:
        """How many units it has, the last of them perhaps shorter."""
        return -(-self.size // UNIT)


@dataclass(frozen=True)
class Split:
    """How a model may be divided: its leaves in the order of its parameters.

    Attributes:
        leaves: All of them, of the whole model.
        blocks: Virtual blocks of the tensor axis, as slots are virtual workers; 1 where that axis divides nothing.
        costs: What each layer costs (seconds, or any unit): a pipeline is cut where the dearest stage is cheapest.
            Empty where a pipeline divides nothing.
        chunks: Runs of layers on each worker of an interleaved pipeline, where there are layers enough.
    """

    leaves: tuple[Leaf, ...]
    blocks: int = 1
    costs: tuple[float, ...] = ()
    chunks: int = 1

    def __post_init__(self) -> None:
        if len({leaf.name for leaf in self.leaves}) < len(self.leaves):
            raise ValueError("two leaves of one name")

    @cached_property
    def trained(self) -> tuple[int, ...]:
        """Indices of the leaves that get gradients."""
        return tuple(i for i, leaf in enumerate(self.leaves) if leaf.trained)

    def stages(self, pipeline: int) -> tuple[range, ...]:
        """The runs of layers of ``pipeline`` workers, in order of layers; run i lies on worker ``i % pipeline``.

        Raises:
            ValueError: Where there are fewer layers than workers.
        """
        layers = max(1, len(self.costs))
        chunks = max(1, min(self.chunks, layers // pipeline)) if pipeline > 1 else 1
        return cut_by_cost(self.costs or (1.0,), pipeline * chunks)

    def computed(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """Indices of the leaves that worker ``rank`` of ``mesh`` computes with, in order."""
        at = mesh.coordinates(rank)
        layers = {layer for run in self.stages(mesh.pipeline)[at["pipeline"] :: mesh.pipeline] for layer in run}
        blocks = cut(self.blocks, mesh.tensor)[at["tensor"]]
        return tuple(
            i
            for i, leaf in enumerate(self.leaves)
            if leaf.layer in layers and (leaf.block is None or leaf.block in blocks)
        )


def gathered_in(split: Split, blocks: Sequence[Sequence[int]]) -> Split:
    """``split`` with leaves that are brought together: those of each of ``blocks``, by their indices."""
    block_of = {leaf: number for number, leaves in enumerate(blocks) for leaf in leaves}
    return replace(split, leaves=tuple(replace(leaf, gathered=block_of[i]) for i, leaf in enumerate(split.leaves)))


def whole_leaves(parameters: Sequence[tuple[str, tuple[int, ...], str, bool]]) -> Split:
    """A model that nothing divides: ``parameters`` are (name, shape, dtype, trained)."""
    return Split(
        tuple(
            Leaf(name, name, tuple((0, size) for size in shape), dtype, trained=trained)
            for name, shape, dtype, trained in parameters
        )
    )


def unit_heads(rows: Sequence[range]) -> list[tuple[int, int, range]]:
    """What has to travel so that each unit of a leaf is whole on the worker that has its first element.

    ``rows``: the elements that each worker has, one worker's behind the other's. Each entry: from which worker, to
    which, and which elements; in order of elements.
    """
    found = []
    for worker, own in enumerate(rows):
        first = own.start // UNIT * UNIT
        if own and first < own.start:
            adder = next(other for other, has in enumerate(rows) if first in has)
            found.append((worker, adder, range(own.start, min(own.stop, first + UNIT))))
    return found


def cut_by_cost(costs: Sequence[float], parts: int) -> tuple[range, ...]:
    """``parts`` contiguous, non-empty ranges over ``costs`` of which the dearest is as cheap as can be.

    The linear partition problem, by dynamic programming over (parts, end); of equally good cuts the earliest.

    Raises:
        ValueError: Where there are fewer costs than parts.
    """
    total = len(costs)
    if not 1 <= parts <= total:
        raise ValueError(f"{total} costs in {parts} parts")
    sums = [0.0, *accumulate(costs)]
    dearest = [0.0] + [float("inf")] * total  # of the first ``end`` costs in as many parts as were looked at
    begins: list[list[int]] = []
    for part in range(1, parts + 1):
        found, begin = [float("inf")] * (total + 1), [0] * (total + 1)
        for end in range(part, total + 1):
            for start in range(part - 1, end):
                value = max(dearest[start], sums[end] - sums[start])
                if value < found[end]:
                    found[end], begin[end] = value, start
        dearest = found
        begins.append(begin)
    ranges, end = [], total
    for begin in reversed(begins):
        ranges.append(range(begin[end], end))
        end = begin[end]
    return tuple(reversed(ranges))
