"""What the user's program may give for numbers."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from elastune.core.errors import UserError

Number = float | int | bool | torch.Tensor


def floats_of(values: Number | Iterable[Number]) -> list[float]:
    """All numbers in a number, a tensor, or an iterable of them. Raises ``UserError`` for text."""
    if isinstance(values, torch.Tensor):
        return [float(x) for x in values.detach().double().reshape(-1).tolist()]
    given: object = values
    if isinstance(given, str):
        raise UserError("a metric must be a number, or numbers", repr(values), "for example session.report(loss=0.5)")
    if isinstance(values, Iterable):
        return [x for value in values for x in floats_of(value)]
    return [float(values)]
