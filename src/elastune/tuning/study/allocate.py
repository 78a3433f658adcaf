"""How many workers each trial of a study gets: a pure decision over all trials.

Every next worker goes where it is worth most. The value of a trial is ``worth`` x useful samples a second, and the
steepest gain per worker wins (goodput shared over a cluster: Qiao et al., "Pollux", OSDI 2021). In ``exact`` mode the
value is a staircase of slots, not a concave function of the workers. Then blocks up to the next corner of its concave
hull are compared. With concave values the result is the optimum; else it misses at most the gain of one block.

Deadline: trials take, most worth first, the fewest workers that end them in time (the minimum satisfactory share of
Gu et al., "ElasticFlow", ASPLOS 2023). Promising trials come first as the deadline nears (Liaw et al., "HyperSched",
SoCC 2019). Budget: a trial or a block is dropped if the budget lacks its worker-seconds until the end (the cost of a
plan in Misra et al., "RubberBand", EuroSys 2021).

Limits: it makes no moves that pay only together with others, and it considers only the given trials.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from elastune.tuning.study.throughput import Floats, MeasuredRates, samples_per_s

SAME = 1e-9  # relative: gains this close count as equal, so that rounding moves no trial


@dataclass(frozen=True)
class Demand:
    """The demand of a trial for workers.

    Attributes:
        trial: The number of the trial.
        current: Its present workers; 0 while it waits.
        low: The fewest workers while it runs.
        high: The most workers while it runs.
        remaining: Useful samples to its end.
        throughput: Its samples a second, by workers.
        worth: The worth of one useful sample, by the trial's rank on the front. Where trials of different models
            compete, divide by the rate of one worker (Pollux's speed-up).
        pause_s: Seconds that a resize or a start costs.
        since_s: Seconds since its workers last changed (also to 0), or since it began to wait.
    """

    trial: int
    current: int
    low: int
    high: int
    remaining: float
    throughput: MeasuredRates
    worth: float = 1.0
    pause_s: float = 0.0
    since_s: float = math.inf

    def __post_init__(self) -> None:
        if not (1 <= self.low <= self.high and self.current >= 0):
            raise ValueError(f"trial {self.trial} needs 1 <= low <= high and current >= 0, not {self}")
        if not (self.remaining > 0 and 0 < self.worth < math.inf):
            raise ValueError(f"trial {self.trial} needs remaining and worth above 0, not {self}")
        if not (0 <= self.pause_s < math.inf and self.since_s >= 0):
            raise ValueError(f"trial {self.trial} needs times >= 0, not {self.pause_s} and {self.since_s}")


@dataclass(frozen=True)
class Rules:
    """The bounds of a decision.

    Attributes:
        horizon_s: A move must pay back its pauses within so many seconds, or by the end of a trial involved.
        min_residence_s: No trial is resized again sooner, unless it must be.
        max_wait_s: A trial that waited longer comes before all trials that run longer than ``min_residence_s``.
        least_gain: The gain that a further worker must bring, relative to a worker of ``low``. A worker that brings
            less is returned where that pays.
        outside_value: The value a second of a worker outside of these trials, for example for a new trial. A worker
            that brings less is not added, and is returned where that pays.
        deadline_s: The remaining seconds of the study.
        budget_s: The remaining worker-seconds of the study.
    """

    horizon_s: float = 600.0
    min_residence_s: float = 30.0
    max_wait_s: float = math.inf
    least_gain: float = 0.0
    outside_value: float = 0.0
    deadline_s: float = math.inf
    budget_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.horizon_s < math.inf or min(vars(self).values()) < 0:
            raise ValueError(f"rules need 0 < horizon_s < inf and nothing below 0, not {self}")


@dataclass(frozen=True)
class _Candidate:
    """A demand, its useful samples a second on 0, 1, 2 ... workers, and the bounds of its workers now."""

    demand: Demand
    rates: Floats
    floor: int
    cap: int

    def value(self, workers: int) -> float:
        return self.demand.worth * float(self.rates[workers])

    def left_s(self, workers: int) -> float:
        """Seconds to the trial's end."""
        return self.demand.remaining / float(self.rates[workers]) if workers else math.inf

    def cost_s(self, workers: int) -> float:
        """Worker-seconds to the trial's end."""
        return workers * self.left_s(workers)


def allocate(demands: Sequence[Demand], workers: int, rules: Rules | None = None) -> dict[int, int]:
    """Decide how many workers each trial has.

    Where not all trials can run, the order is: just resized, waiting beyond ``max_wait_s``, running, waiting. Within
    each group the most worth comes first, but the oldest of those beyond ``max_wait_s``. A trial without measurements
    counts as the median of the others' first worker, with perfect scaling up to twice ``low``. Trials that cannot end
    by the deadline do not start, and have ``low`` while they run.

    The order of ``demands`` does not matter. With the result as ``current`` (and ``since_s`` 0 where it changed) the
    result is the same again.

    Args:
        demands: The demands, one for each trial.
        workers: All workers; the result never has more.
        rules: The bounds of the decision; None: the defaults.

    Returns:
        The workers of each trial, by its number: ``low`` to ``high``, or 0: it waits, or stays paused.

    Raises:
        ValueError: If two demands are of one trial.
    """
    rules = rules or Rules()
    if workers < 0 or len({demand.trial for demand in demands}) < len(demands):
        raise ValueError(f"workers >= 0 and one claim a trial are needed, not {workers} and {len(demands)} claims")
    while True:
        shares = _decided(demands, workers, rules)
        if rules.min_residence_s == 0 or all(demand.current == shares[demand.trial] for demand in demands):
            return shares
        # A trial that changes stays then, so the rest is shared again, until no other trial would change.
        demands = [
            c if c.current == shares[c.trial] else replace(c, current=shares[c.trial], since_s=0) for c in demands
        ]


def _decided(demands: Sequence[Demand], workers: int, rules: Rules) -> dict[int, int]:
    """One round of ``allocate``."""
    candidates = _admitted(_candidates(demands, workers), workers, rules)
    candidates = _staying(_in_time(candidates, workers, rules), workers, rules)
    target = _shared(candidates, workers, rules)
    counts = _moved(candidates, target, workers, rules)
    shares = dict.fromkeys(sorted(demand.trial for demand in demands), 0)
    return shares | {candidate.demand.trial: count for candidate, count in zip(candidates, counts, strict=True)}


def _candidates(demands: Sequence[Demand], workers: int) -> list[_Candidate]:
    """The demands that could run at all, by trial number."""
    possible = sorted((c for c in demands if c.low <= workers), key=lambda demand: demand.trial)
    measured = {
        c.trial: samples_per_s(c.throughput, min(c.high, workers)) for c in possible if c.throughput != MeasuredRates()
    }
    unknown = median(float(rates[1]) for rates in measured.values()) if measured else 1.0
    candidates = []
    for demand in possible:
        cap = min(demand.high, workers)
        known_rates = measured.get(demand.trial)
        rates = samples_per_s(demand.throughput, cap, demand.low, unknown) if known_rates is None else known_rates
        candidates.append(_Candidate(demand, rates, demand.low, cap))
    return candidates


def _admitted(candidates: Sequence[_Candidate], workers: int, rules: Rules) -> list[_Candidate]:
    """The candidates that run, each at least on ``low``, by rank; one that does not fit is passed over."""

    def rank(candidate: _Candidate) -> tuple[int, float, int]:
        demand = candidate.demand
        if demand.current:
            # A change at this very moment counts as just resized: a second call must not undo the decision.
            just = demand.since_s == 0 or demand.since_s < rules.min_residence_s
            return (0 if just else 2), -demand.worth, demand.trial
        starving = demand.since_s > rules.max_wait_s
        return (1, -demand.since_s, demand.trial) if starving else (3, -demand.worth, demand.trial)

    left, budget_s, admitted = workers, rules.budget_s, []
    for candidate in sorted(candidates, key=rank):
        low, cost_s = candidate.floor, candidate.cost_s(candidate.floor) if rules.budget_s < math.inf else 0.0
        waits = candidate.demand.current == 0 and _needed(candidate, rules.deadline_s) is None
        if low <= left and cost_s <= budget_s and not waits:
            admitted.append(candidate)
            left, budget_s = left - low, budget_s - cost_s
    return sorted(admitted, key=lambda candidate: candidate.demand.trial)


def _needed(candidate: _Candidate, deadline_s: float) -> int | None:
    """The fewest workers that end the trial in time, including a pause for its resize; None if no number does.

    Its present workers, if only these do: it has no time left for a pause.
    """
    if deadline_s == math.inf:
        return candidate.floor
    enough = candidate.demand.remaining <= candidate.rates[candidate.floor : candidate.cap + 1] * (
        deadline_s - candidate.demand.pause_s
    )
    if enough.any():
        return candidate.floor + int(enough.argmax())
    kept = candidate.demand.current
    return kept if candidate.floor <= kept <= candidate.cap and candidate.left_s(kept) <= deadline_s else None


def _in_time(candidates: Sequence[_Candidate], workers: int, rules: Rules) -> list[_Candidate]:
    """Raise floors to the workers that the deadline needs, most worth first; late trials stay on ``low``."""
    left = workers - sum(candidate.floor for candidate in candidates)
    budget_s = rules.budget_s
    if budget_s < math.inf:
        budget_s -= sum(candidate.cost_s(candidate.floor) for candidate in candidates)
    by_trial = {}
    for candidate in sorted(candidates, key=lambda candidate: (-candidate.demand.worth, candidate.demand.trial)):
        needed, low, cap = _needed(candidate, rules.deadline_s), candidate.floor, candidate.cap
        floor = low
        if needed is not None and needed > low:
            extra_s = candidate.cost_s(needed) - candidate.cost_s(low) if rules.budget_s < math.inf else 0.0
            if needed - low <= left and extra_s <= budget_s:
                floor, left, budget_s = needed, left - (needed - low), budget_s - extra_s
        if needed is None:
            cap = low
        elif candidate.demand.remaining > candidate.rates[needed] * (rules.deadline_s - candidate.demand.pause_s):
            cap = floor  # it ends in time only without a resize
        by_trial[candidate.demand.trial] = _Candidate(candidate.demand, candidate.rates, floor, cap)
    return [by_trial[candidate.demand.trial] for candidate in candidates]


def _stays(candidate: _Candidate, rules: Rules) -> bool:
    return candidate.demand.current > 0 and candidate.demand.since_s < rules.min_residence_s


def _staying(candidates: Sequence[_Candidate], workers: int, rules: Rules) -> list[_Candidate]:
    """Trials that were just resized keep their workers, most worth first, as long as these exist."""
    if rules.budget_s < math.inf:
        return list(candidates)
    left, by_trial = workers - sum(candidate.floor for candidate in candidates), {}
    for candidate in sorted(candidates, key=lambda candidate: (-candidate.demand.worth, candidate.demand.trial)):
        current = candidate.demand.current
        if _stays(candidate, rules) and candidate.floor <= current <= min(candidate.cap, candidate.floor + left):
            left -= current - candidate.floor
            candidate = replace(candidate, floor=current, cap=current)
        by_trial[candidate.demand.trial] = candidate
    return [by_trial[candidate.demand.trial] for candidate in candidates]


def _shared(candidates: Sequence[_Candidate], workers: int, rules: Rules) -> list[int]:
    """The best shares if moves were free: always the steepest block next, as long as workers and budget last.

    The next corner of a hull is computed only when needed: about one search for each worker, not for each hull.
    """
    shares = [candidate.floor for candidate in candidates]
    left, budget_s = workers - sum(shares), rules.budget_s
    if budget_s < math.inf:
        budget_s -= sum(candidate.cost_s(candidate.floor) for candidate in candidates)
    blocks: list[tuple[float, int, int]] = []  # (-gain per worker, candidate, new share)

    def offer(k: int) -> None:
        candidate, current = candidates[k], shares[k]
        ahead = candidate.rates[current : min(candidate.cap, current + left) + 1]
        if len(ahead) < 2:
            return
        slopes = (ahead[1:] - ahead[0]) / np.arange(1, len(ahead))
        steepest = float(slopes.max())
        if steepest * candidate.demand.worth > max(_least(candidate, rules), SAME * candidate.value(current)):
            size = 1 + int((slopes >= steepest * (1 - SAME)).argmax())
            heapq.heappush(blocks, (-steepest * candidate.demand.worth, k, current + size))

    for k in range(len(candidates)):
        offer(k)
    while blocks and left:
        _, k, upto = heapq.heappop(blocks)
        if upto - shares[k] <= left:
            extra_s = candidates[k].cost_s(upto) - candidates[k].cost_s(shares[k]) if rules.budget_s < math.inf else 0.0
            if extra_s > budget_s:
                continue
            left, budget_s, shares[k] = left - (upto - shares[k]), budget_s - extra_s, upto
        offer(k)
    return shares


def _moved(candidates: Sequence[_Candidate], target: Sequence[int], workers: int, rules: Rules) -> list[int]:
    """Move from the present shares towards ``target``, by necessary moves and by moves that pay.

    This is repeated until no move pays, even if the trials just moved would pause again. So the result is stable.
    """
    shares = [min(max(candidate.demand.current, candidate.floor), candidate.cap) for candidate in candidates]
    if rules.budget_s < math.inf:  # workers beyond the budget must go
        shares = [min(current, best) for current, best in zip(shares, target, strict=True)]
    frozen = {k for k, candidate in enumerate(candidates) if _stays(candidate, rules)}
    surplus = sum(shares) - workers
    for k in _donors(candidates, shares, target, frozen):
        taken = min(max(surplus, 0), shares[k] - target[k])
        shares[k], surplus = shares[k] - taken, surplus - taken
    moved = {k for k, candidate in enumerate(candidates) if shares[k] != candidate.demand.current}
    while True:
        before = list(shares)
        _pass(candidates, shares, target, workers - sum(shares), moved, frozen, rules)
        if shares == before and not moved:
            return shares
        if rules.min_residence_s > 0:
            frozen |= moved
        moved = set()


def _donors(
    candidates: Sequence[_Candidate], shares: Sequence[int], target: Sequence[int], last: Set[int] = frozenset()
) -> list[int]:
    """The candidates above their targets: the least loss per worker first, those of ``last`` last."""
    above = [k for k, candidate in enumerate(candidates) if shares[k] > target[k]]
    return sorted(above, key=lambda k: (k in last, -_gain(candidates[k], shares[k], target[k]), k))


def _least(candidate: _Candidate, rules: Rules) -> float:
    """The value a second that one further worker must exceed."""
    return max(rules.least_gain * candidate.value(candidate.demand.low) / candidate.demand.low, rules.outside_value)


def _gain(candidate: _Candidate, current: int, target: int) -> float:
    """The change of value per worker: above 0 for more workers, below 0 for fewer."""
    return (candidate.value(target) - candidate.value(current)) / abs(target - current)


def _pass(
    candidates: Sequence[_Candidate],
    shares: list[int],
    target: Sequence[int],
    free: int,
    moved: set[int],
    frozen: set[int],
    rules: Rules,
) -> None:
    """One round of moves that pay, in place: trials below their targets take workers, free ones or of trials above."""
    donors = [k for k in _donors(candidates, shares, target) if k not in frozen]
    takers = [k for k in range(len(candidates)) if shares[k] < target[k] and k not in frozen]
    for k in sorted(takers, key=lambda k: (-_gain(candidates[k], shares[k], target[k]), k)):
        spare = sum(shares[donor] - target[donor] for donor in donors)
        for reach in (min(target[k], shares[k] + free + spare), min(target[k], shares[k] + free)):
            goal = shares[k] + int(candidates[k].rates[shares[k] : reach + 1].argmax())
            moves, need = {k: goal}, goal - shares[k] - free
            for donor in donors:
                if need <= 0:
                    break
                taken = min(need, shares[donor] - target[donor])
                if taken:
                    moves[donor], need = shares[donor] - taken, need - taken
            if goal > shares[k] and _pays(candidates, shares, moves, moved, rules.horizon_s):
                free -= sum(count - shares[moving] for moving, count in moves.items())
                for moving, count in moves.items():
                    shares[moving] = count
                moved |= set(moves)
                break
    for donor in donors:
        spared = (shares[donor] - target[donor]) * _least(candidates[donor], rules)
        if shares[donor] > target[donor] and _pays(
            candidates, shares, {donor: target[donor]}, moved, rules.horizon_s, spared
        ):
            shares[donor] = target[donor]
            moved.add(donor)


def _pays(
    candidates: Sequence[_Candidate],
    shares: Sequence[int],
    moves: Mapping[int, int],
    moved: set[int],
    horizon_s: float,
    spared: float = 0.0,
) -> bool:
    """Whether the gain of ``moves`` outweighs their pauses until the first of the trials ends, at most ``horizon_s``.

    A trial that has moved already has had its pause, and may move further without cost. ``spared``: the value a second
    of returned workers.
    """
    during_s = min(horizon_s, *(candidates[k].left_s(shares[k]) for k in moves))
    gained, before = spared * during_s, 0.0
    for k, count in moves.items():
        working_s = during_s if k in moved else max(during_s - candidates[k].demand.pause_s, 0.0)
        gained += candidates[k].value(count) * working_s - candidates[k].value(shares[k]) * during_s
        before += candidates[k].value(shares[k]) * during_s
    return gained > SAME * before
