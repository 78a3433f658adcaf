"""What a crew asks of the training it belongs to: results to hand on, state to hand over."""

from __future__ import annotations

from typing import Protocol

import torch

from elastune.comm.group import Group

Packed = tuple[bytes, list[torch.Tensor]]
"""A state: a description (JSON), and its tensors on the CPU in the order that the description names."""


class StateOwner(Protocol):
    """One worker's training, as its crew sees it."""

    @property
    def step(self) -> int:
        """Completed steps."""
        ...

    @property
    def dirty(self) -> bool:
        """Since its last step it has done what cannot be repeated without the workers it was done with."""
        ...

    @property
    def snapshot_step(self) -> int:
        """The step of the snapshot in memory, -1 without one."""
        ...

    def regroup(self, group: Group) -> None:
        """Reduce on ``group`` from now on."""
        ...

    def held(self) -> list[torch.Tensor]:
        """The complete result of the newest completed step."""
        ...

    def held_like(self) -> list[torch.Tensor]:
        """Room for such a result."""
        ...

    def take_held(self, result: list[torch.Tensor]) -> None:
        """Complete the step at hand by the result that another worker has."""
        ...

    def pack(self) -> Packed:
        """The state at this step boundary."""
        ...

    def unpack(self, packed: Packed) -> None:
        """Take over a state."""
        ...

    def snapshot(self) -> Packed:
        """The snapshot in memory."""
        ...

    def keep_snapshot(self, packed: Packed) -> None:
        """Hold this snapshot instead."""
        ...
