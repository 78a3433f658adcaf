"""Bytes that state takes in a worker's memory, and how much of what it frees the process keeps."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch

_M_MMAP_THRESHOLD = -3  # mallopt(3), of glibc
_LARGE_BYTES = 1 << 20


def give_back_at_once() -> None:
    """From here on this process keeps no large block of memory that it frees on the CPU.

    By itself glibc learns to keep blocks of up to 32 MB for the next ones, and between long-lived ones they do not fit:
    of blocks of gradients that came and went that was as much again as the sums.
    """
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Of the memory that ``tensors`` lie in, each stretch of it counted once; None takes none."""
    storages = [t.untyped_storage() for t in tensors if t is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def optimizer_bytes(states: Iterable[Mapping[str, Any]]) -> int:
    """Of the tensors that an optimizer keeps for its parameters."""
    return storage_bytes(value for state in states for value in state.values() if isinstance(value, torch.Tensor))
