"""Sums over slots whose numbers travel rounded to fewer bytes, and the codecs that round them.

The sums are lossy, but have the same bits for any number of workers where that is required.
Each slot is then encoded by itself. Chunk c of every slot goes to worker c, which decodes the chunks, adds them
along the canonical tree and returns the sum, encoded again. One worker alone rounds just the same.
A block of a codec spans neither two tensors nor two chunks, so its borders do not depend on the workers.
Where bits may depend on the workers, each worker (or host) sums what it has before it encodes.
A codec returns numbers that are not finite as they were, never as others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from elastune.core.slots import Fold, cut, tree_sum
from elastune.parallel.comm.exact import ExactBucket
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.reducer import Bucket, Reducer, plan

# [codecs] Rows of numbers as fewer bytes, and back. Pure; not finite numbers come back as such, never as others.

BLOCK = 256
"""Numbers that share a scale."""


class Codec(ABC):
    """How rows of float32 travel. What is decoded is a function of the bytes alone: equal on every worker."""

    multiple: int = 1
    """Rows have a multiple of so many numbers."""

    @abstractmethod
    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Each row as bytes: uint8, one row a row."""

    @abstractmethod
    def decode(self, data: torch.Tensor) -> torch.Tensor:
        """The rows that these bytes stand for, as float32."""


@dataclass(frozen=True)
class Half(Codec):
    """As numbers of a type of two bytes."""

    dtype: torch.dtype

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, data: torch.Tensor) -> torch.Tensor:
        return data.view(self.dtype).float()


@dataclass(frozen=True)
class ShorterHalf(Half):
    """As bfloat16, rounded towards zero: see ``ShorterFloat8``."""

    dtype: torch.dtype = torch.bfloat16

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return super().encode((rows.float().view(torch.int32) & -65_536).view(torch.float32))


@dataclass(frozen=True)
class Scaled(Codec):
    """As one byte a number or less, times the scale of its block: the largest of its absolute values over ``largest``.

    A block with a number that is not finite comes back as NaN.
    """

    multiple: int = BLOCK
    largest: ClassVar[float]
    block_bytes: ClassVar[int] = BLOCK
    shrinks: ClassVar[float] = 1.0

    @abstractmethod
    def _bytes(self, steps: torch.Tensor) -> torch.Tensor:
        """Numbers of up to ``largest``, block by block as ``block_bytes`` of whatever type."""

    @abstractmethod
    def _numbers(self, data: torch.Tensor) -> torch.Tensor:
        """What these bytes stand for, as float32."""

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        blocks = rows.float().unflatten(1, (-1, BLOCK))
        scales = blocks.abs().amax(2, keepdim=True) * (1 / self.largest)  # a GPU would divide otherwise than a CPU
        steps = torch.where(scales > 0, blocks / scales, 0.0)
        finite = torch.nan_to_num(steps, 0.0, 0.0, 0.0)  # the scale tells of what is not
        bytes_ = self._bytes(finite.clamp(-self.largest, self.largest).flatten(1))
        sent = scales.flatten(1) * self.shrinks
        return torch.cat([sent.contiguous().view(torch.uint8), bytes_.view(torch.uint8)], 1)

    def decode(self, data: torch.Tensor) -> torch.Tensor:
        count = data.shape[1] // (self.block_bytes + 4)
        scales = data[:, : 4 * count].flatten().view(torch.float32).view(len(data), count)
        blocks = self._numbers(data[:, 4 * count :].contiguous()).unflatten(1, (count, BLOCK))
        found: torch.Tensor = blocks * torch.where(scales.isfinite(), scales, torch.nan).unsqueeze(2)
        return found.flatten(1)


@dataclass(frozen=True)
class Blocks(Scaled):
    """As whole numbers of one signed byte. What comes back is off by half a scale at most."""

    largest: ClassVar[float] = 127.0

    def _bytes(self, steps: torch.Tensor) -> torch.Tensor:
        return steps.round().to(torch.int8)

    def _numbers(self, data: torch.Tensor) -> torch.Tensor:
        return data.view(torch.int8).float()


@dataclass(frozen=True)
class HalfBytes(Scaled):
    """As whole numbers of half a byte, -7 to 7; the first half of a block in the low halves of its bytes."""

    largest: ClassVar[float] = 7.0
    block_bytes: ClassVar[int] = BLOCK // 2

    def _bytes(self, steps: torch.Tensor) -> torch.Tensor:
        low, high = (steps.round() + 8).to(torch.uint8).unflatten(1, (-1, 2, BLOCK // 2)).unbind(2)
        pairs: torch.Tensor = low + 16 * high
        return pairs.flatten(1)

    def _numbers(self, data: torch.Tensor) -> torch.Tensor:
        pairs = data.unflatten(1, (-1, 1, BLOCK // 2))
        return torch.cat([pairs % 16, pairs // 16], 2).flatten(1).float() - 8


@dataclass(frozen=True)
class ShorterFloat8(Scaled):
    """As floating-point numbers of one byte (e5m2: Micikevicius et al., arXiv 2209.05433), rounded towards zero.

    For the ways of numbers that must stay what they are, such as second moments, which span decades, are never negative
    and are divided by: what comes back is never larger than what was sent, so no number is taken past where it went.
    It is smaller by a fifth at most, where it is no less than a 900 millionth of the largest of its block, and by a
    millionth at least, so that sums and means may round.
    """

    largest: ClassVar[float] = 57_344.0
    shrinks: ClassVar[float] = 1 - 2e-6

    def _bytes(self, steps: torch.Tensor) -> torch.Tensor:
        nearest = steps.to(torch.float8_e5m2)
        over = nearest.float().abs() > steps.abs() * (1 + 5e-7)  # the largest of a block is to stay, however it rounded
        shorter: torch.Tensor = nearest.view(torch.uint8) - over.to(torch.uint8)  # the next one, of either sign
        return shorter

    def _numbers(self, data: torch.Tensor) -> torch.Tensor:
        return data.view(torch.float8_e5m2).float()


# [encoded] Sums over slots whose numbers travel encoded: lossy, and the same bits for any number of workers where asked for.
#
# Each slot is encoded by itself, on the worker that has it. Chunk c of every slot goes to worker c, which decodes them,
# adds them up along the canonical tree and returns the sum, encoded again, to all. So every number is rounded twice,
# however many workers there are; one worker alone does the same, with nothing to send. Blocks of a codec span neither two
# tensors, whose sizes differ too much for one scale, nor two chunks, so their borders do not depend on the workers. Where
# the number of workers may show, each of them (or each host) adds up what it has before it is encoded, so that bytes do
# not grow with slots.


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
