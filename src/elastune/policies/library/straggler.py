"""Straggler response: a worker that keeps the others waiting is exchanged for another.

In synchronous data parallelism the slowest worker sets the pace (Dean and Barroso, "The Tail at Scale", CACM 2013; for
training: Chen et al., "Revisiting Distributed Synchronous SGD", 2016). The signal ``straggler`` of the performance
monitor names the rank; one slow step is weather, so it has to be named for ``patience`` steps in a row.

What it cannot do: give the slow worker a smaller share (a global batch is cut into equal parts); know whether another
would be faster (a slow rank may be slow because its host is, and a replacement may start there again: hence ``tries``);
shrink away a worker of its choice (fewer workers means that the last ranks leave).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from elastune.core.errors import UserError
from elastune.policies.base import Policy

if TYPE_CHECKING:
    from elastune.policies.run import Run

ACTIONS = ("replace", "shrink")


@dataclass(frozen=True)
class Watch:
    """``rank`` was named ``seen`` steps in a row (-1: none is). ``calm_until``: a step before which nothing is done."""

    rank: int = -1
    seen: int = 0
    workers: int = 0
    calm_until: int = 0
    done: int = 0


def advance(
    watch: Watch, step: int, workers: int, rank: int | None, patience: int, rest: int, tries: int
) -> tuple[Watch, int | None]:
    """The watch after one more step in which ``rank`` was named, and the rank to act on, if it is time."""
    if rank is None or not 0 <= rank < workers or workers == 1:
        return replace(watch, rank=-1, seen=0, workers=workers), None
    same = rank == watch.rank and workers == watch.workers  # ranks shift when somebody comes or goes
    watch = replace(watch, rank=rank, seen=watch.seen + 1 if same else 1, workers=workers)
    if watch.seen < patience or step < watch.calm_until or watch.done >= tries:
        return watch, None
    return replace(watch, seen=0, calm_until=step + rest, done=watch.done + 1), rank


class StragglerResponse(Policy):
    """Act on a worker that was the straggler for ``patience`` steps, at most ``tries`` times in a run.

    ``action="replace"``: another worker is started, and it leaves when that one joins; with no room for another it
    leaves first, or stays where the run would have too few workers without it. ``action="shrink"``: train on without
    it, which can be done only where it is the last rank and more workers are there than the fewest allowed; of others
    nothing is said or done. After that nothing is done for ``rest`` steps, in which the replacement comes; nor is
    anything ever in a run whose workers cannot change.
    """

    monitors: ClassVar[tuple[str, ...]] = ("performance",)

    def __init__(self, action: str = "replace", patience: int = 50, rest: int = 500, tries: int = 3) -> None:
        if action not in ACTIONS:
            raise UserError("unknown answer to a straggler", action, f"use one of {', '.join(ACTIONS)}")
        for name, value in (("patience", patience), ("rest", rest), ("tries", tries)):
            if value < 1:
                raise UserError(f"a straggler's {name} is a whole number", value, "give 1 or more")
        self.action, self.patience, self.rest, self.tries = action, patience, rest, tries
        self.watch = Watch()

    def after_step(self, run: Run) -> None:
        """Count how long one worker has been named; act when it is long enough."""
        value = run.signal("straggler")
        named = round(value) if math.isfinite(value) else None
        if not self._can_act(run, named):
            named = None
        self.watch, rank = advance(self.watch, run.step, run.size(), named, self.patience, self.rest, self.tries)
        if rank is None:
            return
        if self.action == "replace":
            run.replace(rank)
        else:
            run.resize(run.size() - 1)

    def _can_act(self, run: Run, named: int | None) -> bool:
        if self.action == "replace":
            return run.limits.low < run.limits.high
        return named == run.size() - 1 and run.size() > run.limits.low

    def state(self) -> dict[str, Any]:
        """Who was named for how long, and what was done."""
        return dict(vars(self.watch))

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.watch = Watch(**state)
