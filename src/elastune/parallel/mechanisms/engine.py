"""The contract of engines of other packages, which reduce gradients and step the optimizer by themselves."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings
from elastune.core.slots import BatchSlice
from elastune.parallel.comm.norms import clip_factor
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.mechanisms import torch_private
from elastune.parallel.mechanisms.base import Mechanism, Replica, optimizer_bytes, storage_bytes
from elastune.parallel.mechanisms.capabilities import ENGINE, Capabilities
from elastune.parallel.mechanisms.guards import GradientGuard


class Engine(Mechanism, ABC):
    """A mechanism that leaves a step to the engine of another package. Its workers are fixed and lie along one axis."""

    exact: ClassVar[bool] = False
    capabilities: ClassVar[Capabilities] = ENGINE

    def check(self, execution: ExecutionSettings, mesh: Mesh) -> None:
        if mesh.workers not in (mesh.data, mesh.shard):
            raise UserError(f"{self.name} lays all workers along one axis", mesh, f"use --workers {mesh.workers}")


@dataclass(frozen=True)
class EngineTensors:
    """The tensors on one worker: parameters, gradients, and the optimizer's state of each parameter that it updates."""

    parameters: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor | None]
    states: Sequence[Mapping[str, Any]]


class EngineReplica(Replica, ABC):
    """One worker's part of a model that an engine trains.

    ``run`` replaces ``accumulate`` of the base: a backward pass in which the engine reduces gradients itself. The
    user's optimizer stays the object that schedulers and the program use. Its ``step`` runs the engine's step once a
    step, and does nothing between the slices of a step.

    Attributes:
        names: The names of the optimizer's parameters, by the numbers that torch gives them.
        shapes: The shapes of the tensors in the model's state, by name.
        in_pieces: Each worker writes and reads its own part of a checkpoint.
    """

    in_pieces: bool = False

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, comms: Comms) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UserError("an engine takes one step a batch", "LBFGS", "use --mechanism replicated")
        super().__init__(module, optimizer, comms)
        self._reduced = False
        self._mine: list[torch.Tensor | None] = []
        self._count = sum(p.numel() for p in self.params)
        self._order = [list(group["params"]) for group in optimizer.param_groups]
        names = {id(p): name for name, p in module.named_parameters()}
        numbered = enumerate(p for params in self._order for p in params)
        self.names = [names.get(id(p), f"#{number}") for number, p in numbered]
        self.shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}

    @property
    def numbers(self) -> int:
        return self._count

    @abstractmethod
    def run(self, loss: torch.Tensor, part: BatchSlice) -> None:
        """Run a backward pass of ``loss`` times the weight of ``part``. After the step's last pass the engine has the
        sum over all passes of all workers.
        """

    def take_over_steps(self, apply: Callable[[], None], clear: Callable[[], None]) -> None:
        """Make ``optimizer.step()`` call ``apply`` and ``optimizer.zero_grad()`` call ``clear`` from now on.

        Inside ``apply`` the optimizer has its own methods. As torch's schedulers do, this replaces methods of this one
        object and not of its class.
        """
        optimizer = self.optimizer
        attributes = vars(optimizer)
        before: dict[str, Any] = {name: attributes[name] for name in ("step", "zero_grad") if name in attributes}

        def restore() -> None:
            del attributes["step"], attributes["zero_grad"]
            attributes.update(before)

        def replace() -> None:
            attributes["step"], attributes["zero_grad"] = MethodType(step, optimizer), MethodType(zero_grad, optimizer)

        def step(_: torch.optim.Optimizer, closure: Any = None) -> None:
            if closure is not None:
                raise UserError("an engine takes one step a batch", "a closure", "call optimizer.step()")
            torch_private.mark_stepped(optimizer)
            if self._reduced:
                self._reduced = False
                restore()
                try:
                    self._unguard()
                    apply()
                finally:
                    replace()

        def zero_grad(_: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            clear()

        torch_private.mark_scheduled(step)
        replace()

    def begin_step(self, parts: Sequence[BatchSlice] = ()) -> None:
        super().begin_step(parts)
        self._reduced, self._mine = False, []

    def reduced(self) -> None:
        """The step's sum is complete: the program may clip it and step."""
        self._reduced = True

    def guard(self, mine: Sequence[torch.Tensor | None]) -> None:
        """Put a ``GradientGuard`` on every parameter until the optimizer's step, because gradients are not whole here.

        A program that uses such a gradient gets a ``UserError``. ``mine``: the gradients on this worker.
        """
        self._mine = list(mine)
        for p in self.params:
            p.grad = GradientGuard.of(p)

    def _unguard(self) -> None:
        for p, gradient in zip(self.params, self._mine, strict=False):  # none, or all
            if isinstance(p.grad, GradientGuard):  # not cleared by the user
                p.grad = gradient
        self._mine = []

    def abandon(self) -> None:
        self._reduced, self._mine = False, []
        super().abandon()

    def clip_divided(self, held: Sequence[torch.Tensor], max_norm: float) -> float:
        """As ``clip``, where each element of the gradient is in ``held`` of exactly one worker."""
        if not self._reduced:
            return 0.0
        square = torch.zeros(1, dtype=torch.float64)
        for grad in held:
            square += torch.linalg.vector_norm(grad, dtype=torch.float64).cpu() ** 2
        wire = square.to(self.comms.everyone.wire)
        self.comms.everyone.all_reduce(wire).wait()
        norm = math.sqrt(float(wire))
        if held and (factor := clip_factor(norm, max_norm)) != 1.0:
            torch_private.foreach_mul_(list(held), factor)
        return norm

    def held(self) -> EngineTensors:
        """The tensors on this worker after a step's reduction."""
        gradients = self._mine or [p.grad for p in self.params]
        return EngineTensors(list(self.module.parameters()), gradients, list(self.optimizer.state.values()))

    def memory(self) -> dict[str, int]:
        held = self.held()
        return {
            "parameters": storage_bytes([*held.parameters, *self.module.buffers()]),
            "gradients": storage_bytes(held.gradients),
            "optimizer": optimizer_bytes(held.states),
            "copies": 0,
        }

    # -- whole state --------------------------------------------------------------------------------------------------

    def model_state(self) -> dict[str, Any]:
        """The whole model's ``state_dict``, by the user's names. All workers must call this if ``gathers``."""
        return dict(self.module.state_dict())

    def load_model(self, state: Mapping[str, Any]) -> None:
        """Load the ``model_state`` of any mechanism. With ``in_pieces`` its tensors may be ``Stored``."""
        self.module.load_state_dict(state)

    def optimizer_state(self) -> dict[str, Any]:
        """The whole optimizer's ``state_dict``, as torch gives it. All workers must call this if ``gathers``."""
        return dict(self.optimizer.state_dict())

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Load a state that ``optimizer_state`` returned; see ``load_model``."""
        self.optimizer.load_state_dict(dict(state))

    def written(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """This worker's part of ``model_state`` and ``optimizer_state`` for a checkpoint written in parts."""
        return self.model_state(), self.optimizer_state()

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups in the form of its ``state_dict``; parameters are numbers."""
        groups, first = [], 0
        for params, group in zip(self._order, self.optimizer.param_groups, strict=True):
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append({**options, "params": list(range(first, first + len(params)))})
            first += len(params)
        return groups


class SlotEngine(EngineReplica):
    """An engine that adds up whole slots in canonical order. Passes without weight add nothing.

    ``used``: for each of ``params``, whether this worker's passes of the step have given it a gradient.
    """

    used: list[bool]

    @abstractmethod
    def settle(self, used: Sequence[bool]) -> None:
        """Complete the step's sums. ``used``: for each of ``params``, whether any worker's slots gave it a gradient."""
