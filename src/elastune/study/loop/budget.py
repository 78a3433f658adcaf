"""What a study may still use: trials, time, worker-hours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from elastune.core.clock import Clock
from elastune.job.pool import Pool
from elastune.journal.trials import TrialLife, TrialTable
from elastune.study.loop.stop_rules import StopRules

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

    def _usual(self, used_s: Callable[[TrialLife], float]) -> float:
        """Of what the complete trials have used, the median."""
        ended = (self._table.trials[number] for number in self._table.ended)
        used = [used_s(life) for life in ended if life.finished is not None and life.finished.state == "complete"]
        return median(used) if used else 0.0
