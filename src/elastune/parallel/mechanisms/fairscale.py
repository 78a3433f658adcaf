"""FairScale's sharded data parallelism: ZeRO stage 2 by whole parameters.

Each worker updates some of the parameters (OSS), and only that worker gets their gradients (ShardedDataParallel).
Parameters lie whole on every worker.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from elastune.core.run import ExecutionSettings
from elastune.core.slots import BatchSlice
from elastune.parallel.comm.process_groups import Comms, open_default_group
from elastune.parallel.mechanisms.base import Replica
from elastune.parallel.mechanisms.capabilities import ENGINE_CAPABILITIES, Capabilities
from elastune.parallel.mechanisms.engine import Engine, EngineReplica, EngineTensors


class FairScale(Engine):
    """The mechanism ``fairscale``: OSS and ShardedDataParallel.

    FairScale's gradient buckets are off, because they lose track of gradients that ``zero_grad`` sets to None (torch's
    default since 2.0). From the second step on they would sum something else than the step's gradient.
    """

    name: ClassVar[str] = "fairscale"
    capabilities: ClassVar[Capabilities] = ENGINE_CAPABILITIES["fairscale"]

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, comms: Comms, execution: ExecutionSettings
    ) -> Replica:
        open_default_group(comms.everyone)
        return FairScaleReplica(model, optimizer, comms)


_OPTIONS = {"broadcast_buffers": False, "auto_refresh_trainable": False, "reduce_buffer_size": 0}


class FairScaleReplica(EngineReplica):
    """One worker's part of a replica: all parameters, and the gradients and optimizer state of some."""

    gathers = True

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, comms: Comms) -> None:
        super().__init__(module, optimizer, comms)
        oss = importlib.import_module("fairscale.optim.oss").OSS
        sharded = importlib.import_module("fairscale.nn.data_parallel").ShardedDataParallel
        parameters = inspect.signature(type(optimizer).__init__).parameters
        options = {name: value for name, value in optimizer.defaults.items() if name in parameters}
        self._oss = oss(
            optimizer.param_groups, type(optimizer), **options
        )  # the same group objects: learning rates are shared
        self.model = sharded(module, self._oss, **_OPTIONS)
        self._alone: Any = self.model.no_sync
        self.take_over_steps(self._oss.step, lambda: self._oss.zero_grad())

    def run(self, loss: torch.Tensor, part: BatchSlice) -> None:
        self._restore()
        scaled = loss * (part.weight * self.comms.everyone.size)  # the engine averages over workers
        if part.ends_step:
            scaled.backward()
        else:
            with self._alone():
                scaled.backward()

    def reduced(self) -> None:
        super().reduced()
        updated = {id(p) for group in self._oss.partition_parameters()[self.comms.rank] for p in group["params"]}
        self.guard([p.grad if id(p) in updated else None for p in self.params])

    def clip(self, max_norm: float) -> float:
        return self.clip_divided([grad for grad in self._mine if grad is not None], max_norm)

    def held(self) -> EngineTensors:
        return EngineTensors(list(self.module.parameters()), self._mine, list(self._oss.optim.state.values()))

    # -- whole state --------------------------------------------------------------------------------------------------

    def optimizer_state(self) -> dict[str, Any]:
        self._oss.consolidate_state_dict(-1)  # on every worker
        return dict(self._oss.state_dict())

    def load_optimizer(self, state: Mapping[str, Any]) -> None:
        self._oss.load_state_dict(
            {**state, "state": dict(state["state"])}
        )  # OSS empties the state of other workers' parameters
        self.optimizer.param_groups = self._oss.param_groups  # OSS has made new groups
