"""What a run trains: the model, its optimizer and schedulers, as one state that can be saved, loaded and compared."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from elastune.comm.group import GroupBroken
from elastune.elastic.worker.group import WorkerGroup
from elastune.mechanisms.base import Replica
from elastune.mechanisms.owned.replica import OwnedReplica
from elastune.mechanisms.owned.whole import WholeState, load_whole_model, load_whole_optimizer, whole_groups
from elastune.sync.base import Sync
from elastune.train.checkpoints.parts import Named, Part, States, from_trees, load_states, states_of, to_trees
from elastune.train.checkpoints.tree import Tensors, fingerprint

T = TypeVar("T")


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


@dataclass(frozen=True)
class _Buffers:
    """Of a model whose parameters lie in shards, the rest: it is equal on all workers."""

    replica: OwnedReplica
    name: str = "model"

    def state_dict(self) -> dict[str, Any]:
        state = self.replica.module.state_dict()
        return {name: state[name] for name, tensor in self.replica.state_names.items() if tensor is None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.replica.module.load_state_dict(state, strict=False)


@dataclass(frozen=True)
class _Options:
    """Of an optimizer whose state lies in shards, the options of its groups: they are equal on all workers."""

    replica: OwnedReplica
    name: str = "optimizer"

    def state_dict(self) -> dict[str, Any]:
        return {"param_groups": whole_groups(self.replica)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for own, group in zip(self.replica.optimizer.param_groups, state["param_groups"], strict=True):
            own.update({name: value for name, value in group.items() if name != "params"})


@dataclass(frozen=True)
class _Loaded:
    """Weights or optimizer state that lie in shares, to be loaded from whole tensors."""

    name: str
    replica: OwnedReplica
    take: Callable[[OwnedReplica, Mapping[str, Any]], None]

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError("TrainingState.whole gathers it")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.take(self.replica, state)


def repeated(workers: WorkerGroup, what: str, act: Callable[[], T]) -> T:
    """What ``act`` gives, which all workers do together: done again by all of them until none was disturbed in it."""
    while True:
        found: list[T] = []
        try:
            found.append(act())
        except GroupBroken as error:
            workers.recover(error)
        if all(done for (done,) in workers.gather([float(bool(found))], what)) and found:
            return found[0]


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
        model: Part = Named("model", self.replica.module)
        optimizer: Part = Named("optimizer", self.optimizer)
        if isinstance(self.replica, OwnedReplica):  # what lies in shards has a way of its own: ``owned.moving``
            model, optimizer = _Buffers(self.replica), _Options(self.replica)
        return model, optimizer, Named("sync", self.sync), _Schedulers(self.schedulers), _Built(kinds, self.built_rates)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups, as its ``state_dict`` has them of the whole model."""
        if isinstance(self.replica, OwnedReplica):
            return whole_groups(self.replica)
        return list(self.optimizer.state_dict()["param_groups"])

    def state(self) -> States:
        """All of it, as this worker has it."""
        return states_of(self.parts)

    def whole(self, reader: int | None = None) -> States:
        """All of it, whatever of it lies on other workers: what a checkpoint holds, whatever the mechanism.

        Where state lies in shares all workers must call this and read all of it in one order: tensors are gathered one
        by one as they are read, at rank ``reader`` alone where that is given (the others get tensors without values).
        Then this, and reading, raises ``GroupBroken``.
        """
        states, replica = self.state(), self.replica
        if isinstance(replica, OwnedReplica):
            gathered = WholeState(replica, reader)
            states |= {"model": gathered.model, "optimizer": gathered.optimizer}
        return states

    def whole_now(self, workers: WorkerGroup, reader: int | None = None) -> States:
        """As ``whole``, all of it read, whoever is lost meanwhile."""

        def read() -> States:
            tensors: Tensors = {}
            return from_trees(to_trees(self.whole(reader), tensors), tensors)

        return repeated(workers, "the whole state", read) if isinstance(self.replica, OwnedReplica) else self.state()

    def load(self, states: Mapping[str, Any], source: str) -> None:
        """Take over ``states``, of this worker, which came from ``source``. Raises ``UserError`` if they do not fit."""
        load_states(self.parts, states, source)

    def load_whole(self, states: Mapping[str, Any], source: str) -> None:
        """Take over this worker's part of ``whole``, which came from ``source``; as ``load``."""
        load_states(self.saved_parts, states, source)

    @property
    def saved_parts(self) -> tuple[Part, ...]:
        """As ``parts``, but what lies in shares takes over whole tensors."""
        replica = self.replica
        if not isinstance(replica, OwnedReplica):
            return self.parts
        loads = {"model": load_whole_model, "optimizer": load_whole_optimizer}
        return tuple(
            _Loaded(part.name, replica, loads[part.name]) if part.name in loads else part for part in self.parts
        )

    def fingerprint(self, workers: WorkerGroup) -> str:
        """SHA-256 of weights, buffers and optimizer state. Raises ``RuntimeError`` where workers disagree."""

        def read() -> str:
            state = self.whole()
            return fingerprint({"model": state["model"], "optimizer": state["optimizer"]})

        digest = repeated(workers, "weights", read) if isinstance(self.replica, OwnedReplica) else read()
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
