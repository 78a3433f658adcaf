"""Synchronous SGD whose gradients travel in fewer bytes, and what becomes of what a worker has not sent yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from elastune.comm.comms import Comms
from elastune.comm.compress.reducer import CompressedReducer
from elastune.comm.flat import FlatBucket
from elastune.comm.group import Group
from elastune.comm.reducer import Reducer
from elastune.core.batch_slices import BatchSlice
from elastune.core.compression import Compression
from elastune.mechanisms.base import Replica
from elastune.sync.allreduce import FastAllReduce

FACTORS = "factors"


class CompressedAllReduce(FastAllReduce):
    """As ``FastAllReduce``, but a step's gradient is what came through ``compression``.

    Where that leaves residuals (``comm.compress.residual``) each worker has its own. Of a worker that leaves one that
    stays takes it over; a worker that is alone adds its own to its next gradient, since it sends nothing; that of a
    worker that dies is lost, as they all are where training begins again from a snapshot or a checkpoint.
    """

    def __init__(
        self, replica: Replica, comms: Comms, compression: Compression, control: int = 0, *, elastic: bool = False
    ) -> None:
        self._compression = compression
        super().__init__(replica, comms, control, elastic=elastic)

    def _make_reducer(self, *, hold: bool) -> Reducer[FlatBucket]:
        return CompressedReducer(self._like(()), self.group, len(self._params), self._compression, hold=hold)

    @property
    def _compressed(self) -> CompressedReducer | None:
        assert self._reducer is None or isinstance(self._reducer, CompressedReducer)
        return self._reducer

    def _put(self, i: int, gradient: torch.Tensor | None) -> None:
        super()._put(i, gradient)
        reducer = self._compressed
        if gradient is None and reducer is not None and reducer.owes(self._last - i):
            self._used[i] = 1.0  # by an earlier step

    def _alone(self, loss: torch.Tensor, share: BatchSlice) -> None:
        super()._alone(loss, share)
        reducer = self._compressed
        if reducer is None or not share.ends_step:
            return
        for place, owed in reducer.pay().items():
            param = self._params[self._last - place]
            if param.grad is not None:
                param.grad.add_(owed)
            elif owed.any():
                param.grad = torch.empty_like(param).copy_(owed)

    # -- when workers come and go -------------------------------------------------------------------------------------

    def hand_over(self, over: Group, members: int) -> None:
        reducer = self._compressed
        assert reducer is not None
        for tensor in reducer.owed:
            over.send(tensor, (over.rank - members) % members)

    def regroup(self, comms: Comms, over: Group | None = None) -> None:
        super().regroup(comms, over)
        reducer = self._compressed
        if over is None or reducer is None:
            return
        members, given = comms.everyone.size, []
        for leaver in range(members + comms.rank, over.size, members):
            room = [torch.empty_like(tensor) for tensor in reducer.owed]
            for tensor in room:
                over.receive(tensor, leaver)
            given.append(room)
        for room in given:  # all of them, or none
            reducer.owe(room)

    # -- what is saved ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        factors = {} if self._compressed is None else self._compressed.factors
        return {FACTORS: factors} if factors else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._compressed is not None and state:
            self._compressed.set_factors(state[FACTORS])
