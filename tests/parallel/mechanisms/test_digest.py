"""A number of a copy's bits: the same however it is cut, another one for other bits."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastune.core.layout import UNIT
from elastune.parallel.mechanisms.owned.placement import digest

SIZE = 3 * UNIT + 17
MODULUS = 1 << 64


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, SIZE), max_size=4), st.sampled_from(["float32", "bfloat16", "float64", "uint8"]))
def test_it_does_not_show_how_they_lie(cuts: list[int], dtype: str) -> None:
    values = torch.randint(0, 200, (SIZE,), generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    edges = [0, *sorted(cuts), SIZE]
    parts = [digest(values[a:b], a) for a, b in pairwise(edges)]
    assert (sum(parts) - digest(values.clone(), 0)) % MODULUS == 0


@pytest.mark.parametrize("at", [0, UNIT - 1, UNIT, SIZE - 1])
def test_one_bit_shows(at: int) -> None:
    values = torch.randn(SIZE)
    before = digest(values, 0)
    values.view(torch.int32)[at] ^= 1
    assert digest(values, 0) != before


def test_units_at_each_others_places_show() -> None:
    values = torch.randn(4 * UNIT)
    swapped = torch.cat([values[UNIT : 2 * UNIT], values[:UNIT], values[2 * UNIT :]])
    assert digest(values, 0) != digest(swapped, 0)
    assert digest(values, UNIT) != digest(values, 0)


@pytest.mark.parametrize("low", [1, 2], ids=["within a word", "at a word"])
def test_one_bit_of_a_part_of_a_unit_shows(low: int) -> None:
    values = torch.randn(UNIT)
    before = digest(values[low : UNIT - low], low)
    values.view(torch.int32)[UNIT // 2] ^= 1
    assert digest(values[low : UNIT - low], low) != before
