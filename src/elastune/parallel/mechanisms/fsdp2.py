"""torch's ``fully_shard`` (FSDP2): parameters, gradients and optimizer state by rows, gathered a block at a time."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings
from elastune.parallel.comm.process_groups import Comms, open_default_group
from elastune.parallel.mechanisms.base import Replica
from elastune.parallel.mechanisms.engine import Engine
from elastune.parallel.mechanisms.guards import refuse_unless_elementwise

ORDERED = "2.13"
"""The first torch version that gives all of a block's gradients: zeros for parameters that a pass has not used."""


class Fsdp2(Engine):
    """The mechanism ``fsdp2``.

    Blocks are the children of the model and of its ``ModuleList`` containers. Parameters that several blocks share
    belong to the model's own block. In ``fast`` mode torch adds up gradients. In ``exact`` mode elastune does, on two
    workers or more; a single worker has nothing to divide.
    """

    name: ClassVar[str] = "fsdp2"
    exact: ClassVar[bool] = True

    def check(self, execution: ExecutionSettings, mesh: Mesh) -> None:
        super().check(execution, mesh)
        if execution.mode == "exact" and torch.torch_version.TorchVersion(torch.__version__) < ORDERED:
            rule = f"fsdp2 in exact mode needs torch {ORDERED} or newer"
            raise UserError(rule, torch.__version__, "use --mode fast, or --mechanism sharded")

    def examine(self, model: nn.Module, optimizer: torch.optim.Optimizer, execution: ExecutionSettings) -> None:
        for name, p in model.named_parameters():
            if not p.dim():
                fix = "use --mechanism sharded, or give it one element: shape (1,)"
                raise UserError("fsdp2 divides parameters by rows", f"{name} is a scalar", fix)
            if not p.is_contiguous():
                fix = "use --mechanism sharded, or make it contiguous"
                raise UserError("fsdp2 divides contiguous parameters", f"{name} is not", fix)
        if execution.mode == "exact":
            _refuse_inexact(optimizer)

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, comms: Comms, execution: ExecutionSettings
    ) -> Replica:
        self.examine(model, optimizer, execution)
        if execution.mode == "exact" and comms.everyone.size == 1:
            return Replica(model, optimizer, comms)
        open_default_group(comms.everyone)
        if execution.mode == "exact":
            from elastune.parallel.mechanisms.fsdp2_replica import ExactFsdp2Replica

            return ExactFsdp2Replica(model, optimizer, comms, execution.num_slots)
        from elastune.parallel.mechanisms.fsdp2_replica import Fsdp2Replica

        return Fsdp2Replica(model, optimizer, comms)


def _refuse_inexact(optimizer: torch.optim.Optimizer) -> None:
    """Raise ``UserError`` where the optimizer gives other bits on rows than on whole parameters."""
    refuse_unless_elementwise(optimizer)
    if any(group.get("fused") for group in optimizer.param_groups):  # its kernels have tails of their own
        raise UserError("fsdp2 in exact mode cuts parameters anywhere", "a fused optimizer", "use fused=False")
