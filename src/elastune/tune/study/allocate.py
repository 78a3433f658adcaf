"""Who gets the workers: a pure decision over all trials of a study.

Every next worker goes where it is worth most: a trial's value is ``worth`` x useful samples a second, and the steepest
gain per worker wins (goodput shared over a cluster: Qiao et al., "Pollux", OSDI 2021). Where the value is no concave
function of the workers (in ``exact`` mode it is a staircase of slots), blocks up to the next corner of its concave hull
are weighed. With concave values the result is the optimum; else it misses at most what one block would bring.

Deadline: trials take, most worth first, the fewest workers that end them in time (the minimum satisfactory share of
Gu et al., "ElasticFlow", ASPLOS 2023; the promising come first as it nears: Liaw et al., "HyperSched", SoCC 2019).
Budget: nobody is kept, and no block added, whose worker-seconds until the end are not left (the cost of a plan in Misra
et al., "RubberBand", EuroSys 2021).

What it cannot do: make moves that pay only several at once; see past the trials it is told of.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from elastune.tune.study.throughput import Floats, MeasuredRates, samples_per_s

SAME = 1e-9  # relative: gains this close are equal, so that rounding moves nobody


@dataclass(frozen=True)
class Demand:
    """What a trial asks for.

    ``current``: workers it has, 0 while it waits. ``low`` to ``high``: bounds while it runs. ``remaining``: useful
    samples to its end. ``worth``: of one useful sample, by the trial's rank on the front; divide by the rate of one
    worker where trials of different models compete (Pollux's speed-up). ``efficiency``: useful part of a sample, 1
    where the batch is fixed. ``pause_s``: what a resize or a start costs. ``since_s``: since its workers last changed,
    or since it began to wait; the caller counts it again after each change, a change to 0 included.
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
    """What bounds a decision.

    ``horizon_s``: a move must pay back its pauses within it, or sooner where a trial involved ends sooner.
    ``min_residence_s``: no trial is resized again before, but where it must be. ``max_wait_s``: a trial that waited
    longer is let in before all that run longer than ``min_residence_s``. ``least_gain``: a further worker must bring
    this part of what one of ``low`` brings; a worker that does not is given back where that pays. ``outside_value``:
    value a second of a worker that is not given to any of these trials (a new trial could begin on it); a worker that
    brings less is not added, and given back where that pays. ``deadline_s``, ``budget_s``: seconds, and worker-seconds,
    that the study has left.
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
    """A claim, its useful samples a second on 0, 1, 2 ... workers, and the workers it may have now."""

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
    """Workers for every trial, by its number; 0: it waits, or stays paused. Never more than ``workers`` in all.

    A trial that runs has ``low`` to ``high``. Where not all can run, the order is: just resized, waiting beyond
    ``max_wait_s``, running, waiting; the most worth first, of the patient the oldest. A trial that nobody has seen run
    counts as the median of the others' first worker, on perfect scaling up to twice ``low``. Trials that cannot end by
    the deadline are not started, and have ``low`` while they run. The order of ``demands`` does not matter; with the
    result as ``current`` (and ``since_s`` 0 where it changed) the result is the same again. Raises ``ValueError`` where
    two claims are of one trial.
    """
    rules = rules or Rules()
    if workers < 0 or len({demand.trial for demand in demands}) < len(demands):
        raise ValueError(f"workers >= 0 and one claim a trial are needed, not {workers} and {len(demands)} claims")
    while True:
        given = _decided(demands, workers, rules)
        if rules.min_residence_s == 0 or all(demand.current == given[demand.trial] for demand in demands):
            return given
        # Who changes stays then, so what is left is shared again, until nobody else would change.
        demands = [c if c.current == given[c.trial] else replace(c, current=given[c.trial], since_s=0) for c in demands]


def _decided(demands: Sequence[Demand], workers: int, rules: Rules) -> dict[int, int]:
    """One round of ``allocate``."""
    candidates = _admitted(_candidates(demands, workers), workers, rules)
    candidates = _staying(_in_time(candidates, workers, rules), workers, rules)
    target = _shared(candidates, workers, rules)
    given = _moved(candidates, target, workers, rules)
    found = dict.fromkeys(sorted(demand.trial for demand in demands), 0)
    return found | {candidate.demand.trial: count for candidate, count in zip(candidates, given, strict=True)}


def _candidates(demands: Sequence[Demand], workers: int) -> list[_Candidate]:
    """Those that could run at all, by trial number."""
    able = sorted((c for c in demands if c.low <= workers), key=lambda demand: demand.trial)
    seen = {c.trial: samples_per_s(c.throughput, min(c.high, workers)) for c in able if c.throughput != MeasuredRates()}
    unknown = median(float(rates[1]) for rates in seen.values()) if seen else 1.0
    candidates = []
    for demand in able:
        cap = min(demand.high, workers)
        found = seen.get(demand.trial)
        rates = samples_per_s(demand.throughput, cap, demand.low, unknown) if found is None else found
        candidates.append(_Candidate(demand, rates, demand.low, cap))
    return candidates


def _admitted(candidates: Sequence[_Candidate], workers: int, rules: Rules) -> list[_Candidate]:
    """Those that run, each at least on ``low``: by rank, who does not fit is passed over."""

    def rank(candidate: _Candidate) -> tuple[int, float, int]:
        demand = candidate.demand
        if demand.current:
            # Changed at this very moment is just resized, too: asking again must not undo what was decided.
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
    """The fewest workers that end the trial in time, a pause for its resize included; None if none do.

    What it has, if only that does: it has no time left for a pause.
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
    """Seats with the workers that the deadline asks for, most worth first; none beyond ``low`` for the hopeless."""
    left = workers - sum(candidate.floor for candidate in candidates)
    budget_s = rules.budget_s
    if budget_s < math.inf:
        budget_s -= sum(candidate.cost_s(candidate.floor) for candidate in candidates)
    found = {}
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
            cap = floor  # it ends in time only if nobody touches it
        found[candidate.demand.trial] = _Candidate(candidate.demand, candidate.rates, floor, cap)
    return [found[candidate.demand.trial] for candidate in candidates]


def _stays(candidate: _Candidate, rules: Rules) -> bool:
    return candidate.demand.current > 0 and candidate.demand.since_s < rules.min_residence_s


def _staying(candidates: Sequence[_Candidate], workers: int, rules: Rules) -> list[_Candidate]:
    """Seats whose trials were just resized keep their workers, most worth first, as long as those are there."""
    if rules.budget_s < math.inf:
        return list(candidates)
    left, found = workers - sum(candidate.floor for candidate in candidates), {}
    for candidate in sorted(candidates, key=lambda candidate: (-candidate.demand.worth, candidate.demand.trial)):
        has = candidate.demand.current
        if _stays(candidate, rules) and candidate.floor <= has <= min(candidate.cap, candidate.floor + left):
            left -= has - candidate.floor
            candidate = replace(candidate, floor=has, cap=has)
        found[candidate.demand.trial] = candidate
    return [found[candidate.demand.trial] for candidate in candidates]


def _shared(candidates: Sequence[_Candidate], workers: int, rules: Rules) -> list[int]:
    """The best shares if moves were free: the steepest block next, as long as workers and budget last.

    The next corner of a hull is looked for only when it is needed: about one search a worker, not one a hull.
    """
    at = [candidate.floor for candidate in candidates]
    left, budget_s = workers - sum(at), rules.budget_s
    if budget_s < math.inf:
        budget_s -= sum(candidate.cost_s(candidate.floor) for candidate in candidates)
    blocks: list[tuple[float, int, int]] = []  # -gain per worker, seat, up to

    def offer(k: int) -> None:
        candidate, here = candidates[k], at[k]
        ahead = candidate.rates[here : min(candidate.cap, here + left) + 1]
        if len(ahead) < 2:
            return
        slopes = (ahead[1:] - ahead[0]) / np.arange(1, len(ahead))
        steepest = float(slopes.max())
        if steepest * candidate.demand.worth > max(_least(candidate, rules), SAME * candidate.value(here)):
            size = 1 + int((slopes >= steepest * (1 - SAME)).argmax())
            heapq.heappush(blocks, (-steepest * candidate.demand.worth, k, here + size))

    for k in range(len(candidates)):
        offer(k)
    while blocks and left:
        _, k, upto = heapq.heappop(blocks)
        if upto - at[k] <= left:
            extra_s = candidates[k].cost_s(upto) - candidates[k].cost_s(at[k]) if rules.budget_s < math.inf else 0.0
            if extra_s > budget_s:
                continue
            left, budget_s, at[k] = left - (upto - at[k]), budget_s - extra_s, upto
        offer(k)
    return at


def _moved(candidates: Sequence[_Candidate], target: Sequence[int], workers: int, rules: Rules) -> list[int]:
    """From what the trials have towards ``target``, by moves that must be and by moves that pay.

    Repeated until nothing pays even where those just moved would pause again: so the result is its own result.
    """
    at = [min(max(candidate.demand.current, candidate.floor), candidate.cap) for candidate in candidates]
    if rules.budget_s < math.inf:  # what the budget does not hold must go
        at = [min(has, best) for has, best in zip(at, target, strict=True)]
    frozen = {k for k, candidate in enumerate(candidates) if _stays(candidate, rules)}
    surplus = sum(at) - workers
    for k in _donors(candidates, at, target, frozen):
        taken = min(max(surplus, 0), at[k] - target[k])
        at[k], surplus = at[k] - taken, surplus - taken
    moved = {k for k, candidate in enumerate(candidates) if at[k] != candidate.demand.current}
    while True:
        before = list(at)
        _pass(candidates, at, target, workers - sum(at), moved, frozen, rules)
        if at == before and not moved:
            return at
        if rules.min_residence_s > 0:
            frozen |= moved
        moved = set()


def _donors(
    candidates: Sequence[_Candidate], at: Sequence[int], target: Sequence[int], last: Set[int] = frozenset()
) -> list[int]:
    """Who has more than its target: the least loss per worker first, those of ``last`` last."""
    able = [k for k, candidate in enumerate(candidates) if at[k] > target[k]]
    return sorted(able, key=lambda k: (k in last, -_gain(candidates[k], at[k], target[k]), k))


def _least(candidate: _Candidate, rules: Rules) -> float:
    """The value a second that a worker more must exceed."""
    return max(rules.least_gain * candidate.value(candidate.demand.low) / candidate.demand.low, rules.outside_value)


def _gain(candidate: _Candidate, here: int, there: int) -> float:
    """Value per worker on the way: above 0 for what more workers bring, below it for what fewer lose."""
    return (candidate.value(there) - candidate.value(here)) / abs(there - here)


def _pass(
    candidates: Sequence[_Candidate],
    at: list[int],
    target: Sequence[int],
    free: int,
    moved: set[int],
    frozen: set[int],
    rules: Rules,
) -> None:
    """One round of moves that pay, in place: who is below its target takes from the free and from those above."""
    donors = [k for k in _donors(candidates, at, target) if k not in frozen]
    takers = [k for k in range(len(candidates)) if at[k] < target[k] and k not in frozen]
    for k in sorted(takers, key=lambda k: (-_gain(candidates[k], at[k], target[k]), k)):
        spare = sum(at[d] - target[d] for d in donors)
        for reach in (min(target[k], at[k] + free + spare), min(target[k], at[k] + free)):
            goal = at[k] + int(candidates[k].rates[at[k] : reach + 1].argmax())
            moves, need = {k: goal}, goal - at[k] - free
            for d in donors:
                if need <= 0:
                    break
                taken = min(need, at[d] - target[d])
                if taken:
                    moves[d], need = at[d] - taken, need - taken
            if goal > at[k] and _pays(candidates, at, moves, moved, rules.horizon_s):
                free -= sum(count - at[s] for s, count in moves.items())
                for s, count in moves.items():
                    at[s] = count
                moved |= set(moves)
                break
    for d in donors:
        spared = (at[d] - target[d]) * _least(candidates[d], rules)
        if at[d] > target[d] and _pays(candidates, at, {d: target[d]}, moved, rules.horizon_s, spared):
            at[d] = target[d]
            moved.add(d)


def _pays(
    candidates: Sequence[_Candidate],
    at: Sequence[int],
    moves: Mapping[int, int],
    moved: set[int],
    horizon_s: float,
    spared: float = 0.0,
) -> bool:
    """Whether what moves gain outweighs its pauses until the first of the trials ends, at most ``horizon_s``.

    A trial that moved already has had its pause, and may go further for nothing. ``spared``: what workers that are
    given back are worth a second.
    """
    during_s = min(horizon_s, *(candidates[k].left_s(at[k]) for k in moves))
    gained, before = spared * during_s, 0.0
    for k, count in moves.items():
        working_s = during_s if k in moved else max(during_s - candidates[k].demand.pause_s, 0.0)
        gained += candidates[k].value(count) * working_s - candidates[k].value(at[k]) * during_s
        before += candidates[k].value(at[k]) * during_s
    return gained > SAME * before
