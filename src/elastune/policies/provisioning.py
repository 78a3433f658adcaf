"""Throughput-driven provisioning: workers are added as long as each is worth its place.

Source: Mai et al., "KungFu: Making Training in Distributed Machine Learning Adaptive", OSDI 2020, section 6 (adaptive
provisioning): add a worker, measure, go on while throughput still grows enough, else give it back. Here "enough" is
relative to what a worker brings already: an added one must bring ``threshold`` of that.

What it cannot do: it climbs, so it stops at the first poor step. In ``exact`` mode a worker more may bring nothing
until the slots divide evenly again (4 to 7 workers are equally fast with 8 slots): ``add=4`` climbs in larger strides.
It sees a worker's worth through the noise of the step times, which among W workers counts W-fold; who is within its
standard error of being worth it stays. It looks at samples a second only, not at what they are worth (``goodput`` does),
nor at prices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from elastune.core.errors import UserError
from elastune.core.signals import Snapshot
from elastune.policies.base import Policy
from elastune.policies.pace import MOST_STEPS, Pace

if TYPE_CHECKING:
    from elastune.policies.run import Run

Phase = Literal["measuring", "growing", "shrinking", "settled"]


@dataclass(frozen=True)
class Rules:
    """When a worker is worth its place, and how long to wait for what: see ``Provisioning``."""

    threshold: float
    add: int
    settle: int
    retry: int
    wait_s: float


@dataclass(frozen=True)
class Climb:
    """How far it has come. ``workers`` and ``rate`` (samples a second, ``error`` in parts of it): what was measured
    last and is held to be good, 0 for nothing. ``since`` and ``since_s``: the step and the time at which the phase began."""

    phase: Phase = "measuring"
    since: int = 0
    since_s: float = 0.0
    workers: int = 0
    rate: float = 0.0
    error: float = 0.0
    pace: Pace = field(default_factory=Pace)


def worth(workers: int, rate: float, more: int, their_rate: float) -> float:
    """What each worker of ``more`` beyond ``workers`` brings, in parts of what one of ``workers`` does: 1 for perfect
    scaling, 0 for nothing. Rates in samples a second."""
    return (their_rate - rate) / (more - workers) / (rate / workers)


def advance(climb: Climb, now: Snapshot, low: int, high: int, rules: Rules) -> tuple[Climb, int | None]:
    """The climb after one more step, and how many workers to ask for; None: as many as there are."""
    pace = climb.pace.after(now)
    if now.batch_size != climb.pace.batch:  # other times, other worth
        return Climb(since=now.step, since_s=now.seconds, pace=pace), None
    climb = replace(climb, pace=pace)
    if climb.phase == "measuring":
        return _measured(climb, now, low, high, rules)
    waited = now.seconds - climb.since_s > rules.wait_s
    if climb.phase == "shrinking":
        if now.workers <= climb.workers:
            return _enter(climb, "settled", now), None
        return (_enter(climb, "measuring", now, pace.afresh()) if waited else climb), None
    if now.workers > climb.workers:  # who was asked for has come, be it late
        return _enter(climb, "measuring", now), None
    if climb.phase == "growing":
        return (_enter(climb, "settled", now) if waited else climb), None
    if rules.retry and now.step - climb.since >= rules.retry:
        return Climb(since=now.step, since_s=now.seconds, pace=pace.afresh()), None
    return climb, None


def _measured(climb: Climb, now: Snapshot, low: int, high: int, rules: Rules) -> tuple[Climb, int | None]:
    if climb.workers and now.workers <= climb.workers:  # lost again; another may come for it
        return _enter(climb, "growing", now), None
    pace = climb.pace
    if pace.count < rules.settle:
        return climb, None
    if climb.workers and _most_worth(climb, pace) < rules.threshold:
        return _enter(climb, "shrinking", now), max(climb.workers, low)
    climb = replace(climb, workers=now.workers, rate=pace.rate, error=pace.error)
    more = min(now.workers + rules.add, high, now.batch_size)
    if more <= now.workers:
        return _enter(climb, "settled", now), None
    return _enter(climb, "growing", now), more


def _most_worth(climb: Climb, pace: Pace) -> float:
    """The worth of who has come, one standard error taken in their favour: to add them is what was decided before."""
    added = pace.workers - climb.workers
    error = math.hypot(climb.error, pace.error) * climb.workers / added * pace.rate / climb.rate
    return worth(climb.workers, climb.rate, pace.workers, pace.rate) + error


def _enter(climb: Climb, phase: Phase, now: Snapshot, pace: Pace | None = None) -> Climb:
    return replace(climb, phase=phase, since=now.step, since_s=now.seconds, pace=pace or climb.pace)


class Provisioning(Policy):
    """Add ``add`` workers at a time while each brings at least ``threshold`` of what one brought before.

    ``settle``: steps (1 to 64) that are timed at a count; their median decides. Who is not worth it is given back, and
    nothing is tried again for ``retry`` steps (0: never) or until the batch changes. ``wait_s``: seconds to wait for
    workers that were asked for; after that it stays with those it has, and measures late ones when they come.
    A worker that is lost is the membership's to replace.
    """

    monitors: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, threshold: float = 0.5, add: int = 1, settle: int = 40, retry: int = 1000, wait_s: float = 60.0
    ) -> None:
        for name, value, good, fix in (
            ("threshold", threshold, 0 <= threshold <= 1, "give a part of a worker, 0 to 1"),
            ("add", add, add >= 1, "give 1 or more workers"),
            ("settle", settle, 1 <= settle <= MOST_STEPS, f"give 1 to {MOST_STEPS} steps"),
            ("retry", retry, retry >= 0, "give a number of steps, 0 for never"),
            ("wait_s", wait_s, 0 < wait_s < float("inf"), "give seconds above 0"),
        ):
            if not good:
                raise UserError(f"provisioning cannot work with this {name}", value, fix)
        self.rules = Rules(threshold, add, settle, retry, wait_s)
        self.climb = Climb()

    def after_step(self, run: Run) -> None:
        """Time the step; ask for a worker more or fewer where that is due."""
        self.climb, workers = advance(self.climb, run.snapshot, run.limits.low, run.limits.high, self.rules)
        if workers is not None:
            run.resize(workers)

    def state(self) -> dict[str, Any]:
        """How far it has come; the rules are the options'."""
        return {**vars(self.climb), "pace": self.climb.pace.to_json()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.climb = Climb(**{**state, "pace": Pace.from_json(state["pace"])})
