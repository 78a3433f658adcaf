"""What a run trains: the model, its optimizer and schedulers, as one state that can be saved, loaded and compared."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elastune.elastic.worker.group import WorkerGroup
from elastune.mechanisms.base import Replica
from elastune.sync.base import Sync
from elastune.train.checkpoints.parts import Named, Part, States, load_states, states_of
from elastune.train.checkpoints.tree import fingerprint


@dataclass(frozen=True)
class _Schedulers:
    """The schedulers, as one part of a run's state."""

    schedulers: tuple[Any, ...]
    name: str = "schedulers"

    def state_dict(self) -> dict[str, Any]:
        return {"states": [scheduler.state_dict() for scheduler in self.schedulers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for scheduler, saved in zip(self.schedulers, state["states"], strict=True):
            scheduler.load_state_dict(saved)


@dataclass(frozen=True)
class _Built:
    """What the program built: for a run that begins where this one is (``checkpoints.inherit``); nothing is loaded."""

    kinds: list[str]
    rates: tuple[float, ...]
    name: str = "built"

    def state_dict(self) -> dict[str, Any]:
        return {"kinds": self.kinds, "rates": self.rates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """It is the program's."""


END = "the end of the training function"


def described(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """What is trained, in a few words that are equal where tensors and the kind of the optimizer are."""
    tensors = [*model.parameters(), *model.buffers()]
    shapes = zlib.crc32(repr([(t.dtype, tuple(t.shape)) for t in tensors]).encode())
    numbers = sum(t.numel() for t in tensors)
    return f"{type(optimizer).__name__}, {len(tensors)} tensors of {numbers:,} numbers, shapes {shapes:08x}"


@dataclass(frozen=True)
class TrainingState:
    """One worker's part of it, and how it comes together with others' (``sync``).

    ``built_rates``: the learning rates that the program built.
    """

    sync: Sync
    schedulers: tuple[Any, ...]
    built_rates: tuple[float, ...] = ()

    @property
    def replica(self) -> Replica:
        """The model, as it lies on this worker."""
        return self.sync.replica

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Of what lies on this worker."""
        return self.sync.replica.optimizer

    @property
    def parts(self) -> tuple[Part, ...]:
        """All of it, in the order in which it is loaded."""
        kinds = [type(each).__name__ for each in (self.optimizer, *self.schedulers)]
        model, optimizer = Named("model", self.replica.module), Named("optimizer", self.optimizer)
        return model, optimizer, Named("sync", self.sync), _Schedulers(self.schedulers), _Built(kinds, self.built_rates)

    def state(self) -> States:
        """All of it, as this worker has it."""
        return states_of(self.parts)

    def load(self, states: Mapping[str, Any], source: str) -> None:
        """Take over ``states``, which came from ``source``. Raises ``UserError`` where they do not fit."""
        load_states(self.parts, states, source)

    def fingerprint(self, workers: WorkerGroup) -> str:
        """SHA-256 of weights, buffers and optimizer state. Raises ``RuntimeError`` where workers disagree."""
        state = self.state()
        digest = fingerprint({"model": state["model"], "optimizer": state["optimizer"]})
        if len(set(workers.gather_bytes(bytes.fromhex(digest), END))) > 1:
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
