"""Numbers that travel in fewer bytes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastune.comm.compress.codecs import BLOCK, Blocks, Codec, Float8, Half, HalfBytes

CODECS = [Half(torch.bfloat16), Half(torch.float16), Blocks(), HalfBytes(), Float8()]


@pytest.mark.parametrize("codec", CODECS)
@given(seed=st.integers(0, 1000), magnitude=st.sampled_from([1e-4, 1.0, 1e4]))
def test_what_comes_back_is_near(codec: Codec, seed: int, magnitude: float) -> None:
    """By the last bit of a half, half a step of the block's scale, or an eighth of itself."""
    rows = magnitude * torch.randn(3, 2 * BLOCK, generator=torch.Generator().manual_seed(seed))
    back = codec.decode(codec.encode(rows))
    if isinstance(codec, Blocks | HalfBytes):
        bound = rows.unflatten(1, (2, BLOCK)).abs().amax(2, keepdim=True) / codec.largest * 0.501
        assert bool(((back - rows).unflatten(1, (2, BLOCK)).abs() <= bound).all())
    elif isinstance(codec, Float8):
        torch.testing.assert_close(back, rows, rtol=0.126, atol=magnitude * 1e-8)
    else:
        torch.testing.assert_close(back, rows, rtol=2.0**-8, atol=6e-8)


@pytest.mark.parametrize("codec", CODECS)
def test_zeros_are_zeros_and_what_is_not_finite_is_told(codec: Codec) -> None:
    assert not codec.decode(codec.encode(torch.zeros(1, BLOCK))).any()
    for wrong in (math.nan, math.inf, -math.inf):
        rows = torch.ones(1, 2 * BLOCK)
        rows[0, 7] = wrong
        back = codec.decode(codec.encode(rows))
        assert not math.isfinite(back[0, 7])
        assert bool((back[0, BLOCK:] == 1).all()), "another block is as it was"


def test_bytes() -> None:
    rows = torch.randn(2, 4 * BLOCK)
    assert Half(torch.float16).encode(rows).shape == (2, 8 * BLOCK)
    assert Blocks().encode(rows).shape == (2, 4 * BLOCK + 16)
    assert Blocks().encode(rows).dtype == torch.uint8
    assert HalfBytes().encode(rows).shape == (2, 2 * BLOCK + 16)
    assert Float8().encode(rows).shape == (2, 4 * BLOCK + 16)


@given(seed=st.integers(0, 1000), decades=st.integers(1, 30))
def test_what_spans_decades_never_becomes_zero(seed: int, decades: int) -> None:
    """As second moments do, which an optimizer divides by: small ones may come back larger, none smaller by a third."""
    rows = 10 ** (-decades * torch.rand(2, 2 * BLOCK, generator=torch.Generator().manual_seed(seed)))
    rows[0, :3] = torch.tensor([0.0, 1e-30, -1e-30])
    back = Float8().decode(Float8().encode(rows))
    assert back[0, 0] == 0
    assert back[0, 1] > 0 > back[0, 2], "signs stay"
    positive = rows > 0
    assert bool((back[positive] > 0.66 * rows[positive]).all())
    near = positive & (rows > 2e-9 * rows.amax())
    torch.testing.assert_close(back[near], rows[near], rtol=0.126, atol=0)
