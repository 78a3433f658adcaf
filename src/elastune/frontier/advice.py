"""How far the naive rule goes, and what the answer of a frontier rests on, in words. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from elastune.core.text import count, estimate, interval, number
from elastune.frontier.criteria import FrontierCriteria
from elastune.journal.records import FrontierReason, FrontierRow
from elastune.plan.noise_scale import batch_against_noise, samples_text
from elastune.plan.steps.data_parallel import DataParallelStep
from elastune.plan.support import EFFICIENT, smallest_share, supported_workers

NAIVE = "the naive rule (batch and lr x workers)"


@dataclass(frozen=True)
class Advice:
    """What ``rows`` say of the numbers of parts of a batch, one a worker but where these divide layers.

    ``pick``: the row to use; ``faster``: what only the model prefers.
    """

    by: FrontierCriteria
    parts: tuple[int, ...]
    rows: tuple[FrontierRow, ...]
    pick: int | None
    faster: int | None = None

    def naive_rule(self) -> str:
        """How far the naive rule scales before quality pays; "" where it diverges at once."""
        return "" if self._base is None else self._naive_rule(self._base)

    def reasons(self) -> list[FrontierReason]:
        """What decides, most of all first, then hints that the trainings outweigh."""
        chosen = None if self.pick is None else self.rows[self.pick]
        if chosen is None:
            return []
        found = [FrontierReason("decides", self._test(chosen)), FrontierReason("decides", self._times(chosen))]
        if self.faster is not None:
            found.append(FrontierReason("decides", self._tie(chosen, self.rows[self.faster])))
        hint = noise_scale_hint(chosen, self.by.times.model)
        return [*found, FrontierReason("hint", hint)] if hint else found

    # -- the conclusion -----------------------------------------------------------------------------------------------

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
        told = [f"on {self._label(p)} it {self._lost(naive.get(p))}" for p in (first, lost) if p is not None]
        if not before:
            return f"{_capital(NAIVE)} does not help: {', '.join(told)}."
        return f"{_capital(NAIVE)} {holds} up to {self._label(before[-1])} ({_value(base)} on {base.workers}); " + (
            f"{', '.join(told)}."
        )

    def _label(self, parts: int) -> str:
        """The first workers that cut a batch into so many parts."""
        return next((named(r) for r in self.rows if r.num_slots == parts), _workers(parts))

    def _lost(self, r: FrontierRow | None) -> str:
        if r is None:
            return "diverges"
        if r.verdict == "not shown":
            return f"is not shown to: {_value(r)}"
        return f"{'falls' if self.by.quality.direction == 'max' else 'rises'} to {_value(r)}"

    # -- the reasons --------------------------------------------------------------------------------------------------

    def _test(self, chosen: FrontierRow) -> str:
        name, seeds = self.by.quality.name, count(chosen.seeds, "seed")
        if self.by.target is None:
            return self._comparison(chosen)
        error = (
            f"and the error of {count(chosen.test_samples, 'test sample')}"
            if chosen.test_samples is not None
            else "alone, since the program does not tell on how many samples (evaluated_on of session.report)"
        )
        side = "above" if self.by.quality.direction == "max" else "below"
        says = {
            "holds": f"lies at or {side} {self.by.target:g}",
            "not shown": f"holds {self.by.target:g}, so more seeds are needed",
            "falls": f"lies on the wrong side of {self.by.target:g}",
        }
        ends = interval(chosen.ci)
        lost = f"; {count(chosen.diverged, 'seed')} diverged" if chosen.diverged else ""
        return f"{name}: the 95 % interval, {ends}, of {seeds} {error}, {says[chosen.verdict]}{lost}"

    def _comparison(self, chosen: FrontierRow) -> str:
        against = f"{self._label(self.parts[0])} with the program's own settings"
        if chosen.loss_bound is None or chosen.margin is None or chosen.loss is None:
            few = f"{count(chosen.pairs, 'seed')} in common, where at least 2 are needed"
            return f"{self.by.quality.name} against {against}: not shown, {few}"
        way = "worse" if chosen.loss >= 0 else "better"
        says = {"holds": "below", "not shown": "not below", "falls": "above"}[chosen.verdict]
        return (
            f"{self.by.quality.name} against {against}, paired by {count(chosen.pairs, 'seed')}, on the same test "
            f"samples: {number(abs(chosen.loss), 2)} {way} on average, worse by at most {number(chosen.loss_bound, 2)} "
            f"(one-sided t-test at 95 %), {says} the margin of {number(chosen.margin, 2)}"
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
            f"so a modelled time may be off by a factor of {number(self.by.times.miss, 3)} either way, or more beyond "
            "the counts that were measured"
        )

    def _tie(self, chosen: FrontierRow, faster: FrontierRow) -> str:
        if faster.seconds >= chosen.seconds:
            return f"{named(faster)} would be no faster than {chosen.workers}"
        gain = f"{number(chosen.seconds / faster.seconds, 3)} times as fast"
        return f"{named(faster)} would be {gain} by the step-time model, within its error: fewer are taken"


def noise_scale_hint(chosen: FrontierRow, model: DataParallelStep) -> str:
    """What the gradient noise scale of ``chosen`` says of its batch and workers; "" without one."""
    return batch_against_noise(
        chosen.batch_size,
        chosen.noise_scale,
        chosen.noise_scale_error,
        whose="the pick's",
        supports=_supports(chosen.noise_scale, model),
        outweighed="; what it reaches was trained and tested above, which outweighs this estimate",
    )


def _supports(scale: float | None, model: DataParallelStep) -> str:
    """For how many workers a batch of ``scale`` samples is work."""
    share = smallest_share(model.base_s, model.per_sample_s)
    if scale is None or not 0 < scale < math.inf or share == math.inf:
        return ""
    workers = max(1, supported_workers(scale, share))  # where no share is large enough, one worker still trains
    efficient = f"{100 * EFFICIENT:g} % efficient by the step-time model"
    return f", which at {samples_text(share)} samples a worker ({efficient}) is work for {_workers(workers)}"


def _value(r: FrontierRow) -> str:
    return estimate(r.quality, r.ci)


def named(r: FrontierRow) -> str:
    """Its workers, and what of their means stands apart."""
    return f"{_workers(r.workers)} ({r.apart})" if r.apart else _workers(r.workers)


def _workers(n: int) -> str:
    return count(n, "worker")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
