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

from elastune.core.batch_slices import BatchSlice
from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings
from elastune.parallel.comm.norms import clip_factor
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.mechanisms.base import Mechanism, Replica, optimizer_bytes, storage_bytes
from elastune.parallel.mechanisms.capabilities import ENGINE, Capabilities
from elastune.parallel.mechanisms.guards import GradientGuard


class Engine(Mechanism, ABC):
    """A mechanism that leaves a step to another engine, whose workers stay as they are along one axis."""

    exact: ClassVar[bool] = False
    capabilities: ClassVar[Capabilities] = ENGINE

    def check(self, execution: ExecutionSettings, mesh: Mesh) -> None:
        if mesh.workers not in (mesh.data, mesh.shard):
            raise UserError(f"{self.name} lays all workers along one axis", mesh, f"use --workers {mesh.workers}")


@dataclass(frozen=True)
class EngineTensors:
    """The tensors that one worker has: parameters, gradients, and what the optimizer keeps for each of its own."""

    parameters: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor | None]
    states: Sequence[Mapping[str, Any]]


class EngineReplica(Replica, ABC):
    """One worker's part of what an engine trains.

    ``names``: of the optimizer's parameters, by the numbers that torch gives them; ``shapes``: of the model's state.
    ``in_pieces``: each worker writes and reads its own part of a checkpoint.

    ``accumulate`` of the base becomes ``run``: a backward pass in which the engine reduces by itself. The user's
    optimizer stays the object that schedulers and the user's lines hold: its ``step`` does what the engine does, once a
    step, and nothing between the slices of one.
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
        known = {id(p): name for name, p in module.named_parameters()}
        numbered = enumerate(p for params in self._order for p in params)
        self.names = [known.get(id(p), f"#{number}") for number, p in numbered]
        self.shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}

    @property
    def numbers(self) -> int:
        return self._count

    @abstractmethod
    def run(self, loss: torch.Tensor, part: BatchSlice) -> None:
        """A backward pass of ``loss`` times the weight of ``part``. After the step's last one the engine has the sum
        over all passes of all workers.
        """

    def take_over_steps(self, apply: Callable[[], None], clear: Callable[[], None]) -> None:
        """From here on ``optimizer.step()`` is ``apply``, in which it is itself again; ``zero_grad()`` is ``clear``.

        A method of this one object is replaced, as torch's schedulers do it too.
        """
        optimizer = self.optimizer
        own = vars(optimizer)
        before: dict[str, Any] = {name: own[name] for name in ("step", "zero_grad") if name in own}

        def itself() -> None:
            del own["step"], own["zero_grad"]
            own.update(before)

        def steer() -> None:
            own["step"], own["zero_grad"] = MethodType(step, optimizer), MethodType(zero_grad, optimizer)

        def step(_: torch.optim.Optimizer, closure: Any = None) -> None:
            if closure is not None:
                raise UserError("an engine takes one step a batch", "a closure", "call optimizer.step()")
            optimizer._opt_called = True  # type: ignore[attr-defined]  # what schedulers ask
            if self._reduced:
                self._reduced = False
                itself()
                try:
                    self._unguard()
                    apply()
                finally:
                    steer()

        def zero_grad(_: torch.optim.Optimizer, set_to_none: bool = True) -> None:
            clear()

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        steer()

    def begin_step(self, parts: Sequence[BatchSlice] = ()) -> None:
        super().begin_step(parts)
        self._reduced, self._mine = False, []

    def reduced(self) -> None:
        """The step's sum is there: the user's lines may clip it and step."""
        self._reduced = True

    def guard(self, mine: Sequence[torch.Tensor | None]) -> None:
        """Where gradients are not whole on this worker, which has ``mine`` of them: until the optimizer's step, whoever
        uses a parameter's by himself is told so.
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
        """As ``clip``, where each number of the gradient is in ``held`` of one worker alone."""
        if not self._reduced:
            return 0.0
        square = torch.zeros(1, dtype=torch.float64)
        for grad in held:
            square += torch.linalg.vector_norm(grad, dtype=torch.float64).cpu() ** 2
        wire = square.to(self.comms.everyone.wire)
        self.comms.everyone.all_reduce(wire).wait()
        norm = math.sqrt(float(wire))
        if held and (factor := clip_factor(norm, max_norm)) != 1.0:
            torch._foreach_mul_(list(held), factor)
        return norm

    def held(self) -> EngineTensors:
        """What lies on this worker, after a step's reduction."""
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

    # -- whole --------------------------------------------------------------------------------------------------------

    def model_state(self) -> dict[str, Any]:
        """The whole model's ``state_dict``, by the user's names; where it ``gathers``, all workers call this."""
        return dict(self.module.state_dict())

    def load_model(self, state: Mapping[str, Any]) -> None:
        """Take over what ``model_state`` gave, under this mechanism or another, and stored tensors if ``in_pieces``."""
        self.module.load_state_dict(state)

    def optimizer_state(self) -> dict[str, Any]:
        """The whole optimizer's ``state_dict``, as torch has it; where it ``gathers``, all workers call this."""
        return dict(self.optimizer.state_dict())

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        """Take over what ``optimizer_state`` gave, as ``load_model`` does."""
        self.optimizer.load_state_dict(dict(state))

    def written(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What this worker writes of ``model_state`` and ``optimizer_state``, where each writes its part."""
        return self.model_state(), self.optimizer_state()

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups of parameters, as its ``state_dict`` has them; parameters by number."""
        found, at = [], 0
        for params, group in zip(self._order, self.optimizer.param_groups, strict=True):
            options = {key: value for key, value in group.items() if key != "params"}
            found.append({**options, "params": list(range(at, at + len(params)))})
            at += len(params)
        return found


class SlotEngine(EngineReplica):
    """An engine that adds up whole slots in canonical order; passes without weight add nothing.

    ``used``: which of ``params`` this worker's passes have given gradients since it was last told to forget.
    """

    used: list[bool]

    @abstractmethod
    def settle(self, used: Sequence[bool]) -> None:
        """Complete the step's sums; ``used``: which of ``params`` any worker's slots have given gradients."""
