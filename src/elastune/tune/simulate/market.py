"""One job on a market of spot and on-demand workers: a replay of price changes, its strategies, and a forecast.

Every worker is paid from the moment it is taken: while it starts, waits, or repeats lost work. Useful is the time that
becomes progress. Work is counted in seconds of one worker. A job can be read from the journal of a run that has ended.
The strategies are the policy ``spot`` and those it is compared with.
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
from elastune.tune.simulate.trial_model import Scaling, parse_scaling

# [market] One job on a market of spot and on-demand workers, from change to change on a virtual clock.
#
# Paid for is every worker from the moment that it is taken: while it starts, stands still, or does work again. Useful is
# the time that becomes progress. Work is counted in seconds of one worker.

LOOK_S = 60.0
_DONE = 1e-9  # of the work
Strategy = Callable[[JobProgress], SpotChoice]


@dataclass(frozen=True)
class Overheads:
    """What changes cost.

    Attributes:
        start_s: From the moment that a worker is paid for until it can take part; the others go on.
        join_s: All stand still when workers join or leave as planned.
        loss_s: All stand still when workers are lost.
        redo_s: So much of the time before a loss is done again.
    """

    start_s: float = 0.0
    join_s: float = 0.0
    loss_s: float = 0.0
    redo_s: float = 0.0


@dataclass(frozen=True)
class MarketJob:
    """``work_s``: seconds that one worker would take. ``speed``: of so many workers, that of one being 1."""

    work_s: float
    speed: Speed = float


@dataclass(frozen=True)
class Market:
    """What is on offer, and at what prices. On-demand workers can always be had."""

    offer: Availability
    prices: Prices


@dataclass(frozen=True)
class MarketReplay:
    """What became of a job.

    Attributes:
        cost: In units of the prices.
        done_s: When it was done; None: it was not, by the end of the replay.
        done: The part of its work that was.
        spot_s: Worker-seconds paid for.
        on_demand_s: Likewise.
        useful_s: Worker-seconds that became progress.
        changes: How often the workers changed.
        losses: How many of them were lost.
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
    """Workers of one kind: those that train, and when each of the others will."""

    members: int = 0
    starting: list[float] = field(default_factory=list)

    @property
    def paid(self) -> int:
        return self.members + len(self.starting)


class _MarketSimulation:
    """A replay while it goes on."""

    def __init__(self, job: MarketJob, market: Market, strategy: Strategy, overheads: Overheads) -> None:
        self._job, self._market, self._strategy, self._overheads = job, market, strategy, overheads
        self._clock = VirtualClock()
        self._crews = {SPOT: _MarketWorkers(), ON_DEMAND: _MarketWorkers()}
        self._still_until = 0.0
        self._done = self._useful_s = self._cost = 0.0
        self._paid_s = {SPOT: 0.0, ON_DEMAND: 0.0}
        self._changes = self._losses = 0

    def run(self, until_s: float) -> MarketReplay:
        """To the job's end, at most until then."""
        times = sorted({*(at for at, _ in self._market.offer.steps), *self._market.prices.changes, math.inf})
        done_s = None
        while done_s is None and self._clock.now() < until_s:
            self._meet()
            now = self._clock.now()
            ready = [at for crew in self._crews.values() for at in crew.starting]
            held = [self._still_until] if self._still_until > now else []
            change = times[bisect_right(times, now)]
            rate = 0.0 if held else self._job.speed(self._members)
            end = now + (self._job.work_s - self._done) / rate if rate else math.inf
            at = min([until_s, now + LOOK_S, change, end, *ready, *held])
            self._go_on(at, rate)
            if self._done >= self._job.work_s * (1 - _DONE):
                done_s = at
        part = min(1.0, self._done / self._job.work_s)
        spot_s, on_demand_s = self._paid_s[SPOT], self._paid_s[ON_DEMAND]
        return MarketReplay(self._cost, done_s, part, spot_s, on_demand_s, self._useful_s, self._changes, self._losses)

    @property
    def _members(self) -> int:
        return sum(crew.members for crew in self._crews.values())

    def _go_on(self, at: float, rate: float) -> None:
        now = self._clock.now()
        for kind, crew in self._crews.items():
            self._cost += self._market.prices.cost(Paid(kind, crew.paid, now, at))
            self._paid_s[kind] += crew.paid * (at - now)
        if rate:
            self._done += rate * (at - now)
            self._useful_s += self._members * (at - now)
        self._clock.advance_to(at)

    def _meet(self) -> None:
        """What happens now: workers are lost, workers are ready, the strategy chooses."""
        now, before = self._clock.now(), self._members
        offered = self._market.offer.at(now)
        lost = self._revoke(offered)
        left = self._choose(offered)
        joined = 0
        for crew in self._crews.values():
            ready = sum(at <= now for at in crew.starting)
            crew.starting = [at for at in crew.starting if at > now]
            crew.members, joined = crew.members + ready, joined + ready
        if (joined and before) or left:
            self._stand(self._overheads.join_s)
        self._changes += bool(lost or joined or left)

    def _revoke(self, offered: int) -> int:
        """Spot workers beyond those ``offered`` are gone, the ones that train first: the worse case. How many did."""
        spot = self._crews[SPOT]
        gone = max(0, spot.paid - offered)
        lost = min(gone, spot.members)
        del spot.starting[: gone - lost]
        if lost:
            self._again(self._members)
            spot.members -= lost
            self._losses += lost
            self._stand(self._overheads.loss_s)
        return lost

    def _choose(self, offered: int) -> int:
        """Take and give back what the strategy says; how many of those that train leave."""
        choice, now, left = self._strategy(self._standing(offered)), self._clock.now(), 0
        for kind, wanted in ((SPOT, min(choice.spot, offered)), (ON_DEMAND, choice.on_demand)):
            crew = self._crews[kind]
            crew.starting += [now + self._overheads.start_s] * (wanted - crew.paid)
            del crew.starting[max(0, wanted - crew.members) :]
            leavers = max(0, crew.members - wanted)
            crew.members, left = crew.members - leavers, left + leavers
        return left

    def _standing(self, offered: int) -> JobProgress:
        now, prices = self._clock.now(), self._market.prices
        return JobProgress(
            now_s=now,
            work_s=self._job.work_s,
            done_s=self._done,
            offered=offered,
            on_demand=self._crews[ON_DEMAND].paid,
            spot_price=prices.at(SPOT, now),
            on_demand_price=prices.at(ON_DEMAND, now),
            spent=self._cost,
        )

    def _again(self, workers: int) -> None:
        """What was done last has to be done again; it was not useful."""
        redone = min(self._done, self._overheads.redo_s * self._job.speed(workers))
        if self._done:
            self._useful_s *= 1 - redone / self._done
        self._done -= redone

    def _stand(self, seconds: float) -> None:
        self._still_until = max(self._still_until, self._clock.now() + seconds)


def replay(
    job: MarketJob,
    market: Market,
    strategy: Strategy,
    overheads: Overheads | None = None,
    *,
    until_s: float | None = None,
) -> MarketReplay:
    """``job`` on ``market``, with the workers that ``strategy`` chooses at every change and every minute.

    Args:
        job: What is to be done.
        market: Begins at second 0.
        strategy: Is asked again and again, and keeps nothing in mind.
        overheads: What changes cost; nothing, by default.
        until_s: When to end; by default where the offer's trace does.
    """
    end_s = market.offer.end_s if until_s is None else until_s
    return _MarketSimulation(job, market, strategy, overheads or Overheads()).run(end_s)


# [strategies] What a policy for spot workers is held against, each as a strategy for ``simulate.market``.


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


# [forecast] What a job will cost on a market, and when it is done: by the policy ``spot``, and by what it is held against.

POLICY = "spot and on demand (policy spot)"
UNIFORM = "the same, uniform progress"
SPOT_ALONE = "spot alone"
ON_DEMAND_ALONE = "on demand alone"
RESTARTS = "policy spot, all restart at a change"
GANG = "all or nothing, all restart"
HINDSIGHT = "hindsight optimum"
RESTART = Overheads(join_s=20.0, loss_s=74.0)
"""Elastic Ray Train 2.60, as measured by us with small trainings, once (the machine's load was not noted): 20 s until
more workers train, 74 s after a loss. ``benchmarks/elastic/hosts.py`` saw 69 s and 104 s, once, at load 8 on 2 cores: the lower
ones are what is compared with."""


@dataclass(frozen=True)
class CostForecast:
    """One way of running the job. ``replay``: what became of it; None for the optimum, which only has a cost.

    ``cost``: None where the work cannot be done by the deadline at all.
    """

    name: str
    cost: float | None
    replay: MarketReplay | None = None

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
    best = least_cost(job.work_s, rules.most, job.speed, market_spans(market.offer, market.prices, rules.deadline_s))
    return (*(CostForecast(name, seen.cost, seen) for name, seen in found), CostForecast(HINDSIGHT, best))


def _worst(overheads: Overheads) -> float:
    return overheads.start_s + max(overheads.join_s, overheads.loss_s + overheads.redo_s)


def _fewest(job: MarketJob, rules: SpotRules, lost_s: float) -> int:
    """The fewest workers that do it in time if they stay and lose so much; the most there may be where none do."""
    pace = job.work_s / max(rules.deadline_s - lost_s, 1e-9)
    return next((n for n in range(1, rules.most) if job.speed(n) >= pace), rules.most)


# [recorded run] A run that has ended, as work for a market: what its steps took, on each number of workers that it had.


@dataclass(frozen=True)
class RecordedRun:
    """A run's ``steps``, and seconds of one by the number of workers: evaluations and pauses between two reports are in
    them, starting and what was lost with a controller are not."""

    config: Config
    steps: int
    step_s: dict[int, float]

    def seconds(self, workers: int, scaling: Scaling) -> float:
        """Of all its steps on so many workers, from what was measured of the next fewer, or of the fewest."""
        known = max((n for n in self.step_s if n <= workers), default=min(self.step_s))
        return self.steps * self.step_s[known] * scaling(self.config, known, workers)


def recorded_run(entries: Sequence[Entry], name: object) -> RecordedRun:
    """The run in ``entries``, which a message calls ``name``. Raises ``UserError`` where none has ended there, or its
    workers changed between any two reports."""
    points: list[tuple[int, float]] = []  # steps that were done, and the seconds of training until then
    crews: list[tuple[int, int]] = []  # from which step on there were how many workers
    config: Config = {}
    ended = False
    for entry in entries:
        match entry.record:
            case RunStarted() as started:
                kept = started.resumed_step or 0
                points = [point for point in points if point[0] <= kept] or [(0, 0.0)]
                crews = [*(crew for crew in crews if crew[0] <= kept), (kept, int(started.execution["workers"]))]
                config, ended = started.config, False
            case Reported(step=step, seconds=seconds):
                points.append((step, seconds))
            case Regrouped(step=step, members=members):
                crews.append((step, len(members)))
            case RunFinished(steps=step, seconds=seconds):
                points.append((step, seconds))
                ended = True
    if not ended or points[-1][0] < 1:
        raise UserError("a run must have trained and ended, to tell what it takes", name, "let it end")
    steps, seconds_by = Counter[int](), defaultdict[int, float](float)
    for (first, begun_s), (last, until_s) in pairwise(points):
        workers = [n for step, n in crews if step <= first][-1]
        if not any(first < step < last for step, _ in crews):  # an evaluation may lie between two reports, and no step
            steps[workers] += last - first
            seconds_by[workers] += until_s - begun_s
    if not steps.total():
        rule = "a run must have made some steps on unchanged workers, from one report to the next"
        raise UserError(rule, name, "take one whose workers change less often")
    return RecordedRun(config, points[-1][0], {n: seconds_by[n] / steps[n] for n in sorted(+steps)})


def job_of_run(out: Path, most: int, scaling: str) -> tuple[MarketJob, str]:
    """The run in the folder ``out`` as work for up to ``most`` workers, and what that rests on.

    Args:
        out: The output folder of ``elastune run``.
        most: Workers that there may be.
        scaling: Of numbers of workers that it did not have: see ``RecordedModel``.

    Raises:
        UserError: Where there is no such run, or a number of workers would take no time.
    """
    entries = read(out / JOURNAL)
    run, factor = recorded_run(entries, out), parse_scaling(scaling, entries)
    seconds = {n: run.seconds(n, factor) for n in range(1, most + 1)}
    if not all(0 < each < math.inf for each in seconds.values()):
        raise UserError("a training takes some time on any number of workers", f"{min(seconds.values()):g} s", "see it")
    speeds = [0.0, *(seconds[1] / each for each in seconds.values())]
    told = ", ".join(f"{duration(each)} on {count(n, 'worker')}" for n, each in run.step_s.items())
    source = f"{count(run.steps, 'step')} of {out}, measured: {told}; other numbers of workers by {scaling} scaling"
    return MarketJob(seconds[1], lambda n: speeds[n]), source
