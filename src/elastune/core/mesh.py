"""The mesh of a run: its workers as a grid, and the mechanisms that divide a model along the grid's axes.

The name of a mechanism, such as "zero" or "tensor+pipeline+sharded", says along which axes it divides a replica.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Literal, get_args

from elastune.core.errors import UserError
from elastune.core.plugins import Plugins

Axis = Literal["data", "shard", "tensor", "pipeline"]
AXES: tuple[Axis, ...] = ("data", "shard", "pipeline", "tensor")
"""From the slowest to the fastest axis: neighbouring ranks differ in the tensor axis first. A replica's workers, and
the slots that they run, are therefore consecutive, and a run grows by whole replicas at its end.
"""
MOST_WORKERS = 65_536
_SIZE = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True)
class Mesh:
    """The number of workers along each axis of a grid.

    Attributes:
        data: Replicas of the model; the elastic axis.
        shard: Divides one replica's tensors, and the samples.
        tensor: Divides the arithmetic of one replica's layers.
        pipeline: Divides one replica's layers into stages.

    Example:
        >>> elastune.Mesh(data=2, tensor=2).workers
        4
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
        """Return the number of workers along ``axis``."""
        return int(getattr(self, axis))

    @cached_property
    def workers(self) -> int:
        """The number of all workers."""
        return self.data * self.replica

    @cached_property
    def replica(self) -> int:
        """The number of workers that hold one replica."""
        return self.shard * self.tensor * self.pipeline

    @property
    def batch(self) -> int:
        """The number of parts that the samples of a global batch are cut into."""
        return self.data * self.shard

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Return the place of worker ``rank`` along each axis."""
        self._check(rank)
        coordinates: dict[Axis, int] = {}
        for axis in reversed(AXES):
            rank, coordinates[axis] = divmod(rank, self.size(axis))
        return coordinates

    def batch_rank(self, rank: int) -> int:
        """Return the part of the samples that worker ``rank`` runs. Workers that run a part together have the same."""
        self._check(rank)
        return rank // (self.tensor * self.pipeline)

    def group(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Return the workers that differ from ``rank`` in ``axis`` alone, itself included, in order."""
        self._check(rank)
        stride = 1
        for faster in reversed(AXES):
            if faster == axis:
                break
            stride *= self.size(faster)
        first = rank - self.coordinates(rank)[axis] * stride
        return tuple(first + i * stride for i in range(self.size(axis)))

    def batch_group(self, rank: int) -> tuple[int, ...]:
        """Return the workers with the same part of the model as ``rank``, by batch rank. They run different samples."""
        self._check(rank)
        inner = self.tensor * self.pipeline
        return tuple(range(rank % inner, self.workers, inner))

    def speaks(self, rank: int) -> bool:
        """Return whether worker ``rank`` speaks for its samples: it alone of their workers has the loss.

        It is the first worker along the tensor axis in the last stage of the pipeline.
        """
        self._check(rank)
        slower, tensor = divmod(rank, self.tensor)
        return tensor == 0 and slower % self.pipeline == self.pipeline - 1

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Return all groups along ``axis``; every worker is in one of them."""
        return tuple(sorted({self.group(axis, rank) for rank in range(self.workers)}))

    def fitted(self, workers: int) -> Mesh | None:
        """Return as many whole replicas of this kind as ``workers`` can hold; None where not even one fits."""
        data = workers // self.replica
        return replace(self, data=data) if data else None

    def __str__(self) -> str:
        """Return the text that ``parse`` reads: "data=2,tensor=2"; axes of one worker are left out."""
        return ",".join(f"{axis}={self.size(axis)}" for axis in get_args(Axis) if self.size(axis) > 1) or "data=1"

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Return the mesh that ``--mesh`` names: "data=2,shard=2,tensor=1,pipeline=1".

        Axes that are left out have one worker.

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


# The names of mechanisms: "zero", "tensor+pipeline+sharded".

State = Literal["replicated", "zero", "sharded"]
Dividing = Literal["tensor", "pipeline"]
FOREIGN: Mapping[str, Axis] = MappingProxyType(
    {"fsdp2": "shard", "deepspeed": "shard", "fairscale": "shard", "horovod": "data"}
)
"""Mechanisms of other packages, and the axis that they lay workers along. None of them goes with another one."""
STAGED = ("deepspeed", "fairscale")
"""Those with a ZeRO stage to choose."""
_JOINED = (*get_args(State), *get_args(Dividing))
WORDS = (*_JOINED, *FOREIGN)
INSTALLED = Plugins("elastune.mechanisms", "mechanism")
"""Mechanisms of other packages, each a subclass of ``parallel.mechanisms.base.Mechanism``."""


@dataclass(frozen=True)
class MechanismName:
    """The parts of a mechanism's name.

    Attributes:
        state: Where parameters, gradients and optimizer state are. "replicated": whole on every worker. "zero": all but
            parameters divided. "sharded": all divided.
        tensor: Whether layers are divided.
        pipeline: Whether the model is cut into stages of layers.
        foreign: The one of ``FOREIGN`` or ``INSTALLED`` that does everything, or "".

    Example:
        >>> MechanismName.parse("tensor+zero").words
        ('zero', 'tensor')
    """

    state: State = "replicated"
    tensor: bool = False
    pipeline: bool = False
    foreign: str = ""

    @property
    def installed(self) -> bool:
        """Whether it is a mechanism that another package offers."""
        return bool(self.foreign) and self.foreign not in FOREIGN

    @property
    def words(self) -> tuple[str, ...]:
        """The single names that it joins, in a fixed order."""
        if self.foreign:
            return (self.foreign,)
        words = [word for word in get_args(Dividing) if getattr(self, word)]
        return (*words, self.state) if self.state != "replicated" or not words else tuple(words)

    @property
    def dividing(self) -> tuple[Axis, ...]:
        """The axes along which it may divide a replica; an installed mechanism refuses axes itself (its ``check``)."""
        if self.installed:
            return tuple(axis for axis in AXES if axis != "data")
        if self.foreign:
            return ("shard",) if FOREIGN[self.foreign] == "shard" else ()
        shards: tuple[Axis, ...] = () if self.state == "replicated" else ("shard",)
        return (*shards, *(axis for axis in get_args(Dividing) if getattr(self, axis)))

    def mesh(self, workers: int) -> Mesh:
        """Return the mesh with ``workers`` along the one axis that divides a replica; along data if no axis does.

        An installed mechanism has its workers along data, too, unless a mesh says otherwise.

        Raises:
            UserError: For several axes and several workers: ``--mesh`` must give the number along each axis.
        """
        axes = () if self.installed else self.dividing
        if len(axes) > 1 and workers > 1:
            fix = f"use --mesh, for example {','.join(f'{axis}=2' for axis in axes)}"
            raise UserError("a mechanism that divides along several axes needs a mesh", f"{self}, no mesh", fix)
        return Mesh(**{axes[0] if axes else "data": workers})

    def serving(self, mesh: Mesh) -> MechanismName:
        """Return this name, joined with what ``mesh`` needs.

        Parameters of a pipeline's stages are not divided (decision 11).
        """
        state, pipeline = self.state, self.pipeline or mesh.pipeline > 1
        if (state == "sharded" and pipeline) or (state == "replicated" and mesh.shard > 1):
            state = "zero"
        return MechanismName(state, self.tensor or mesh.tensor > 1, pipeline)

    def __str__(self) -> str:
        return "+".join(self.words)

    @classmethod
    def parse(cls, text: str) -> MechanismName:
        """Return what ``--mechanism`` names: single names, joined by "+" in any order.

        Raises:
            UserError: For an unknown name, a name that occurs twice, and names that do not go together.
        """
        words, text = [word.strip() for word in text.split("+")], text[:100]
        for word in words:
            if word not in WORDS and word not in INSTALLED.names():
                known = ", ".join([*WORDS, *INSTALLED.names()])
                raise UserError("mechanism must be known", repr(word[:100]), f"use one of {known}")
            if words.count(word) > 1:
                raise UserError("a mechanism is named once", text, f"leave out the second {word}")
        states = [state for state in get_args(State) if state in words]
        if len(states) > 1:
            rule = "a mechanism has one of replicated, zero and sharded"
            raise UserError(rule, text, f"leave out all but one of {', '.join(states)}")
        for word in words:
            if word not in _JOINED and len(words) > 1:
                raise UserError(f"{word} goes with no other mechanism", text, f"use {word} alone")
        if words[0] not in _JOINED:
            return cls(foreign=words[0])
        return cls(states[0] if states else "replicated", "tensor" in words, "pipeline" in words)

    @classmethod
    def minimal_for(cls, mesh: Mesh | None, virtual_tensor: int | None = None) -> MechanismName:
        """Return the least mechanism that can serve ``mesh``, with ``virtual_tensor`` blocks of divided layers."""
        mesh = mesh or Mesh()
        tensor = mesh.tensor > 1 or (virtual_tensor or 1) > 1
        return cls("zero" if mesh.shard > 1 else "replicated", tensor, mesh.pipeline > 1)
