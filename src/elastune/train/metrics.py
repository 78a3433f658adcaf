"""What the user's program may give for numbers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

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


def sample_counts(told: int | Mapping[str, int] | None, names: Collection[str]) -> dict[str, int]:
    """How many samples each of the metrics ``names`` was measured on, as ``session.report`` was told.

    Raises ``UserError`` for a count that is none, or one of a metric that is not reported with it.
    """
    counts = {} if told is None else dict(told) if isinstance(told, Mapping) else dict.fromkeys(names, told)
    for name, n in counts.items():
        if name not in names or isinstance(n, bool) or not isinstance(n, int) or n < 1:
            rule = "evaluated_on must be a number of samples, or one for metrics of the same report"
            raise UserError(rule, f"{name!r}: {n!r}", "for example evaluated_on=len(data.test)")
    return counts
