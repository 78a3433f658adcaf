"""Sums of matrices that travel as products of two narrow ones: PowerSGD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from elastune.comm.compress.residual import ResidualBucket
from elastune.comm.group import Group, Work


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


class PowerSgdBucket(ResidualBucket):
    """One power iteration a step, begun where the last one came to (Vogels et al., NeurIPS 2019, arXiv 1905.13727).

    All-reduces bring P = sum of M Q, which every worker makes orthonormal, and then Q = sum of transposed M P; the sum
    of the workers' M becomes P times transposed Q. A worker owes what P does not span of its own M. Tensors of which
    factors would not be smaller travel whole, in single precision.

    A result is (P, Q, what travelled whole): whoever lacked a step has the same P and Q for the next.

    P is made orthonormal on each worker by itself: their processors must do that to the same bits.
    """

    rounds = 1

    def __init__(
        self, members: list[int], like: Sequence[torch.Tensor], group: Group, rank: int, *, hold: bool
    ) -> None:
        super().__init__(members, like, group, hold=hold)
        self._matrices, self._plain, self._factors = self._planned(rank)
        plain = sum(stop - start for start, stop in self._plain)
        self._sets = self._sets[:1]  # results are in ``_results``
        size, device = self._factors + plain, group.wire
        self._results = [torch.zeros(size, dtype=torch.float32, device=device) for _ in range(2 if hold else 1)]
        self._at = 0
        self._q = self._first_q()
        self._due_now = torch.empty(0)
        self._p = self._rest = self._received = self._due_now
        self._rest_work: Work | None = None

    def _planned(self, rank: int) -> tuple[list[_Matrix], list[tuple[int, int]], int]:
        """Matrices; where what is none lies; how many numbers the factors have."""
        found: list[tuple[int, int, int, int]] = []
        plain: list[tuple[int, int]] = []
        start = 0
        for shape, size in zip(self._shapes, self._sizes, strict=True):
            rows = shape[0] if len(shape) > 1 else 1
            columns = size // rows if rows else 0
            if 0 < (rows + columns) * rank < rows * columns:
                found.append((start, rows, columns, rank))
            else:
                plain.append((start, start + size))
            start += size
        lefts = sum(rows * rank for _, rows, _, rank in found)
        left, right, matrices = 0, lefts, []
        for at, rows, columns, _ in found:
            matrices.append(_Matrix(at, rows, columns, rank, left, right))
            left, right = left + rows * rank, right + columns * rank
        return matrices, plain, right

    def _first_q(self) -> list[torch.Tensor]:
        """Where the first power iteration begins; equal on all workers."""
        generator = torch.Generator().manual_seed(1 + self.members[0])
        return [torch.randn(m.columns, m.rank, generator=generator).to(self._device) for m in self._matrices]

    def launch(self) -> None:
        self.launched = True
        group = self._group
        due = self._due_now = self._due()
        products = [(m.of(due) @ q).view(-1) for m, q in zip(self._matrices, self._q, strict=True)]
        self._p = torch.cat([due[:0], *products]).to(group.wire)
        self._rest = torch.cat([due[:0], *(due[start:stop] for start, stop in self._plain)]).to(group.wire)
        self._work, self._rest_work = self._add_up(self._p), self._add_up(self._rest)

    def _add_up(self, data: torch.Tensor) -> Work:
        return self._group.all_reduce(data) if data.numel() else Work(self._group, None)

    def combine(self) -> None:
        """P is here: on to Q."""
        assert self._work is not None
        self._work.wait()
        p = self._p.to(self._device)
        for m in self._matrices:
            m.left_of(p).copy_(torch.linalg.qr(m.left_of(p)).Q)
        self._p = p.to(self._group.wire)
        own = self._project(p)
        self._received = torch.cat([self._due_now[:0], *(q.view(-1) for q in own)]).to(self._group.wire)
        self._work = self._add_up(self._received)

    def _project(self, p: torch.Tensor) -> list[torch.Tensor]:
        """This worker's part of Q; what P does not span is owed from here on."""
        own = []
        for m in self._matrices:
            matrix, left = m.of(self._due_now), m.left_of(p)
            own.append(matrix.T @ left)
            matrix.sub_(left @ own[-1].T)
        for start, stop in self._plain:
            self._due_now[start:stop] = 0.0
        self._next = self._due_now
        return own

    def wait(self) -> None:
        super().wait()
        assert self._rest_work is not None
        self._rest_work.wait()
        self._results[self._at].copy_(torch.cat([self._p, self._received, self._rest]))

    def _sums(self) -> torch.Tensor:
        result = self._results[self._at].to(self._device)
        into = self._given if self._given is not None else self.here
        for m in self._matrices:
            m.of(into).copy_(m.left_of(result) @ m.right_of(result).T)
        whole = result[self._factors :].split([stop - start for start, stop in self._plain])
        for (start, stop), part in zip(self._plain, whole, strict=True):
            into[start:stop] = part
        return into

    def complete(self) -> None:
        super().complete()
        result = self._results[self._at].to(self._device)
        self._at = (self._at + 1) % len(self._results)
        if bool(result.isfinite().all()):
            self._q = [m.right_of(result).clone() for m in self._matrices]
        else:  # or no later step would have a finite sum; all workers find this alike
            self._q, self._residual = self._first_q(), None

    def last_result(self) -> torch.Tensor:
        return self._results[self._at - 1]

    def adopt(self, result: torch.Tensor) -> None:
        self._results[self._at].copy_(result)
        assert self._next is not None, "there is no result without this worker's part of Q"

    @property
    def factors(self) -> list[torch.Tensor]:
        """Where the next power iteration begins."""
        return self._q

    @factors.setter
    def factors(self, q: list[torch.Tensor]) -> None:
        wanted, found = [tuple(old.shape) for old in self._q], [tuple(new.shape) for new in q]
        if wanted != found:
            raise ValueError(f"factors of shapes {found} where {wanted} are needed")
        self._q = [new.to(self._device, torch.float32, copy=True) for new in q]
