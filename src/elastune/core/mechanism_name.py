"""The names of mechanisms: "zero", "tensor+pipeline+sharded"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from elastune.core.errors import UserError
from elastune.core.mesh import Axis, Mesh

State = Literal["replicated", "zero", "sharded"]
Dividing = Literal["tensor", "pipeline"]
FOREIGN: Mapping[str, Axis] = MappingProxyType(
    {"fsdp2": "shard", "deepspeed": "shard", "fairscale": "shard", "horovod": "data"}
)
"""Mechanisms of other packages, and the axis that they lay workers along. None of them goes with another one."""
STAGED = ("deepspeed", "fairscale")
"""Those with a ZeRO stage to choose."""
WORDS = (*get_args(State), *get_args(Dividing), *FOREIGN)


@dataclass(frozen=True)
class MechanismName:
    """The parts of a mechanism's name.

    Attributes:
        state: Where parameters, gradients and optimizer state are: whole on every worker ("replicated"), all but
            parameters divided ("zero"), or all divided ("sharded").
        tensor: Whether layers are divided.
        pipeline: Whether the model is cut into stages of layers.
        foreign: The one of ``FOREIGN`` that does everything, or "".
    """

    state: State = "replicated"
    tensor: bool = False
    pipeline: bool = False
    foreign: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """The single names that it joins, in a fixed order."""
        if self.foreign:
            return (self.foreign,)
        found = [word for word in get_args(Dividing) if getattr(self, word)]
        return (*found, self.state) if self.state != "replicated" or not found else tuple(found)

    @property
    def dividing(self) -> tuple[Axis, ...]:
        """The axes along which it divides a replica."""
        if self.foreign:
            return ("shard",) if FOREIGN[self.foreign] == "shard" else ()
        shards: tuple[Axis, ...] = () if self.state == "replicated" else ("shard",)
        return (*shards, *(axis for axis in get_args(Dividing) if getattr(self, axis)))

    def mesh(self, workers: int) -> Mesh:
        """Return the mesh with ``workers`` along the one axis that it divides a replica along, or else along data.

        Raises:
            UserError: Where it divides along several axes and there are several workers, since nothing says how many
                are along which axis.
        """
        axes = self.dividing
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
            if word not in WORDS:
                raise UserError("mechanism must be known", repr(word[:100]), f"use one of {', '.join(WORDS)}")
            if words.count(word) > 1:
                raise UserError("a mechanism is named once", text, f"leave out the second {word}")
        states = [state for state in get_args(State) if state in words]
        if len(states) > 1:
            raise UserError("state lies in one way", text, f"leave out all but one of {', '.join(states)}")
        for word in words:
            if word in FOREIGN and len(words) > 1:
                raise UserError(f"{word} goes with no other mechanism", text, f"use {word} alone")
        if words[0] in FOREIGN:
            return cls(foreign=words[0])
        return cls(states[0] if states else "replicated", "tensor" in words, "pipeline" in words)

    @classmethod
    def least_for(cls, mesh: Mesh | None, virtual_tensor: int | None = None) -> MechanismName:
        """Return the least mechanism that can serve ``mesh``, with ``virtual_tensor`` blocks of divided layers."""
        mesh = mesh or Mesh()
        tensor = mesh.tensor > 1 or (virtual_tensor or 1) > 1
        return cls("zero" if mesh.shard > 1 else "replicated", tensor, mesh.pipeline > 1)
