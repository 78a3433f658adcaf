"""The answer of a frontier from its rows: the pick, what settings and workers each buy, and why. Pure.

A row *qualifies* where its quality is shown to hold. Without a target it must also lie within the margin of the most
accurate row that holds. Of the rows that qualify, the pick has the least time x cost. So it takes more workers where
the speed-up is larger than the rise in cost: the knee of Eager, Zahorjan and Lazowska ("Speedup versus efficiency
in parallel systems", IEEE Transactions on Computers 1989).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Literal

from scipy.special import stdtrit

from elastune.core.formatting import count, estimate, interval, number
from elastune.core.journal.records import (
    Conclusion,
    FrontierAnswer,
    FrontierReason,
    FrontierRow,
    Gain,
    OwnMachine,
    ScalingPoint,
)
from elastune.core.plan.batch_size import (
    EFFICIENT_SHARE,
    batch_against_noise,
    samples_text,
    smallest_share,
    supported_workers,
)
from elastune.core.plan.confidence_intervals import bounded_ci
from elastune.core.plan.data_parallel import DataParallelStep
from elastune.tuning.frontier.criteria import FrontierCriteria
from elastune.tuning.search.objective import Objective

NAIVE = "the naive rule (batch and lr x workers)"
OWN, RULE, TUNED = "the program's own settings", "the naive rule", "tuned settings"
MOST_WORDS = 20  # of the headline
MOST_SEEDS = 10
"""If a row of the program's own settings needs more further seeds than this, the answer does not suggest it."""


# --- the reasons, in words ---


@dataclass(frozen=True)
class Advice:
    """How far the naive rule goes, and what the answer of a frontier rests on, in words.

    Attributes:
        by: How the rows were judged.
        parts: Into how many parts the layouts cut a batch, ascending: one for each worker, unless layers are divided.
        rows: The table.
        pick: The row to use.
        faster: A row that only the step-time model prefers.
    """

    by: FrontierCriteria
    parts: tuple[int, ...]
    rows: tuple[FrontierRow, ...]
    pick: int | None
    faster: int | None = None

    def naive_rule(self) -> str:
        """How far the naive rule scales before quality pays; "" if it diverges on the fewest workers."""
        return "" if self._base is None else self._naive_rule(self._base)

    def reasons(self) -> list[FrontierReason]:
        """The deciding reasons, the most important first, then hints. The trainings outweigh the hints."""
        chosen = None if self.pick is None else self.rows[self.pick]
        if chosen is None:
            return []
        reasons = [FrontierReason("decides", self._test(chosen)), FrontierReason("decides", self._times(chosen))]
        if self.faster is not None:
            reasons.append(FrontierReason("decides", self._tie(chosen, self.rows[self.faster])))
        hint = noise_scale_hint(chosen, self.by.times.model)
        return [*reasons, FrontierReason("hint", hint)] if hint else reasons

    @property
    def _base(self) -> FrontierRow | None:
        return next((r for r in self.rows if r.role == "naive" and r.num_slots == self.parts[0]), None)

    def _naive_rule(self, base: FrontierRow) -> str:
        naive = {r.num_slots: r for r in reversed(self.rows) if r.role == "naive"}
        words = {parts: naive[parts].verdict if parts in naive else "diverges" for parts in self.parts}
        holds = "holds it" if self.by.target is None else "reaches it"
        first = next((parts for parts in self.parts if words[parts] != "holds"), None)
        if first is None:
            last = self.parts[-1]
            return f"{_capital(NAIVE)} {holds} up to {self._label(last)}: {_value(naive[last])}."
        before = [parts for parts in self.parts if parts < first]
        lost = next((p for p in self.parts if p > first and words[p] in ("falls", "diverges")), None)
        losses = [f"on {self._label(p)} it {self._lost(naive.get(p))}" for p in (first, lost) if p is not None]
        if not before:
            return f"{_capital(NAIVE)} does not help: {', '.join(losses)}."
        return f"{_capital(NAIVE)} {holds} up to {self._label(before[-1])} ({_value(base)} on {base.workers}); " + (
            f"{', '.join(losses)}."
        )

    def _label(self, parts: int) -> str:
        """The first worker layout that cuts a batch into so many parts, in words."""
        return next((named(r) for r in self.rows if r.num_slots == parts), _workers(parts))

    def _lost(self, r: FrontierRow | None) -> str:
        if r is None:
            return "diverges"
        if r.verdict == "not shown":
            return f"is not shown to: {_value(r)}"
        return f"{'falls' if self.by.quality.direction == 'max' else 'rises'} to {_value(r)}"

    def _test(self, chosen: FrontierRow) -> str:
        name, seeds = self.by.quality.name, count(chosen.seeds, "seed")
        if self.by.target is None:
            return self._comparison(chosen)
        error = (
            f"and the error of {count(chosen.test_samples, 'test sample')}"
            if chosen.test_samples is not None
            else "alone, since the program does not report on how many samples (evaluated_on of session.report)"
        )
        side = "above" if self.by.quality.direction == "max" else "below"
        verdicts = {
            "holds": f"lies at or {side} {self.by.target:g}",
            "not shown": f"holds {self.by.target:g}, so more seeds are needed",
            "falls": f"lies on the wrong side of {self.by.target:g}",
        }
        ends = interval(chosen.ci)
        lost = f"; {count(chosen.diverged, 'seed')} diverged" if chosen.diverged else ""
        return f"{name}: the 95 % interval, {ends}, of {seeds} {error}, {verdicts[chosen.verdict]}{lost}"

    def _comparison(self, chosen: FrontierRow) -> str:
        against = f"{self._label(self.parts[0])} with the program's own settings"
        if chosen.loss_bound is None or chosen.margin is None or chosen.loss is None:
            few = f"{count(chosen.pairs, 'seed')} in common, where at least 2 are needed"
            return f"{self.by.quality.name} against {against}: not shown, {few}"
        direction = "worse" if chosen.loss >= 0 else "better"
        verdict = {"holds": "below", "not shown": "not below", "falls": "above"}[chosen.verdict]
        return (
            f"{self.by.quality.name} against {against}, paired by {count(chosen.pairs, 'seed')}, on the same test "
            f"samples: {number(abs(chosen.loss), 2)} {direction} on average, "
            f"worse by at most {number(chosen.loss_bound, 2)} (one-sided t-test at 95 %), "
            f"{verdict} the margin of {number(chosen.margin, 2)}"
        )

    def _times(self, chosen: FrontierRow) -> str:
        if chosen.seconds_label == "measured":
            return "time: step times of the pick were measured here"
        errors = self.by.times.errors
        if not errors:
            return "time: modelled, and the model could not be checked on several workers here"
        low, high = min(errors.values()), max(errors.values())
        span = number(low, 2) if low == high else f"{number(low, 2)} to {number(high, 2)}"
        return (
            f"time: modelled; predicted / measured was {span} on {count(len(errors), 'cell')} that could be measured, "
            f"so a modelled time may be wrong by a factor of {number(self.by.times.miss, 3)}, or more beyond "
            "the counts that were measured"
        )

    def _tie(self, chosen: FrontierRow, faster: FrontierRow) -> str:
        if faster.seconds >= chosen.seconds:
            return f"{named(faster)} would be no faster than {chosen.workers}"
        gain = f"{number(chosen.seconds / faster.seconds, 3)} times as fast"
        return f"{named(faster)} would be {gain} by the step-time model, within its error: fewer are taken"


def noise_scale_hint(chosen: FrontierRow, model: DataParallelStep) -> str:
    """A sentence that compares batch and workers of ``chosen`` with its gradient noise scale; "" without one."""
    return batch_against_noise(
        chosen.batch_size,
        chosen.noise_scale,
        chosen.noise_scale_error,
        whose="the pick's",
        supports=_supports(chosen.noise_scale, model),
        outweighed="; what it reaches was trained and tested above, which outweighs this estimate",
    )


def _supports(scale: float | None, model: DataParallelStep) -> str:
    """How many workers a batch of ``scale`` samples can keep busy, in words."""
    share = smallest_share(model.base_s, model.per_sample_s)
    if scale is None or not 0 < scale < math.inf or share == math.inf:
        return ""
    workers = max(1, supported_workers(scale, share))  # where no share is large enough, one worker still trains
    efficient = f"{100 * EFFICIENT_SHARE:g} % efficient by the step-time model"
    return f", which at {samples_text(share)} samples a worker ({efficient}) is work for {_workers(workers)}"


def _value(r: FrontierRow) -> str:
    return estimate(r.quality, r.ci)


def named(r: FrontierRow) -> str:
    """The workers of a row, with the execution settings that differ from those asked for."""
    return f"{_workers(r.workers)} ({r.apart})" if r.apart else _workers(r.workers)


def _workers(n: int) -> str:
    return count(n, "worker")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# --- from the rows to the answer ---


@dataclass(frozen=True)
class PickedRow:
    """The row to use, and the rows that it was preferred to.

    Attributes:
        row: The row to use; None if all rows fall.
        faster: A row that is faster only by the step-time model, within the model's error.
        shown: The best row that is shown to qualify, if ``row`` is one of the program's own settings. These do as well
            and are no slower and no dearer, but that is not shown yet.
        more_seeds: How many further seeds would show it.
    """

    row: int | None
    faster: int | None = None
    shown: int | None = None
    more_seeds: int | None = None


def answer_of(
    rows: Sequence[FrontierRow],
    by: FrontierCriteria,
    parts: Sequence[int],
    machine: OwnMachine | None = None,
    not_done: Sequence[str] = (),
) -> FrontierAnswer:
    """Build the answer from ``rows``, without commands.

    Args:
        rows: The table.
        by: How its rows were judged.
        parts: Into how many parts the workers asked about cut a batch, ascending.
        machine: The cores and GPUs of this machine; None: the trainings ran on other hosts.
        not_done: What was asked for and not done, in words.

    Returns:
        The answer with its headline.
    """
    picked = pick_row(rows, by)
    base = _baseline(rows, parts)
    chosen = None if picked.row is None else rows[picked.row]
    answer = FrontierAnswer(
        "", not_done=list(not_done), naive_rule=Advice(by, tuple(parts), tuple(rows), None).naive_rule()
    )
    if machine is not None:
        answer = replace(answer, this_machine=replace(machine, row=_within(rows, by, machine)))
    if chosen is None or (base is None and chosen.verdict != "holds"):
        answer = replace(answer, conclusion="none" if base is not None else "diverged")
    else:
        fastest = _fastest(rows, chosen, by)
        answer = replace(
            answer,
            pick=picked.row,
            settings_name=settings_name(chosen, base),
            settings=_of_settings(chosen, base, rows),
            workers=_of_workers(rows, chosen),
            total=None if base is None or chosen is base else _gain(_of_row(chosen), _of_row(base, rows.index(base))),
            naive=_beside_naive(rows, chosen),
            more_workers=_of_more_workers(chosen),
            cheapest=_beside_cheapest(rows, chosen, by),
            fastest_row=fastest,
            fastest=None if fastest is None else _gain(_of_row(rows[fastest]), _of_row(chosen, picked.row)),
            shown=picked.shown,
            more_seeds=picked.more_seeds,
        )
        answer = replace(answer, conclusion=_conclusion(answer, rows))
    return replace(answer, sentence=sentence(answer, rows, by))


# --- the pick ---


def pick_row(rows: Sequence[FrontierRow], by: FrontierCriteria) -> PickedRow:
    """The row to use.

    Of the rows that qualify, the pick has the least time x cost. Two exceptions follow. If more workers are faster
    only by the model, within its error, the row with fewer workers is taken. If the program's own settings do as well
    and are no slower and no dearer, they are taken, although this is not shown yet.

    If no row qualifies, the pick is a row that may hold: its interval comes nearest to the target, or its loss has the
    lowest bound.
    """
    holding = qualifying(rows, by)
    if not holding:
        open_ones = [i for i, r in enumerate(rows) if r.verdict == "not shown"]
        return PickedRow(min(open_ones, key=lambda i: _doubt(rows[i], by), default=None))
    first = min(holding, key=lambda i: (rows[i].seconds * rows[i].cost, rows[i].workers))
    tied = [i for i in holding if rows[i].workers < rows[first].workers and _tie(rows[i], rows[first])]
    best = min([first, *tied], key=lambda i: (rows[i].workers, rows[i].seconds))
    if (own_settings := _own_instead(rows, rows[best], by)) is not None:
        return PickedRow(own_settings[0], shown=best, more_seeds=own_settings[1])
    return PickedRow(best, None if best == first else first)


def qualifying(rows: Sequence[FrontierRow], by: FrontierCriteria) -> list[int]:
    """The rows that qualify (see the module). Validation data decide: the pick must not be chosen on the test set."""
    holding = [i for i, r in enumerate(rows) if r.verdict == "holds"]
    if by.target is not None or not holding:
        return holding
    top = min((rows[i].validation for i in holding), key=lambda value: by.loss(value, 0.0))
    return [i for i in holding if by.loss(rows[i].validation, top) <= by.margin_at(top)]


def more_seeds(r: FrontierRow, by: FrontierCriteria) -> int | None:
    """How many further seeds would show that ``r`` holds, if its mean and its spread stay.

    None if that takes more than ``MOST_SEEDS``, or if a seed diverged.
    """
    if r.diverged:
        return None
    return next((more for more in range(1, MOST_SEEDS + 1) if _would_hold(r, by, more)), None)


def _would_hold(r: FrontierRow, by: FrontierCriteria, more: int) -> bool:
    if by.target is not None:
        if len(r.seed_values) < 2:
            return False
        ends = by.interval(_alike(r.seed_values, len(r.seed_values) + more, by.quality), r.test_samples)
        return ends is not None and all(map(by.reaches, ends))
    if r.loss is None or r.loss_bound is None or r.margin is None or r.pairs < 2:
        return False
    spread = (r.loss_bound - r.loss) * math.sqrt(r.pairs) / float(stdtrit(r.pairs - 1, 0.95))
    seeds = r.pairs + more
    return r.loss + float(stdtrit(seeds - 1, 0.95)) * spread / math.sqrt(seeds) < r.margin


def _alike(values: Sequence[float], n: int, quality: Objective) -> list[float]:
    """``n`` values with the mean and the spread of ``values``, within the bounds of ``quality``."""
    mean, spread = fmean(values), stdev(values)
    away = spread if n % 2 else spread * math.sqrt((n - 1) / n)
    if quality.low <= mean <= quality.high:
        away = min(away, mean - quality.low, quality.high - mean)
    return [mean] * (n % 2) + [mean - away, mean + away] * (n // 2)


def _own_instead(rows: Sequence[FrontierRow], chosen: FrontierRow, by: FrontierCriteria) -> tuple[int, int] | None:
    """A row of the naive rule that does as well as ``chosen`` but is not yet shown to hold, and the seeds it needs.

    The row takes no more time, cost or workers than ``chosen``. Returns (row, further seeds that would show it).
    """
    candidates = []
    for i, r in enumerate(rows):
        no_dearer = r.workers <= chosen.workers and r.seconds <= chosen.seconds and r.cost <= chosen.cost
        if r.role == "naive" and r.verdict == "not shown" and no_dearer and _does_as_well(r, chosen, by):
            more = more_seeds(r, by)
            candidates += [] if more is None else [(i, more)]
    return min(candidates, key=lambda each: rows[each[0]].seconds * rows[each[0]].cost, default=None)


def _does_as_well(r: FrontierRow, chosen: FrontierRow, by: FrontierCriteria) -> bool:
    """Whether nothing shows that ``chosen`` is better: its mean is no better, or lies in the interval of ``r``."""
    return by.loss(r.quality, chosen.quality) <= 0 or (r.ci is not None and r.ci[0] <= chosen.quality <= r.ci[1])


def _tie(fewer: FrontierRow, more: FrontierRow) -> bool:
    """Whether more workers are not shown to be faster: they are slower, or faster only within the model's error."""
    if fewer.seconds <= more.seconds:
        return True
    factors = [r.seconds_factor for r in (fewer, more) if r.seconds_label == "modelled"]
    return bool(factors) and fewer.seconds <= more.seconds * max(math.inf if f is None else f for f in factors)


def _doubt(r: FrontierRow, by: FrontierCriteria) -> float:
    """How far the interval of a row is from the target, or how large its loss may be."""
    if by.target is not None:
        return max((by.loss(end, by.target) for end in r.ci), default=math.inf) if r.ci else math.inf
    return math.inf if r.loss_bound is None else r.loss_bound


def _within(rows: Sequence[FrontierRow], by: FrontierCriteria, machine: OwnMachine) -> int | None:
    """The best row that the machine has room for; None if no such row qualifies."""
    room = min(machine.cores, machine.gpus) if machine.gpus else machine.cores
    fitting = [i for i, r in enumerate(rows) if r.workers <= room]
    picked = pick_row([rows[i] for i in fitting], by)
    if picked.row is None or (rows[fitting[picked.row]].verdict != "holds" and picked.shown is None):
        return None
    return fitting[picked.row]


# --- what settings and workers buy ---


@dataclass(frozen=True)
class _Timed:
    """One side of a comparison. ``ends``: the interval of its time over seeds, if these differ. ``row``: its number."""

    workers: int
    seconds: float
    label: str
    factor: float | None
    cost: float
    row: int | None = None
    ends: tuple[float, float] | None = None


def _of_row(r: FrontierRow, number: int | None = None) -> _Timed:
    varies = len(r.seed_seconds) > 1 and min(r.seed_seconds) < max(r.seed_seconds)
    ends = bounded_ci(r.seed_seconds, 0.0) if varies else None
    return _Timed(r.workers, r.seconds, r.seconds_label, r.seconds_factor, r.cost, number, ends)


def _of_point(point: ScalingPoint, row: int | None = None) -> _Timed:
    return _Timed(point.workers, point.seconds, point.seconds_label, point.seconds_factor, point.cost, row)


def _gain(of: _Timed, beside: _Timed) -> Gain | None:
    """How many times as fast and as dear ``of`` is as ``beside``; None if a time or a cost is 0."""
    if min(of.seconds, beside.seconds, of.cost, beside.cost) <= 0:
        return None
    factor = beside.seconds / of.seconds
    misses = [each.factor for each in (of, beside) if each.label == "modelled"]
    bounded = [miss for miss in misses if miss is not None]
    label: Literal["measured", "modelled"] = "modelled" if misses else "measured"
    low = high = None
    if len(bounded) == len(misses) and (misses or of.ends or beside.ends):
        this, other = of.ends or (of.seconds, of.seconds), beside.ends or (beside.seconds, beside.seconds)
        miss = max(bounded, default=1.0)
        low, high = other[0] / this[1] / miss if this[1] else 0.0, other[1] / this[0] * miss if this[0] else math.inf
    return Gain(of.workers, beside.workers, factor, low, high, label, of.cost / beside.cost, beside.row)


def _points(r: FrontierRow) -> list[ScalingPoint]:
    """The times of the settings of ``r`` on several worker counts, fewest first, the row's own time included."""
    this_row = ScalingPoint(r.workers, r.seconds, r.seconds_label, r.seconds_factor, r.cost)
    return sorted([*(p for p in r.scaling if p.workers != r.workers), this_row], key=lambda point: point.workers)


def _of_settings(chosen: FrontierRow, base: FrontierRow | None, rows: Sequence[FrontierRow]) -> Gain | None:
    """What the settings of ``chosen`` buy: the settings change, on the fewest workers.

    ``_of_workers`` is the second step: the workers change, with the settings of ``chosen``. The product of both is the
    whole gain, and no part of it is counted twice.
    """
    fewest = _points(chosen)[0]
    if base is None or fewest.workers != base.workers or chosen.settings == base.settings:
        return None
    ends, scale = _of_row(chosen).ends, fewest.seconds / chosen.seconds if chosen.seconds else 1.0
    side = replace(_of_point(fewest), ends=None if ends is None else (ends[0] * scale, ends[1] * scale))
    return _gain(side, _of_row(base, rows.index(base)))


def _of_workers(rows: Sequence[FrontierRow], chosen: FrontierRow) -> Gain | None:
    """What the workers of ``chosen`` buy over the fewest workers, with its settings."""
    fewest = _points(chosen)[0]
    if fewest.workers == chosen.workers:
        return None
    alike = (i for i, r in enumerate(rows) if r.settings == chosen.settings and r.workers == fewest.workers)
    return _gain(_of_row(replace(chosen, seed_seconds=[])), _of_point(fewest, next(alike, None)))


def _of_more_workers(chosen: FrontierRow) -> Gain | None:
    """What more workers than those of ``chosen`` would buy, with its settings: the fastest such count."""
    more = [point for point in _points(chosen) if point.workers > chosen.workers]
    fastest = min(more, key=lambda point: point.seconds, default=None)
    return None if fastest is None else _gain(_of_point(fastest), _of_row(replace(chosen, seed_seconds=[])))


def _beside_naive(rows: Sequence[FrontierRow], chosen: FrontierRow) -> Gain | None:
    """``chosen`` beside the naive rule on as many workers."""
    alike = (i for i, r in enumerate(rows) if r.role == "naive" and r.workers == chosen.workers)
    row = next((i for i in alike if rows[i].division == chosen.division), None)
    return None if row is None or chosen.role == "naive" else _gain(_of_row(chosen), _of_row(rows[row], row))


def _beside_cheapest(rows: Sequence[FrontierRow], chosen: FrontierRow, by: FrontierCriteria) -> Gain | None:
    """``chosen`` beside the cheapest row that qualifies; None if no cheaper row does."""
    qualified = qualifying(rows, by)
    row = min(qualified, key=lambda i: (rows[i].cost, rows[i].seconds), default=None)
    return None if row is None or rows[row].cost >= chosen.cost else _gain(_of_row(chosen), _of_row(rows[row], row))


def _fastest(rows: Sequence[FrontierRow], chosen: FrontierRow, by: FrontierCriteria) -> int | None:
    """The fastest row that qualifies; None if no faster row does."""
    row = min(qualifying(rows, by), key=lambda i: (rows[i].seconds, rows[i].cost), default=None)
    return None if row is None or rows[row].seconds >= chosen.seconds else row


def settings_name(r: FrontierRow, base: FrontierRow | None) -> str:
    """The name of the settings of ``r``; ``base``: the row of the program's own settings on the fewest workers."""
    if base is not None and r.settings == base.settings:
        return OWN
    return RULE if r.role == "naive" else TUNED


def _baseline(rows: Sequence[FrontierRow], parts: Sequence[int]) -> FrontierRow | None:
    return next((r for r in rows if r.role == "naive" and r.num_slots == parts[0]), None)


def _conclusion(answer: FrontierAnswer, rows: Sequence[FrontierRow]) -> Conclusion:
    assert answer.pick is not None
    chosen = rows[answer.pick]
    if answer.shown is not None:
        return "own settings do"
    if chosen.verdict != "holds":
        return "not shown"
    if answer.workers is None:
        chosen_side = _of_row(replace(chosen, seed_seconds=[]))
        gains = [_gain(_of_point(point), chosen_side) for point in _points(chosen)[1:]]
        return "fewest are enough" if gains and not any(g is not None and g.pays for g in gains) else "use"
    if answer.workers.pays:
        return "use"
    beside = answer.workers.beside
    fails = chosen.mode != "exact" and beside is not None and rows[beside].verdict == "falls"
    return "use" if fails else "fewest may be enough"


# --- the headline ---


def sentence(answer: FrontierAnswer, rows: Sequence[FrontierRow], by: FrontierCriteria) -> str:
    """The headline: the first of several wordings, from full to short, that has at most ``MOST_WORDS`` words."""
    wordings = _wordings(answer, rows, by)
    return next((words for words in wordings if len(words.split()) <= MOST_WORDS), wordings[-1])


def _wordings(answer: FrontierAnswer, rows: Sequence[FrontierRow], by: FrontierCriteria) -> list[str]:
    goal = f"reach {by.target:g}" if by.target is not None else f"hold {by.quality.name}"
    if answer.conclusion == "diverged":
        return ["The program's own settings diverged on the fewest workers: there is nothing to scale yet."]
    if answer.pick is None:
        return [f"No settings were found that may {goal}; search longer."]
    r, name = rows[answer.pick], answer.settings_name
    full, short = named(r), count(r.workers, "worker")
    value = f"{by.quality.name} {estimate(r.quality, r.ci)}"
    match answer.conclusion:
        case "own settings do":
            do = "does" if name == RULE else "do"
            more = count(answer.more_seeds or 1, "more seed")
            return [f"{_capital(name)} {do} as well on {on}, not yet shown: {more} would." for on in (full, short)]
        case "not shown":
            nearest = f"No settings are shown to {goal}: nearest {'is' if name == RULE else 'are'} {name}"
            return [f"{nearest} on {full}, {value}.", f"{nearest} on {short}, {value}.", f"{nearest} on {short}."]
        case "fewest are enough":
            return _enough(answer, r)
        case "fewest may be enough" if answer.workers is not None:
            fewest = _few(answer.workers.beside_workers)
            only = f"only {_times(answer.workers)} as fast{_label(answer.workers)}"
            price = f"for {_cost(answer.workers)} the cost"
            return [
                f"{fewest} may be enough: {full} {_are(r.workers)} {only} {price}.",
                f"{fewest} may be enough: {short} {_are(r.workers)} {only} {price}.",
                f"{fewest} may be enough: {short} {_are(r.workers)} {only}.",
            ]
    reaches = f"reaches {by.target:g}" if by.target is not None else "holds"
    why = [word for word in (_earned(answer, r), f"{value} {reaches}") if word]
    return [
        *(f"Use {on} with {name}: {word}." for word in why for on in (full, short)),
        f"Use {short} with {name}.",
    ]


def _enough(answer: FrontierAnswer, r: FrontierRow) -> list[str]:
    more, fewest = answer.more_workers, _few(r.workers)
    if more is None:
        return [f"{fewest} {_are(r.workers)} enough."]
    on, label, price = count(more.workers, "worker"), _label(more), f"for {_cost(more)} the cost"
    if answer.settings is None:
        name = "its own settings" if answer.settings_name == OWN else answer.settings_name
        speed = f"{on} {_are(more.workers)} {_times(more)} as fast{label} {price}"
        enough = f"{fewest} {_are(r.workers)} enough"
        return [f"{enough}: with {name} {speed}.", f"{enough}: {speed}."]
    brings = "brings" if answer.settings_name == RULE else "bring"
    speed = f"{_times(answer.settings)} the speed{_label(answer.settings)}"
    more_is = f"{on} {_times(more)}{label}"
    return [
        f"{fewest} {_are(r.workers)} enough: {answer.settings_name} {brings} {speed}, {more_is} {price}.",
        f"{fewest} {_are(r.workers)} enough: settings bring {speed}, {more_is} {price}.",
        f"{fewest} {_are(r.workers)} enough: {_times(answer.settings)} as fast by settings, {more_is} {price}.",
        f"{fewest} {_are(r.workers)} enough: settings bring {speed}, {more_is}.",
    ]


def _earned(answer: FrontierAnswer, r: FrontierRow) -> str:
    """How many times as fast the pick is by its settings, and by its workers."""
    settings, workers = answer.settings, answer.workers
    parts = []
    if settings is not None:
        parts.append(f"{_times(settings)} as fast by settings{_label(settings)}")
    if workers is not None and settings is not None:
        parts.append(f"{_times(workers)} by workers{_label(workers)}")
    elif workers is not None:
        parts.append(f"{_times(workers)} as fast{_label(workers)} as {count(workers.beside_workers, 'worker')}")
    return ", ".join(parts)


def _times(gain: Gain) -> str:
    return f"{number(gain.times_as_fast, 2)} times"


def _cost(gain: Gain) -> str:
    return f"{number(gain.times_the_cost, 2)} times"


def _label(gain: Gain) -> str:
    return " (modelled)" if gain.label == "modelled" else ""


def _few(workers: int) -> str:
    return "One worker" if workers == 1 else count(workers, "worker")


def _are(workers: int) -> str:
    return "is" if workers == 1 else "are"
