"""Bytes that state takes in a worker's memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Of the memory that ``tensors`` lie in, each stretch of it counted once; None takes none."""
    storages = [t.untyped_storage() for t in tensors if t is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def optimizer_bytes(states: Iterable[Mapping[str, Any]]) -> int:
    """Of the tensors that an optimizer keeps for its parameters."""
    return storage_bytes(value for state in states for value in state.values() if isinstance(value, torch.Tensor))
