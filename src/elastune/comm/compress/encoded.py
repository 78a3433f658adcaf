"""Sums over slots whose numbers travel encoded: lossy, and the same bits for any number of workers where asked for.

Each slot is encoded by itself, on the worker that has it. Chunk c of every slot goes to worker c, which decodes them,
adds them up along the canonical tree and returns the sum, encoded again, to all. So every number is rounded twice,
however many workers there are; one worker alone does the same, with nothing to send. Blocks of a codec span neither two
tensors, whose sizes differ too much for one scale, nor two chunks, so their borders do not depend on the workers. Where
the number of workers may show, each of them (or each host) adds up what it has before it is encoded, so that bytes do
not grow with slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from elastune.comm.compress.codecs import Codec
from elastune.comm.exact import ExactBucket
from elastune.comm.group import Group
from elastune.comm.reducer import Bucket, Reducer, plan
from elastune.core.slots import Fold, cut, tree_sum


class EncodedBucket(Bucket):
    """From each to each, whatever the topology. Slots that nobody ``put`` count as zero.

    ``num_slots``: None, if each worker puts one vector, in whatever slot. Where several workers are on each of several
    hosts those of a host add up theirs first then, unrounded, and one piece of that a worker travels among hosts.
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
        self._padding = [-size % codec.multiple for size in self._sizes]
        self._padded = sum(self._sizes) + sum(self._padding)
        self._leaf = torch.zeros(self._padded, dtype=self._dtype, device=self._device)  # padding stays zero
        self._views = dict(zip(members, self._unpadded(self._leaf), strict=True))
        self.regroup(group)

    def begin(self) -> None:
        self.launched, self.combined = False, 0
        self._missing = set(self.members)
        self._rows: dict[int, torch.Tensor] = {}

    def regroup(self, group: Group) -> None:
        self._group = group
        climbs = self._num_slots is None and len(group.levels) == 2
        self._within: Group | None = group.levels[0] if climbs else None
        self._across = group.levels[1] if climbs else group
        self._legs = [self._enter, self._add_up, self._leave] if climbs else [self._add_up]
        self.rounds = len(self._legs)
        self._runs = cut(self._num_slots or self._across.size, self._across.size)
        pieces = group.size * self._codec.multiple
        self._chunk = -(-self._padded // pieces) * self._codec.multiple  # that a worker adds up
        self.begin()

    def put(self, index: int, value: torch.Tensor | None) -> bool:
        self._missing.remove(index)
        if value is None:
            self._views[index].zero_()
        else:
            self._views[index].copy_(value)
        return not self._missing

    def _unpadded(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The bucket's tensors, of one whose tensors are padded to whole blocks."""
        lengths = [length for pair in zip(self._sizes, self._padding, strict=True) for length in pair]
        parts = flat[: self._padded].split(lengths)[::2]
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    @property
    def here(self) -> torch.Tensor:
        return torch.cat([view.reshape(-1) for view in self._views.values()])

    def end_slot(self, slot: int) -> None:
        assert not self._missing
        if self._within is None:
            self._rows[slot if self._num_slots else self._group.rank] = self._encoded(self._leaf)
        self._missing = set(self.members)

    def _encoded(self, flat: torch.Tensor) -> torch.Tensor:
        """A row of bytes for each worker of those that meet encoded."""
        size = self._across.size
        filled = F.pad(flat.float(), (0, size * self._chunk - len(flat)))
        return self._codec.encode(filled.view(size, self._chunk)).to(self._group.wire)

    # Memory is new in each step: a step that broke may still write to it.

    def launch(self) -> None:
        self.launched = True
        if self._within is None:
            self._exchange(self._rows)
            self._rows = {}
            return
        piece = self._across.size * self._chunk
        flat = F.pad(self._leaf.float(), (0, self._within.size * piece - self._padded)).to(self._group.wire)
        self._summands = torch.empty_like(flat)
        equal = [piece] * self._within.size
        self._work = self._within.all_to_all(self._summands, flat, equal, equal)

    def _enter(self) -> None:
        """This worker's piece is here from its whole host."""
        assert self._within is not None
        self._work.wait()
        rows = self._summands.view(self._within.size, -1)
        total = tree_sum([(range(i, i + 1), row) for i, row in enumerate(rows)], len(rows), torch.add)
        self._exchange({self._across.rank: self._encoded(total)})

    def _exchange(self, rows: dict[int, torch.Tensor]) -> None:
        """Send each worker its chunk of this one's ``rows``, by slot."""
        group = self._across
        run = self._runs[group.rank]
        for slot in run:
            if slot not in rows:
                rows[slot] = self._encoded(torch.zeros_like(self._leaf))
        sent = torch.stack([rows[slot] for slot in run], dim=1)  # by worker, then by slot
        length = sent.shape[2]
        if group.size == 1:
            self._received = sent[0]
            return
        self._received = sent.new_empty(sum(map(len, self._runs)), length)
        came, went = [len(each) * length for each in self._runs], [len(run) * length] * group.size
        self._work = group.all_to_all(self._received.view(-1), sent.view(-1), came, went)

    def combine(self) -> None:
        self.combined += 1
        self._legs[self.combined - 1]()

    def _add_up(self) -> None:
        """This worker's chunk of every slot is here: add it up, and send the sum to all."""
        if self._across.size > 1:
            self._work.wait()
        rows = range(len(self._received))
        fold: Fold[torch.Tensor] = Fold(rows, len(rows), lambda a, b: a.add_(b))  # few are decoded at a time
        for i in rows:
            fold.push(i, self._codec.decode(self._received[i : i + 1]))
        ((_, total),) = fold.parts
        encoded = self._codec.encode(total)
        self._received = encoded
        if self._across.size > 1:
            self._received = encoded.new_empty(self._across.size, encoded.shape[1])
            self._work = self._across.all_gather(self._received.view(-1), encoded.view(-1))

    def _leave(self) -> None:
        """The sum of this worker's piece is here: give it to the host."""
        assert self._within is not None
        self._work.wait()
        piece = self._codec.decode(self._received).view(-1)
        self._summands = piece.new_empty(self._within.size * len(piece))
        self._work = self._within.all_gather(self._summands, piece)

    def wait(self) -> None:
        if self._group.size > 1:
            self._work.wait()
        sums = self._codec.decode(self._received).view(-1) if self._within is None else self._summands
        self._sets[self._turn][: self._numel].copy_(torch.cat([part.reshape(-1) for part in self._unpadded(sums)]))


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
