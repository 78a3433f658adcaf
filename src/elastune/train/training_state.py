"""What a run trains: the model, its optimizer and schedulers, as one state that can be saved, loaded and compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from elastune.core.errors import UserError
from elastune.elastic.worker.group import WorkerGroup
from elastune.mechanisms.base import Replica
from elastune.train.checkpoints.tree import fingerprint


@dataclass(frozen=True)
class TrainingState:
    """One worker's replica and what belongs to it. ``built_rates``: the learning rates that the program built."""

    replica: Replica
    optimizer: torch.optim.Optimizer
    schedulers: tuple[Any, ...]
    built_rates: tuple[float, ...] = ()

    def state(self) -> dict[str, Any]:
        """All of it, as this worker has it."""
        return {
            "model": self.replica.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedulers": [s.state_dict() for s in self.schedulers],
            "kinds": [type(part).__name__ for part in (self.optimizer, *self.schedulers)],
            "built_rates": self.built_rates,
        }

    def load(self, state: dict[str, Any], source: str) -> None:
        """Take over ``state``, which came from ``source``. Raises ``UserError`` where it does not fit."""
        try:
            self.replica.module.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
                scheduler.load_state_dict(saved)
        except (RuntimeError, ValueError, KeyError) as error:
            fix = "resume with the program that wrote it"
            raise UserError("a checkpoint must fit the program", f"{source}: {error}", fix) from None

    def fingerprint(self, workers: WorkerGroup) -> str:
        """SHA-256 of weights, buffers and optimizer state. Raises ``RuntimeError`` where workers disagree."""
        state = self.state()
        digest = fingerprint({"model": state["model"], "optimizer": state["optimizer"]})
        if len(set(workers.gather_bytes(bytes.fromhex(digest)))) > 1:
            raise RuntimeError("workers hold different weights: does the model or optimizer depend on the rank?")
        return digest

    @property
    def parameters(self) -> int:
        """How many numbers of the model are trained."""
        return sum(p.numel() for p in self.replica.params)

    @property
    def gradient_bytes(self) -> int:
        """The size of what a step reduces."""
        return sum(p.numel() * p.element_size() for p in self.replica.params)
