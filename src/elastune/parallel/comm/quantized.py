"""Sums over slots whose numbers travel rounded to fewer bytes, and the codecs that round them.

The sums are lossy, but have the same bits for any number of workers where that is required.
Each slot is then encoded by itself. Chunk c of every slot goes to worker c, which decodes the chunks, adds them
along the canonical tree and returns the sum, encoded again. So every number is rounded twice, for any number of
workers: one worker alone rounds alike.
A block of a codec lies within one tensor, because numbers of two tensors differ too much for one scale. It lies within
one chunk, so its borders do not depend on the workers.
If the bits may depend on the workers, each worker (or host) first sums its own slots and then encodes the sum. The
bytes then do not grow with the number of slots.
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

BLOCK = 256
"""Numbers that share a scale."""


class EncodedReducer(Reducer[Bucket]):
    """As ``parallel.comm.exact.ExactReducer``, but the tensors that have a codec travel encoded.

    Args:
        like: See ``ExactReducer``, as for ``num_slots``, ``group`` and ``hold``.
        codecs: The codec of each encoded tensor, by its place in ``like``.
        by_slot: Encode slot by slot, so that the bits do not depend on the workers. If False, each worker puts the sum
            of its slots into one of them.
    """

    def __init__(
        self,
        like: Sequence[torch.Tensor],
        num_slots: int,
        group: Group,
        codecs: Mapping[int, Codec],
        *,
        by_slot: bool = True,
        hold: bool = False,
    ) -> None:
        buckets: list[Bucket] = []
        bucket_slots = num_slots if by_slot else None
        for codec in dict.fromkeys(codecs.values()):
            places = [i for i, other in codecs.items() if other == codec]
            for members in _planned(like, places):
                buckets.append(EncodedBucket(members, like, bucket_slots, group, codec, hold=hold))
        for members in _planned(like, [i for i in range(len(like)) if i not in codecs]):
            buckets.append(ExactBucket(members, like, num_slots, group, hold=hold))
        super().__init__(buckets, group)


def _planned(like: Sequence[torch.Tensor], places: Sequence[int]) -> list[list[int]]:
    """Plan buckets of the tensors at ``places``."""
    return [[places[i] for i in members] for members in plan([like[place] for place in places])]


class EncodedBucket(Bucket):
    """One bucket whose numbers travel encoded, from each worker to each, whatever the topology.

    Slots without a ``put`` count as zero. ``num_slots`` is None if each worker puts one vector, in any slot. If
    several workers run on each of several hosts, the workers of a host then first add their vectors, unrounded. Each
    worker exchanges one piece of that sum with the other hosts.
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
        self._slot_vector = torch.zeros(self._padded, dtype=self._dtype, device=self._device)  # padding stays zero
        self._views = dict(zip(members, self._unpadded(self._slot_vector), strict=True))
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
        self._chunk = -(-self._padded // pieces) * self._codec.multiple  # elements that each worker adds up
        self.begin()

    def put(self, index: int, value: torch.Tensor | None) -> bool:
        self._missing.remove(index)
        if value is None:
            self._views[index].zero_()
        else:
            self._views[index].copy_(value)
        return not self._missing

    def _unpadded(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The bucket's tensors, cut from a vector in which each tensor is padded to whole blocks."""
        lengths = [length for pair in zip(self._sizes, self._padding, strict=True) for length in pair]
        parts = flat[: self._padded].split(lengths)[::2]
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    @property
    def slot_values(self) -> torch.Tensor:
        return torch.cat([view.reshape(-1) for view in self._views.values()])

    def end_slot(self, slot: int) -> None:
        assert not self._missing
        if self._within is None:
            self._rows[slot if self._num_slots else self._group.rank] = self._encoded(self._slot_vector)
        self._missing = set(self.members)

    def _encoded(self, flat: torch.Tensor) -> torch.Tensor:
        """A row of bytes for each worker of the group that exchanges encoded numbers."""
        size = self._across.size
        filled = F.pad(flat.float(), (0, size * self._chunk - len(flat)))
        return self._codec.encode(filled.view(size, self._chunk)).to(self._group.wire)

    # Memory is new in each step: a broken step may still write to it.

    def launch(self) -> None:
        self.launched = True
        if self._within is None:
            self._exchange(self._rows)
            self._rows = {}
            return
        piece = self._across.size * self._chunk
        flat = F.pad(self._slot_vector.float(), (0, self._within.size * piece - self._padded)).to(self._group.wire)
        self._summands = torch.empty_like(flat)
        equal = [piece] * self._within.size
        self._work = self._within.all_to_all(self._summands, flat, equal, equal)

    def _enter(self) -> None:
        """This worker's piece has arrived from its whole host: add it up, and send it to the other hosts."""
        assert self._within is not None
        self._work.wait()
        rows = self._summands.view(self._within.size, -1)
        total = tree_sum([(range(i, i + 1), row) for i, row in enumerate(rows)], len(rows), torch.add)
        self._exchange({self._across.rank: self._encoded(total)})

    def _exchange(self, rows: dict[int, torch.Tensor]) -> None:
        """Send each worker its chunk of this worker's ``rows`` (by slot)."""
        group = self._across
        run = self._runs[group.rank]
        for slot in run:
            if slot not in rows:
                rows[slot] = self._encoded(torch.zeros_like(self._slot_vector))
        sent = torch.stack([rows[slot] for slot in run], dim=1)  # by worker, then by slot
        length = sent.shape[2]
        if group.size == 1:
            self._received = sent[0]
            return
        self._received = sent.new_empty(sum(map(len, self._runs)), length)
        out_sizes, sizes = [len(slots) * length for slots in self._runs], [len(run) * length] * group.size
        self._work = group.all_to_all(self._received.view(-1), sent.view(-1), out_sizes, sizes)

    def combine(self) -> None:
        self.combined += 1
        self._legs[self.combined - 1]()

    def _add_up(self) -> None:
        """This worker's chunk of every slot has arrived: add it up, and send the sum to all."""
        if self._across.size > 1:
            self._work.wait()
        rows = range(len(self._received))
        # The fold keeps few decoded rows at a time.
        fold: Fold[torch.Tensor] = Fold(rows, len(rows), lambda a, b: a.add_(b))
        for i in rows:
            fold.push(i, self._codec.decode(self._received[i : i + 1]))
        ((_, total),) = fold.parts
        encoded = self._codec.encode(total)
        self._received = encoded
        if self._across.size > 1:
            self._received = encoded.new_empty(self._across.size, encoded.shape[1])
            self._work = self._across.all_gather(self._received.view(-1), encoded.view(-1))

    def _leave(self) -> None:
        """The sum of this worker's piece has arrived: send it to the workers of this host."""
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


# --- codecs -----------------------------------------------------------------------------------------------------------


class Codec(ABC):
    """How rows of float32 travel as fewer bytes.

    The decoded numbers depend on the bytes alone, so they are equal on every worker. A number that is not finite never
    decodes to a finite one.

    Example::

        codec = Blocks()
        rows = codec.decode(codec.encode(torch.randn(2, 512)))  # off by half a scale at most
    """

    multiple: int = 1
    """The length of a row must be a multiple of it."""

    @abstractmethod
    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Each row as bytes: one row of uint8 for each row."""

    @abstractmethod
    def decode(self, data: torch.Tensor) -> torch.Tensor:
        """The rows that ``data`` encodes, as float32."""


@dataclass(frozen=True)
class Half(Codec):
    """As numbers of a dtype of two bytes."""

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
    """As one byte or less for a number, and one scale for a block: its largest absolute value over ``largest``.

    A block with a number that is not finite decodes to NaN.
    """

    multiple: int = BLOCK
    largest: ClassVar[float]
    block_bytes: ClassVar[int] = BLOCK
    shrinks: ClassVar[float] = 1.0

    @abstractmethod
    def _bytes(self, steps: torch.Tensor) -> torch.Tensor:
        """Numbers of up to ``largest`` as ``block_bytes`` for each block, of any dtype."""

    @abstractmethod
    def _numbers(self, data: torch.Tensor) -> torch.Tensor:
        """The numbers that ``data`` encodes, as float32, before scaling."""

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        blocks = rows.float().unflatten(1, (-1, BLOCK))
        scales = blocks.abs().amax(2, keepdim=True) * (1 / self.largest)  # a GPU and a CPU divide to different bits
        steps = torch.where(scales > 0, blocks / scales, 0.0)
        finite = torch.nan_to_num(steps, 0.0, 0.0, 0.0)  # the scale carries the rest
        bytes_ = self._bytes(finite.clamp(-self.largest, self.largest).flatten(1))
        sent = scales.flatten(1) * self.shrinks
        return torch.cat([sent.contiguous().view(torch.uint8), bytes_.view(torch.uint8)], 1)

    def decode(self, data: torch.Tensor) -> torch.Tensor:
        count = data.shape[1] // (self.block_bytes + 4)
        scales = data[:, : 4 * count].flatten().view(torch.float32).view(len(data), count)
        blocks = self._numbers(data[:, 4 * count :].contiguous()).unflatten(1, (count, BLOCK))
        scaled: torch.Tensor = blocks * torch.where(scales.isfinite(), scales, torch.nan).unsqueeze(2)
        return scaled.flatten(1)


@dataclass(frozen=True)
class Blocks(Scaled):
    """As whole numbers of one signed byte. A decoded number is off by half a scale at most."""

    largest: ClassVar[float] = 127.0

    def _bytes(self, steps: torch.Tensor) -> torch.Tensor:
        return steps.round().to(torch.int8)

    def _numbers(self, data: torch.Tensor) -> torch.Tensor:
        return data.view(torch.int8).float()


@dataclass(frozen=True)
class HalfBytes(Scaled):
    """As whole numbers of half a byte, -7 to 7; the first half of a block lies in the low halves of its bytes."""

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

    For changes of numbers such as second moments, which span decades, are never negative, and are divisors. A decoded
    number is never larger than the original, so no change overshoots. It is smaller by a fifth at most, unless it is
    below a 900 millionth of the largest of its block. It is smaller by a millionth at least, so that sums and means
    may round.
    """

    largest: ClassVar[float] = 57_344.0
    shrinks: ClassVar[float] = 1 - 2e-6

    def _bytes(self, steps: torch.Tensor) -> torch.Tensor:
        nearest = steps.to(torch.float8_e5m2)
        # The factor keeps the largest number of a block, even if it was rounded up a little.
        over = nearest.float().abs() > steps.abs() * (1 + 5e-7)
        # One bit pattern less is the next smaller number, of either sign.
        shorter: torch.Tensor = nearest.view(torch.uint8) - over.to(torch.uint8)
        return shorter

    def _numbers(self, data: torch.Tensor) -> torch.Tensor:
        return data.view(torch.float8_e5m2).float()
