"""The numbers that an optimizer keeps of a leaf beside tensors of its size ("step"), as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def encoded(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """For ``decoded``. Tensors of one number keep their type; floats come back to the bit."""
    return {
        name: [str(value.dtype)[6:], value.item()] if isinstance(value, torch.Tensor) else value
        for name, value in scalars.items()
    }


def decoded(told: Mapping[str, Any]) -> dict[str, Any]:
    """What ``encoded`` was given; tensors on the CPU."""
    return {
        name: torch.tensor(value[1], dtype=getattr(torch, value[0])) if isinstance(value, list) else value
        for name, value in told.items()
    }
