"""Data parallelism: each worker carries a whole replica."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from elastune.comm.comms import Comms
from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import Means
from elastune.mechanisms.base import Mechanism, Replica


class Replicated(Mechanism):
    """Every tensor lies whole on every worker."""

    name: ClassVar[str] = "replicated"
    exact: ClassVar[bool] = True

    def check(self, means: Means, mesh: Mesh) -> None:
        if mesh.replica > 1:
            rule = f"a replica of {self.name} lies on one worker"
            raise UserError(rule, f"{mesh.replica} workers a replica", f"use data={mesh.workers} alone")

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, comms: Comms, means: Means) -> Replica:
        return Replica(model, optimizer, comms)
