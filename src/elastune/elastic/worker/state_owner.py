"""What a worker group asks of the training it belongs to: results for other workers, and the state for joiners."""

from __future__ import annotations

from typing import Protocol

import torch

from elastune.comm.comms import Comms

Packed = tuple[bytes, list[torch.Tensor]]
"""A state: a description (JSON), and its tensors on the CPU in the order that the description names."""


class StateOwner(Protocol):
    """One worker's training, as its group sees it."""

    @property
    def step(self) -> int:
        """Completed steps, with one whose sum is here and not applied yet."""
        ...

    @property
    def unrepeatable(self) -> bool:
        """Whether since its last step it has done what cannot be repeated without the workers it was done with."""
        ...

    @property
    def reducing(self) -> bool:
        """Whether it waits for a step's reduction; if not, the newest operation is a gather."""
        ...

    @property
    def snapshot_step(self) -> int:
        """The step of the snapshot in memory, -1 without one."""
        ...

    def regroup(self, comms: Comms) -> None:
        """Reduce on ``comms`` from now on."""
        ...

    def last_result(self) -> list[torch.Tensor]:
        """The complete result of the newest completed step."""
        ...

    def result_room(self) -> list[torch.Tensor]:
        """Room for such a result."""
        ...

    def adopt_result(self, result: list[torch.Tensor]) -> None:
        """Complete the open step by the result that another worker has."""
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
