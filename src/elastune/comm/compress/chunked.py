"""Sums of encoded gradients: each worker decodes and adds up one chunk of a bucket, and sends its sum encoded again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from elastune.comm.compress.codecs import Codec
from elastune.comm.flat import FlatBucket
from elastune.comm.group import Group


class ChunkedBucket(FlatBucket):
    """Adds in float32, in the order of ranks; encoded numbers are never added up, so that many workers round no more
    than two do. All decode the same bytes to the same sums.
    """

    rounds = 1

    def __init__(
        self, members: list[int], like: Sequence[torch.Tensor], group: Group, codec: Codec, *, hold: bool
    ) -> None:
        super().__init__(members, like, group, hold=hold)
        self._codec = codec
        self._received = torch.empty(0, dtype=torch.uint8)  # new in each step: a step that broke may still write to it

    def launch(self) -> None:
        self.launched = True
        group, codec = self._group, self._codec
        chunk = -(-self._numel // (group.size * codec.multiple)) * codec.multiple
        rows = F.pad(self.here.float(), (0, group.size * chunk - self._numel)).view(group.size, chunk)
        sent = codec.encode(rows).to(group.wire)
        sizes = [sent.shape[1]] * group.size
        self._received = torch.empty_like(sent)
        self._work = group.all_to_all(self._received.view(-1), sent.view(-1), sizes, sizes)

    def combine(self) -> None:
        """This worker's chunk is here from all: add it up, and send it to all."""
        assert self._work is not None
        self._work.wait()
        total = self._codec.encode(self._codec.decode(self._received).sum(0, keepdim=True)).view(-1)
        self._received = torch.empty_like(self._received)
        self._work = self._group.all_gather(self._received.view(-1), total)

    def wait(self) -> None:
        super().wait()
        sums = self._codec.decode(self._received).view(-1)[: self._numel]
        self._sets[self._turn][: self._numel].copy_(sums)
