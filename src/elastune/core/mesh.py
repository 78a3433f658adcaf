"""Workers as a grid: which of them carry one replica together, and which are the same part of different ones."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

from elastune.core.errors import UserError

Axis = Literal["data", "shard", "tensor", "pipeline"]
AXES: tuple[Axis, ...] = ("data", "shard", "pipeline", "tensor")
"""From the slowest to the fastest: neighbouring ranks differ in the tensor axis first. A replica's workers, and the
slots that they run, are therefore consecutive, and a run grows by whole replicas at its end."""

MOST_WORKERS = 65_536
_SIZE = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True)
class Mesh:
    """How many workers there are along each axis.

    ``data``: replicas of the model; the elastic axis. The others divide ONE replica: ``shard`` its tensors and the
    samples, ``tensor`` the arithmetic of its layers, ``pipeline`` its layers.
    """

    data: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise UserError("a mesh has at least one worker along each axis", f"{axis}={size!r}", f"use {axis}=1")
        if self.workers > MOST_WORKERS:
            raise UserError(f"a mesh has at most {MOST_WORKERS:,} workers", self, "use fewer")

    def size(self, axis: Axis) -> int:
        """How many workers differ in ``axis`` alone."""
        return int(getattr(self, axis))

    @cached_property
    def workers(self) -> int:
        """All of them."""
        return self.data * self.replica

    @cached_property
    def replica(self) -> int:
        """The workers that carry one replica."""
        return self.shard * self.tensor * self.pipeline

    @property
    def batch(self) -> int:
        """How many parts the samples of a global batch are cut into."""
        return self.data * self.shard

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Where worker ``rank`` stands along each axis."""
        self._check(rank)
        found: dict[Axis, int] = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, self.size(axis))
        return found

    def batch_rank(self, rank: int) -> int:
        """Which part of the samples worker ``rank`` runs: equal for the workers that run a part together."""
        self._check(rank)
        return rank // (self.tensor * self.pipeline)

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The workers that differ from ``rank`` in ``axis`` alone, itself included, in order."""
        self._check(rank)
        stride = 1
        for faster in reversed(AXES):
            if faster == axis:
                break
            stride *= self.size(faster)
        first = rank - self.coordinates(rank)[axis] * stride
        return tuple(first + i * stride for i in range(self.size(axis)))

    def batch_group(self, rank: int) -> tuple[int, ...]:
        """The workers that compute with the same part of the model as ``rank``, on other samples; by batch rank."""
        self._check(rank)
        inner = self.tensor * self.pipeline
        return tuple(range(rank % inner, self.workers, inner))

    def speaks(self, rank: int) -> bool:
        """Whether worker ``rank`` speaks for its samples: of those that run them together, the one that has the loss.

        That is the first along the tensor axis of the pipeline's last stage.
        """
        self._check(rank)
        slower, tensor = divmod(rank, self.tensor)
        return tensor == 0 and slower % self.pipeline == self.pipeline - 1

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """All groups along ``axis``; every worker is in one of them."""
        return tuple(sorted({self.group(axis, rank) for rank in range(self.workers)}))

    def fitted(self, workers: int) -> Mesh | None:
        """As many whole replicas of this kind as ``workers`` carry; None where they do not carry one."""
        data = workers // self.replica
        return replace(self, data=data) if data else None

    def __str__(self) -> str:
        """As ``parse`` reads it: "data=2,tensor=2"; axes of one worker are left out."""
        return ",".join(f"{axis}={self.size(axis)}" for axis in get_args(Axis) if self.size(axis) > 1) or "data=1"

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """What ``--mesh`` says: "data=2,shard=2,tensor=1,pipeline=1"; axes that are left out have one worker.

        Raises:
            UserError: For anything else.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            axis, _, size = (word.strip() for word in part.partition("="))
            if axis not in get_args(Axis):
                rule = f"the axes of a mesh are {', '.join(get_args(Axis))}"
                raise UserError(rule, repr(part[:100]), "such as data=2,shard=2")
            if axis in sizes:
                raise UserError("a mesh names each axis once", text[:100], f"leave out the second {axis}")
            if not _SIZE.fullmatch(size):
                rule = f"an axis of a mesh has from 1 to {MOST_WORKERS:,} workers"
                raise UserError(rule, repr(part[:100]), f"such as {axis}=2")
            sizes[axis] = int(size)
        return cls(**sizes)

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.workers:
            raise ValueError(f"rank {rank} in a mesh of {self.workers} workers")
