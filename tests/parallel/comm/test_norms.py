"""Norms of a bucket's gradients are the same numbers on a GPU, where they are taken in few kernels, as on a CPU."""

from __future__ import annotations

import pytest
import torch

from elastune.parallel.comm.reducer import BLOCK, _square_together


def test_blocks_together_are_blocks_one_by_one() -> None:
    blocks = list(torch.randn(5 * BLOCK // 2, generator=torch.Generator().manual_seed(1)).split(BLOCK))
    alone = sum(float(torch.dot(block.double(), block.double())) for block in blocks)
    assert float(_square_together(blocks)) == pytest.approx(alone, rel=1e-6)
