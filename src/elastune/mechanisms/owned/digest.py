"""What is compared of copies: a number of their bits, the same however they are cut, at the speed of reading memory.

Each unit's 8-byte words are added up, and the units' sums times a number that depends on the unit's place, all modulo
2**64. So a copy with one wrong element, or with right ones at a wrong unit, has another number. (It is no checksum
against an adversary, and two faults of one unit may cancel out.)
"""

from __future__ import annotations

import torch

from elastune.core.leaves import UNIT

_STEP = 0x9E3779B97F4A7C15  # odd, so no two units have one weight
_MODULUS = 1 << 64
_WEIGHTS: dict[torch.device, torch.Tensor] = {}


def digest(values: torch.Tensor, start: int) -> int:
    """Of flat ``values``, the elements of a leaf from ``start`` on.

    Returns:
        A number below 2**64. Those of neighbours add up to that of both, modulo 2**64.
    """
    stop = start + len(values)
    first, last = -(-start // UNIT), stop // UNIT
    found = 0
    if first < last:
        rows = _words(values[first * UNIT - start : last * UNIT - start]).view(last - first, -1).sum(1)
        found += int(rows.mul_(_weights(first, last, values.device)).sum())
    for low, high in ((start, min(stop, first * UNIT)), (max(first, last) * UNIT, stop)):
        if low < high:  # a part of a unit: the rest of it is zero
            unit, part = low // UNIT, values[low - start : high - start]
            if (low - unit * UNIT) * part.element_size() % 8 or part.nbytes % 8:  # it begins or ends within a word
                part = values.new_zeros(UNIT)
                part[low - unit * UNIT : high - unit * UNIT] = values[low - start : high - start]
            found += int(_words(part).sum()) * (2 * unit + 1) * _STEP
    return found % _MODULUS


def _weights(first: int, last: int, device: torch.device) -> torch.Tensor:
    """By unit, from ``first`` to ``last`` (exclusive); made once, for short tensors are many."""
    known = _WEIGHTS.get(device)
    if known is None or len(known) < last:
        known = (2 * torch.arange(max(2 * last, 1024), device=device) + 1) * (_STEP - _MODULUS)
        _WEIGHTS[device] = known
    return known[first:last]


def _words(values: torch.Tensor) -> torch.Tensor:
    data = values.detach().contiguous()
    return (data.clone() if data.storage_offset() * data.element_size() % 8 else data).view(torch.int64)
