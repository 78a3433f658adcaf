"""How a frontier's budget is split among its phases, from the first steps that were measured. Pure.

All phases share one budget, and the search gets at least ``SEARCH_SHARE`` of it. If the other phases do not fit into
the rest, they are shortened in this order: throughput, seeds, settings to confirm. The answer lists what was
shortened or left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastune.core.errors import UserError
from elastune.core.formatting import count, duration

SEARCH_SHARE = 0.4
"""The least part of a budget that is for the search."""
LEAST_SEEDS = 2
"""The least seeds of a row: a confidence interval needs two."""
LANE = 0.5
"""The throughput that each core after the first adds: trainings that share a machine slow each other down."""
TIMED_STEPS = 25
LEAST_STEPS = 8
"""The most and the least steps of a short run. Its first steps warm up and do not count."""
TIMING_SHARE = 0.01
"""The largest part of a budget that the steps of one short run may take."""
SPARE = 1.3
"""The factor on the predicted time of confirming: the search's front is confirmed, too, so that it has an interval."""
SHORTEST_S, LONGEST_S = 10.0, 600.0
"""Bounds of a budget that is chosen from the first steps."""


@dataclass(frozen=True)
class TrainingCost:
    """What one training with the program's own settings takes on one worker, as measured by its first steps.

    Args:
        step_s: Seconds of a step.
        steps: Steps of a whole training.
        report_s: Seconds between the steps, for each report.
        reports: Reports of a whole training.
        start_s: Seconds until the first step, and from the last one to the end.
        whole_s: Measured seconds of a whole training, once some have ended; None: the sum of the parts.
    """

    step_s: float
    steps: int
    report_s: float = 0.0
    reports: int = 1
    start_s: float = 0.0
    whole_s: float | None = None

    @property
    def training_s(self) -> float:
        """Seconds of a whole training that runs alone on the machine."""
        if self.whole_s is not None:
            return self.whole_s
        return self.start_s + self.steps * self.step_s + self.reports * self.report_s

    def timing_s(self, factor: float = 1.0, budget_s: float = math.inf) -> float:
        """Seconds of a short run whose batch is ``factor`` times the program's own."""
        step_s = self.step_s * max(1.0, factor)
        return self.start_s + timed_steps(step_s, budget_s) * step_s + self.report_s


@dataclass(frozen=True)
class PhaseWork:
    """The work of a frontier, as known after its first steps were measured.

    Args:
        trainers: For each worker count, how many workers train for it.
        policies: The same for each count under each policy that was given.
        seeds: Trainings of each.
        cores: Workers that may train at a time.
        timings: Short runs that calibrate: the batch of each, over the program's own.
        throughput: The number of short runs that look for faster execution settings.
        rows: Short runs that time the rows: the batch of each, over the program's own.
        spent_s: Seconds of the budget that are spent.
        done: Trainings of the naive rule that ended in that time.
        searched_s: Seconds of that time that the search had.
    """

    trainers: tuple[int, ...]
    policies: tuple[int, ...] = ()
    seeds: int = 3
    cores: int = 1
    timings: tuple[float, ...] = ()
    throughput: int = 0
    rows: tuple[float, ...] = ()
    spent_s: float = 0.0
    done: int = 0
    searched_s: float = 0.0


@dataclass(frozen=True)
class PhaseBudget:
    """The seconds of each phase, in their order. ``calibrate`` includes the time that was spent before the split.

    Attributes:
        budget_s: Seconds of all phases together.
        seeds: Trainings of each cell of the table.
        confirmed: For how many worker counts there is time to confirm settings.
        needs_s: The least budget that includes a search.
        searches: Whether the search runs, with its share of the budget.
        left_out: What is shortened or left out, and why, in words.
    """

    budget_s: float
    calibrate: float
    throughput: float
    naive: float
    policy: float
    search: float
    confirm: float
    timing: float
    seeds: int
    confirmed: int
    needs_s: float
    searches: bool = True
    left_out: tuple[str, ...] = ()

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase."""
        names = ("calibrate", "throughput", "naive", "policy", "search", "confirm", "timing")
        return {name: getattr(self, name) for name in names}


def timed_steps(step_s: float, budget_s: float) -> int:
    """How many steps a short run takes: fewer if they are long."""
    if not 0 < step_s < math.inf or budget_s == math.inf:
        return TIMED_STEPS
    return int(min(TIMED_STEPS, max(LEAST_STEPS, TIMING_SHARE * budget_s / step_s)))


def trainings_s(trainers: Sequence[int], training_s: float, cores: int) -> float:
    """Seconds of trainings with the given worker counts, if ``cores`` workers may train at a time.

    A training as wide as the machine runs alone. It is not assumed to be faster for its workers.
    """
    lanes = 1 + LANE * (cores - 1)
    single = sum(workers == 1 for workers in trainers)
    wide = sum(max(1.0, workers / cores) / max(1, cores // workers) for workers in trainers if workers > 1)
    return training_s * (max(float(single > 0), single / lanes) + wide)


def plan_phases(cost: TrainingCost, work: PhaseWork, budget_s: float | None, *, short: bool = False) -> PhaseBudget:
    """Split ``budget_s`` among the phases.

    A budget without time for the search gives a result whose ``searches`` is false. Unless the user allows that, the
    caller must refuse it (see ``refuse_small``).

    Args:
        cost: The cost of a training, as measured.
        work: The work of all phases.
        budget_s: Seconds from the beginning of the frontier to its answer; None: a budget that all of ``work`` fits in.
        short: Whether the user allows to leave the search out.

    Returns:
        The seconds of each phase, and what was shortened.

    Example:
        >>> plan_phases(TrainingCost(0.004, 384), PhaseWork((1, 1), seeds=3, cores=2), 90.0).seeds
        3
    """
    whole = _others(cost, work, work.seeds, len(work.trainers), budget_s or LONGEST_S)
    needs_s = sum(_others(cost, work, min(work.seeds, LEAST_SEEDS), 1, 0.0, tried=False)) / (1 - SEARCH_SHARE)
    if budget_s is None:
        wanted_s = (sum(whole) + (SPARE - 1) * whole[4]) / (1 - SEARCH_SHARE)
        budget_s = max(SHORTEST_S, _rounded(wanted_s))
        budget_s = budget_s if budget_s <= LONGEST_S else max(LONGEST_S, _rounded(1.15 * needs_s))
    share_s = max(0.0, SEARCH_SHARE * budget_s - work.searched_s)
    rest_s = budget_s - share_s
    for seeds, confirmed in _shorter(work):
        for tried in (True, False) if work.throughput else (False,):
            others = _others(cost, work, seeds, confirmed, budget_s, tried=tried)
            if sum(others) <= rest_s or (tried and sum(others) - others[1] + cost.timing_s() * 4 <= rest_s):
                calibrate, throughput, naive, policy, confirm, timing = others
                throughput = min(throughput, rest_s - (sum(others) - throughput))
                free_s = budget_s - calibrate - throughput - naive - policy - timing
                confirm = min(SPARE * confirm, free_s - share_s)
                phases = PhaseBudget(
                    *(budget_s, calibrate, throughput, naive, policy, free_s - confirm, confirm, timing),
                    *(seeds, confirmed, needs_s),
                )
                return replace(phases, left_out=_left_out(work, phases, tried, whole[1]))
    return _without_search(cost, work, budget_s, needs_s)


def refuse_small(phases: PhaseBudget, cost: TrainingCost) -> None:
    """Raise ``UserError`` if a budget leaves the search less than its share."""
    if phases.searches:
        return
    rule = f"{SEARCH_SHARE:.0%} of a budget are for the search, and the other phases must fit into the rest"
    took = f"{duration(phases.budget_s)}, where one training takes about {duration(cost.training_s)} here now"
    needs_s = _rounded(1.15 * phases.needs_s)
    raise UserError(rule, took, f"use --budget {needs_s:.0f}s, or --short to leave the search out")


def _shorter(work: PhaseWork) -> list[tuple[int, int]]:
    """(seeds, worker counts whose settings are confirmed), from the full request to the least possible."""
    counts, least = len(work.trainers), min(work.seeds, LEAST_SEEDS)
    fewer = [(seeds, counts) for seeds in range(work.seeds, least - 1, -1)]
    return [*fewer, *((least, confirmed) for confirmed in range(counts - 1, 0, -1))]


def _others(
    cost: TrainingCost, work: PhaseWork, seeds: int, confirmed: int, budget_s: float, *, tried: bool = True
) -> tuple[float, float, float, float, float, float]:
    """Seconds of all phases but the search: calibrate, throughput, naive, policy, confirm, timing."""
    calibrate = work.spent_s + sum(cost.timing_s(factor, budget_s) for factor in work.timings)
    throughput = work.throughput * cost.timing_s(1.0, budget_s) if tried else 0.0
    naive = trainings_s((work.trainers * seeds)[work.done :], cost.training_s, work.cores)
    policy = trainings_s(work.policies * seeds, cost.training_s, work.cores)
    confirm = trainings_s(work.trainers[-confirmed:] * seeds, cost.training_s, work.cores)
    timing = sum(cost.timing_s(factor, budget_s) for factor in work.rows)
    return calibrate, throughput, naive, policy, confirm, timing


def _without_search(cost: TrainingCost, work: PhaseWork, budget_s: float, needs_s: float) -> PhaseBudget:
    """As many seeds as the budget has time for, at least one; nothing is confirmed."""
    calibrate = work.spent_s + sum(cost.timing_s(factor, budget_s) for factor in work.timings)
    left_s = budget_s - calibrate
    each_s = trainings_s((*work.trainers, *work.policies), cost.training_s, work.cores)
    seeds = int(min(work.seeds, max(1.0, left_s / each_s))) if each_s > 0 else work.seeds
    naive = min(max(0.0, left_s), trainings_s(work.trainers * seeds, cost.training_s, work.cores))
    policy = min(max(0.0, left_s - naive), trainings_s(work.policies * seeds, cost.training_s, work.cores))
    phases = PhaseBudget(budget_s, calibrate, 0.0, naive, policy, 0.0, 0.0, 0.0, seeds, 0, needs_s, searches=False)
    why = f"the search: a budget of {duration(budget_s)} has no time for it, {duration(needs_s)} would have"
    return replace(phases, left_out=(why, *_left_out(work, phases, False, 0.0)))


def _left_out(work: PhaseWork, phases: PhaseBudget, tried: bool, throughput_s: float) -> tuple[str, ...]:
    words = []
    if work.throughput and not tried:
        words.append("the throughput phase: there is no time for it")
    elif phases.throughput < throughput_s * 0.99:
        words.append(f"of the throughput phase, what takes more than {duration(phases.throughput)}")
    if phases.seeds < work.seeds:
        words.append(f"{count(work.seeds - phases.seeds, 'seed')} of {work.seeds} for each cell of the table")
    if phases.searches and phases.confirmed < len(work.trainers):
        few, all_of = phases.confirmed, len(work.trainers)
        words.append(f"confirming tuned settings for all worker counts: there is time for {few} of {all_of}")
    return tuple(words)


def _rounded(seconds: float) -> float:
    """``seconds`` rounded up to the next ten."""
    return 10.0 * math.ceil(seconds / 10)
