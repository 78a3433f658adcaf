"""Sums over slots whose numbers travel encoded: lossy, and the same bits for any number of workers where asked for.

Each slot is encoded by itself, on the worker that has it. Chunk c of every slot goes to worker c, which decodes them,
adds them up along the canonical tree and returns the sum, encoded again, to all. So every number is rounded twice,
however many workers there are; one worker alone does the same, with nothing to send. Blocks of a codec never span two
chunks, so their borders do not depend on the workers either. Where the number of workers may show, each of them adds
up what it has before it encodes that, so that bytes do not grow with slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from elastune.comm.compress.codecs import Codec
from elastune.comm.exact import ExactBucket
from elastune.comm.group import Group
from elastune.comm.reducer import Bucket, Reducer, plan
from elastune.core.slots import cut, tree_sum


class EncodedBucket(Bucket):
    """From each to each, whatever the topology. Slots that nobody ``put`` count as zero.

    ``num_slots``: None, if each worker puts one vector, in whatever slot.
    """

    def __init__(
        self,
        members: list[int],
        like: Sequence[torch.Tensor],
        num_slots: int | None,
        group: Group,
        codec: Codec,
        *,
        hold: bool,
    ) -> None:
        super().__init__(members, like, group, hold=hold)
        self._num_slots, self._codec = num_slots, codec
        self._leaf = torch.zeros(self._numel, dtype=self._dtype, device=self._device)
        self._views = self._cut(self._leaf)
        self._rows: dict[int, torch.Tensor] = {}
        self._received = torch.empty(0, dtype=torch.uint8)  # new in each step: a step that broke may still write to it
        self.regroup(group)

    def begin(self) -> None:
        self.launched = False
        self._missing = set(self.members)
        self._rows = {}

    def regroup(self, group: Group) -> None:
        self._group = group
        self._runs = cut(self._num_slots or group.size, group.size)
        self._chunk = -(-self._numel // (group.size * self._codec.multiple)) * self._codec.multiple
        self.begin()

    def put(self, index: int, value: torch.Tensor | None) -> bool:
        self._missing.remove(index)
        if value is None:
            self._views[index].zero_()
        else:
            self._views[index].copy_(value)
        return not self._missing

    @property
    def here(self) -> torch.Tensor:
        return self._leaf

    def end_slot(self, slot: int) -> None:
        assert not self._missing
        self._rows[slot if self._num_slots else self._group.rank] = self._encoded(self._leaf)
        self._missing = set(self.members)

    def _encoded(self, flat: torch.Tensor) -> torch.Tensor:
        """A row of bytes for each worker."""
        size = self._group.size
        padded = F.pad(flat.float(), (0, size * self._chunk - self._numel))
        return self._codec.encode(padded.view(size, self._chunk)).to(self._group.wire)

    def launch(self) -> None:
        self.launched = True
        group = self._group
        run = self._runs[group.rank]
        nothing = self._encoded(torch.zeros_like(self._leaf)) if any(slot not in self._rows for slot in run) else None
        rows = [self._rows.get(slot, nothing) for slot in run]
        sent = torch.stack([row for row in rows if row is not None], dim=1)  # by worker, then by slot
        length = sent.shape[2]
        if group.size == 1:
            self._received = sent[0]
            return
        self._received = sent.new_empty(sum(map(len, self._runs)), length)
        came, went = [len(each) * length for each in self._runs], [len(run) * length] * group.size
        self._work = group.all_to_all(self._received.view(-1), sent.view(-1), came, went)

    def combine(self) -> None:
        """This worker's chunk of every slot is here: add it up, and send the sum to all."""
        if self._group.size > 1:
            self._work.wait()
        rows = self._codec.decode(self._received)
        total = tree_sum([(range(i, i + 1), row) for i, row in enumerate(rows)], len(rows), torch.add)
        encoded = self._codec.encode(total.unsqueeze(0))
        self._received = encoded
        if self._group.size > 1:
            self._received = encoded.new_empty(self._group.size, encoded.shape[1])
            self._work = self._group.all_gather(self._received.view(-1), encoded.view(-1))

    def wait(self) -> None:
        if self._group.size > 1:
            self._work.wait()
        sums = self._codec.decode(self._received).view(-1)[: self._numel]
        self._sets[self._turn][: self._numel].copy_(sums)


class EncodedReducer(Reducer[Bucket]):
    """As ``comm.exact.ExactReducer``, but those of the tensors that ``codecs`` has travel encoded.

    ``each``: they are encoded slot by slot. Else each worker puts all that it has in one of its slots.
    """

    def __init__(
        self,
        like: Sequence[torch.Tensor],
        num_slots: int,
        group: Group,
        codecs: Mapping[int, Codec],
        *,
        each: bool = True,
        hold: bool = False,
    ) -> None:
        buckets: list[Bucket] = []
        apart = num_slots if each else None
        for codec in dict.fromkeys(codecs.values()):
            own = [i for i, other in codecs.items() if other == codec]
            for members in _planned(like, own):
                buckets.append(EncodedBucket(members, like, apart, group, codec, hold=hold))
        for members in _planned(like, [i for i in range(len(like)) if i not in codecs]):
            buckets.append(ExactBucket(members, like, num_slots, group, hold=hold))
        super().__init__(buckets, group)


def _planned(like: Sequence[torch.Tensor], places: Sequence[int]) -> list[list[int]]:
    """Buckets of some of the tensors."""
    return [[places[i] for i in members] for members in plan([like[place] for place in places])]
