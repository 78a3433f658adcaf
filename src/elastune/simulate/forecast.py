"""What a job will cost on a market, and when it is done: by the policy ``spot``, and by what it is held against."""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastune.core.cost import KINDS
from elastune.core.errors import UserError
from elastune.core.text import duration
from elastune.plan.hindsight import least_cost, stretches
from elastune.policies.library.spot import SpotRules
from elastune.simulate.market import Market, MarketJob, Overheads, Replay, Strategy, replay
from elastune.simulate.strategies import gang, mixed, on_demand_alone, spot_alone

POLICY = "spot and on demand (policy spot)"
UNIFORM = "the same, uniform progress"
SPOT_ALONE = "spot alone"
ON_DEMAND_ALONE = "on demand alone"
RESTARTS = "policy spot, all restart at a change"
GANG = "all or nothing, all restart"
HINDSIGHT = "hindsight optimum"
RESTART = Overheads(join_s=20.0, loss_s=74.0)
"""Elastic Ray Train 2.60, as measured by us with small trainings, once (the machine's load was not noted): 20 s until
more workers train, 74 s after a loss. ``benchmarks/hosts.py`` saw 69 s and 104 s, once, at load 8 on 2 cores: the lower
ones are what is compared with."""


@dataclass(frozen=True)
class CostForecast:
    """One way of running the job. ``replay``: what became of it; None for the optimum, which only has a cost.

    ``cost``: None where the work cannot be done by the deadline at all.
    """

    name: str
    cost: float | None
    replay: Replay | None = None

    def in_time(self, deadline_s: float) -> bool:
        """Whether it is done by then."""
        if self.replay is None:
            return self.cost is not None
        return self.replay.done_s is not None and self.replay.done_s <= deadline_s


def check_reach(market: Market, rules: SpotRules) -> None:
    """Raise ``UserError`` where the offer ends before the deadline, or a kind of host has no price."""
    if market.offer.end_s < rules.deadline_s:
        value = f"{duration(market.offer.end_s)}, a deadline of {duration(rules.deadline_s)}"
        raise UserError("a trace must reach to the deadline", value, "give a longer trace or an earlier deadline")
    for kind in KINDS:
        market.prices.at(kind, 0.0)


def forecasts(
    job: MarketJob, market: Market, rules: SpotRules, overheads: Overheads, restart: Overheads = RESTART
) -> tuple[CostForecast, ...]:
    """The job on the market in seven ways; the policy first, the optimum last.

    Args:
        job: What is to be done.
        market: Begins at second 0; its offer is known up to the deadline or longer.
        rules: The policy's bounds; ``changeover_s`` follows from the overheads.
        overheads: What changes cost elastune.
        restart: What they cost where all workers restart from a checkpoint.

    Raises:
        UserError: Where the offer ends before the deadline, or a kind of host has no price.
    """
    check_reach(market, rules)
    own, other = (replace(rules, changeover_s=_worst(each)) for each in (overheads, restart))
    fixed, all_or_none = _fewest(job, rules, overheads.start_s), _fewest(job, rules, 3 * _worst(restart))
    ways: tuple[tuple[str, Strategy, Overheads], ...] = (
        (POLICY, mixed(own, job.speed), overheads),
        (UNIFORM, mixed(replace(own, patience=0.0), job.speed), overheads),
        (SPOT_ALONE, spot_alone(rules.most), overheads),
        (ON_DEMAND_ALONE, on_demand_alone(fixed), overheads),
        (RESTARTS, mixed(other, job.speed), restart),
        (GANG, gang(all_or_none, rules.deadline_s, _worst(restart), job.speed), restart),
    )
    found = [(name, replay(job, market, strategy, each)) for name, strategy, each in ways]
    best = least_cost(job.work_s, rules.most, job.speed, stretches(market.offer, market.prices, rules.deadline_s))
    return (*(CostForecast(name, seen.cost, seen) for name, seen in found), CostForecast(HINDSIGHT, best))


def _worst(overheads: Overheads) -> float:
    return overheads.start_s + max(overheads.join_s, overheads.loss_s + overheads.redo_s)


def _fewest(job: MarketJob, rules: SpotRules, lost_s: float) -> int:
    """The fewest workers that do it in time if they stay and lose so much; the most there may be where none do."""
    pace = job.work_s / max(rules.deadline_s - lost_s, 1e-9)
    return next((n for n in range(1, rules.most) if job.speed(n) >= pace), rules.most)
