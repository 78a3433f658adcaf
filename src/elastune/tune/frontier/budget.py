"""How a frontier's budget is split among its phases, from the first steps that were measured. Pure.

All phases share one budget, and the search gets at least ``SEARCH_SHARE`` of it. If the other phases do not fit into
the rest, they are shortened in this order: throughput, seeds, settings to confirm. The answer says in words what was
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
"""Of a row: a confidence interval needs them."""
LANE = 0.5
"""What each core after the first adds where trainings share a machine: they slow each other down."""
TIMED_STEPS = 25
LEAST_STEPS = 8
"""Of a short run: the first few steps warm up and do not count."""
TIMING_SHARE = 0.01
"""The most of a budget that the steps of one short run may take."""
SPARE = 1.3
"""Of what confirming is predicted to take: the search's front is confirmed, too, so that it has an interval."""
SHORTEST_S, LONGEST_S = 10.0, 600.0
"""Bounds of a budget that is chosen from the first steps."""


@dataclass(frozen=True)
class TrainingCost:
    """What one training with the program's own settings takes on one worker, as measured by its first steps.

    Args:
        step_s: Seconds of a step.
        steps: Steps of a whole training.
        report_s: Seconds of what comes between the steps, for each report.
        reports: Reports of a whole training.
        start_s: Seconds until the first step, and from the last one to the end.
        whole_s: Of a whole training, once some were made; None: as its parts say.
    """

    step_s: float
    steps: int
    report_s: float = 0.0
    reports: int = 1
    start_s: float = 0.0
    whole_s: float | None = None

    @property
    def training_s(self) -> float:
        """Seconds of a whole training that has the machine for itself."""
        if self.whole_s is not None:
            return self.whole_s
        return self.start_s + self.steps * self.step_s + self.reports * self.report_s

    def timing_s(self, factor: float = 1.0, budget_s: float = math.inf) -> float:
        """Seconds of a short run whose batch is ``factor`` times the program's own."""
        step_s = self.step_s * max(1.0, factor)
        return self.start_s + timed_steps(step_s, budget_s) * step_s + self.report_s


@dataclass(frozen=True)
class PhaseWork:
    """What a frontier is to do, after its first steps were measured.

    Args:
        trainers: For each worker count, how many workers train for it.
        policies: The same for each count under each policy that was given.
        seeds: Trainings of each.
        cores: Workers that may train at a time.
        timings: Short runs that calibrate, each by its batch over the program's own.
        throughput: Short runs that look for faster execution.
        rows: Short runs that time what is found, each by its batch over the program's own.
        spent_s: Seconds of the budget that are gone.
        done: Trainings of the naive rule that were made in them.
        searched_s: What the search had of them.
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
    """Seconds of each phase, in their order. ``calibrate`` includes what was spent before.

    ``searches``: whether there is a search, with its share of the budget. ``seeds``: trainings of each cell of the
    table. ``confirmed``: for how many worker counts there is time to confirm settings. ``left_out``: what is shortened,
    and why, in words. ``needs_s``: the least budget with a search in it.
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
        """By phase."""
        names = ("calibrate", "throughput", "naive", "policy", "search", "confirm", "timing")
        return {name: getattr(self, name) for name in names}


def timed_steps(step_s: float, budget_s: float) -> int:
    """How many steps a short run takes: fewer where they are long."""
    if not 0 < step_s < math.inf or budget_s == math.inf:
        return TIMED_STEPS
    return int(min(TIMED_STEPS, max(LEAST_STEPS, TIMING_SHARE * budget_s / step_s)))


def trainings_s(trainers: Sequence[int], training_s: float, cores: int) -> float:
    """Seconds of trainings on so many workers each, where ``cores`` may train at a time.

    One that is as wide as the machine runs by itself, and is not taken to be faster for its workers.
    """
    lanes = 1 + LANE * (cores - 1)
    single = sum(workers == 1 for workers in trainers)
    wide = sum(max(1.0, workers / cores) / max(1, cores // workers) for workers in trainers if workers > 1)
    return training_s * (max(float(single > 0), single / lanes) + wide)


def plan_phases(cost: TrainingCost, work: PhaseWork, budget_s: float | None, *, short: bool = False) -> PhaseBudget:
    """Split ``budget_s`` (None: one that all of ``work`` fits into) among the phases.

    With ``short``, a budget without time for the search is for the rest. Without it, and in a budget that is too small,
    the result has no ``search`` either: whoever asks must refuse it, see ``refuse_small``.

    Args:
        cost: Of a training, as measured.
        work: What is to be done.
        budget_s: Seconds for everything, from the beginning of the frontier to its answer.
        short: Whether the search may be left out.

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
                found = PhaseBudget(
                    *(budget_s, calibrate, throughput, naive, policy, free_s - confirm, confirm, timing),
                    *(seeds, confirmed, needs_s),
                )
                return replace(found, left_out=_left_out(work, found, tried, whole[1]))
    return _without_search(cost, work, budget_s, needs_s)


def refuse_small(found: PhaseBudget, cost: TrainingCost) -> None:
    """Raise ``UserError`` where a budget leaves the search less than its share."""
    if found.searches:
        return
    rule = f"{SEARCH_SHARE:.0%} of a budget are for the search, and the other phases must fit into the rest"
    took = f"{duration(found.budget_s)}, where one training takes about {duration(cost.training_s)} here now"
    needs_s = _rounded(1.15 * found.needs_s)
    raise UserError(rule, took, f"use --budget {needs_s:.0f}s, or --short to leave the search out")


def _shorter(work: PhaseWork) -> list[tuple[int, int]]:
    """(seeds, counts whose settings are confirmed), from all that was asked for to the least."""
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
    one_s = trainings_s((*work.trainers, *work.policies), cost.training_s, work.cores)
    seeds = int(min(work.seeds, max(1.0, left_s / one_s))) if one_s > 0 else work.seeds
    naive = min(max(0.0, left_s), trainings_s(work.trainers * seeds, cost.training_s, work.cores))
    policy = min(max(0.0, left_s - naive), trainings_s(work.policies * seeds, cost.training_s, work.cores))
    found = PhaseBudget(budget_s, calibrate, 0.0, naive, policy, 0.0, 0.0, 0.0, seeds, 0, needs_s, searches=False)
    why = f"the search: a budget of {duration(budget_s)} has no time for it, {duration(needs_s)} would have"
    return replace(found, left_out=(why, *_left_out(work, found, False, 0.0)))


def _left_out(work: PhaseWork, found: PhaseBudget, tried: bool, throughput_s: float) -> tuple[str, ...]:
    words = []
    if work.throughput and not tried:
        words.append("the throughput phase: there is no time for it")
    elif found.throughput < throughput_s * 0.99:
        words.append(f"of the throughput phase, what takes more than {duration(found.throughput)}")
    if found.seeds < work.seeds:
        words.append(f"{count(work.seeds - found.seeds, 'seed')} of {work.seeds} for each cell of the table")
    if found.searches and found.confirmed < len(work.trainers):
        few, all_of = found.confirmed, len(work.trainers)
        words.append(f"confirming tuned settings for all worker counts: there is time for {few} of {all_of}")
    return tuple(words)


def _rounded(seconds: float) -> float:
    """Up to the next ten seconds."""
    return 10.0 * math.ceil(seconds / 10)
