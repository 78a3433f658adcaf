"""What a worker group asks of the training it belongs to: results for other workers, and the state for joiners."""

from __future__ import annotations

from typing import Protocol

import torch

from elastune.comm.comms import Comms
from elastune.comm.group import Group
from elastune.core.layout import Unrecoverable
from elastune.elastic.protocol.view import View
from elastune.elastic.worker.open_round import OpenRound

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
    def round_steps(self) -> int:
        """Steps in the newest round that this worker has completed."""
        ...

    @property
    def open_round(self) -> OpenRound:
        """The round that it has begun and not completed, where that can end without some of its learners."""
        ...

    @property
    def snapshot_step(self) -> int:
        """The step of the snapshot in memory, -1 without one."""
        ...

    def regroup(self, comms: Comms, over: Group | None) -> None:
        """Reduce on ``comms`` from now on; what workers hold moves between them, ``over`` the same and such as leave.

        Raises ``Unrecoverable`` on every worker, where nobody has a piece of the state.
        """
        ...

    def climb(self, comms: Comms) -> None:
        """From the next step on reduce on ``comms``, the same workers, by the levels that their group has now."""
        ...

    def hand_over(self, group: Group, view: View) -> None:
        """As a worker that leaves: what it holds to those of ``view``, which ``group`` begins with."""
        ...

    def place_snapshot(self, comms: Comms) -> None:
        """Bring the snapshots' pieces to where they belong among ``comms``. Raises ``Unrecoverable`` as ``regroup``."""
        ...

    def tell_lost(self, error: Unrecoverable) -> None:
        """Write down that state was lost."""
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
