"""When a study ends: by its budget (trials, time, worker-hours), or by ``--until`` and ``--patience``.

The file also applies a user's prices to a request, and resumes the meter that counts the costs of trials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

import numpy as np

from elastune.core.clock import Clock
from elastune.core.cost import ONE_PRICE, UNKNOWN, Prices
from elastune.core.errors import UserError
from elastune.core.journal.records import Entry, Record, TrialFinished, TrialPaused, TrialStarted
from elastune.core.journal.trials import TrialSummary, TrialTable, fold
from elastune.runtime.job.pool import MoneyMeter, Pool
from elastune.tune.search.constraint import Constraint, fulfilled
from elastune.tune.search.objective import Floats, Objective, oriented
from elastune.tune.study.request import SearchRequest
from elastune.tune.study.trial_results import known, visible

# [stop rules] When a study has found enough, or finds nothing better any more: the rules of ``--until`` and ``--patience``.


class StopRules:
    """Told of everything that happens to a study's trials, in the order of its journal; says why it is to end.

    Trials belong to generations of ``generation`` by the order in which they were begun (1: each is one of its own). A
    trial is better where, at its end, no earlier one is at least as good in every objective: with one objective a new
    best, with several a new point of the front. A generation is over once its trials, and all begun before, have ended
    or were paused by the search.

    Args:
        until: What one complete trial must reach, by its settings and metrics, for the study to end.
        patience: Generations in a row without a better trial, after which no further trial begins; None: any number.
        generation: How many trials one has.
        objectives: Those of the search.
    """

    def __init__(
        self,
        until: Sequence[Constraint] = (),
        patience: int | None = None,
        generation: int = 1,
        objectives: Sequence[Objective] = (),
    ) -> None:
        self._until = tuple(until)
        self._patience = patience
        self._size = generation
        self._objectives = tuple(objectives)
        self._met = ""
        self._reported: set[str] = set()
        self._order: dict[int, int] = {}
        self._over: set[int] = set()  # of the order
        self._prefix = 0  # so many of those begun first are over
        self._better_by = 0  # generations, at the end of which something was better
        self._front: Floats = np.empty((0, len(self._objectives)))

    @property
    def met(self) -> str:
        """Why what runs is to be paused and the study is to end; empty while it is not."""
        return self._met

    @property
    def stale(self) -> str:
        """Why no further trial is to begin; empty while some may."""
        if self._patience is None or self._prefix // self._size - self._better_by < self._patience:
            return ""
        what = "no better trial" if len(self._objectives) == 1 else "no trial joined the front"
        if self._size == 1:
            return f"{what} in {self._patience} trials"
        return f"{what} in {self._patience} generations of {self._size} trials"

    def hear(self, record: Record, life: TrialSummary) -> None:
        """Take in what happened to the trial of ``life``. Raises ``UserError`` where no trial can tell its rules."""
        if life.started.phase != "search":
            return
        order = self._order.setdefault(life.number, len(self._order))
        match record:
            case TrialStarted():
                self._over.discard(order)
            case TrialPaused(cut_off=False):
                self._ended(order)
            case TrialFinished():
                better = record.state == "complete" and self._joins(record)
                self._ended(order)
                if better:
                    self._better_by = max(self._better_by, order // self._size + 1, self._prefix // self._size)
                if record.state == "complete":
                    self._look(record, life)

    def _ended(self, order: int) -> None:
        self._over.add(order)
        while self._prefix in self._over:
            self._prefix += 1

    def _joins(self, record: TrialFinished) -> bool:
        """Whether a complete trial is on the front of those that have ended; keep that front."""
        point = oriented(record.values, self._objectives)
        if (self._front <= point).all(axis=1).any():
            return False
        beaten = (point <= self._front).all(axis=1)
        self._front = np.vstack([self._front[~beaten], point])
        return True

    def _look(self, record: TrialFinished, life: TrialSummary) -> None:
        """Whether a complete trial has reached what the study is to end by."""
        names = {**known(life.started), **visible(record.metrics)}
        self._reported |= names.keys()
        for rule in self._until:
            if missing := sorted(rule.names - self._reported):
                known_names = ", ".join(sorted(self._reported))
                raise UserError("--until may name settings and reported metrics", missing[0], f"known: {known_names}")
        if self._until and not self._met and fulfilled(self._until, names):
            shown = sorted(name for rule in self._until for name in rule.names if name in record.metrics)
            values = ", ".join(f"{name} {record.metrics[name]:.6g}" for name in dict.fromkeys(shown))
            rules = " and ".join(rule.text for rule in self._until)
            self._met = f"trial {life.number} reached {rules}" + (f" ({values})" if values else "")


# [budget] What a study may still use: trials, time, worker-hours.

TICK_S = 0.01


@dataclass(frozen=True)
class Bounds:
    """What a study may use: trials, seconds, worker-hours; None: as much as it takes.

    ``reserve_s``: new trials begin while more seconds than these are left; None: as many as the complete trials took in
    the median.
    """

    trials: int | None = None
    budget_s: float | None = None
    worker_hours: float | None = None
    reserve_s: float | None = None


class Budget:
    """``bounds``, against what trials on ``pool``, and those of ``table`` before, have used; and what they found."""

    def __init__(self, table: TrialTable, pool: Pool, clock: Clock, rules: StopRules) -> None:
        self.bounds = Bounds()
        self._rules = rules
        self._table = table
        self._pool = pool
        self._clock = clock
        self._spent_before_s = 0.0
        self._started = clock.now()

    def resume(self) -> None:
        """Count what earlier controllers took, by the trials' table."""
        self._spent_before_s = self._table.seconds

    @property
    def elapsed_s(self) -> float:
        """Seconds that controllers have worked on the study."""
        return self._spent_before_s + self._clock.now() - self._started

    @property
    def left_s(self) -> float:
        budget_s = self.bounds.budget_s
        return float("inf") if budget_s is None else budget_s - self.elapsed_s

    @property
    def left_worker_s(self) -> float:
        hours, now_s = self.bounds.worker_hours, self._clock.now()
        if hours is None:
            return float("inf")
        running = sum(job.worker_seconds(now_s) for job in self._pool.jobs.values())
        return hours * 3600 - sum(life.worker_seconds for life in self._table.trials.values()) - running

    @property
    def soonest_s(self) -> float:
        """Seconds until a budget can be over, with the workers that are busy now; never so few that no clock shows."""
        busy = sum(job.workers for job in self._pool.jobs.values())
        return max(min(self.left_s, self.left_worker_s / busy if busy else float("inf")), TICK_S)

    def over(self) -> str:
        """The budget, or the find, that ends what runs; empty while there is some left."""
        if self._rules.met:
            return self._rules.met
        if self.left_s <= 0:
            return f"a budget of {self.bounds.budget_s:g} s"
        if self.left_worker_s <= 0:
            return f"a budget of {self.bounds.worker_hours:g} worker-hours"
        return ""

    def spent(self) -> str:
        """The budget that has no room for one more new trial, or why none is wanted; empty while it has."""
        if self._rules.stale:
            return self._rules.stale
        tried = sum(life.started.phase != "member" for life in self._table.trials.values())
        if self.bounds.trials is not None and tried >= self.bounds.trials:
            return f"{self.bounds.trials} trials"
        budget_s, hours = self.bounds.budget_s, self.bounds.worker_hours
        if budget_s is not None:
            reserve_s = self.bounds.reserve_s
            if self.left_s <= (self._usual(lambda life: life.seconds) if reserve_s is None else reserve_s):
                return f"a budget of {budget_s:g} s"
        if hours is not None and self.left_worker_s <= self._usual(lambda life: life.worker_seconds):
            return f"a budget of {hours:g} worker-hours"
        return ""

    def _usual(self, used_s: Callable[[TrialSummary], float]) -> float:
        """Of what the complete trials have used, the median."""
        ended = (self._table.trials[number] for number in self._table.ended)
        used = [used_s(life) for life in ended if life.finished is not None and life.finished.state == "complete"]
        return median(used) if used else 0.0


# [metering] What the prices of hosts are to a study: its meter goes on where the controller before it has ended.

Request = TypeVar("Request", bound=SearchRequest)


def with_prices(request: Request, prices: Prices | None, clock: Clock) -> Request:
    """``request`` at ``prices``, where there are any, which know hosts that do not tell their kind.

    Raises ``UserError``.
    """
    if prices is None:
        return request
    if request.price_per_worker_hour != SearchRequest.price_per_worker_hour:
        raise UserError(ONE_PRICE, "both a price and a file of prices", "leave one of them out")
    first = prices.since(clock.wall()).at(UNKNOWN, 0.0)
    if not first > 0:
        rule = "the first price of a study's workers must be above 0"
        raise UserError(rule, f"{first:g}", "leave --prices out where nothing is paid")
    return replace(request, prices=prices, price_per_worker_hour=first)


def resume_meter(prices: Prices | None, before: Sequence[Entry], clock: Clock) -> MoneyMeter | None:
    """What counts the costs of trials; None without prices.

    Args:
        prices: Seconds in them count from the study's first beginning, dates are dates.
        before: The journal so far. What a trial was paid for after its last record in there is not known.
        clock: That of the pool.
    """
    if prices is None:
        return None
    begun_s = before[0].at if before else clock.wall()
    meter = MoneyMeter(prices, clock.wall() - clock.now() - (0.0 if prices.absolute else begun_s))
    meter.costs.update({life.number: life.cost for life in fold(before).trials.values() if life.cost is not None})
    return meter
