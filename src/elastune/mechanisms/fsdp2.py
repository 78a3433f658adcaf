"""torch's ``fully_shard`` (FSDP2): parameters, gradients and optimizer state by rows, gathered a block at a time."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from elastune.comm.comms import Comms
from elastune.comm.default_group import open_default_group
from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import Means
from elastune.mechanisms.base import Abilities, Mechanism, Replica
from elastune.mechanisms.engine import require_one_axis


class Fsdp2(Mechanism):
    """Blocks are the children of lists and sequences, and of the model itself; what several of them share stays above.

    Its sums are torch's own: ``exact`` is for ``sharded``.
    """

    name: ClassVar[str] = "fsdp2"
    exact: ClassVar[bool] = False
    abilities: ClassVar[Abilities] = Abilities(
        elastic=False, reshapes=False, bf16=False, offloads=False, measures=False
    )

    def check(self, means: Means, mesh: Mesh) -> None:
        require_one_axis(self.name, mesh)

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, comms: Comms, means: Means) -> Replica:
        for name, p in model.named_parameters():
            if not p.dim():
                fix = "use --mechanism sharded, or give it one element: shape (1,)"
                raise UserError("fsdp2 divides parameters by rows", f"{name} is a scalar", fix)
        from elastune.mechanisms.fsdp2_replica import Fsdp2Replica

        open_default_group(comms.everyone)
        return Fsdp2Replica(model, optimizer, comms)
