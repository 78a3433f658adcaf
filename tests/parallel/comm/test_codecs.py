"""Numbers that travel in fewer bytes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastune.parallel.comm.compressed import BLOCK, Blocks, Codec, Half, HalfBytes, ShorterFloat8, ShorterHalf

CODECS = [Half(torch.bfloat16), Half(torch.float16), Blocks(), HalfBytes(), ShorterHalf(), ShorterFloat8()]


@pytest.mark.parametrize("codec", CODECS)
@given(seed=st.integers(0, 1000), magnitude=st.sampled_from([1e-4, 1.0, 1e4]))
def test_what_comes_back_is_near(codec: Codec, seed: int, magnitude: float) -> None:
    """By the last bit of a half, half a step of the block's scale, or a fifth of itself."""
    rows = magnitude * torch.randn(3, 2 * BLOCK, generator=torch.Generator().manual_seed(seed))
    back = codec.decode(codec.encode(rows))
    if isinstance(codec, Blocks | HalfBytes):
        bound = rows.unflatten(1, (2, BLOCK)).abs().amax(2, keepdim=True) / codec.largest * 0.501
        assert bool(((back - rows).unflatten(1, (2, BLOCK)).abs() <= bound).all())
    elif isinstance(codec, ShorterFloat8):
        torch.testing.assert_close(back, rows, rtol=0.201, atol=magnitude * 1e-8)
    else:
        torch.testing.assert_close(back, rows, rtol=2.0**-7 if isinstance(codec, ShorterHalf) else 2.0**-8, atol=6e-8)


@pytest.mark.parametrize("codec", CODECS)
def test_zeros_are_zeros_and_what_is_not_finite_is_told(codec: Codec) -> None:
    assert not codec.decode(codec.encode(torch.zeros(1, BLOCK))).any()
    for wrong in (math.nan, math.inf, -math.inf):
        rows = torch.ones(1, 2 * BLOCK)
        rows[0, 7] = wrong
        back = codec.decode(codec.encode(rows))
        assert not math.isfinite(back[0, 7])
        torch.testing.assert_close(back[0, BLOCK:], torch.ones(BLOCK), rtol=3e-6, atol=0)  # another block stays


def test_bytes() -> None:
    rows = torch.randn(2, 4 * BLOCK)
    assert Half(torch.float16).encode(rows).shape == (2, 8 * BLOCK)
    assert Blocks().encode(rows).shape == (2, 4 * BLOCK + 16)
    assert Blocks().encode(rows).dtype == torch.uint8
    assert HalfBytes().encode(rows).shape == (2, 2 * BLOCK + 16)
    assert ShorterFloat8().encode(rows).shape == (2, 4 * BLOCK + 16)


@pytest.mark.parametrize("codec", [ShorterHalf(), ShorterFloat8()])
@given(seed=st.integers(0, 1000), decades=st.integers(1, 30))
def test_nothing_is_taken_past_where_it_went(codec: Codec, seed: int, decades: int) -> None:
    """As second moments need it, which are never negative: their ways come back no longer than they were."""
    generator = torch.Generator().manual_seed(seed)
    began = 10 ** (-decades * torch.rand(2, 2 * BLOCK, generator=generator))
    ends = began * torch.rand(2, 2 * BLOCK, generator=generator).round(decimals=3)  # some of them are zero
    way = ends - began
    way[0, :3] = torch.tensor([0.0, 1e-30, -1e-30])
    back = codec.decode(codec.encode(way))
    assert bool((back.abs() <= way.abs()).all())
    assert bool((back * way >= 0).all()), "signs stay"
    assert bool((began + codec.decode(codec.encode(back)) >= 0)[0, 3:].all())
    largest = way.unflatten(1, (2, BLOCK)).abs().amax(2, keepdim=True).expand(2, 2, BLOCK).flatten(1)
    near = way.abs() > 2e-9 * largest
    torch.testing.assert_close(back[near], way[near], rtol=0.201, atol=0)


@pytest.mark.parametrize("codec", [ShorterHalf(), ShorterFloat8()])
@pytest.mark.parametrize("change", [-1e-3, 1e-3])
def test_what_moves_little_in_a_round_still_moves(codec: Codec, change: float) -> None:
    """Beside others of its block that are larger by far; a second moment that itself were rounded would not."""
    value = torch.full((1, BLOCK), 1e-6)
    value[0, 0] = 1.0
    expected = value * (1 + change) ** 300
    for _ in range(300):
        value += codec.decode(codec.encode(change * value))
    assert bool(((value / expected - 1).abs() < 0.08).all())
