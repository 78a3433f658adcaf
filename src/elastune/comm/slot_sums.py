"""One worker's slots, added up along the canonical tree while their values come in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from elastune.core.slots import Fold


class SlotSums:
    """Flat vectors, one a slot, each made of members that come in any order; what is added up is used again.

    ``room``: makes an empty vector. ``views``: cuts one into its members.
    """

    def __init__(
        self, room: Callable[[], torch.Tensor], views: Callable[[torch.Tensor], Mapping[int, torch.Tensor]]
    ) -> None:
        self._make_room = room
        self._cut = views
        self._pool: list[torch.Tensor] = []
        self._views_of: dict[int, Mapping[int, torch.Tensor]] = {}  # by data pointer: every slot asks for them again
        self._in_use: list[torch.Tensor] = []  # what goes back to the pool when a step begins
        self._missing: set[int] = set()
        self._members: tuple[int, ...] = ()

    def begin(self, run: range, num_slots: int, members: Sequence[int]) -> None:
        """A step begins, of which this worker has the slots ``run``; whatever is left of an earlier one is dropped."""
        self._pool.extend(self._in_use)
        self._in_use = []
        self._run = run
        self._fold: Fold[torch.Tensor] = Fold(run, num_slots, self._merge)
        self._next_slot = run.start
        self._leaf: torch.Tensor | None = None
        self._members = tuple(members)
        self._missing = set(members)
        self._views: Mapping[int, torch.Tensor] = {}

    def forget(self) -> None:
        """Somebody else may still write to or read from this memory: never use it again."""
        self._pool, self._in_use, self._views_of = [], [], {}

    def put(self, member: int, value: torch.Tensor | None) -> bool:
        """Member ``member`` of the current slot (None: zero), copied. True once the slot is complete."""
        if self._leaf is None:
            self._leaf = self._blank()
            self._views = self._views_of[self._leaf.data_ptr()]
        self._missing.remove(member)
        if value is None:
            self._views[member].zero_()
        else:
            self._views[member].copy_(value)
        return not self._missing

    @property
    def here(self) -> torch.Tensor:
        """The current slot's vector, as far as it is in."""
        assert self._leaf is not None
        return self._leaf

    def end_slot(self, slot: int) -> None:
        """Every member of ``slot`` is in; slots that were left out before it count as zero."""
        assert self._leaf is not None
        assert not self._missing
        self._skip_to(slot)
        self._fold.push(slot, self._leaf)
        self._next_slot = slot + self._run.step
        self._leaf = None
        self._missing = set(self._members)

    def parts(self) -> list[torch.Tensor]:
        """The sums of the maximal subtrees of this worker's slots, in order. It has no more to put."""
        self._skip_to(self._run.stop)
        return [value for _, value in self._fold.parts]

    def _skip_to(self, slot: int) -> None:
        for empty in range(self._next_slot, slot, self._run.step):
            self._fold.push(empty, self._blank().zero_())
            self._next_slot = empty + self._run.step

    def _blank(self) -> torch.Tensor:
        if self._pool:
            blank = self._pool.pop()
        else:
            blank = self._make_room()
            self._views_of[blank.data_ptr()] = self._cut(blank)
        self._in_use.append(blank)
        return blank

    def _merge(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self._in_use = [t for t in self._in_use if t is not b]
        self._pool.append(b)
        return a.add_(b)
