"""Straggler response: exchange a worker that keeps the others waiting for another one.

In synchronous data parallelism the slowest worker sets the pace (Dean and Barroso, "The Tail at Scale", CACM 2013; for
training: Chen et al., "Revisiting Distributed Synchronous SGD", 2016). The signal ``straggler`` of the performance
monitor names the rank. One slow step is chance, so the same rank must be named for ``patience`` steps in a row.

Limits: it cannot give the slow worker a smaller share (a global batch is cut into equal parts). It does not know
whether another worker would be faster (a rank may be slow because its host is, and a replacement may start there again:
hence ``tries``). It cannot shrink away a worker of its choice (with fewer workers, the last ranks leave).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from elastune.adapt.policies.base import Hook, Policy
from elastune.core.errors import UserError

if TYPE_CHECKING:
    from elastune.adapt.policies.base import Run

ACTIONS = ("replace", "shrink")


@dataclass(frozen=True)
class StragglerState:
    """``rank`` was named ``seen`` steps in a row (-1: none is). Before step ``calm_until`` nothing is done."""

    rank: int = -1
    seen: int = 0
    workers: int = 0
    calm_until: int = 0
    done: int = 0


def advance(
    watch: StragglerState, step: int, workers: int, rank: int | None, patience: int, rest: int, tries: int
) -> tuple[StragglerState, int | None]:
    """Return the watch after one more step in which ``rank`` was named, and the rank to act on, if it is time."""
    if rank is None or not 0 <= rank < workers or workers == 1:
        return replace(watch, rank=-1, seen=0, workers=workers), None
    same = rank == watch.rank and workers == watch.workers  # ranks shift when somebody comes or goes
    watch = replace(watch, rank=rank, seen=watch.seen + 1 if same else 1, workers=workers)
    if watch.seen < patience or step < watch.calm_until or watch.done >= tries:
        return watch, None
    return replace(watch, seen=0, calm_until=step + rest, done=watch.done + 1), rank


@dataclass(frozen=True)
class StragglerResponse(Policy):
    """``straggler``: act on a worker that was the straggler for ``patience`` steps in a row.

    Nothing is ever done in a run whose workers cannot change.

    Args:
        action: "replace": another worker is started, and the slow one leaves when that one joins. With no room for
            another worker, the slow one leaves first; or it stays, where the run would have too few workers without it.
            "shrink": train on without the slow worker. That works only where it is the last rank and there are more
            workers than the fewest allowed; otherwise nothing is said or done.
        patience: Steps in a row.
        rest: Steps after an action in which nothing is done, while the replacement comes.
        tries: The most actions in a run.
    """

    monitors: ClassVar[tuple[str, ...]] = ("performance",)
    hooks: ClassVar[tuple[Hook, ...]] = ("after_step",)

    action: str = "replace"
    patience: int = 50
    rest: int = 500
    tries: int = 3

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise UserError("unknown answer to a straggler", self.action, f"use one of {', '.join(ACTIONS)}")
        for name in ("patience", "rest", "tries"):
            if (value := getattr(self, name)) < 1:
                raise UserError(f"a straggler's {name} is a whole number", value, "give 1 or more")

    def init(self) -> StragglerState:
        return StragglerState()

    def decide(self, hook: Hook, state: StragglerState, run: Run) -> StragglerState:
        """Count how long one worker has been named; act when that is long enough."""
        value = run.signal("straggler")
        named = round(value) if math.isfinite(value) else None
        if not self._can_act(run, named):
            named = None
        watch, rank = advance(state, run.step, run.size(), named, self.patience, self.rest, self.tries)
        if rank is not None and self.action == "replace":
            run.replace(rank)
        elif rank is not None:
            run.resize(run.size() - 1)
        return watch

    def _can_act(self, run: Run, named: int | None) -> bool:
        if self.action == "replace":
            return run.limits.low < run.limits.high
        return named == run.size() - 1 and run.size() > run.limits.low
