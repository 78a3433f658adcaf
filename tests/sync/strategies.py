"""What the kit is tried on; a toy among them, local SGD: every few steps parameters become their mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch

from elastune.comm.comms import Comms
from elastune.core.batch_slices import BatchSlice
from elastune.mechanisms.base import Replica
from elastune.sync.allreduce import ExactAllReduce, FastAllReduce
from elastune.sync.base import Sync
from elastune.testing.kits.mechanism import SLOTS
from elastune.testing.kits.sync import CONTROL


class Averaging(Sync):
    """Workers train by themselves in between. Exchanged are parameters, ``control``, and a one from each worker."""

    name: ClassVar[str] = "averaging"
    exact: ClassVar[bool] = False
    drifts: ClassVar[bool] = True
    agreement: ClassVar[Literal["in_reduction", "by_coordinator"]] = "in_reduction"

    def __init__(self, replica: Replica, comms: Comms, control: int, every: int) -> None:
        super().__init__(replica, comms, control)
        self.steps_in_round = every
        self._done = 0
        self._weight = 0.0
        self._result = self._flat()

    def _flat(self) -> torch.Tensor:
        numbers = torch.tensor([*self.control, 1.0])
        return torch.cat([*(p.detach().reshape(-1) for p in self.replica.params), numbers])

    def begin(self, share: BatchSlice, *, starts_step: bool) -> None:
        if starts_step:
            self.replica.begin_step()
            self._weight = 0.0

    def backward(self, loss: torch.Tensor, share: BatchSlice) -> None:
        self.replica.refuse_leftovers()
        self._weight += share.weight
        self.replica.accumulate(loss, share.weight)
        if share.ends_step:
            self.replica.adopt([None if p.grad is None else p.grad / self._weight for p in self.replica.params])
        else:
            self.replica.hide()

    def after_step(self) -> None:
        self._done += 1
        if self._done % self.steps_in_round == 0:
            sums = self._flat()
            self.group.all_reduce(sums).wait()
            self.adopt_result([sums])

    def last_result(self) -> list[torch.Tensor]:
        return [self._result]

    def result_room(self) -> list[torch.Tensor]:
        return [torch.empty_like(self._result)]

    def adopt_result(self, result: Sequence[torch.Tensor]) -> None:
        (self._result,) = result
        sizes = [p.numel() for p in self.replica.params]
        *parts, numbers = torch.split(self._result, [*sizes, len(self.control) + 1])
        for p, part in zip(self.replica.params, parts, strict=True):
            p.detach().copy_((part / numbers[-1]).view(p.shape))
        self.totals = numbers[:-1].tolist()

    def abandon(self) -> None:
        self.group.drain()
        self.replica.abandon()

    def state_dict(self) -> dict[str, Any]:
        return {"done": self._done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._done = int(state["done"])


def make_exact(replica: Replica, comms: Comms) -> Sync:
    return ExactAllReduce(replica, comms, SLOTS, CONTROL, elastic=True)


def make_fast(replica: Replica, comms: Comms) -> Sync:
    return FastAllReduce(replica, comms, CONTROL, elastic=True)


def make_averaging(replica: Replica, comms: Comms) -> Sync:
    return Averaging(replica, comms, CONTROL, every=2)
