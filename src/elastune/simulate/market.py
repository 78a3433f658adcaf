"""One job on a market of spot and on-demand workers, from change to change on a virtual clock.

Paid for is every worker from the moment that it is taken: while it starts, stands still, or does work again. Useful is
the time that becomes progress. Work is counted in seconds of one worker.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

from elastune.core.clock import VirtualClock
from elastune.core.cost import ON_DEMAND, SPOT, Paid, Prices
from elastune.plan.hindsight import Speed
from elastune.plan.traces import Availability
from elastune.policies.library.spot import JobStanding, SpotChoice

LOOK_S = 60.0
_DONE = 1e-9  # of the work
Strategy = Callable[[JobStanding], SpotChoice]


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
class Replay:
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
class _Crew:
    """Workers of one kind: those that train, and when each of the others will."""

    members: int = 0
    starting: list[float] = field(default_factory=list)

    @property
    def paid(self) -> int:
        return self.members + len(self.starting)


class _Replaying:
    """A replay while it goes on."""

    def __init__(self, job: MarketJob, market: Market, strategy: Strategy, overheads: Overheads) -> None:
        self._job, self._market, self._strategy, self._overheads = job, market, strategy, overheads
        self._clock = VirtualClock()
        self._crews = {SPOT: _Crew(), ON_DEMAND: _Crew()}
        self._still_until = 0.0
        self._done = self._useful_s = self._cost = 0.0
        self._paid_s = {SPOT: 0.0, ON_DEMAND: 0.0}
        self._changes = self._losses = 0

    def run(self, until_s: float) -> Replay:
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
        return Replay(self._cost, done_s, part, spot_s, on_demand_s, self._useful_s, self._changes, self._losses)

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

    def _standing(self, offered: int) -> JobStanding:
        now, prices = self._clock.now(), self._market.prices
        return JobStanding(
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
) -> Replay:
    """``job`` on ``market``, with the workers that ``strategy`` chooses at every change and every minute.

    Args:
        job: What is to be done.
        market: Begins at second 0.
        strategy: Is asked again and again, and keeps nothing in mind.
        overheads: What changes cost; nothing, by default.
        until_s: When to end; by default where the offer's trace does.
    """
    end_s = market.offer.end_s if until_s is None else until_s
    return _Replaying(job, market, strategy, overheads or Overheads()).run(end_s)
