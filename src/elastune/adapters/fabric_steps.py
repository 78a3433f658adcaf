"""The steps of a script for Lightning's Fabric: each batch of its loader is one step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.train.session import Session


class FabricSteps:
    """Gives batches, and checks that an optimizer steps once for each. Of the parts of a batch, the last one counts."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._scaler: Any = None
        self._due = False

    def scale(self, precision: Any) -> None:
        """Scale gradients where ``precision`` does so (16-mixed). Call it after ``session.prepare``."""
        self._scaler = getattr(precision, "scaler", None)
        if self._scaler is not None:
            self._session.track("fabric scaler", self._scaler)

    def of(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield ``batches`` to train on.

        Raises:
            UserError: Where no optimizer has stepped by the end of a batch, or of a part of one. A script that
                accumulates gradients means one step by several batches, and counts what differs from worker to worker.
        """
        for batch in batches:
            yield batch
            if self._due:
                fix = "give its DataLoader the batch of a step, which --micro-batch cuts"
                raise UserError("each batch of a loader is a step", "one without optimizer.step()", fix)

    def backward(self, loss: torch.Tensor, module: nn.Module | None) -> None:
        """Do what ``session.backward`` does, with the loss scaled where there is a scaler."""
        self._session.backward(loss if self._scaler is None else self._scaler.scale(loss), module)
        self._due = True

    def stepped(self) -> None:
        """Note that an optimizer has stepped."""
        self._due = False
