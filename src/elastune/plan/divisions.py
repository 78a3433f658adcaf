"""Every way to divide a cluster among trainings at once and the axes of each training's mesh, as columns. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastune.core.errors import UserError
from elastune.core.mesh import MOST_WORKERS, Mesh
from elastune.plan.steps.splits import StepSplits

Floats = NDArray[np.float64]
MOST_PLANS = 400_000  # before those are left out that cut a batch into more parts than it has samples
MOST_BATCH = 2**31


@dataclass(frozen=True)
class Nodes:
    """Like nodes, each with room for ``workers_each``, which have a faster link in common."""

    count: int
    workers_each: int

    def __post_init__(self) -> None:
        for name, value, option in (
            ("nodes", self.count, "--nodes"),
            ("workers of a node", self.workers_each, "--gpus-per-node"),
        ):
            if value < 1:
                raise UserError(f"there must be {name}", value, f"use {option} 1 or more")
        if self.workers > MOST_WORKERS:
            raise UserError(f"a cluster has at most {MOST_WORKERS:,} workers", self.workers, "use fewer --nodes")

    @property
    def workers(self) -> int:
        """All of them."""
        return self.count * self.workers_each


@dataclass(frozen=True)
class Allowed:
    """What a program can be given. ``batches`` and ``micros``: global batches and samples of a pass at most.

    ``tensor`` and ``pipeline``: into how many parts its layers and its chain of them can be divided at most; ``shard``:
    whether its state can be. ``width``: trainings at once at most. ``mesh``: the only one that is looked at, if any.
    """

    batches: tuple[int, ...]
    micros: tuple[int, ...]
    width: int
    tensor: int = 1
    pipeline: int = 1
    shard: bool = True
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        numbers = (*self.batches, *self.micros, self.width, self.tensor, self.pipeline)
        if not (self.batches and self.micros) or not all(1 <= number <= MOST_BATCH for number in numbers):
            raise ValueError(f"batches, micro-batches and divisions are at least 1, not {self}")


@dataclass(frozen=True)
class Divisions:
    """Plans for a whole cluster: ``width`` trainings at once, each split as ``splits``."""

    width: Floats
    splits: StepSplits

    def take(self, index: NDArray[np.intp] | slice) -> Divisions:
        """Some of them."""
        return Divisions(self.width[index], self.splits.take(index))

    @property
    def workers(self) -> Floats:
        """That each plan uses, of the whole cluster."""
        return self.width * self.splits.workers


def divisions(nodes: Nodes, allowed: Allowed) -> Divisions:
    """All that ``allowed`` lets be, with sizes that divide the number of workers, or trainings as many as fit.

    Where that were more than ``MOST_PLANS``, as of workers with many divisors, some sizes are left out, so that the
    others lie a like factor apart.

    Raises:
        UserError: Where ``allowed`` asks for a mesh that does not divide the cluster, the batch or the program.
    """
    total = nodes.workers
    if allowed.mesh is not None:
        check_mesh(allowed.mesh, nodes, allowed)
    sizes = [size for size in range(1, total + 1) if total % size == 0]
    each_row = len(allowed.batches) * len(allowed.micros)
    meshes, apart = _meshes(total, sizes, allowed), 1.0
    while sum(_widths(total, sizes, allowed, mesh)[1] for mesh in meshes) * each_row > MOST_PLANS:
        apart *= 1.1
        sizes = _thinned(sizes, apart)
        meshes = _meshes(total, sizes, allowed)
    rows = []
    for mesh in meshes:
        most, _ = _widths(total, sizes, allowed, mesh)
        widths = {most, *sizes[: bisect_right(sizes, most)]}
        rows += [(width, *mesh) for width in sorted(widths)]
    wide, parts = np.array([row[0] for row in rows], float), np.array([row[1] * row[2] for row in rows], float)
    batch, micro = (np.array(each, float) for each in (allowed.batches, allowed.micros))
    grid = np.stack(np.meshgrid(np.arange(len(rows)), batch, micro, indexing="ij"), axis=-1).reshape(-1, 3)
    row = grid[:, 0].astype(np.intp)
    share = np.ceil(grid[:, 1] / parts[row])
    # A pass of more samples than a worker has is one of as many as it has: that plan stands with its own size.
    kept = (grid[:, 1] >= parts[row]) & ((grid[:, 2] <= share) | (grid[:, 2] == micro.min()))
    row, grid, share = row[kept], grid[kept], share[kept]
    _, data, shard, tensor, pipeline = np.array(rows, float)[row].T
    each = np.full(len(row), float(nodes.workers_each))
    splits = StepSplits(grid[:, 1], np.minimum(grid[:, 2], share), data, shard, tensor, pipeline, each)
    return Divisions(wide[row], splits)


def check_mesh(mesh: Mesh, nodes: Nodes, allowed: Allowed) -> None:
    """Raise ``UserError`` for a mesh that does not divide the workers there are, or what it is to divide."""
    if nodes.workers % mesh.workers:
        value = f"{mesh}: {mesh.workers} of {nodes.workers} workers"
        raise UserError("a mesh must divide the workers of the cluster", value, "use axes whose product divides them")
    batches = [batch for batch in allowed.batches if batch % mesh.batch == 0]
    for axis, size, of in (
        ("data x shard", mesh.batch, 0 if batches else max(allowed.batches)),
        ("tensor", mesh.tensor, 0 if mesh.tensor <= allowed.tensor else allowed.tensor),
        ("pipeline", mesh.pipeline, 0 if mesh.pipeline <= allowed.pipeline else allowed.pipeline),
        ("shard", mesh.shard, 0 if mesh.shard == 1 or allowed.shard else 1),
    ):
        if of:
            what = "a batch's samples" if axis == "data x shard" else "the program"
            raise UserError(f"a mesh must divide {what} evenly", f"{axis}={size} of {of}", "use a smaller --mesh")


def _meshes(total: int, sizes: Sequence[int], allowed: Allowed) -> list[tuple[int, int, int, int]]:
    """Every mesh of ``sizes`` that ``total`` workers carry, as data, shard, tensor and pipeline."""
    most = max(allowed.batches)  # no more parts than samples
    if allowed.mesh is not None:
        return [(allowed.mesh.data, allowed.mesh.shard, allowed.mesh.tensor, allowed.mesh.pipeline)]
    return [
        (data, shard, tensor, pipeline)
        for tensor in sizes[: bisect_right(sizes, allowed.tensor)]
        for pipeline in sizes[: bisect_right(sizes, min(allowed.pipeline, total // tensor))]
        for shard in (sizes[: bisect_right(sizes, min(most, total // (tensor * pipeline)))] if allowed.shard else [1])
        for data in sizes[: bisect_right(sizes, min(most, total // (tensor * pipeline)) // shard)]
    ]


def _widths(total: int, sizes: Sequence[int], allowed: Allowed, mesh: tuple[int, int, int, int]) -> tuple[int, int]:
    """The most trainings at once on such meshes, and how many numbers of them are looked at, at most."""
    most = min(total // math.prod(mesh), allowed.width)
    return most, bisect_right(sizes, most) + 1


def _thinned(sizes: Sequence[int], apart: float) -> list[int]:
    """Some of ``sizes``, ascending, each at least ``apart`` times the one before; the first and the last are kept."""
    kept = [sizes[0]]
    for size in sizes[1:-1]:
        if size >= apart * kept[-1]:
            kept.append(size)
    return [*kept, *sizes[1:][-1:]]
