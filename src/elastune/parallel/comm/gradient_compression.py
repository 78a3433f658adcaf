"""Sums of compressed gradients: half precision, top-k and PowerSGD, with error feedback.

Error feedback: a worker adds what it did not send in one step to its gradient of the next step.
Only gradients are compressed. Counts, votes and statistics travel beside them as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Protocol

import torch
import torch.nn.functional as F

from elastune.core.communication import BFloat16, Compression, Float16, Int8, PowerSgd, TopK
from elastune.parallel.comm.group import Group, Work
from elastune.parallel.comm.quantized import Blocks, Codec, Half
from elastune.parallel.comm.reducer import FlatBucket, Reducer, plan


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
