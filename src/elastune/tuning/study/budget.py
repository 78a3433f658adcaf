"""When a study ends: by its budget (trials, time, worker-hours), by ``--until`` and ``--patience``, or by a failure.

The file also applies a user's prices to a request, and resumes the meter that counts the costs of trials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import numpy as np

from elastune.core.clock import Clock
from elastune.core.cost import Prices
from elastune.core.errors import UserError, page_of
from elastune.core.journal.folds import TrialSummary, TrialTable, fold
from elastune.core.journal.records import Entry, Record, RunFailed, TrialFinished, TrialPaused, TrialStarted
from elastune.runtime.job.pool import JobEvent, MoneyMeter, Pool
from elastune.train.checkpoints.checkpoint import UNWRITABLE
from elastune.train.data.fingerprint import OTHER_DATA
from elastune.train.program.source import EDITED
from elastune.train.proof.first_step import MISTAKES
from elastune.tuning.search.constraint import Constraint, fulfilled
from elastune.tuning.search.objective import Floats, Objective, oriented
from elastune.tuning.study.request import SearchRequest
from elastune.tuning.study.trial_results import UNREPORTED, known, visible

TICK_S = 0.01  # the shortest wait
Request = TypeVar("Request", bound=SearchRequest)

# --- ends by results ---


class StopRules:
    """Decides by results when a study ends: the rules of ``--until`` and ``--patience``.

    It hears all events of a study's trials, in the order of the journal. Trials belong to generations by the order in
    which they began. A trial is better if, at its end, no earlier one is at least as good in all objectives. With one
    objective it is a new best, with several a new point of the front. A generation is over once its trials, and all
    that began before, have ended or were paused by the search.

    Args:
        until: The conditions that one complete trial must reach, by its settings and metrics, to end the study.
        patience: Generations in a row without a better trial, after which no further trial begins; None: any number.
        generation: How many trials a generation has; 1: each trial is a generation.
        objectives: The objectives of the search.
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
        self._over: set[int] = set()  # ended trials, by their order
        self._prefix = 0  # so many of the first trials are over
        self._better_by = 0  # the last generation, counted from 1, with a better trial
        self._front: Floats = np.empty((0, len(self._objectives)))

    @property
    def met(self) -> str:
        """The reason to end the study and pause its trials; "": it goes on."""
        return self._met

    @property
    def stale(self) -> str:
        """The reason why no further trial may begin; "": trials may begin."""
        if self._patience is None or self._prefix // self._size - self._better_by < self._patience:
            return ""
        what = "no better trial" if len(self._objectives) == 1 else "no trial joined the front"
        if self._size == 1:
            return f"{what} in {self._patience} trials"
        return f"{what} in {self._patience} generations of {self._size} trials"

    def observe(self, record: Record, life: TrialSummary) -> None:
        """Record an event of the trial of ``life``. Raises ``UserError`` if a rule names an unknown metric."""
        if life.started.phase != "search":
            return
        order = self._order.setdefault(life.number, len(self._order))
        match record:
            case TrialStarted():
                self._over.discard(order)
            case TrialPaused(cut_off=False):
                self._ended(order)
            case TrialFinished():
                better = record.state == "complete" and self._add_to_front(record)
                self._ended(order)
                if better:
                    self._better_by = max(self._better_by, order // self._size + 1, self._prefix // self._size)
                if record.state == "complete":
                    self._check_until(record, life)

    def _ended(self, order: int) -> None:
        self._over.add(order)
        while self._prefix in self._over:
            self._prefix += 1

    def _add_to_front(self, record: TrialFinished) -> bool:
        """Add a complete trial to the front of the ended ones. Returns whether it is on it."""
        point = oriented(record.values, self._objectives)
        if (self._front <= point).all(axis=1).any():
            return False
        beaten = (point <= self._front).all(axis=1)
        self._front = np.vstack([self._front[~beaten], point])
        return True

    def _check_until(self, record: TrialFinished, life: TrialSummary) -> None:
        """Check whether a complete trial has reached the conditions that end the study."""
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


# --- ends by budgets ---


@dataclass(frozen=True)
class Bounds:
    """What a study may use; None: no bound.

    Attributes:
        trials: Number of trials.
        budget_s: Seconds.
        worker_hours: Worker-hours.
        reserve_s: New trials begin while more seconds than these are left; None: the median of the complete trials.
    """

    trials: int | None = None
    budget_s: float | None = None
    worker_hours: float | None = None
    reserve_s: float | None = None


class Budget:
    """Compares ``bounds`` with what the trials of a study have used, and applies the stop rules.

    Args:
        table: All trials of the study.
        pool: The running trials.
        clock: The clock of the study.
        rules: The stop rules.
    """

    def __init__(self, table: TrialTable, pool: Pool, clock: Clock, rules: StopRules) -> None:
        self.bounds = Bounds()
        self._rules = rules
        self._table = table
        self._pool = pool
        self._clock = clock
        self._spent_before_s = 0.0
        self._started = clock.now()

    def resume(self) -> None:
        """Count the time of earlier controllers, by the table of trials."""
        self._spent_before_s = self._table.seconds

    @property
    def tried(self) -> int:
        """The trials that count against the budget."""
        return sum(life.started.phase != "member" for life in self._table.trials.values())

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
        hours = self.bounds.worker_hours
        return float("inf") if hours is None else hours * 3600 - self.used_worker_s

    @property
    def used_worker_s(self) -> float:
        """Worker-seconds of all trials."""
        now_s = self._clock.now()
        running = sum(job.worker_seconds(now_s) for job in self._pool.jobs.values())
        return sum(life.worker_seconds for life in self._table.trials.values()) + running

    @property
    def soonest_s(self) -> float:
        """Seconds until a budget can end, with the workers that are busy now; at least ``TICK_S``."""
        busy = sum(job.workers for job in self._pool.jobs.values())
        return max(min(self.left_s, self.left_worker_s / busy if busy else float("inf")), TICK_S)

    def over(self) -> str:
        """Return the budget, or the result, that ends running trials; "": they go on."""
        if self._rules.met:
            return self._rules.met
        if self.left_s <= 0:
            return f"a budget of {self.bounds.budget_s:g} s"
        if self.left_worker_s <= 0:
            return f"a budget of {self.bounds.worker_hours:g} worker-hours"
        return ""

    def spent(self) -> str:
        """Return the reason why no new trial may begin; "": one may."""
        if self._rules.stale:
            return self._rules.stale
        if self.bounds.trials is not None and self.tried >= self.bounds.trials:
            return f"{self.bounds.trials} trials"
        budget_s, hours = self.bounds.budget_s, self.bounds.worker_hours
        if budget_s is not None:
            reserve_s = self.bounds.reserve_s
            if self.left_s <= (self._median_used(lambda life: life.seconds) if reserve_s is None else reserve_s):
                return f"a budget of {budget_s:g} s"
        if hours is not None and self.left_worker_s <= self._median_used(lambda life: life.worker_seconds):
            return f"a budget of {hours:g} worker-hours"
        return ""

    def _median_used(self, used_s: Callable[[TrialSummary], float]) -> float:
        """The median of ``used_s`` over the complete trials."""
        ended = (self._table.trials[number] for number in self._table.ended)
        used = [used_s(life) for life in ended if life.finished is not None and life.finished.state == "complete"]
        return median(used) if used else 0.0


def resume_meter(prices: Prices | None, before: Sequence[Entry], clock: Clock) -> MoneyMeter | None:
    """Return the meter that counts the costs of trials; None without prices.

    Args:
        prices: The prices. Their seconds count from the first beginning of the study; dates are dates.
        before: The journal so far. Costs of a trial after its last record are unknown.
        clock: The clock of the pool.
    """
    if prices is None:
        return None
    start_s = before[0].at if before else clock.wall()
    meter = MoneyMeter(prices, clock.wall() - clock.now() - (0.0 if prices.absolute else start_s))
    meter.costs.update({life.number: life.cost for life in fold(before).trials.values() if life.cost is not None})
    return meter


# --- failures that end a study: no other trial would do better ---

LOSSES = page_of("elastune.train.losses")
MAX_FAILED_TRIALS = 5  # so many trials that raise, and none that does not, are a bug in the program


class FailureLimit:
    """Ends a study with an error if its first trials all raise, or all lack an objective."""

    def __init__(self) -> None:
        self._crashed_in_a_row = self._lacking_in_a_row = 0

    def ended(self, event: JobEvent, table: TrialTable) -> None:
        """Record that a trial ended. Raises ``UserError`` if no trial is likely to succeed."""
        outcome = event.outcome
        crashed = isinstance(outcome, RunFailed) and outcome.reason in ("exception", "user_error")
        self._crashed_in_a_row = self._crashed_in_a_row + 1 if crashed else 0
        if self._crashed_in_a_row >= MAX_FAILED_TRIALS and isinstance(outcome, RunFailed) and not _works(table):
            rule = f"of the first {MAX_FAILED_TRIALS} trials one must not raise"
            raise UserError(rule, outcome.detail, f"fix the program; a log is {event.spec.out / 'logs'}")
        self._lacking_in_a_row = self._lacking_in_a_row + 1 if _lacks(table.trials[event.job]) else 0
        if self._lacking_in_a_row >= MAX_FAILED_TRIALS:
            self.over(table)

    def over(self, table: TrialTable) -> None:
        """Check the trials at the end of a study. Raises ``UserError`` if none works and one lacks an objective."""
        if _works(table):
            return
        for life in table.trials.values():
            if life.finished is not None and _lacks(life):
                fix = "report it (session.report, or a line of a command), or name another --objective"
                value = f"trial {life.number} {life.finished.reason}"
                raise UserError("an objective must be a metric that the program reports", value, fix)


def _lacks(life: TrialSummary) -> bool:
    return life.finished is not None and life.finished.reason.startswith(UNREPORTED)


def _works(table: TrialTable) -> bool:
    """Whether some trial has completed or paused, so that the program can be trained."""
    lives = table.trials.values()
    return any(life.state == "paused" or (life.finished and life.finished.state == "complete") for life in lives)


def program_error(event: JobEvent) -> UserError | None:
    """Return the error if a trial failed by no fault of its settings: program or data have changed, or the proof of
    the first step has found a mistake in the program."""
    outcome = event.outcome
    if not isinstance(outcome, RunFailed):
        return None
    undo = "undo that, then --resume; or go on with it by --resume --accept-changes"
    for rule, fix in {EDITED: undo, OTHER_DATA: undo, **MISTAKES}.items():
        if rule in outcome.detail:
            cause = outcome.detail.partition("(got ")[2].rpartition("): ")[0]  # the value in its worker's own error
            page = LOSSES if rule in MISTAKES else None
            return UserError(rule, f"trial {event.job}: {cause or outcome.detail}", fix, page)
    return None


def raise_if_disk_full(event: JobEvent) -> None:
    """Raise ``UserError`` if a trial failed because the disk of its machine is full."""
    outcome = event.outcome
    if isinstance(outcome, RunFailed) and UNWRITABLE in outcome.detail:
        cause = outcome.detail.partition("(got ")[2].rpartition("): ")[0]  # the value in its worker's own error
        raise UserError(UNWRITABLE, f"trial {event.job}: {cause or outcome.detail}", "free space, then --resume")
