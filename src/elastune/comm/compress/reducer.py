"""Sums whose gradients travel compressed; what rides along (counts, votes, statistics) travels as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

import torch

from elastune.comm.compress.chunked import ChunkedBucket
from elastune.comm.compress.codecs import Blocks, Half
from elastune.comm.compress.power_sgd import PowerSgdBucket
from elastune.comm.compress.residual import ResidualBucket
from elastune.comm.compress.top_k import TopKBucket
from elastune.comm.flat import FlatBucket
from elastune.comm.group import Group
from elastune.comm.reducer import Reducer, plan
from elastune.core.compression import BFloat16, Compression, Float16, Int8, PowerSgd, TopK


class _Make(Protocol):
    def __call__(self, members: list[int], like: Sequence[torch.Tensor], group: Group, *, hold: bool) -> FlatBucket: ...


class CompressedReducer(Reducer[FlatBucket]):
    """As ``comm.flat.FlatReducer``, but the first ``gradients`` tensors travel as ``compression`` says."""

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
        own = [make(members, like, group, hold=hold) for members in plan(like[:gradients])]
        others = [[i + gradients for i in members] for members in plan(like[gradients:])]
        rest = [FlatBucket(members, like, group, hold=hold) for members in others]
        super().__init__([*own, *rest], group, gradients)
        self._owing = [bucket for bucket in own if isinstance(bucket, ResidualBucket)]

    # -- what this worker owes ----------------------------------------------------------------------------------------

    @property
    def owed(self) -> list[torch.Tensor]:
        """What it has not sent yet of its gradients: as many tensors, of the same shapes, on every worker."""
        return [bucket.owed for bucket in self._owing]

    def owe(self, more: Sequence[torch.Tensor]) -> None:
        """Take over what another worker ``owed``."""
        for bucket, part in zip(self._owing, more, strict=True):
            bucket.owe(part)

    def owes(self, index: int) -> bool:
        """Whether anything of tensor ``index`` is owed."""
        bucket = self._bucket_of[index]
        return isinstance(bucket, ResidualBucket) and bucket.owes(index)

    def pay(self) -> dict[int, torch.Tensor]:
        """All that is owed, by tensor, for the caller to apply; nothing is from here on."""
        return {i: part for bucket in self._owing for i, part in bucket.pay().items()}

    @property
    def factors(self) -> dict[str, torch.Tensor]:
        """Where PowerSGD's next power iterations begin: equal on all workers."""
        return {f"{n}.{i}": q for n, bucket in self._iterating for i, q in enumerate(bucket.factors)}

    def set_factors(self, factors: Mapping[str, torch.Tensor]) -> None:
        """Go on from ``factors``. Raises ``ValueError`` where they are of another model."""
        if factors.keys() != self.factors.keys():
            raise ValueError("factors of other matrices")
        for n, bucket in self._iterating:
            bucket.factors = [factors[f"{n}.{i}"] for i in range(len(bucket.factors))]

    @property
    def _iterating(self) -> list[tuple[int, PowerSgdBucket]]:
        return [(n, bucket) for n, bucket in enumerate(self._owing) if isinstance(bucket, PowerSgdBucket)]


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
