"""One worker's rows of a model that ``fully_shard`` divides. Imported where it is used: FSDP2 takes long to import."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from elastune.comm.comms import Comms
from elastune.core.batch_slices import BatchSlice
from elastune.mechanisms.engine import EngineReplica, Held


class Fsdp2Replica(EngineReplica):
    """One worker's rows. The module stays the user's; its parameters are others from here on."""

    gathers = True

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, comms: Comms) -> None:
        whole = dict(module.named_parameters(remove_duplicate=False))
        super().__init__(module, optimizer, comms)
        self.equal_passes = True
        self._mesh = DeviceMesh(next(module.parameters()).device.type, list(range(comms.everyone.size)))
        for block in (*_blocks(module), module):
            fully_shard(block, mesh=self._mesh)
            assert isinstance(block, FSDPModule)
            block.set_gradient_divide_factor(1.0)
            block.set_force_sum_reduction_for_comms(True)  # else in fp32 a kind of sum that gloo does not know
        rows = {id(whole[name]): p for name, p in module.named_parameters(remove_duplicate=False)}
        for group in optimizer.param_groups:
            group["params"] = [rows[id(p)] for p in group["params"]]
        self._order = [list(group["params"]) for group in optimizer.param_groups]
        self.params = [p for p in module.parameters() if p.requires_grad]
        self._whole = False
        step, clear = optimizer.step, optimizer.zero_grad
        self.take_over_steps(lambda: _ignored(step()), clear)

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin_step(self, parts: Sequence[BatchSlice] = ()) -> None:
        super().begin_step(parts)
        self._hold_whole(False)

    def run(self, loss: torch.Tensor, part: BatchSlice) -> None:
        self._restore()
        (loss * part.weight).backward()

    def clip(self, max_norm: float) -> float:
        gradients = [p.grad for p in self.params if p.grad is not None]
        return self.clip_divided([local(gradient) for gradient in gradients], max_norm)

    def held(self) -> Held:
        gradients = [local(grad) for grad in super().held().gradients if grad is not None]
        states = [
            {key: local(value) for key, value in state.items() if isinstance(value, torch.Tensor)}
            for state in self.optimizer.state.values()
        ]
        return Held([local(p.detach()) for p in self.module.parameters()], gradients, states)

    def gather(self) -> None:
        self._hold_whole(True)

    def _hold_whole(self, whole: bool) -> None:
        """Whether parameters are here, whole, between forward passes."""
        if whole == self._whole:
            return
        self._whole = whole
        for block in self.module.modules():
            if isinstance(block, FSDPModule):
                block.set_reshard_after_forward(not whole, recurse=False)
                block.unshard() if whole else block.reshard()

    # -- whole --------------------------------------------------------------------------------------------------------

    def model_state(self) -> dict[str, Any]:
        self._hold_whole(False)
        return {name: _full(tensor) for name, tensor in self.module.state_dict().items()}

    def load_model(self, state: Mapping[str, Any]) -> None:
        own = self.module.state_dict()
        self.module.load_state_dict({name: self._rows(values, own.get(name)) for name, values in state.items()})

    def optimizer_state(self) -> dict[str, Any]:
        told = self.optimizer.state_dict()
        state = {i: {key: _full(value) for key, value in kept.items()} for i, kept in told["state"].items()}
        return {**told, "state": state}

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        ordered = [p for params in self._order for p in params]
        kept = {
            i: {
                key: self._rows(value, ordered[i]) if _shaped(value, ordered[i]) else value for key, value in of.items()
            }
            for i, of in state["state"].items()
        }
        self.optimizer.load_state_dict({**state, "state": kept})

    def _rows(self, values: Any, like: Any) -> Any:
        """This worker's part of ``values``, which it has whole."""
        if not isinstance(like, DTensor):
            return values
        return distribute_tensor(values.to(like.device), self._mesh, like.placements, src_data_rank=None)


def _blocks(module: nn.Module) -> list[nn.Module]:
    """The parts of ``module`` to be gathered one by one, without those that share parameters with others."""
    found = [part for part in _parts(module) if any(p.requires_grad for p in part.parameters())]
    users: dict[int, int] = {}
    for part in found:
        for p in part.parameters():
            users[id(p)] = users.get(id(p), 0) + 1
    return [part for part in found if all(users[id(p)] == 1 for p in part.parameters())]


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from _parts(child)
        else:
            yield child


def _shaped(value: Any, p: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == p.shape


def local(tensor: Any) -> torch.Tensor:
    """This worker's part of ``tensor``."""
    found: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _ignored(_: object) -> None:
    """What a step returns."""
