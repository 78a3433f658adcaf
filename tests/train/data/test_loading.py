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
    result = to_device(given, device)
    assert [type(each) for each in result] == [torch.Tensor, str, Named, tuple, Pair, dict]
    moved = [result[0], result[2][0], result[3][0], result[4].x, result[5]["x"][0]]
    assert all(each.device == device for each in moved)
    assert (result[1], result[2][1], result[3][1], result[4].y) == ("word", 3, b"bytes", None)
    assert to_device(given, x.device)[0] is x
