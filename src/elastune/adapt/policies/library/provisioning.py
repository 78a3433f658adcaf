"""Throughput-driven provisioning: add workers as long as each is worth its place.

Source: Mai et al., "KungFu: Making Training in Distributed Machine Learning Adaptive", OSDI 2020, figure 6 (adaptive
provisioning): add a worker, measure, go on while throughput still grows enough, else give it back. Here "enough" is
relative to what a worker brings already: an added one must bring ``threshold`` of that.

Limits: it climbs, so it stops at the first poor step. In ``exact`` mode one more worker may bring nothing until the
slots divide evenly again (4 to 7 workers are equally fast with 8 slots): ``add=4`` climbs in larger strides. It
measures a worker's worth through the noise of the step times, which among W workers counts W-fold; a worker within a
standard error of being worth it stays. It looks at samples a second only, not at what they are worth (``goodput``
does), nor at prices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from elastune.adapt.policies.base import Hook, Policy
from elastune.core.decisions import Snapshot
from elastune.core.errors import UserError

if TYPE_CHECKING:
    from elastune.adapt.policies.base import Run

Phase = Literal["measuring", "growing", "shrinking", "settled"]
LEAST_SETTLE = 5  # steps; the monitor needs some to measure the new setting's times


@dataclass(frozen=True)
class Rate:
    """A measured throughput.

    Attributes:
        workers: Number of workers; 0: not known.
        per_s: Their samples a second.
        error: Its standard error.
    """

    workers: int = 0
    per_s: float = 0.0
    error: float = 0.0


@dataclass(frozen=True)
class ProvisioningState:
    """How far the policy has come.

    Attributes:
        phase: What it does now.
        since: The step at which the phase began.
        waited_s: Seconds of training since then.
        good: The newest measurement that was worth it.
        workers, batch: The present setting.
        steps: Steps at the present setting.
    """

    phase: Phase = "measuring"
    since: int = 0
    waited_s: float = 0.0
    good: Rate = Rate()
    workers: int = 0
    batch: int = 0
    steps: int = 0


def worth(few: Rate, many: Rate) -> tuple[float, float]:
    """Return what each further worker of ``many`` brings, relative to one of ``few``, and the standard error.

    1 is perfect scaling, 0 is nothing.
    """
    one = few.per_s / few.workers * (many.workers - few.workers)
    slope = many.per_s / few.per_s * few.error  # by the rate of few
    return (many.per_s - few.per_s) / one, math.hypot(many.error, slope) / one


def advance(
    climb: ProvisioningState, now: Snapshot, rate: Rate | None, low: int, high: int, rules: Provisioning
) -> tuple[ProvisioningState, int | None]:
    """Return the climb after one more step, and how many workers to ask for; None: as many as there are.

    ``rate`` is what the monitor measured; None: nothing yet.
    """
    if now.batch_size != climb.batch:  # other times, other worth
        return ProvisioningState(since=now.step, workers=now.workers, batch=now.batch_size), None
    same = now.workers == climb.workers
    step_s = now.batch_size / rate.per_s if rate else 0.0
    climb = replace(climb, workers=now.workers, steps=climb.steps + 1 if same else 0, waited_s=climb.waited_s + step_s)
    if climb.phase == "measuring":
        return _measured(climb, now, rate, low, high, rules)
    waited = climb.waited_s > rules.wait_s
    if climb.phase == "shrinking":
        if now.workers <= climb.good.workers:
            return _enter(climb, "settled", now), None
        return (replace(_enter(climb, "measuring", now), steps=0) if waited else climb), None
    if now.workers > climb.good.workers:  # the requested worker has come, perhaps late
        return _enter(climb, "measuring", now), None
    if climb.phase == "growing":
        return (_enter(climb, "settled", now) if waited else climb), None
    if rules.retry and now.step - climb.since >= rules.retry:
        return ProvisioningState(since=now.step, workers=now.workers, batch=now.batch_size), None
    return climb, None


def _measured(
    climb: ProvisioningState, now: Snapshot, rate: Rate | None, low: int, high: int, rules: Provisioning
) -> tuple[ProvisioningState, int | None]:
    if climb.good.workers and now.workers <= climb.good.workers:  # lost again; another may come for it
        return _enter(climb, "growing", now), None
    if rate is None or climb.steps < rules.settle:
        return climb, None
    if climb.good.workers:
        value, error = worth(climb.good, rate)
        if value + error < rules.threshold:
            return _enter(climb, "shrinking", now), max(climb.good.workers, low)
    climb = replace(climb, good=rate)
    more = min(now.workers + rules.add, high, now.batch_size)
    if more <= now.workers:
        return _enter(climb, "settled", now), None
    return _enter(climb, "growing", now), more


def _enter(climb: ProvisioningState, phase: Phase, now: Snapshot) -> ProvisioningState:
    return replace(climb, phase=phase, since=now.step, waited_s=0.0)


def measured(now: Snapshot) -> Rate | None:
    """Return what the performance monitor measured; None: nothing yet."""
    throughput = now.signals.get("throughput")
    if throughput is None or not 0 < throughput.value < math.inf:
        return None
    error = throughput.error if throughput.error is not None and math.isfinite(throughput.error) else 0.0
    return Rate(now.workers, throughput.value, error)


@dataclass(frozen=True)
class Provisioning(Policy):
    """``provisioning``: add workers while each brings at least ``threshold`` of what one worker brought before.

    Workers that are not worth it are given back. A lost worker is not this policy's to replace: the membership does
    that.

    Args:
        threshold: What an added worker must bring, as a part of what one worker brought before.
        add: How many workers to add at a time.
        settle: Steps with a number of workers before it is judged. The monitor's median decides.
        retry: Steps before it tries again; 0: never. A change of batch also ends the wait.
        wait_s: Seconds of training to wait for workers that were asked for. After that it stays with the present
            workers, and measures late ones when they come.
    """

    monitors: ClassVar[tuple[str, ...]] = ("performance",)
    hooks: ClassVar[tuple[Hook, ...]] = ("after_step",)

    threshold: float = 0.5
    add: int = 1
    settle: int = 30
    retry: int = 1000
    wait_s: float = 60.0

    def __post_init__(self) -> None:
        for name, good, fix in (
            ("threshold", 0 <= self.threshold <= 1, "give a part of a worker, 0 to 1"),
            ("add", self.add >= 1, "give 1 or more workers"),
            ("settle", self.settle >= LEAST_SETTLE, f"give {LEAST_SETTLE} or more steps"),
            ("retry", self.retry >= 0, "give a number of steps, 0 for never"),
            ("wait_s", 0 < self.wait_s < math.inf, "give seconds above 0"),
        ):
            if not good:
                raise UserError(f"provisioning cannot work with this {name}", getattr(self, name), fix)

    def init(self) -> ProvisioningState:
        return ProvisioningState()

    def decide(self, hook: Hook, state: ProvisioningState, run: Run) -> ProvisioningState:
        """Look at the throughput; ask for more or fewer workers where that is due."""
        low, high = run.limits.low, run.limits.high
        climb, workers = advance(state, run.snapshot, measured(run.snapshot), low, high, self)
        if workers is not None:
            run.resize(workers)
        return climb
