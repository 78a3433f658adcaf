"""Sums over workers in whatever order comes: one all-reduce a bucket, or by the routes of a topology."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastune.comm.group import Group, Work
from elastune.comm.reducer import Bucket, Reducer, plan
from elastune.comm.relay import Relay


class FlatBucket(Bucket):
    """One all-reduce of what this worker ``put``."""

    def __init__(self, members: list[int], like: Sequence[torch.Tensor], group: Group, *, hold: bool) -> None:
        super().__init__(members, like, group, hold=hold)
        # What lies on another device than the wire's is gathered there first.
        self._gathered = self._room(self._device) if self._staged else None
        self._views: dict[int, torch.Tensor] = {}
        self._work: Work | Relay | None = None
        self._relay = self._relay_of(group)

    def begin(self) -> None:
        self._missing = set(self.members)
        self.launched = False
        self._views = self._cut(self._sets[self._turn] if self._gathered is None else self._gathered)

    def regroup(self, group: Group) -> None:
        self._group = group
        self._relay = self._relay_of(group)

    def _relay_of(self, group: Group) -> Relay | None:
        routed = group.size > 1 and bool(group.routes)
        return Relay(group, self._sets[0][: self._numel], self.members[0]) if routed else None

    def settle(self) -> bool:
        return self._relay is None or self._relay.settle()

    def put(self, index: int, value: torch.Tensor | None) -> bool:
        view = self._views[index]
        self._missing.remove(index)
        if value is None:
            view.zero_()
        else:
            view.copy_(value)
        return not self._missing

    @property
    def here(self) -> torch.Tensor:
        return (self._sets[self._turn] if self._gathered is None else self._gathered)[: self._numel]

    def end_slot(self, slot: int) -> None:
        assert not self._missing

    def launch(self) -> None:
        self.launched = True
        data = self._sets[self._turn][: self._numel]
        if self._gathered is not None:
            data.copy_(self._gathered[: self._numel])
        if self._relay is None:
            self._work = self._group.all_reduce(data)
        else:
            self._relay.start([data], data)
            self._work = self._relay

    def combine(self) -> None:
        """An all-reduce goes all the way by itself."""

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()


class FlatReducer(Reducer[FlatBucket]):
    """Sums what each worker ``put``, once a step. See ``Reducer`` and ``Bucket``."""

    def __init__(
        self,
        like: Sequence[torch.Tensor],
        group: Group,
        gradients: int = 0,
        *,
        hold: bool = False,
        bucket_bytes: int | None = None,
    ) -> None:
        members = plan(like, bucket_bytes)
        super().__init__([FlatBucket(each, like, group, hold=hold) for each in members], group, gradients)
