"""A toy mechanism: the rows of every parameter lie half on each of two workers, and are gathered for a forward pass."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.func import functional_call

from elastune.core.errors import UserError
from elastune.core.layout import Box
from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.process_groups import Comms
from elastune.parallel.mechanisms.base import Mechanism, Replica

PARTS = 2


class Halves(Mechanism):
    """Both workers of a replica run the same samples on the whole model, and each updates its half."""

    name: ClassVar[str] = "halves"
    exact: ClassVar[bool] = True

    def check(self, execution: ExecutionSettings, mesh: Mesh) -> None:
        if (mesh.tensor, mesh.replica) != (PARTS, PARTS):
            raise UserError("a replica of halves lies on two workers", f"tensor={mesh.tensor}", "use tensor=2")

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, comms: Comms, execution: ExecutionSettings
    ) -> Replica:
        part = comms.mesh.coordinates(comms.rank)["tensor"]
        boxes: dict[str, Box] = {}
        for name, whole in list(model.named_parameters()):
            rows = len(whole) // PARTS
            if len(whole) % PARTS:
                raise UserError("halves need an even number of rows", f"{len(whole)} in {name}", "use another layer")
            boxes[name] = ((part * rows, (part + 1) * rows), *((0, size) for size in whole.shape[1:]))
            half = nn.Parameter(whole.detach()[part * rows : (part + 1) * rows].clone())
            owner, _, param_block = name.rpartition(".")
            setattr(model.get_submodule(owner), param_block, half)
            for group in optimizer.param_groups:
                group["params"] = [half if p is whole else p for p in group["params"]]
        return HalfReplica(model, optimizer, comms, boxes)


class HalfReplica(Replica):
    """One of two."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, comms: Comms, boxes: dict[str, Box]):
        super().__init__(module, optimizer, comms, boxes)
        self.model = _Gathered(self)

    def clip(self, max_norm: float) -> float:
        square = torch.stack([p.grad.square().sum() for p in self.params if p.grad is not None]).sum().reshape(1)
        self.comms.group("tensor").all_reduce(square).wait()
        norm = float(square.sqrt())
        for p in self.params:
            if p.grad is not None and norm > max_norm:
                p.grad *= max_norm / (norm + 1e-6)
        return norm


class _Gathered(nn.Module):
    """The whole model, in a forward pass."""

    def __init__(self, replica: HalfReplica) -> None:
        super().__init__()
        object.__setattr__(self, "_replica", replica)

    def forward(self, *inputs: Any) -> Any:
        replica: HalfReplica = self._replica
        group = replica.comms.group("tensor")
        whole = {name: _Gather.apply(half, group) for name, half in replica.module.named_parameters()}
        return functional_call(replica.module, whole, inputs)


class _Gather(torch.autograd.Function):
    """Both halves. What comes back is the whole gradient, equal on both workers: each takes its half of it."""

    @staticmethod
    def forward(ctx: Any, half: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.rank, ctx.rows = group.rank, len(half)
        whole = half.new_empty(PARTS * half.numel())
        group.all_gather(whole, half.detach().reshape(-1)).wait()
        return whole.view(PARTS * len(half), *half.shape[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (whole,) = gradients
        return whole[ctx.rank * ctx.rows : (ctx.rank + 1) * ctx.rows], None
