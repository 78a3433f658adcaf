"""Data parallelism whose gradients Horovod's engine sums."""

from __future__ import annotations

import importlib
import json
import os
from typing import Any, ClassVar

import torch
from torch import nn

from elastune.core.errors import UserError
from elastune.core.run import ExecutionSettings
from elastune.core.slots import BatchSlice
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.process_groups import Comms, own_address
from elastune.parallel.mechanisms.base import Replica
from elastune.parallel.mechanisms.capabilities import ENGINE_CAPABILITIES, Capabilities
from elastune.parallel.mechanisms.engine import Engine, EngineReplica


class Horovod(Engine):
    """The mechanism ``horovod``: each gradient goes to Horovod's background engine as soon as it exists.

    Horovod's ``DistributedOptimizer`` does the same. All workers must be on one host; ``attach`` refuses others.
    """

    name: ClassVar[str] = "horovod"
    capabilities: ClassVar[Capabilities] = ENGINE_CAPABILITIES["horovod"]

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, comms: Comms, execution: ExecutionSettings
    ) -> Replica:
        return HorovodReplica(model, optimizer, comms, _engine(comms.everyone))


class HorovodReplica(EngineReplica):
    """One worker's whole replica, with gradients that Horovod adds up."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, comms: Comms, engine: Any) -> None:
        super().__init__(module, optimizer, comms)
        self._engine = engine
        self._sent: dict[int, Any] = {}
        step, clear = optimizer.step, optimizer.zero_grad

        def apply() -> None:
            step()

        self.take_over_steps(apply, clear)

    def run(self, loss: torch.Tensor, part: BatchSlice) -> None:
        if not part.ends_step:
            self.accumulate(loss, part.weight)
            return
        self.stream(loss, part.weight, self._send)
        self.adopt([self._engine.synchronize(self._sent.pop(i)) for i in range(len(self.params))])

    def _send(self, i: int, gradient: torch.Tensor | None) -> None:
        """Start the sum of one gradient. An unused parameter sends zeros: Horovod needs every worker's gradient."""
        data = torch.zeros_like(self.params[i]) if gradient is None else gradient
        if data.is_sparse:
            raise UserError("horovod sums dense gradients here", "a sparse gradient", "use sparse=False")
        self._sent[i] = self._engine.allreduce_async_(data.detach(), op=self._engine.Sum, name=f"gradient.{i}")


def _engine(everyone: Group) -> Any:
    """The initialised module ``horovod.torch``. Rank 0 serves the rendezvous, as horovodrun would."""
    engine = importlib.import_module("horovod.torch")
    if engine.is_initialized():
        return engine
    host, port = own_address(), 0
    if everyone.rank == 0:
        hosts = importlib.import_module("horovod.runner.common.util.hosts")
        server = importlib.import_module("horovod.runner.http.http_server").RendezvousServer()
        port = server.start()
        server.init(hosts.get_host_assignments(hosts.parse_hosts(f"{host}:{everyone.size}"), everyone.size))
    address = torch.tensor(list(json.dumps([host, port]).encode()), dtype=torch.uint8)
    rows = [json.loads(bytes(row.tolist())) for row in everyone.gather_tensors(address)] if everyone.size > 1 else []
    if any(other != host for other, _ in rows):
        raise UserError("workers of horovod are on one host here", ", ".join({h for h, _ in rows}), "use deepspeed")
    position = {"RANK": everyone.rank, "SIZE": everyone.size, "LOCAL_RANK": everyone.rank, "LOCAL_SIZE": everyone.size}
    rendezvous = {"GLOO_RENDEZVOUS_ADDR": host, "GLOO_RENDEZVOUS_PORT": rows[0][1] if rows else port}
    operations = {
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_IFACE": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    settings = {**position, "HOSTNAME": host, "CROSS_RANK": 0, "CROSS_SIZE": 1, **rendezvous, **operations}
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in settings.items()})
    engine.init()
    return engine
