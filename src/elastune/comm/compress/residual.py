"""Error feedback: what a worker has not sent of its gradient in one step, it adds to its gradient of the next."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastune.comm.flat import FlatBucket
from elastune.comm.group import Group


class ResidualBucket(FlatBucket):
    """A bucket that sends a part of what it was given, and owes the rest: its *residual*.

    It becomes another one when a step completes, and stays as it is when one is lost. (Source: Karimireddy et al., ICML
    2019, arXiv 1901.09847.)
    """

    def __init__(self, members: list[int], like: Sequence[torch.Tensor], group: Group, *, hold: bool) -> None:
        super().__init__(members, like, group, hold=hold)
        self._residual: torch.Tensor | None = None  # float32; None: nothing is owed
        self._next: torch.Tensor | None = None  # once this step completes

    def begin(self) -> None:
        super().begin()
        self._next = None

    def _due(self) -> torch.Tensor:
        """This step's gradient and what is owed of earlier ones: float32, and the caller's to change."""
        due = self.here.to(torch.float32, copy=True)
        return due if self._residual is None else due.add_(self._residual)

    def complete(self) -> None:
        super().complete()
        self._residual, self._next = self._next, None

    @property
    def owed(self) -> torch.Tensor:
        """The residual, flat."""
        if self._residual is None:
            return torch.zeros(self._numel, dtype=torch.float32, device=self._device)
        return self._residual

    def owe(self, more: torch.Tensor) -> None:
        """Take over what another worker owed."""
        self._residual = self.owed + more.to(self._device)

    def pay(self) -> dict[int, torch.Tensor]:
        """By member, what was owed; nothing is from here on."""
        residual, self._residual = self._residual, None
        return {} if residual is None else self._cut(residual)

    def owes(self, index: int) -> bool:
        """Whether anything of member ``index`` is owed."""
        return self._residual is not None and bool(self._cut(self._residual)[index].any())
