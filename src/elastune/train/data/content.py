"""Do all workers read the same data? Each reads the same few samples of a pass, and their checksums are compared.

A data set that augments at random, and not from the random numbers that elastune seeds for each sample, reads otherwise
each time: that is no difference between workers. So samples are read more than once.

What is not seen: a difference in some samples alone, until a pass happens to look at one of them; data of an evaluation
beyond their number; and what differs from read to read.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

READS = 2  # in each pass
PRIME = 4093  # sums of up to 4096 workers' checksums are exact in single precision
MORE_READS = 8  # where checksums differ, before it is believed
MOST_BYTES = 1 << 16  # of a tensor; of a larger one numbers at equal distances
CHANGES = 0  # the checksum of what is not the same when read again


def content(batches: Sequence[Any]) -> int:
    """The checksum of what was read several times, or ``CHANGES``."""
    found = {checksum_of(batch) for batch in batches}
    return found.pop() if len(found) == 1 else CHANGES


def checksum_of(value: Any) -> int:
    """Of tensors, text and numbers in it, and of what kind anything else is."""
    return _checksum(value, 1)


def _checksum(value: Any, start: int) -> int:
    if isinstance(value, torch.Tensor):
        return zlib.crc32(_bytes_of(value), zlib.crc32(f"{value.dtype}{tuple(value.shape)}".encode(), start))
    if isinstance(value, Mapping):
        for key, item in value.items():
            start = _checksum(item, zlib.crc32(repr(key).encode(), start))
        return start
    if isinstance(value, (str, bytes, bool, int, float)) or value is None:
        return zlib.crc32(repr(value).encode(), start)
    if isinstance(value, Sequence):
        for item in value:
            start = _checksum(item, start)
        return start
    return zlib.crc32(type(value).__name__.encode(), start)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return b""
    flat = tensor.detach().cpu().reshape(-1)
    step = max(1, flat.numel() * flat.element_size() // MOST_BYTES)
    return flat[::step].contiguous().view(torch.uint8).numpy().tobytes()
