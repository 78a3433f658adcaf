"""Sums over workers in whatever order the backend adds: one all-reduce a bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastune.comm.group import Group, Work
from elastune.comm.reducer import Bucket, Reducer, plan


class _Bucket(Bucket):
    def __init__(self, members: list[int], like: Sequence[torch.Tensor], group: Group, *, hold: bool) -> None:
        super().__init__(members, like, group, hold=hold)
        # What lies on another device than the wire's is gathered there first.
        self._gathered = self._room(self._device) if self._staged else None
        self._views: dict[int, torch.Tensor] = {}
        self._work: Work | None = None

    def begin(self) -> None:
        self._missing = set(self.members)
        self.launched = False
        self._views = self._cut(self._sets[self._turn] if self._gathered is None else self._gathered)

    def regroup(self, group: Group) -> None:
        self._group = group

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
        self._work = self._group.all_reduce(data)

    def combine(self) -> None:
        """An all-reduce goes all the way by itself."""

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()


class FlatReducer(Reducer[_Bucket]):
    """Sums what each worker ``put``, once a step. See ``Reducer`` and ``Bucket``."""

    def __init__(self, like: Sequence[torch.Tensor], group: Group, gradients: int = 0, *, hold: bool = False) -> None:
        super().__init__([_Bucket(members, like, group, hold=hold) for members in plan(like)], group, gradients)
