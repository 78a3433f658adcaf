"""One job on a market of spot and on-demand workers: a replay of price changes, its strategies, and a forecast.

Every worker is paid from the moment it is taken: while it starts, waits, or repeats lost work. Useful time is time that
becomes progress. Work is counted in seconds of one worker. A job can be read from the journal of a run that has ended.
The strategies are the policy ``spot`` and the strategies it is compared with.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from elastune.adapt.policies.library.spot import JobProgress, SpotChoice, SpotRules, choose
from elastune.core.clock import VirtualClock
from elastune.core.cost import KINDS, ON_DEMAND, SPOT, Paid, Prices
from elastune.core.errors import UserError
from elastune.core.formatting import count, duration
from elastune.core.journal.files import read
from elastune.core.journal.records import Entry, Regrouped, Reported, RunFinished, RunStarted
from elastune.core.plan.prices import Availability, Speed, least_cost, market_spans
from elastune.core.run import Config
from elastune.runtime.job.output import JOURNAL
from elastune.tuning.simulate.trial_model import Scaling, parse_scaling

LOOK_S = 60.0  # seconds between two choices of a strategy, at most
POLICY = "spot and on demand (policy spot)"
UNIFORM = "the same, uniform progress"
SPOT_ALONE = "spot alone"
ON_DEMAND_ALONE = "on demand alone"
RESTARTS = "policy spot, all restart at a change"
GANG = "all or nothing, all restart"
HINDSIGHT = "hindsight optimum"
_DONE = 1e-9  # of the work
Strategy = Callable[[JobProgress], SpotChoice]

# --- the replay ---


@dataclass(frozen=True)
class Overheads:
    """The time that changes of workers cost.

    Attributes:
        start_s: Seconds from the payment of a worker until it can take part; the others go on training.
        join_s: Seconds for which all workers stand still when workers join or leave as planned.
        loss_s: Seconds for which all workers stand still when workers are lost.
        redo_s: Seconds of work before a loss that are done again.
    """

    start_s: float = 0.0
    join_s: float = 0.0
    loss_s: float = 0.0
    redo_s: float = 0.0


@dataclass(frozen=True)
class MarketJob:
    """The work to do.

    Attributes:
        work_s: Seconds that one worker would take.
        speed: The speed of a number of workers, relative to that of one worker.
    """

    work_s: float
    speed: Speed = float


@dataclass(frozen=True)
class Market:
    """The offered spot workers over time, and all prices. On-demand workers are always available."""

    offer: Availability
    prices: Prices


@dataclass(frozen=True)
class MarketReplay:
    """The result of replaying a job on a market.

    Attributes:
        cost: The cost, in units of the prices.
        done_s: When the job ended; None: not before the end of the replay.
        done: The completed share of its work.
        spot_s: Paid worker-seconds of spot workers.
        on_demand_s: Paid worker-seconds of on-demand workers.
        useful_s: Worker-seconds that became progress.
        changes: How often the workers changed.
        losses: How many workers were lost.
    """

    cost: float
    done_s: float | None
    done: float
    spot_s: float
    on_demand_s: float
    useful_s: float
    changes: int
    losses: int

    @property
    def goodput(self) -> float:
        """Useful worker-seconds over paid ones."""
        paid = self.spot_s + self.on_demand_s
        return self.useful_s / paid if paid else 0.0


@dataclass
class _MarketWorkers:
    """Workers of one kind: ``members`` train, and ``starting`` holds the times at which the others will."""

    members: int = 0
    starting: list[float] = field(default_factory=list)

    @property
    def paid(self) -> int:
        return self.members + len(self.starting)


class _MarketSimulation:
    """A replay in progress: moves the clock from one change to the next."""

    def __init__(self, job: MarketJob, market: Market, strategy: Strategy, overheads: Overheads) -> None:
        self._job, self._market, self._strategy, self._overheads = job, market, strategy, overheads
        self._clock = VirtualClock()
        self._workers = {SPOT: _MarketWorkers(), ON_DEMAND: _MarketWorkers()}
        self._paused_until = 0.0
        self._done = self._useful_s = self._cost = 0.0
        self._paid_s = {SPOT: 0.0, ON_DEMAND: 0.0}
        self._changes = self._losses = 0

    def run(self, until_s: float) -> MarketReplay:
        """Replay to the end of the job, at most to ``until_s``."""
        times = sorted({*(at for at, _ in self._market.offer.steps), *self._market.prices.changes, math.inf})
        done_s = None
        while done_s is None and self._clock.now() < until_s:
            self._apply_changes()
            now = self._clock.now()
            ready = [at for group in self._workers.values() for at in group.starting]
            pauses = [self._paused_until] if self._paused_until > now else []
            change = times[bisect_right(times, now)]
            rate = 0.0 if pauses else self._job.speed(self._members)
            end = now + (self._job.work_s - self._done) / rate if rate else math.inf
            at = min([until_s, now + LOOK_S, change, end, *ready, *pauses])
            self._advance(at, rate)
            if self._done >= self._job.work_s * (1 - _DONE):
                done_s = at
        part = min(1.0, self._done / self._job.work_s)
        spot_s, on_demand_s = self._paid_s[SPOT], self._paid_s[ON_DEMAND]
        return MarketReplay(self._cost, done_s, part, spot_s, on_demand_s, self._useful_s, self._changes, self._losses)

    @property
    def _members(self) -> int:
        return sum(group.members for group in self._workers.values())

    def _advance(self, until: float, rate: float) -> None:
        now = self._clock.now()
        for kind, group in self._workers.items():
            self._cost += self._market.prices.cost(Paid(kind, group.paid, now, until))
            self._paid_s[kind] += group.paid * (until - now)
        if rate:
            self._done += rate * (until - now)
            self._useful_s += self._members * (until - now)
        self._clock.advance_to(until)

    def _apply_changes(self) -> None:
        """Apply the changes of this moment: lost workers, ready workers, and the choice of the strategy."""
        now, before = self._clock.now(), self._members
        offered = self._market.offer.at(now)
        lost = self._revoke(offered)
        left = self._choose(offered)
        joined = 0
        for group in self._workers.values():
            ready = sum(at <= now for at in group.starting)
            group.starting = [at for at in group.starting if at > now]
            group.members, joined = group.members + ready, joined + ready
        if (joined and before) or left:
            self._pause(self._overheads.join_s)
        self._changes += bool(lost or joined or left)

    def _revoke(self, offered: int) -> int:
        """Remove spot workers beyond those ``offered``, training ones first (the worse case); return how many."""
        spot = self._workers[SPOT]
        gone = max(0, spot.paid - offered)
        lost = min(gone, spot.members)
        del spot.starting[: gone - lost]
        if lost:
            self._redo(self._members)
            spot.members -= lost
            self._losses += lost
            self._pause(self._overheads.loss_s)
        return lost

    def _choose(self, offered: int) -> int:
        """Take and give back workers as the strategy chooses. Returns how many training workers leave."""
        choice, now, left = self._strategy(self._job_progress(offered)), self._clock.now(), 0
        for kind, wanted in ((SPOT, min(choice.spot, offered)), (ON_DEMAND, choice.on_demand)):
            group = self._workers[kind]
            group.starting += [now + self._overheads.start_s] * (wanted - group.paid)
            del group.starting[max(0, wanted - group.members) :]
            leavers = max(0, group.members - wanted)
            group.members, left = group.members - leavers, left + leavers
        return left

    def _job_progress(self, offered: int) -> JobProgress:
        now, prices = self._clock.now(), self._market.prices
        return JobProgress(
            now_s=now,
            work_s=self._job.work_s,
            done_s=self._done,
            offered=offered,
            on_demand=self._workers[ON_DEMAND].paid,
            spot_price=prices.at(SPOT, now),
            on_demand_price=prices.at(ON_DEMAND, now),
            spent=self._cost,
        )

    def _redo(self, workers: int) -> None:
        """Discard the last work, which is done again and was not useful."""
        redone = min(self._done, self._overheads.redo_s * self._job.speed(workers))
        if self._done:
            self._useful_s *= 1 - redone / self._done
        self._done -= redone

    def _pause(self, seconds: float) -> None:
        self._paused_until = max(self._paused_until, self._clock.now() + seconds)


def replay(
    job: MarketJob,
    market: Market,
    strategy: Strategy,
    overheads: Overheads | None = None,
    *,
    until_s: float | None = None,
) -> MarketReplay:
    """Replay ``job`` on ``market``, with the workers that ``strategy`` chooses at every change and every minute.

    Args:
        job: The work to do.
        market: The market; it begins at second 0.
        strategy: Chooses workers by the progress of the job; it must keep no state.
        overheads: The time that changes cost; by default none.
        until_s: The end of the replay; by default the end of the offer's trace.
    """
    end_s = market.offer.end_s if until_s is None else until_s
    return _MarketSimulation(job, market, strategy, overheads or Overheads()).run(end_s)


# --- strategies ---


def mixed(rules: SpotRules, speed: Speed = float) -> Strategy:
    """The policy ``spot``."""
    return lambda now: choose(now, rules, speed)


def spot_alone(most: int) -> Strategy:
    """All offered spot workers; no deadline."""
    return lambda now: SpotChoice(min(now.offered, most), 0)


def on_demand_alone(workers: int) -> Strategy:
    """A fixed number of workers that stay."""
    return lambda now: SpotChoice(0, workers)


def gang(workers: int, deadline_s: float, changeover_s: float, speed: Speed = float) -> Strategy:
    """Uniform Progress as published, for a job that runs on all of its ``workers`` or none.

    All workers are on spot hosts, on demand, or idle (Wu et al., NSDI 2024, sections 5.2.2 and 5.5). ``changeover_s``
    is the paper's d.
    """

    def strategy(now: JobProgress) -> SpotChoice:
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


# --- forecast of costs ---

RESTART = Overheads(join_s=20.0, loss_s=74.0)
"""Elastic Ray Train 2.60, measured once with small trainings: 20 s until more workers train, 74 s after a loss.

The load of the machine was not recorded. ``benchmarks/elastic/hosts.py`` measured 69 s and 104 s, once, at load 8 on 2
cores. The comparison uses the lower values."""


@dataclass(frozen=True)
class CostForecast:
    """The forecast of one strategy.

    Attributes:
        name: The strategy, in words.
        cost: The cost; None where no strategy finishes by the deadline.
        replay: The replay of the job; None for the optimum, which only has a cost.
    """

    name: str
    cost: float | None
    replay: MarketReplay | None = None

    def in_time(self, deadline_s: float) -> bool:
        """Return whether the job is done by the deadline."""
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
    """Forecast the job on the market for seven strategies; the policy first, the optimum last.

    Args:
        job: The work to do.
        market: The market; it begins at second 0, and its offer reaches to the deadline or further.
        rules: The policy's bounds; ``changeover_s`` follows from the overheads.
        overheads: The time that changes cost elastune.
        restart: The time that changes cost where all workers restart from a checkpoint.

    Raises:
        UserError: If the offer ends before the deadline, or a kind of host has no price.
    """
    check_reach(market, rules)
    elastic_rules, restart_rules = (replace(rules, changeover_s=_worst(each)) for each in (overheads, restart))
    fixed, all_or_none = _fewest(job, rules, overheads.start_s), _fewest(job, rules, 3 * _worst(restart))
    strategies: tuple[tuple[str, Strategy, Overheads], ...] = (
        (POLICY, mixed(elastic_rules, job.speed), overheads),
        (UNIFORM, mixed(replace(elastic_rules, patience=0.0), job.speed), overheads),
        (SPOT_ALONE, spot_alone(rules.most), overheads),
        (ON_DEMAND_ALONE, on_demand_alone(fixed), overheads),
        (RESTARTS, mixed(restart_rules, job.speed), restart),
        (GANG, gang(all_or_none, rules.deadline_s, _worst(restart), job.speed), restart),
    )
    replays = [(name, replay(job, market, strategy, each)) for name, strategy, each in strategies]
    best = least_cost(job.work_s, rules.most, job.speed, market_spans(market.offer, market.prices, rules.deadline_s))
    return (*(CostForecast(name, result.cost, result) for name, result in replays), CostForecast(HINDSIGHT, best))


def _worst(overheads: Overheads) -> float:
    return overheads.start_s + max(overheads.join_s, overheads.loss_s + overheads.redo_s)


def _fewest(job: MarketJob, rules: SpotRules, lost_s: float) -> int:
    """The fewest workers that finish in time if they stay and lose ``lost_s``; ``rules.most`` where none do."""
    pace = job.work_s / max(rules.deadline_s - lost_s, 1e-9)
    return next((n for n in range(1, rules.most) if job.speed(n) >= pace), rules.most)


# --- a recorded run as a job ---


@dataclass(frozen=True)
class RecordedRun:
    """The duration of a finished run, measured by its journal.

    Attributes:
        config: Its configuration.
        steps: How many steps it made.
        step_s: Seconds of a step, by the number of workers. They include evaluations and pauses between two reports,
            but not starts, nor work lost with a controller.
    """

    config: Config
    steps: int
    step_s: dict[int, float]

    def seconds(self, workers: int, scaling: Scaling) -> float:
        """Return the seconds of all steps on ``workers`` workers, from the next smaller measured number of workers."""
        measured = max((n for n in self.step_s if n <= workers), default=min(self.step_s))
        return self.steps * self.step_s[measured] * scaling(self.config, measured, workers)


def recorded_run(entries: Sequence[Entry], name: object) -> RecordedRun:
    """Return the run in ``entries``, which error texts call ``name``.

    Raises ``UserError`` if no run has ended, or if its workers changed between any two reports.
    """
    points: list[tuple[int, float]] = []  # completed steps, and seconds of training until then
    layouts: list[tuple[int, int]] = []  # (first step, number of workers) of each layout
    config: Config = {}
    ended = False
    for entry in entries:
        match entry.record:
            case RunStarted() as started:
                kept = started.resumed_step or 0
                points = [point for point in points if point[0] <= kept] or [(0, 0.0)]
                layouts = [
                    *(layout for layout in layouts if layout[0] <= kept),
                    (kept, int(started.execution["workers"])),
                ]
                config, ended = started.config, False
            case Reported(step=step, seconds=seconds):
                points.append((step, seconds))
            case Regrouped(step=step, members=members):
                layouts.append((step, len(members)))
            case RunFinished(steps=step, seconds=seconds):
                points.append((step, seconds))
                ended = True
    if not ended or points[-1][0] < 1:
        raise UserError("a run must have trained and ended, to tell what it takes", name, "let it end")
    steps, seconds_by = Counter[int](), defaultdict[int, float](float)
    for (first, start_s), (last, until_s) in pairwise(points):
        workers = [n for step, n in layouts if step <= first][-1]
        if not any(first < step < last for step, _ in layouts):  # an evaluation may lie between two reports
            steps[workers] += last - first
            seconds_by[workers] += until_s - start_s
    if not steps.total():
        rule = "a run must have made some steps on unchanged workers, from one report to the next"
        raise UserError(rule, name, "take one whose workers change less often")
    return RecordedRun(config, points[-1][0], {n: seconds_by[n] / steps[n] for n in sorted(+steps)})


def job_of_run(out: Path, most: int, scaling: str) -> tuple[MarketJob, str]:
    """Return the run in the folder ``out`` as a job for up to ``most`` workers, and the source of its times in words.

    Args:
        out: The output folder of ``elastune run``.
        most: The largest number of workers.
        scaling: The scaling to numbers of workers that the run did not have: see ``RecordedModel``.

    Raises:
        UserError: If the folder has no such run, or a number of workers would take no time.
    """
    entries = read(out / JOURNAL)
    run, factor = recorded_run(entries, out), parse_scaling(scaling, entries)
    seconds = {n: run.seconds(n, factor) for n in range(1, most + 1)}
    if not all(0 < each < math.inf for each in seconds.values()):
        raise UserError("a training takes some time on any number of workers", f"{min(seconds.values()):g} s", "see it")
    speeds = [0.0, *(seconds[1] / each for each in seconds.values())]
    measured = ", ".join(f"{duration(each)} on {count(n, 'worker')}" for n, each in run.step_s.items())
    source = f"{count(run.steps, 'step')} of {out}, measured: {measured}; other numbers of workers by {scaling} scaling"
    return MarketJob(seconds[1], lambda n: speeds[n]), source
