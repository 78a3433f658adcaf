"""The steps of a script for Lightning's Fabric: each batch of its loader is one, with a gradient scaler or without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.train.session import Session


class FabricSteps:
    """Batches, and the optimizer's step that belongs to each; of a batch's parts the last one counts."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._scaler: Any = None
        self._due = False

    def scale(self, precision: Any) -> None:
        """Behind ``session.prepare``: scale gradients where ``precision`` does so (16-mixed)."""
        self._scaler = getattr(precision, "scaler", None)
        if self._scaler is not None:
            self._session.track("fabric scaler", self._scaler)

    def of(self, batches: Iterator[Any]) -> Iterator[Any]:
        """``batches`` to train on. Raises ``UserError`` where no optimizer has stepped by the end of one, or of a part:
        a script that adds up several means one step by them, and counts what differs from worker to worker."""
        for batch in batches:
            yield batch
            if self._due:
                fix = "give its DataLoader the batch of a step, which --micro-batch cuts"
                raise UserError("each batch of a loader is a step", "one without optimizer.step()", fix)

    def backward(self, loss: torch.Tensor, module: nn.Module | None) -> None:
        """As ``session.backward``."""
        self._session.backward(loss if self._scaler is None else self._scaler.scale(loss), module)
        self._due = True

    def stepped(self) -> None:
        """An optimizer has made its step."""
        self._due = False
