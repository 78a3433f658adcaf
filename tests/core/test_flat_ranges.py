"""Flat runs of boxes as boxes: nothing twice, nothing left out, in the order of the elements."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elastune.core.layout import FlatRange, fills, volume, whole_range


@st.composite
def stretches(draw: st.DrawFn) -> tuple[tuple[int, ...], FlatRange]:
    """The shape of a tensor, and a stretch of a part of it."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    edges = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    box = tuple((start, stop) for start, stop in edges)
    start, stop = sorted(draw(st.tuples(st.integers(0, volume(box)), st.integers(0, volume(box)))))
    return shape, FlatRange(box, start, stop)


@given(stretches())
def test_boxes_of_a_stretch_have_its_elements_in_order(drawn: tuple[tuple[int, ...], FlatRange]) -> None:
    shape, stretch = drawn
    tensor = np.arange(int(np.prod(shape))).reshape(shape)
    wanted = tensor[tuple(slice(*edge) for edge in stretch.box)].reshape(-1)[stretch.start : stretch.stop]
    result = np.full(stretch.size, -1)
    for box, at in stretch.boxes:
        values = tensor[tuple(slice(*edge) for edge in box)].reshape(-1)
        assert (result[at : at + len(values)] == -1).all()
        result[at : at + len(values)] = values
    assert (result == wanted).all()
    assert len(stretch.boxes) <= max(1, 2 * len(shape) - 1)


@given(stretches(), st.data())
def test_a_tensor_is_filled_by_its_parts_once(drawn: tuple[tuple[int, ...], FlatRange], data: st.DataObject) -> None:
    shape, _ = drawn
    whole = whole_range(shape)
    cuts = sorted({0, whole.size, *data.draw(st.lists(st.integers(0, whole.size), max_size=4))})
    parts = [FlatRange(whole.box, a, b) for a, b in itertools.pairwise(cuts)]
    assert fills(shape, parts)
    if whole.size:
        left_out = data.draw(st.integers(0, len(parts) - 1))
        assert not fills(shape, [part for i, part in enumerate(parts) if i != left_out])
        assert not fills(shape, [*parts, parts[left_out]])
