"""Sums of the largest numbers of each worker's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch

from elastune.comm.compress.residual import ResidualBucket
from elastune.comm.group import Group


class TopKBucket(ResidualBucket):
    """Each worker sends its largest numbers and their places to all, which add them up in the order of ranks.

    Each sends 8 x ``ratio`` bytes for every number to each other worker: with many workers that is more than an
    all-reduce takes.
    """

    def __init__(
        self, members: list[int], like: Sequence[torch.Tensor], group: Group, ratio: float, *, hold: bool
    ) -> None:
        super().__init__(members, like, group, hold=hold)
        self._count = min(self._numel, ceil(ratio * self._numel))  # 0 of a bucket whose tensors are all empty
        self._received = torch.empty(0, dtype=torch.uint8)

    def launch(self) -> None:
        self.launched = True
        due, group = self._due(), self._group
        places = due.abs().topk(self._count, sorted=False).indices
        values = due[places]
        due[places] = 0.0
        self._next = due
        sent = torch.cat([places.to(torch.int32).view(torch.uint8), values.view(torch.uint8)]).to(group.wire)
        self._received = torch.empty(group.size * len(sent), dtype=torch.uint8, device=group.wire)
        self._work = group.all_gather(self._received, sent)

    def wait(self) -> None:
        super().wait()
        sums = torch.zeros(self._numel, dtype=torch.float32, device=self._received.device)
        for places, values in self._received.view(torch.int32).view(self._group.size, 2, self._count):
            sums[places.long()] += values.view(torch.float32)  # no place twice in one row
        self._sets[self._turn][: self._numel].copy_(sums)
