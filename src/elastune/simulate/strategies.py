"""What a policy for spot workers is held against, each as a strategy for ``simulate.market``."""

from __future__ import annotations

from elastune.plan.hindsight import Speed
from elastune.policies.library.spot import JobStanding, SpotChoice, SpotRules, choose
from elastune.simulate.market import Strategy


def mixed(rules: SpotRules, speed: Speed = float) -> Strategy:
    """The policy ``spot``."""
    return lambda now: choose(now, rules, speed)


def spot_alone(most: int) -> Strategy:
    """All spot workers that can be had; no deadline."""
    return lambda now: SpotChoice(min(now.offered, most), 0)


def on_demand_alone(workers: int) -> Strategy:
    """A fixed number of workers that stay."""
    return lambda now: SpotChoice(0, workers)


def gang(workers: int, deadline_s: float, changeover_s: float, speed: Speed = float) -> Strategy:
    """Uniform Progress as published, for a job that runs on all of its ``workers`` or not at all (Wu et al., NSDI 2024,
    sections 5.2.2 and 5.5): all on spot hosts, all on demand, or idle. ``changeover_s``: the paper's d."""

    def strategy(now: JobStanding) -> SpotChoice:
        def ahead(seconds: float) -> bool:
            return now.done_s >= now.work_s * (now.now_s + seconds) / deadline_s

        left_s = (now.work_s - now.done_s) / speed(workers)
        late = deadline_s - now.now_s < left_s + 2 * changeover_s
        if now.on_demand and (late or not ahead(2 * changeover_s)):
            return SpotChoice(0, workers)
        if now.offered >= workers:
            return SpotChoice(workers, 0)
        return SpotChoice(0, 0 if ahead(0.0) and not late else workers)

    return strategy
