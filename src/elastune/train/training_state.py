"""What a run trains: model, optimizer, schedulers and frozen parameters as one state: saved, loaded and compared.

``TrainingState`` is the whole; ``Flags`` has the parameters that train; the functions at the end name an optimizer's
state by its parameters' names, as a checkpoint has it.
"""

from __future__ import annotations

import copy
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.elastic.worker.group import WorkerGroup
from elastune.parallel.comm.group import GroupBroken
from elastune.parallel.mechanisms.base import Replica
from elastune.parallel.mechanisms.engine import EngineReplica
from elastune.parallel.mechanisms.owned.replica import OwnedReplica
from elastune.parallel.mechanisms.owned.state import (
    FullState,
    load_whole_model,
    load_whole_optimizer,
    sharded_state,
    whole_groups,
)
from elastune.parallel.mechanisms.tensor_storage import whole
from elastune.parallel.sync.base import ActiveSync, Sync
from elastune.train.checkpoints.tree import Named, Part, States, fingerprint, load_states, states_of
from elastune.train.schedules import FoundSchedulers

T = TypeVar("T")
END = "the end of the training function"
LATER = 'use session.unfreeze(model, {"head.*": 0, "*": 2})'


@dataclass(frozen=True)
class TrainingState:
    """What a run trains, as it lies on this worker: model, optimizer, schedulers, and the sync strategy in use.

    ``session.prepare`` makes it. Checkpoints, joining workers and the final digest go through it.

    Attributes:
        active_sync: The sync strategy, which brings the workers' parts together; it has model and optimizer.
        given_schedulers: The schedulers that the program gave to ``session.prepare``.
        built_rates: The learning rates that the program built.
        flags: Which parameters train.
        found_schedulers: Other schedulers of the optimizers.
    """

    active_sync: ActiveSync
    given_schedulers: tuple[Any, ...]
    built_rates: tuple[float, ...] = ()
    flags: Flags = field(init=False)
    found_schedulers: FoundSchedulers = field(default_factory=FoundSchedulers)

    def __post_init__(self) -> None:
        object.__setattr__(self, "flags", Flags(self.replica))

    @property
    def schedulers(self) -> tuple[Any, ...]:
        """All schedulers."""
        return (*self.given_schedulers, *self.found_schedulers.schedulers)

    @property
    def sync(self) -> Sync:
        """The strategy in use."""
        return self.active_sync.sync

    @property
    def replica(self) -> Replica:
        """The model, as it lies on this worker."""
        return self.sync.replica

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the parameters that lie on this worker."""
        return self.sync.replica.optimizer

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of this state, in the order in which they are loaded."""
        kinds = [type(each).__name__ for each in (self.optimizer, *self.given_schedulers)]
        model: Part = Named("model", self.replica.module)
        optimizer: Part = Named("optimizer", self.optimizer)
        if isinstance(self.replica, EngineReplica):
            model = _Saved("model", self.replica.model_state, self.replica.load_model)
            optimizer = _Saved("optimizer", self.replica.optimizer_state, self.replica.load_optimizer)
        if isinstance(self.replica, OwnedReplica):  # shards move by themselves: ``parallel.mechanisms.owned``
            model, optimizer = _Buffers(self.replica), _Options(self.replica)
        return (
            model,
            optimizer,
            Named("sync", self.active_sync),
            _Schedulers(self.given_schedulers, self.found_schedulers),
            _Built(kinds, self.built_rates, self.flags),
        )

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups, as a checkpoint has them: of the whole model, by the parameters' names."""
        replica = self.replica
        if isinstance(replica, OwnedReplica):
            groups = whole_groups(replica)
        elif isinstance(replica, EngineReplica):
            groups = replica.groups()
        else:
            groups = self.optimizer.state_dict()["param_groups"]
        return list(by_name({"state": {}, "param_groups": groups}, self._names)["param_groups"])

    @property
    def _names(self) -> list[str]:
        """The names of the optimizer's parameters, by their number in its ``state_dict``."""
        replica = self.replica
        if isinstance(replica, OwnedReplica):
            return list(replica.store.places)
        if isinstance(replica, EngineReplica):
            return replica.names
        return names_of(self.optimizer, replica.module)

    @property
    def shapes(self) -> dict[str, tuple[int, ...] | None]:
        """The shapes of all tensors of the whole model's state, by name; () for a value that is no tensor."""
        replica = self.replica
        if isinstance(replica, EngineReplica):
            return dict(replica.shapes)
        if not isinstance(replica, OwnedReplica):
            return shapes_of(replica.module.state_dict())
        others = shapes_of(replica.other_state())
        names = replica.state_names.items()
        return {name: others[name] if tensor is None else replica.shapes[tensor] for name, tensor in names}

    def state(self) -> States:
        """The state as this worker has it."""
        return states_of(self.parts)

    @property
    def in_shares(self) -> bool:
        """Whether workers hold different pieces of the state, so that each writes its own to a checkpoint."""
        replica = self.replica
        return isinstance(replica, OwnedReplica) or (isinstance(replica, EngineReplica) and replica.in_pieces)

    def whole(self) -> States:
        """The whole state, with the pieces of other workers.

        Where state lies in shares, all workers must call this and read all of it in one order: each tensor is gathered
        as it is read. The call and the reading may then raise ``GroupBroken``.
        """
        states, replica = self.state(), self.replica
        if isinstance(replica, OwnedReplica):
            gathered = FullState(replica)
            states |= {"model": gathered.model, "optimizer": gathered.optimizer}
        return states

    def written(self, rank: int) -> States:
        """The part of a checkpoint that this worker, of ``rank``, writes; rank 0 also writes what all have alike."""
        if rank == 0:
            return states_of(self.saved_parts)
        model, optimizer = states_of(self.saved_parts[:2]).values()
        return {"model": model, "optimizer": {"state": optimizer["state"]}}

    def load(self, states: Mapping[str, Any], source: str) -> None:
        """Load ``states`` of this worker, which came from ``source``. Raises ``UserError`` if they do not fit."""
        load_states(self.parts, states, source)

    def load_whole(self, states: Mapping[str, Any], source: str) -> None:
        """Load this worker's part of a whole state, which came from ``source``. Raises as ``load``."""
        named = {**states, "optimizer": by_name(states["optimizer"], self._names)}
        load_states(self.saved_parts, named, source)

    @property
    def saved_parts(self) -> tuple[Part, ...]:
        """The parts as a checkpoint has them: this worker's pieces; the optimizer's state by parameters' names.

        They load the states that any workers have written, whole or in pieces, from tensors or from files.
        """
        replica, names = self.replica, self._names
        model, optimizer, *others = self.parts
        if isinstance(replica, OwnedReplica):
            return (
                _Saved(
                    "model", lambda: sharded_state(replica)["model"], lambda state: load_whole_model(replica, state)
                ),
                _Saved(
                    "optimizer",
                    lambda: by_name(sharded_state(replica)["optimizer"], names),
                    lambda state: load_whole_optimizer(replica, by_number(state, names)),
                ),
                *others,
            )
        if isinstance(replica, EngineReplica) and replica.in_pieces:
            return (
                _Saved("model", lambda: replica.written()[0], replica.load_model),
                _Saved(
                    "optimizer",
                    lambda: by_name(replica.written()[1], names),
                    lambda state: replica.load_optimizer(by_number(state, names)),
                ),
                *others,
            )
        return (
            _Saved("model", model.state_dict, lambda state: model.load_state_dict(_read(state))),
            _Saved(
                "optimizer",
                lambda: by_name(optimizer.state_dict(), names),
                lambda state: optimizer.load_state_dict(_read(by_number(state, names))),
            ),
            *others,
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
        """How many numbers of the model train."""
        return self.replica.numbers

    def held(self) -> HeldSettings:
        """The settings that the program's lines before the first epoch must not change in a run that goes on."""
        return HeldSettings(self.flags, self.optimizer)

    def remember_schedulers(self) -> list[Any]:
        """The schedulers' states, for ``restore_schedulers``."""
        return [copy.deepcopy(scheduler.state_dict()) for scheduler in self.schedulers]

    def restore_schedulers(self, states: list[Any] | None) -> None:
        """Put the schedulers back; None: nothing was remembered. The optimizer's own state has the learning rates."""
        if states is not None:
            for scheduler, state in zip(self.schedulers, states, strict=True):
                scheduler.load_state_dict(state)

    @property
    def state_bytes(self) -> int:
        """The bytes of parameters and optimizer state on this worker."""
        return sum(self.replica.memory().get(name, 0) for name in ("parameters", "optimizer"))

    @property
    def gradient_bytes(self) -> int:
        """The bytes of gradients that a step reduces."""
        return sum(p.numel() * p.element_size() for p in self.replica.params)


# --- parts of the state ---


@dataclass(frozen=True)
class _Schedulers:
    """The schedulers, as one part of a run's state."""

    registered: tuple[Any, ...]
    found: FoundSchedulers
    name: str = "schedulers"

    def state_dict(self) -> dict[str, Any]:
        return {"states": [scheduler.state_dict() for scheduler in self.registered], "found": self.found.states()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for scheduler, saved in zip(self.registered, state["states"], strict=True):
            scheduler.load_state_dict(saved)
        self.found.load(state.get("found", ()))


@dataclass(frozen=True)
class _Built:
    """What the program built: for a run that begins where this run is, see ``checkpoints.run_folder.inherit``.

    Only the names of frozen parameters are loaded.
    """

    kinds: list[str]
    rates: tuple[float, ...]
    flags: Flags
    name: str = "built"

    def state_dict(self) -> dict[str, Any]:
        return {"kinds": self.kinds, "rates": self.rates, "frozen": self.flags.frozen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.flags.set(state.get("frozen", ()))


@dataclass(frozen=True)
class _Buffers:
    """The rest of a model whose parameters lie in shards: it is equal on all workers."""

    replica: OwnedReplica
    name: str = "model"

    def state_dict(self) -> dict[str, Any]:
        return self.replica.other_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.replica.module.load_state_dict(state, strict=False)


@dataclass(frozen=True)
class _Options:
    """The options of the groups of an optimizer whose state lies in shards: they are equal on all workers."""

    replica: OwnedReplica
    name: str = "optimizer"

    def state_dict(self) -> dict[str, Any]:
        return {"param_groups": whole_groups(self.replica)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for target, group in zip(self.replica.optimizer.param_groups, state["param_groups"], strict=True):
            target.update({name: value for name, value in group.items() if name != "params"})


@dataclass(frozen=True)
class _Saved:
    """Weights or optimizer state: ``give`` returns what this worker writes, ``take`` loads what it needs."""

    name: str
    give: Callable[[], dict[str, Any]]
    take: Callable[[Mapping[str, Any]], object]

    def state_dict(self) -> dict[str, Any]:
        return self.give()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.take(state)


def _read(state: Any) -> Any:
    """``state`` with tensors in memory in place of stored tensors."""
    if isinstance(state, Mapping):
        return {key: _read(value) for key, value in state.items()}
    return whole(state) if hasattr(state, "read") else state


def repeated(workers: WorkerGroup, what: str, act: Callable[[], T]) -> T:
    """The result of ``act``, which all workers do together: all do it again until no worker was disturbed in it."""
    while True:
        results: list[T] = []
        try:
            results.append(act())
        except GroupBroken as error:
            workers.recover(error)
        if all(done for (done,) in workers.gather([float(bool(results))], what)) and results:
            return results[0]


def shapes_of(state: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """The shapes of the tensors in a ``state_dict``, stored tensors too; () for other values."""
    return {name: tuple(getattr(value, "shape", ())) for name, value in state.items()}


def described(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Model and optimizer in a few words, equal where the tensors' shapes and the optimizer's class are."""
    tensors = [*model.parameters(), *model.buffers()]
    shapes = zlib.crc32(repr([(t.dtype, tuple(t.shape)) for t in tensors]).encode())
    numbers = sum(t.numel() for t in tensors)
    return f"{type(optimizer).__name__}, {len(tensors)} tensors of {numbers:,} numbers, shapes {shapes:08x}"


# --- parameters that train ---


class Flags:
    """Which parameters of a model train, by their ``requires_grad``: frozen and unfrozen alike on all workers.

    A parameter that required gradients at ``session.prepare`` has its place in the sum over workers, and may be frozen
    and unfrozen later. Another parameter has none: if it were unfrozen later, each worker would train it by its own
    gradients. The frozen names are a part of a run's state: joining workers and resumed runs have them.
    """

    def __init__(self, replica: Replica) -> None:
        self._whole = type(replica) is Replica
        self._optimizer = replica.optimizer
        self._groups = _sizes(replica.optimizer)
        named = list(replica.module.named_parameters())
        self._fixed = [(name, weakref.ref(p)) for name, p in named if not p.requires_grad]
        # Parameters in pieces may be released and replaced: these references do not keep them.
        trained = [(name, p) for name, p in named if p.requires_grad] if self._whole else []
        self._names = [name for name, _ in trained]
        self._parameters: list[nn.Parameter] = [p for _, p in trained]
        self._pieces = [] if self._whole else [weakref.ref(p) for p in replica.params]

    def check(self) -> None:
        """Raise ``UserError`` where a parameter was frozen or unfrozen and this run cannot follow it."""
        for name, reference in self._fixed:
            parameter = reference()
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
        """The names of parameters that could train and do not."""
        return [name for name, p in zip(self._names, self._parameters, strict=True) if not p.requires_grad]

    def checksum(self) -> int:
        """A number that differs where other parameters train."""
        return hash(tuple(p.requires_grad for p in self._parameters))

    def set(self, frozen: Iterable[str]) -> None:
        """Freeze the parameters of these names, and no others."""
        names = set(frozen)
        for name, parameter in zip(self._names, self._parameters, strict=True):
            parameter.requires_grad_(name not in names)


class HeldSettings:
    """Frozen parameters and optimizer options of a run that goes on, put back before its first epoch.

    The program's lines between ``session.prepare`` and the first epoch ran when the run began. When it goes on they
    run again, and would undo later changes.
    """

    def __init__(self, flags: Flags, optimizer: torch.optim.Optimizer) -> None:
        self._flags, self._frozen = flags, flags.frozen
        self._groups = optimizer.param_groups
        self._options = [_options(group) for group in self._groups]

    def restore(self) -> None:
        """Put frozen parameters and options back."""
        self._flags.set(self._frozen)
        for group, options in zip(self._groups, self._options, strict=False):  # more of them are refused in a step
            group.update(options)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in group.items() if name != "params"}
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in plain.items()}


def _sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


# --- an optimizer's state by the names of parameters ---


def names_of(optimizer: torch.optim.Optimizer, module: nn.Module) -> list[str]:
    """The parameters' names in ``module``, by the numbers that ``optimizer.state_dict()`` gives them.

    A parameter that is not the module's gets "#" and its number.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [names.get(id(p), f"#{number}") for number, p in enumerate(params)]


def by_name(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A ``state_dict`` of an optimizer with ``names`` in place of numbers."""
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]]
    return {**state, "state": {names[number]: kept for number, kept in state["state"].items()}, "param_groups": groups}


def by_number(state: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Undo ``by_name``: numbers in place of ``names``. Raises ``ValueError`` for a name that is not among them."""
    numbers = {name: number for number, name in enumerate(names)}
    used = [*state["state"], *(name for group in state["param_groups"] for name in group["params"])]
    if unknown := [name for name in used if name not in numbers]:
        raise ValueError(f"it knows the parameter {unknown[0]}, and this one does not")
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]]
    return {**state, "state": {numbers[name]: kept for name, kept in state["state"].items()}, "param_groups": groups}
