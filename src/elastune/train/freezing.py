"""Which parameters train, by their own flags (``requires_grad``): frozen and unfrozen in mid-run, alike on all workers.

What required gradients when ``session.prepare`` was called has its place in the sum over workers, and may be frozen and
unfrozen from then on. What did not has none: unfrozen later it would be trained by each worker's own gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.mechanisms.base import Replica

LATER = 'use session.unfreeze(model, {"head.*": 0, "*": 2})'


class Flags:
    """Those of one model, a part of a run's state: workers that join, and runs that resume, have them as they were."""

    def __init__(self, replica: Replica) -> None:
        self._whole = type(replica) is Replica
        self._optimizer = replica.optimizer
        self._groups = _sizes(replica.optimizer)
        named = list(replica.module.named_parameters())
        self._fixed = [(name, weakref.ref(p)) for name, p in named if not p.requires_grad]
        # In pieces parameters may be let go of, and others take their place: nothing here keeps them.
        trained = [(name, p) for name, p in named if p.requires_grad] if self._whole else []
        self._names = [name for name, _ in trained]
        self._parameters: list[nn.Parameter] = [p for _, p in trained]
        self._pieces = [] if self._whole else [weakref.ref(p) for p in replica.params]

    def check(self) -> None:
        """Raise ``UserError`` where something trains, or does not, that this run cannot bring together."""
        for name, kept in self._fixed:
            parameter = kept()
            if parameter is not None and parameter.requires_grad:
                rule = "what trains later requires gradients when session.prepare is called"
                raise UserError(rule, f"{name}, unfrozen since", f"{LATER}, or freeze it behind session.prepare")
        for piece in self._pieces:
            parameter = piece()
            if parameter is not None and not parameter.requires_grad:
                rule = "where workers hold the model in pieces, what trains is decided before session.prepare"
                raise UserError(rule, "a parameter frozen since", "freeze it before, or use --mechanism replicated")
        if self._whole and _sizes(self._optimizer) != self._groups:
            rule = "an optimizer has all its parameter groups when session.prepare is called"
            raise UserError(rule, "others now", f"{LATER}, or give it all groups, with lr 0 for those that wait")

    @property
    def frozen(self) -> list[str]:
        """The names of those that could train and do not."""
        return [name for name, p in zip(self._names, self._parameters, strict=True) if not p.requires_grad]

    def checksum(self) -> int:
        """A number that tells apart which of them train."""
        return hash(tuple(p.requires_grad for p in self._parameters))

    def set(self, frozen: Iterable[str]) -> None:
        """Freeze these, and no others."""
        names = set(frozen)
        for name, parameter in zip(self._names, self._parameters, strict=True):
            parameter.requires_grad_(name not in names)


class AsItWas:
    """What a run goes on with, and lines between ``session.prepare`` and the first epoch are not to change.

    They ran when it began, and did not when it came to where it goes on: flags, and options of the optimizer's groups,
    are as they were there.
    """

    def __init__(self, flags: Flags, optimizer: torch.optim.Optimizer) -> None:
        self._flags, self._frozen = flags, flags.frozen
        self._groups = optimizer.param_groups
        self._options = [_options(group) for group in self._groups]

    def restore(self) -> None:
        """As they were when this was made."""
        self._flags.set(self._frozen)
        for group, options in zip(self._groups, self._options, strict=False):  # more of them are refused in a step
            group.update(options)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in group.items() if name != "params"}
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in plain.items()}


def _sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]
