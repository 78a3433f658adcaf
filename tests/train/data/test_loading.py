"""How a batch comes to a device."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch

from elastune.train.data.loading import to_device

Pair = namedtuple("Pair", "x y")


class Named(list[Any]):
    """A list of a kind of its own."""


def test_a_batch_keeps_its_structure() -> None:
    x, device = torch.ones(2), torch.device("meta")
    given = [x, "word", Named([x, 3]), (x, b"bytes"), Pair(x, None), {"x": [x]}]
    found = to_device(given, device)
    assert [type(each) for each in found] == [torch.Tensor, str, Named, tuple, Pair, dict]
    moved = [found[0], found[2][0], found[3][0], found[4].x, found[5]["x"][0]]
    assert all(each.device == device for each in moved)
    assert (found[1], found[2][1], found[3][1], found[4].y) == ("word", 3, b"bytes", None)
    assert to_device(given, x.device)[0] is x
