"""Spot and on-demand workers together: as cheap as a deadline and a budget allow.

Source: Wu et al., "Can't Be Late: Optimizing Spot Instance Savings under Deadlines", NSDI 2024, section 5.2 (Uniform
Progress): a job that falls behind the straight line from nothing to done at the deadline takes on-demand machines,
stays on them until it is ahead of the line by two changeovers (hysteresis), and else uses spot machines and no others;
once only on-demand machines can still make it, it keeps them to the end (safety net).

The paper's job has all of its machines or none. An elastic job goes on with the machines that it has, so two things
differ here. On-demand workers stand beside spot workers, only as many as the required pace (work left over time left)
lacks. And a spot worker that comes later takes the place of an on-demand worker at once. So work that is bought late is
never bought twice, and waiting costs nothing while the pace can still be reached. ``patience`` moves the line, from the
published one (0) to the latest from which ``most`` workers can finish in time (1). The safety net is the same rule: the
pace never rises above what ``most`` workers reach.

Limits: it cannot foresee offers or prices. It cannot make up for on-demand workers that do not come when they are
wanted, which weighs the more the later it asks. It cannot keep a budget and a deadline that contradict each other (the
budget wins).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from elastune.adapt.policies.base import Policy
from elastune.core.errors import UserError


@dataclass(frozen=True)
class SpotRules:
    """The bounds of a job.

    Attributes:
        deadline_s: When the job must be done, in seconds from its start.
        most: The most workers at once.
        budget: The most that it may cost, in units of the prices.
        patience: How far it may fall behind uniform progress: 0 not at all, 1 as far as ``most`` workers can make up.
        changeover_s: What a change of workers costs at worst, in seconds: until a new one takes part, and the pause.
        look_s: Seconds that may pass until it is asked again.
    """

    deadline_s: float
    most: int
    budget: float = math.inf
    patience: float = 0.5
    changeover_s: float = 0.0
    look_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 < self.deadline_s < math.inf:
            raise UserError("a deadline lies in the future", f"{self.deadline_s:g} s", "give --deadline 20h, say")
        if self.most < 1:
            raise UserError("a job needs at least one worker", self.most, "give it more")
        if not self.budget > 0:
            raise UserError("a budget must be above 0", self.budget, "leave it out for none")
        if not 0 <= self.patience <= 1:
            raise UserError(
                "patience lies from 0 (uniform progress) to 1 (as late as can be)", self.patience, "give .5"
            )


@dataclass(frozen=True)
class Spot(Policy):
    """``spot``: have on-demand workers beside spot workers only as a deadline asks.

    It decides in the controller, and at no hook: only the controller knows the hosts and their kinds.

    Args:
        deadline_h: The deadline, in hours after the run's start.
        prices: The file with the prices of hosts.
        spend: The most that the run may cost; 0 for no bound.
        patience: See ``SpotRules``.
    """

    monitors: ClassVar[tuple[str, ...]] = ()

    deadline_h: float
    prices: str
    spend: float = 0.0
    patience: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.spend < math.inf:
            raise UserError("spend is a finite amount that is not negative", self.spend, "give 0 for no bound")
        self.rules(1, 0.0)

    def rules(self, most: int, changeover_s: float) -> SpotRules:
        """Return the bounds of a run on at most ``most`` workers. Raises ``UserError``."""
        return SpotRules(self.deadline_h * 3600, most, self.spend or math.inf, self.patience, changeover_s)


@dataclass(frozen=True)
class JobProgress:
    """Where a job stands.

    Attributes:
        now_s: Seconds since its start.
        work_s: All of its work, in seconds of one worker.
        done_s: The part of the work that is done.
        offered: Spot workers that can be had, with those that it has.
        on_demand: On-demand workers that it has.
        spot_price: The present price of a spot worker-hour.
        on_demand_price: The present price of an on-demand worker-hour.
        spent: What it has cost so far.
    """

    now_s: float
    work_s: float
    done_s: float
    offered: int
    on_demand: int
    spot_price: float
    on_demand_price: float
    spent: float = 0.0


@dataclass(frozen=True)
class SpotChoice:
    """How many workers of each kind to have from now on."""

    spot: int
    on_demand: int


def choose(now: JobProgress, rules: SpotRules, speed: Callable[[int], float] = float) -> SpotChoice:
    """Return the workers to have, so that the job is done in time at little cost.

    Args:
        now: Where the job stands.
        rules: Its bounds.
        speed: The work that a number of workers does in a second, in seconds of one worker.
    """
    if now.spent >= rules.budget:
        return SpotChoice(0, 0)
    uniform, fastest = now.work_s / rules.deadline_s, speed(rules.most)
    spot = min(now.offered, rules.most, _worth(now, uniform, rules.most, speed))
    line = uniform + rules.patience * max(0.0, fastest - uniform)
    reserve_s = 2 * rules.changeover_s + rules.look_s
    pace = _pace(now, rules.deadline_s - reserve_s)
    # Who has on-demand workers keeps them until the pace would do even after two changeovers more.
    kept = _pace(now, rules.deadline_s - reserve_s - 2 * rules.changeover_s) if now.on_demand else pace
    if kept <= line or not _affordable(now, rules):
        return SpotChoice(spot, 0)
    return SpotChoice(spot, max(0, _workers_for(pace, rules.most, speed) - spot))


def _pace(now: JobProgress, until_s: float) -> float:
    """What must be done in a second from now on; infinite where it is too late."""
    return (now.work_s - now.done_s) / (until_s - now.now_s) if until_s > now.now_s else math.inf


def _workers_for(pace: float, most: int, speed: Callable[[int], float]) -> int:
    return next((n for n in range(most) if speed(n) >= pace * (1 - 1e-9)), most)


def _worth(now: JobProgress, uniform: float, most: int, speed: Callable[[int], float]) -> int:
    """How many spot workers add work that costs no more than it would on demand, at the uniform pace."""
    needed = max(1, _workers_for(uniform, most, speed))
    on_demand = now.on_demand_price * needed / speed(needed)  # of a second's work
    worth = (n for n in range(most) if now.spot_price > on_demand * (speed(n + 1) - speed(n)) * (1 + 1e-9))
    return next(worth, most)


def _affordable(now: JobProgress, rules: SpotRules) -> bool:
    """Whether the budget would still pay for all that is left, at the cheaper price of now."""
    return now.spent + (now.work_s - now.done_s) / 3600 * min(now.spot_price, now.on_demand_price) < rules.budget
