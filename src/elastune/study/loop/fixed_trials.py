"""A schedule of trials whose settings are given: some at once, each to its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from elastune.journal.records import Phase
from elastune.search.stopping.schedule import FixedTrial, IntermediateResult, Next, Schedule


class FixedTrials(Schedule):
    """Starts ``trials`` in their order, ``at_once`` at a time (None: as many as there is room for).

    ``shares``: as of any schedule; else each has the workers that it was given.
    """

    proposes = False

    def __init__(
        self, phase: Phase, trials: Iterable[FixedTrial] = (), *, at_once: int | None = None, shares: bool = False
    ) -> None:
        self.phase = phase
        self.shares = shares
        self.todo = list(trials)
        self.running: set[int] = set()
        self._at_once = at_once
        self._offered: FixedTrial | None = None

    @property
    def supplies(self) -> bool:
        return bool(self.todo) or self._offered is not None

    def next(self, fresh: bool) -> Next:
        if not fresh or (self._at_once is not None and len(self.running) >= self._at_once):
            return None
        if self._offered is None and self.todo:
            self._offered = self.todo.pop(0)
        return self._offered

    def started(self, trial: int, params: Mapping[str, Any], parent: int | None = None) -> None:
        self.running.add(trial)
        self._offered = None

    def reported(self, glimpse: IntermediateResult) -> str:
        return ""

    def paused(self, trial: int, epoch: int) -> None:
        self.running.discard(trial)

    def resumed(self, trial: int) -> None:
        self.running.add(trial)

    def ended(self, trial: int, values: tuple[float, ...] | None, violation: float = 0.0) -> None:
        self.running.discard(trial)

    def estimates(self) -> Mapping[int, tuple[float, ...]]:
        return {}
