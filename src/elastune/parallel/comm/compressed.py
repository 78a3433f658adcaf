"""Sums of gradients that travel as fewer bytes: rounded to short numbers, or compressed with error feedback.

The sums are lossy, but have the same bits for any number of workers where that is required. Each slot is then encoded
by itself. Chunk c of every slot goes to worker c, which decodes the chunks, adds them along the canonical tree and
returns the sum, encoded again. So every number is rounded twice, for any number of workers: one worker alone rounds
alike. A block of a codec lies within one tensor, because numbers of two tensors differ too much for one scale. It
lies within one chunk, so its borders do not depend on the workers. If the bits may depend on the workers, each worker
(or host) first sums its own slots and then encodes the sum. The bytes then do not grow with the number of slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F

from elastune.core.communication import BFloat16, Compression, Float16, Int8, PowerSgd, TopK
from elastune.core.slots import Fold, cut, tree_sum
from elastune.parallel.comm.exact import ExactBucket
from elastune.parallel.comm.group import Group, Work
from elastune.parallel.comm.reducer import Bucket, FlatBucket, Reducer, plan

# Sums over slots whose numbers travel rounded to fewer bytes, and the codecs that round them.

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

    def put(self, index: int, value: torch.Tensor | None, *, owned: bool = False) -> bool:
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


# Sums of compressed gradients: half precision, top-k and PowerSGD, with error feedback.
#
# Error feedback: a worker adds what it did not send in one step to its gradient of the next step. Only gradients are
# compressed. Counts, votes and statistics travel beside them as they are.


class CompressedReducer(Reducer[FlatBucket]):
    """As ``parallel.comm.reducer.FlatReducer``, but the first ``gradients`` tensors travel compressed by
    ``compression``.

    Error feedback keeps a residual on each worker. ``owed`` and ``owe`` move it to another worker; ``pay`` takes it
    out.
    """

    def __init__(
        self,
        like: Sequence[torch.Tensor],
        group: Group,
        gradients: int,
        compression: Compression,
        *,
        hold: bool = False,
    ) -> None:
        make = _maker(compression)
        compressed = [make(members, like, group, hold=hold) for members in plan(like[:gradients])]
        rest = [
            FlatBucket([i + gradients for i in members], like, group, hold=hold) for members in plan(like[gradients:])
        ]
        super().__init__([*compressed, *rest], group, gradients)
        self._owing = [bucket for bucket in compressed if isinstance(bucket, ResidualBucket)]

    # -- the residuals of this worker ---------------------------------------------------------------------------------

    @property
    def owed(self) -> list[torch.Tensor]:
        """The parts of its gradients that it has not sent yet; the same shapes on every worker."""
        return [bucket.owed for bucket in self._owing]

    def owe(self, more: Sequence[torch.Tensor]) -> None:
        """Take over ``owed`` of another worker."""
        for bucket, part in zip(self._owing, more, strict=True):
            bucket.owe(part)

    def owes(self, index: int) -> bool:
        """Whether this worker owes a part of tensor ``index``."""
        bucket = self._bucket_of[index]
        return isinstance(bucket, ResidualBucket) and bucket.owes(index)

    def pay(self) -> dict[int, torch.Tensor]:
        """Return all residuals, by tensor, for the caller to apply; the worker owes nothing from here on."""
        return {i: part for bucket in self._owing for i, part in bucket.pay().items()}

    @property
    def factors(self) -> dict[str, torch.Tensor]:
        """The start of PowerSGD's next power iterations: equal on all workers."""
        return {f"{n}.{i}": q for n, bucket in self._iterating for i, q in enumerate(bucket.factors)}

    def set_factors(self, factors: Mapping[str, torch.Tensor]) -> None:
        """Go on from ``factors``. Raises ``ValueError`` if they are of another model."""
        if factors.keys() != self.factors.keys():
            raise ValueError("factors of other matrices")
        for n, bucket in self._iterating:
            bucket.factors = [factors[f"{n}.{i}"] for i in range(len(bucket.factors))]

    @property
    def _iterating(self) -> list[tuple[int, PowerSgdBucket]]:
        return [(n, bucket) for n, bucket in enumerate(self._owing) if isinstance(bucket, PowerSgdBucket)]


class _Make(Protocol):
    def __call__(self, members: list[int], like: Sequence[torch.Tensor], group: Group, *, hold: bool) -> FlatBucket: ...


def _maker(compression: Compression) -> _Make:
    match compression:
        case BFloat16():
            return partial(ChunkedBucket, codec=Half(torch.bfloat16))
        case Float16():
            return partial(ChunkedBucket, codec=Half(torch.float16))
        case Int8():
            return partial(ChunkedBucket, codec=Blocks())
        case PowerSgd(rank):
            return partial(PowerSgdBucket, rank=rank)
        case TopK(ratio):
            return partial(TopKBucket, ratio=ratio)
    raise NotImplementedError(compression)


class ChunkedBucket(FlatBucket):
    """A bucket whose numbers travel encoded by ``codec``, in one chunk per worker.

    Each worker decodes one chunk of all workers, adds it in float32 in the order of ranks, and sends the sum to all,
    encoded again. Encoded numbers are never added, so many workers round no more often than two workers do. All
    workers decode the same bytes to the same sums.
    """

    rounds = 1

    def __init__(
        self, members: list[int], like: Sequence[torch.Tensor], group: Group, codec: Codec, *, hold: bool
    ) -> None:
        super().__init__(members, like, group, hold=hold)
        self._codec = codec
        self._received = torch.empty(0, dtype=torch.uint8)  # new in each step: a broken step may still write to it

    def launch(self) -> None:
        self.launched = True
        group, codec = self._group, self._codec
        chunk = -(-self._numel // (group.size * codec.multiple)) * codec.multiple
        rows = F.pad(self.slot_values.float(), (0, group.size * chunk - self._numel)).view(group.size, chunk)
        sent = codec.encode(rows).to(group.wire)
        sizes = [sent.shape[1]] * group.size
        self._received = torch.empty_like(sent)
        self._work = group.all_to_all(self._received.view(-1), sent.view(-1), sizes, sizes)

    def combine(self) -> None:
        """This worker's chunk has arrived from all workers: add it up, and send the sum to all."""
        assert self._work is not None
        self._work.wait()
        total = self._codec.encode(self._codec.decode(self._received).sum(0, keepdim=True)).view(-1)
        self._received = torch.empty_like(self._received)
        self._work = self._group.all_gather(self._received.view(-1), total)

    def wait(self) -> None:
        super().wait()
        sums = self._codec.decode(self._received).view(-1)[: self._numel]
        self._sets[self._turn][: self._numel].copy_(sums)


class ResidualBucket(FlatBucket):
    """A bucket with error feedback: it sends a part of its gradient, and owes the rest, its *residual*.

    The residual changes when a step completes, and stays as it is when a step is lost. (Source: Karimireddy et al.,
    ICML 2019, arXiv 1901.09847.)
    """

    def __init__(self, members: list[int], like: Sequence[torch.Tensor], group: Group, *, hold: bool) -> None:
        super().__init__(members, like, group, hold=hold)
        self._residual: torch.Tensor | None = None  # float32; None: the worker owes nothing
        self._next: torch.Tensor | None = None  # once this step completes

    def begin(self) -> None:
        super().begin()
        self._next = None

    def _due(self) -> torch.Tensor:
        """This step's gradient plus the residual of earlier steps, in float32; the caller may change it."""
        due = self.slot_values.to(torch.float32, copy=True)
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
        """Take over the residual of another worker."""
        self._residual = self.owed + more.to(self._device)

    def pay(self) -> dict[int, torch.Tensor]:
        """Return the residual by member, and owe nothing from here on."""
        residual, self._residual = self._residual, None
        return {} if residual is None else self._cut(residual)

    def owes(self, index: int) -> bool:
        """Whether the residual of member ``index`` is not zero."""
        return self._residual is not None and bool(self._cut(self._residual)[index].any())


class TopKBucket(ResidualBucket):
    """Sums of the largest numbers of each worker's gradient.

    Each worker sends its largest numbers and their places to all workers, which add them in the order of ranks. For
    every number of the bucket it sends 8 x ``ratio`` bytes to each other worker. With many workers that is more than
    an all-reduce sends.
    """

    def __init__(
        self, members: list[int], like: Sequence[torch.Tensor], group: Group, ratio: float, *, hold: bool
    ) -> None:
        super().__init__(members, like, group, hold=hold)
        self._count = min(self._numel, ceil(ratio * self._numel))  # 0 if all tensors of the bucket are empty
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


class PowerSgdBucket(ResidualBucket):
    """Sums of matrices that travel as products of two narrow ones: PowerSGD (Vogels et al., NeurIPS 2019,
    arXiv 1905.13727).

    Each step is one power iteration, which starts from the result of the last one. A first all-reduce brings
    P = sum of M Q, which every worker makes orthonormal. A second one brings Q = sum of transposed M P. The sum of the
    workers' M becomes P times transposed Q. A worker owes the part of its own M that P does not span. A tensor whose
    factors would not be smaller travels whole, in single precision.

    A result is (P, Q, the whole tensors): a worker that adopts it has the same P and Q for the next step.

    Each worker makes P orthonormal by itself, so the processors of all workers must compute the same bits.
    """

    rounds = 1

    def __init__(
        self, members: list[int], like: Sequence[torch.Tensor], group: Group, rank: int, *, hold: bool
    ) -> None:
        super().__init__(members, like, group, hold=hold)
        self._matrices, self._whole, self._factors = self._planned(rank)
        whole = sum(stop - start for start, stop in self._whole)
        self._sets = self._sets[:1]  # results are in ``_results``
        size, device = self._factors + whole, group.wire
        self._results = [torch.zeros(size, dtype=torch.float32, device=device) for _ in range(2 if hold else 1)]
        self._at = 0
        self._q = self._first_q()
        self._due_now = torch.empty(0)
        self._p = self._rest = self._received = self._due_now
        self._rest_work: Work | None = None

    def _planned(self, rank: int) -> tuple[list[_Matrix], list[tuple[int, int]], int]:
        """The matrices; the places of the tensors that travel whole; the number of elements of all factors."""
        factored: list[tuple[int, int, int]] = []
        whole: list[tuple[int, int]] = []
        start = 0
        for shape, size in zip(self._shapes, self._sizes, strict=True):
            rows = shape[0] if len(shape) > 1 else 1
            columns = size // rows if rows else 0
            if 0 < (rows + columns) * rank < rows * columns:
                factored.append((start, rows, columns))
            else:
                whole.append((start, start + size))
            start += size
        left, right, matrices = 0, sum(rows * rank for _, rows, _ in factored), []
        for at, rows, columns in factored:
            matrices.append(_Matrix(at, rows, columns, rank, left, right))
            left, right = left + rows * rank, right + columns * rank
        return matrices, whole, right

    def _first_q(self) -> list[torch.Tensor]:
        """The start of the first power iteration; equal on all workers."""
        generator = torch.Generator().manual_seed(1 + self.members[0])
        return [torch.randn(m.columns, m.rank, generator=generator).to(self._device) for m in self._matrices]

    def launch(self) -> None:
        self.launched = True
        group = self._group
        due = self._due_now = self._due()
        products = [(m.of(due) @ q).view(-1) for m, q in zip(self._matrices, self._q, strict=True)]
        self._p = torch.cat([due[:0], *products]).to(group.wire)
        self._rest = torch.cat([due[:0], *(due[start:stop] for start, stop in self._whole)]).to(group.wire)
        self._work, self._rest_work = self._add_up(self._p), self._add_up(self._rest)

    def _add_up(self, data: torch.Tensor) -> Work:
        return self._group.all_reduce(data) if data.numel() else Work(self._group, None)

    def combine(self) -> None:
        """P has arrived: start to sum Q."""
        assert self._work is not None
        self._work.wait()
        p = self._p.to(self._device)
        for m in self._matrices:
            m.left_of(p).copy_(torch.linalg.qr(m.left_of(p)).Q)
        self._p = p.to(self._group.wire)
        projections = self._project(p)
        self._received = torch.cat([self._due_now[:0], *(q.view(-1) for q in projections)]).to(self._group.wire)
        self._work = self._add_up(self._received)

    def _project(self, p: torch.Tensor) -> list[torch.Tensor]:
        """This worker's part of Q; from here on it owes the part of its gradient that P does not span."""
        projections = []
        for m in self._matrices:
            matrix, left = m.of(self._due_now), m.left_of(p)
            projections.append(matrix.T @ left)
            matrix.sub_(left @ projections[-1].T)
        for start, stop in self._whole:
            self._due_now[start:stop] = 0.0
        self._next = self._due_now
        return projections

    def wait(self) -> None:
        super().wait()
        assert self._rest_work is not None
        self._rest_work.wait()
        self._results[self._at].copy_(torch.cat([self._p, self._received, self._rest]))

    def _sums(self) -> torch.Tensor:
        result = self._results[self._at].to(self._device)
        into = self._output if self._output is not None else self.slot_values
        for m in self._matrices:
            m.of(into).copy_(m.left_of(result) @ m.right_of(result).T)
        whole = result[self._factors :].split([stop - start for start, stop in self._whole])
        for (start, stop), part in zip(self._whole, whole, strict=True):
            into[start:stop] = part
        return into

    def complete(self) -> None:
        super().complete()
        result = self._results[self._at].to(self._device)
        self._at = (self._at + 1) % len(self._results)
        if bool(result.isfinite().all()):
            self._q = [m.right_of(result).clone() for m in self._matrices]
        else:  # without this no later step would have a finite sum; all workers decide alike
            self._q, self._residual = self._first_q(), None

    def last_result(self) -> torch.Tensor:
        return self._results[self._at - 1]

    def adopt(self, result: torch.Tensor) -> None:
        self._results[self._at].copy_(result)
        assert self._next is not None, "there is no result without this worker's part of Q"

    @property
    def factors(self) -> list[torch.Tensor]:
        """The start of the next power iteration."""
        return self._q

    @factors.setter
    def factors(self, q: list[torch.Tensor]) -> None:
        needed, shapes = [tuple(old.shape) for old in self._q], [tuple(new.shape) for new in q]
        if needed != shapes:
            raise ValueError(f"factors of shapes {shapes} where {needed} are needed")
        self._q = [new.to(self._device, torch.float32, copy=True) for new in q]


@dataclass(frozen=True)
class _Matrix:
    """Where a matrix of ``rows`` x ``columns`` lies in a bucket, and its factors (of ``rank`` columns) in a result."""

    start: int
    rows: int
    columns: int
    rank: int
    left: int
    right: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The matrix, as a view."""
        return flat[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)

    def left_of(self, factors: torch.Tensor) -> torch.Tensor:
        """Its left factor, as a view."""
        return factors[self.left : self.left + self.rows * self.rank].view(self.rows, self.rank)

    def right_of(self, factors: torch.Tensor) -> torch.Tensor:
        """Its right factor, as a view."""
        return factors[self.right : self.right + self.columns * self.rank].view(self.columns, self.rank)
