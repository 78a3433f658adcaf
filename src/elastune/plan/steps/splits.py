"""Ways to split one training step over workers, as columns: one entry a plan."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from elastune.plan.steps.work import Floats, StepWork


@dataclass(frozen=True)
class StepSplits:
    """Whole numbers, all at least 1. ``batch`` and ``micro`` are samples: of a step, and of one pass of one replica.

    ``data`` and ``shard`` cut the samples, ``tensor`` the layers, ``pipeline`` the chain of blocks, as the axes of
    ``core.mesh.Mesh``. ``per_node``: how many workers have the fast link in common.
    """

    batch: Floats
    micro: Floats
    data: Floats
    shard: Floats
    tensor: Floats
    pipeline: Floats
    per_node: Floats

    def __post_init__(self) -> None:
        columns = np.broadcast_arrays(*(np.asarray(getattr(self, f.name), dtype=np.float64) for f in fields(self)))
        for field, values in zip(fields(self), columns, strict=True):
            if values.ndim != 1 or not (np.isfinite(values).all() and (values >= 1).all()):
                raise ValueError(f"{field.name} of plans is a column of numbers of at least 1")
            object.__setattr__(self, field.name, values)

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def parts(self) -> Floats:
        """Into how many parts the samples are cut."""
        return self.data * self.shard

    @property
    def workers(self) -> Floats:
        """All of a plan."""
        return self.parts * self.tensor * self.pipeline

    @property
    def passes(self) -> Floats:
        """How often the busiest worker runs its part of the model, forward and backward, in one step."""
        return np.ceil(self.batch / (self.parts * self.micro))

    @property
    def inner(self) -> Floats:
        """Workers that run the same samples together."""
        return self.tensor * self.pipeline

    @property
    def nodes(self) -> Floats:
        """On how many nodes those stand that sum their gradients together: as few as it takes, of those there are."""
        apart = np.ceil(self.parts / np.maximum(1.0, np.floor(self.per_node / self.inner)))
        return np.minimum(apart, np.ceil(self.workers / self.per_node))

    def across(self, neighbours: Floats) -> NDArray[np.bool_]:
        """Whether some of every so many ``neighbours`` in the order of ranks, which stand node by node, are on another
        node than the first of them."""
        cut = (self.workers > self.per_node) & (self.per_node % neighbours > 0)
        return np.asarray((neighbours > self.per_node) | cut, dtype=np.bool_)

    def take(self, index: NDArray[np.intp] | slice) -> Self:
        """Some of the plans."""
        return replace(self, **{f.name: getattr(self, f.name)[index] for f in fields(self)})


def coordinates(work: StepWork, splits: StepSplits) -> Floats:
    """Where each plan stands, in doublings: plans near one another have like errors. One row a plan.

    The first ``SHAPE`` of them are the shape of a pass's matrices: plans that share it run the same kernels.
    """
    told = (splits.micro, splits.tensor, work.block_flops, splits.passes, splits.parts, splits.pipeline, work.blocks)
    return np.log2(np.maximum(np.stack(np.broadcast_arrays(*told), axis=1).astype(np.float64), 1.0))


SHAPE = 3
