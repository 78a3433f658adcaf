"""Gradual unfreezing: which tensors train from which epoch on, as data.

Howard, Ruder 2018, "Universal Language Model Fine-tuning for Text Classification": the last layers of a model that has
learnt something else train first, the others join them epoch by epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from elastune.core.errors import UserError


@dataclass(frozen=True)
class Unfreezing:
    """``from_epoch``: the first epoch, from 0, in which a tensor trains, by its name; None: never."""

    from_epoch: Mapping[str, int | None]
    _parameters: tuple[tuple[nn.Parameter, int | None], ...] = ()

    def hide(self, epoch: int) -> None:
        """Take away the gradients of what is frozen in ``epoch``: to the optimizer, and to clipping, it has none."""
        for parameter, first in self._parameters:
            if first is None or epoch < first:
                parameter.grad = None


def unfreezing(model: nn.Module, schedule: Mapping[str, int | None]) -> Unfreezing:
    """What ``schedule``, patterns of names and epochs, means for the tensors of ``model``; the first that fits counts.

    Raises:
        UserError: For epochs that are none, for patterns that name nothing, for tensors that no pattern names, and
            where nothing trains in the first epoch.
    """
    if not isinstance(schedule, Mapping) or not schedule:
        rule = "a schedule of unfreezing has the first epoch of some names"
        raise UserError(rule, repr(schedule)[:80], '{"head.*": 0, "*": 2}')
    for pattern, epoch in schedule.items():
        whole = epoch is None or (isinstance(epoch, int) and not isinstance(epoch, bool) and epoch >= 0)
        if not isinstance(pattern, str) or not whole:
            rule = "a schedule of unfreezing has an epoch from 0 for a name, or None for never"
            raise UserError(rule, f"{pattern!r}: {epoch!r}"[:80], '{"head.*": 0, "*": 2}')
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found: dict[str, int | None] = {}
    for name in trained:
        fits = [pattern for pattern in schedule if fnmatchcase(name, pattern)]
        if not fits:
            raise UserError("a schedule of unfreezing names every tensor that trains", name, 'end it with "*": 0')
        found[name] = schedule[fits[0]]
    for pattern in schedule:
        if not any(fnmatchcase(name, pattern) for name in trained):
            rule, there = "what is unfrozen is a tensor of the model that trains", ", ".join(list(trained)[-3:])
            raise UserError(rule, pattern[:80], f"such as {there}"[:300])
    if 0 not in found.values():
        raise UserError("something trains in the first epoch", "nothing", 'such as {"head.*": 0, "*": 2}')
    return Unfreezing(found, tuple((trained[name], epoch) for name, epoch in found.items()))
