"""One worker's rows of a model that ``fully_shard`` divides. Imported where it is used: FSDP2 takes long to import."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from elastune.comm.comms import Comms
from elastune.core.batch_slices import BatchSlice
from elastune.core.stretches import Stretch, whole_stretch
from elastune.mechanisms.engine import EngineReplica, Held
from elastune.mechanisms.owned.placement import VALUES
from elastune.mechanisms.scattered import Scattered, elements, whole


class Fsdp2Replica(EngineReplica):
    """One worker's rows. The module stays the user's; its parameters are others from here on."""

    gathers = True
    in_pieces = True

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
            i: {key: self._rows(value, ordered[i] if _shaped(value, ordered[i]) else None) for key, value in of.items()}
            for i, of in state["state"].items()
        }
        self.optimizer.load_state_dict({**state, "state": kept})

    def written(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What lies in rows, by its rows; anything else is rank 0's."""
        self._hold_whole(False)
        first = {id(p): name for name, p in self.module.named_parameters()}  # of names of tied weights
        kept = self.module.state_dict(keep_vars=True)
        model = self._pieces((name, f"{first.get(id(value), name)}:{VALUES}", value) for name, value in kept.items())
        told = self.optimizer.state_dict()
        state = {
            i: self._pieces((key, f"{self.names[i]}:{key}", value) for key, value in kept.items())
            for i, kept in told["state"].items()
        }
        return model, {**told, "state": state}

    def _pieces(self, tensors: Iterable[tuple[str, str, Any]]) -> dict[str, Any]:
        """What this worker writes of ``tensors``: their keys, their names in a checkpoint, and what is here."""
        found: dict[str, Any] = {}
        for key, name, value in tensors:
            if isinstance(value, DTensor):
                rows = local(value.detach()).reshape(-1)
                pieces = ((self._stretch(value), rows),) if len(rows) else ()
                found[key] = Scattered(name, tuple(value.shape), value.dtype, pieces)
            elif self.comms.rank == 0:
                found[key] = value.detach() if isinstance(value, torch.Tensor) else value
        return found

    def _stretch(self, like: DTensor) -> Stretch:
        """Where this worker's rows lie in ``like``."""
        rows = rows_of(like, self.comms.everyone.size)[self.comms.rank]
        return Stretch(whole_stretch(like.shape).box, rows.start, rows.stop)

    def _rows(self, values: Any, like: Any) -> Any:
        """This worker's part of ``values``, which are here, whole, or stored."""
        if not isinstance(like, DTensor):
            return whole(values) if hasattr(values, "read") else values
        if tuple(values.shape) != tuple(like.shape):
            raise ValueError(f"a tensor of shape {tuple(values.shape)} in place of {tuple(like.shape)}")
        rows = elements(values, self._stretch(like)).to(like.device).view(local(like).shape)
        return DTensor.from_local(
            rows, self._mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def rows_of(p: torch.Tensor, workers: int) -> list[range]:
    """The elements of ``p`` that each worker has: as many rows each as the first one, as far as there are rows."""
    length = p.numel() // max(1, p.shape[0])
    most = -(-p.shape[0] // workers)
    edges = [min(p.shape[0], most * worker) * length for worker in range(workers + 1)]
    return [range(low, high) for low, high in pairwise(edges)]


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
    return tuple(getattr(value, "shape", ())) == tuple(p.shape)  # which is no scalar


def local(tensor: Any) -> torch.Tensor:
    """This worker's part of ``tensor``."""
    found: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _ignored(_: object) -> None:
    """What a step returns."""
