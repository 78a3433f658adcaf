"""Population-based training: bad members restart from the checkpoint of a good one, with changed settings.

Jaderberg et al. 2017, "Population Based Training of Neural Networks", algorithm 1 with truncation selection. A member
among the worst takes over weights and settings of one of the best (*exploit*), then resamples or perturbs the settings
(*explore*). So settings become schedules, found while the population trains once.
Here the successor is a trial of its own, and the replaced trial never resumes. Members are compared at equal numbers
of passes, so being slow is no disadvantage. No member waits: the least advanced one gets the next free worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Literal

import numpy as np
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from elastune.core.errors import UserError
from elastune.core.options import Range
from elastune.core.run import derive
from elastune.core.sync_plan import SETTING_NAMES, SYNC_NAMES, chooses
from elastune.train.program.space import Sample, Space, compose, draw, nth, probe, size
from elastune.tune.search.objective import Objective
from elastune.tune.search.schedule import ForkTrial, IntermediateResult, NewTrial, Resume, RungEntry, Schedule, ranked

# [explore] How a child's settings differ from its parent's in population-based training: *explore*, by resampling or a push.
#
# Jaderberg et al. 2017, "Population Based Training of Neural Networks", section 4: each hyperparameter is drawn afresh
# from its prior (*resample*), or multiplied by 1.2 or 0.8 (*perturb*).


def explore(
    space: Space,
    params: Mapping[str, Any],
    *,
    resample: float,
    factor: float,
    fixed: Collection[str],
    rng: np.random.Generator,
) -> Sample:
    """``params`` with each parameter drawn afresh with probability ``resample``, else pushed; ``fixed`` ones stay.

    What ``params`` lack, or hold out of range because another parameter decides the range, is drawn.
    """

    def choose(name: str, distribution: BaseDistribution) -> Any:
        if name not in params or not distribution._contains(distribution.to_internal_repr(params[name])):
            return draw(distribution, rng)
        if name in fixed:
            return params[name]
        fresh, up = rng.random() < resample, rng.random() < 0.5
        return draw(distribution, rng) if fresh else pushed(distribution, params[name], factor, up=up)

    return compose(space, choose)


def pushed(distribution: BaseDistribution, value: Any, factor: float, *, up: bool) -> Any:
    """``value`` times ``factor`` or, not ``up``, divided by it, within the bounds.

    Where values have steps, the nearest one, but at least the next. Categories that are ascending numbers: the next.
    Others have no order, and stay.
    """
    towards = 1 if up else -1
    match distribution:
        case CategoricalDistribution(choices=choices):
            at = choices.index(value)
            return choices[min(max(at + towards, 0), len(choices) - 1)] if _ascends(choices) else value
        case FloatDistribution(step=None, low=low, high=high):
            return min(max(value * factor**towards, low), high)
        case IntDistribution(low=low, step=unit) | FloatDistribution(low=low, step=float() as unit):
            at, target = round((value - low) / unit), round((value * factor**towards - low) / unit)
            if target == at:
                target += towards
            return nth(distribution, min(max(target, 0), int(size(distribution)) - 1))
    raise AssertionError(f"unknown distribution {distribution}")


def _ascends(choices: tuple[Any, ...]) -> bool:
    numbers = [c for c in choices if isinstance(c, (int, float)) and not isinstance(c, bool)]
    return len(numbers) == len(choices) and all(a < b for a, b in pairwise(numbers))


# [population] Population-based training: members that do badly begin again from the checkpoint of one that does well.
#
# Jaderberg et al. 2017, "Population Based Training of Neural Networks", algorithm 1 with truncation selection: a member
# that is among the worst after some passes takes over weights and settings of one of the best (*exploit*), and changes
# the settings a little (*explore*). So settings become schedules, found while the population trains once.
#
# Here the successor is a trial of its own, a child; whom it replaces never goes on. Members are compared by what they had
# reached after as many passes, however far they are now, so that being slow is no fault, nor, in seconds, a merit.
# Nobody waits: whoever is the least far has the next free worker.

ALWAYS_FIXED = (
    "mode",
    "compress",
    "workers",
    "optimizer",
    *SYNC_NAMES,
)  # with others of them a run cannot begin with this checkpoint
ENOUGH = (
    0.75  # of a population, to judge by: of two of four the worse would be replaced, half of all instead of a quarter
)
_ATTEMPTS = 20  # to change settings so that they are allowed
_PROBES = 100  # configurations that are looked at for their parameters


@dataclass(frozen=True)
class Selection:
    """How a population is selected: ``population`` members pause ``every`` so many passes.

    The worst ``quantile`` of them are replaced by children of the best ``quantile``. A parameter is drawn afresh
    with probability ``resample``, else multiplied by ``factor`` or divided by it. Those ``fixed`` stay: what decides
    the model's shapes must.
    """

    population: Annotated[int, Range(2, 65536)] = 8
    every: Annotated[int, Range(1, 10**6)] = 1
    quantile: Annotated[float, Range(0.01, 0.5)] = 0.25
    resample: Annotated[float, Range(0, 1)] = 0.25
    factor: Annotated[float, Range(1.001, 1000)] = 1.2
    fixed: tuple[str, ...] = ()


@dataclass
class _Member:
    """A trial that holds a seat of a population. ``shown``: by passes, what it and its ancestors had reached then.

    ``saved``: it has paused, so there surely is a checkpoint. ``judged``: after how many passes it was, last.
    """

    trial: int
    params: Mapping[str, Any]
    state: Literal["running", "paused", "finished", "failed"] = "running"
    epoch: int = 0
    epochs: int = 0
    saved: bool = False
    judged: int = 0
    shown: dict[int, tuple[tuple[float, ...], float]] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        return self.state in ("running", "paused")

    def at(self, epoch: int) -> RungEntry | None:
        """What it had reached after ``epoch`` passes; None where it is not so far, or says nothing."""
        newest = max((e for e in self.shown if e <= epoch), default=None)
        if self.epoch < epoch or newest is None or self.state == "failed":
            return None
        return RungEntry(self.trial, *self.shown[newest])


Population = list[_Member]


class PopulationBasedTraining(Schedule):
    """See the module. Further populations begin where workers are free and the study's budget is not spent.

    ``space``: to change settings within their ranges; ``allowed``: whether such a configuration may run. Raises
    ``UserError`` where something is to be fixed that the space does not ask for.
    """

    parents = True

    def __init__(
        self,
        objectives: Sequence[Objective],
        space: Space,
        selection: Selection | None = None,
        seed: int = 0,
        allowed: Callable[[Sample], bool] = lambda sample: True,
    ) -> None:
        self._signs = tuple(-1.0 if o.direction == "max" else 1.0 for o in objectives)
        self._space = space
        self._selection = selection or Selection()
        self._seed = seed
        self._allowed = allowed
        self._populations: list[Population] = []
        samples = probe(space, _PROBES, seed)
        self._of_strategies = SETTING_NAMES if any(chooses(sample.values) for sample in samples) else ()
        known = {name for sample in samples for name in sample.params}
        for name in self._selection.fixed:
            if name not in known:
                raise UserError("what is fixed must be a parameter of the space", name, f"one of {sorted(known)}")

    # -- what happens -------------------------------------------------------------------------------------------------

    def started(self, trial: int, params: Mapping[str, Any], parent: int | None = None) -> None:
        member = _Member(trial, dict(params))
        for population in self._populations if parent is not None else ():
            for other in population:
                if other.trial == parent:
                    member.epoch, member.epochs, member.shown = other.epoch, other.epochs, dict(other.shown)
                    member.judged = other.epoch  # what it inherits is its parent's merit
                    replaced = (m.trial for m in _waiting(population) if self._successor(m, population))
                    self._seat(member, population, next(replaced, None))
                    return
        for population in self._populations:
            failed = next((m.trial for m in population if m.state == "failed"), None)
            if failed is not None or len(population) < self._selection.population:
                self._seat(member, population, failed)
                return
        self._populations.append([member])

    def _seat(self, member: _Member, population: Population, instead: int | None) -> None:
        population[:] = [other for other in population if other.trial != instead] + [member]

    def reported(self, intermediate: IntermediateResult) -> str:
        if member := self._find(intermediate.trial):
            oriented = tuple(sign * value for sign, value in zip(self._signs, intermediate.values, strict=True))
            member.shown[intermediate.epoch] = oriented, intermediate.violation
            member.epoch, member.epochs = max(member.epoch, intermediate.epoch), intermediate.epochs
        return ""

    def paused(self, trial: int, epoch: int) -> None:
        if member := self._find(trial):
            member.state, member.epoch, member.saved = "paused", max(member.epoch, epoch), True

    def resumed(self, trial: int) -> None:
        for population in self._populations:
            for member in population:
                if member.trial == trial:
                    member.judged, _ = self._ranking(population, member.epoch, member.judged)
                    member.state = "running"

    def ended(self, trial: int, values: tuple[float, ...] | None, violation: float = 0.0) -> None:
        if member := self._find(trial):
            member.state = "failed" if values is None else "finished"

    def _find(self, trial: int) -> _Member | None:
        """The member; None where its place was taken."""
        return next((m for population in self._populations for m in population if m.trial == trial), None)

    # -- what is to be done -------------------------------------------------------------------------------------------

    def next(self, fresh: bool) -> Resume | ForkTrial | NewTrial | None:
        for population in self._populations:
            if fresh and len(population) < self._selection.population:
                return NewTrial(self._selection.every)
            for member in _waiting(population):
                if fresh and (child := self._successor(member, population)):
                    return child
                if member.state == "paused":
                    return Resume(member.trial, "not among the worst", self._pause_after(member.epoch))
                if fresh:
                    return NewTrial(self._selection.every)
        return NewTrial(self._selection.every) if fresh else None

    def estimates(self) -> Mapping[int, tuple[float, ...]]:
        """None: what a member will reach depends on settings that it does not have yet."""
        return {}

    def _successor(self, member: _Member, population: Population) -> ForkTrial | None:
        """Who is to take the member's place: None where the member goes on, or nobody can be its successor's parent."""
        failed = member.state == "failed"
        after = min((m.epoch for m in population if m.shown and m.trains), default=0) if failed else member.epoch
        after, order = self._ranking(population, after, 0 if failed else member.judged)
        count = min(math.ceil(self._selection.quantile * len(order)), len(order) // 2)
        if not count or (not failed and member.trial not in order[-count:]):
            return None
        best = [m for m in population if m.trial in order[:count] and m.trains and m.saved and m.epoch < m.epochs]
        if not best:
            return None
        rng = np.random.default_rng(derive(self._seed, "population", member.trial, member.epoch))
        parent = best[int(rng.integers(len(best)))]
        why = "failed" if failed else f"among the worst {count} of {len(order)}"
        reason = f"trial {member.trial} {'' if failed else 'was '}{why}, trial {parent.trial} among the best"
        reason += f" at epoch {after}"
        return ForkTrial(parent.trial, self._changed(parent.params, rng), reason, self._pause_after(parent.epoch))

    def _ranking(self, population: Population, epoch: int, judged: int) -> tuple[int, list[int]]:
        """Trials by what they had reached after at most ``epoch`` passes, best first, and after how many that was.

        After the most for which enough of them have come so far: who is the first to arrive is judged by what all had
        reached before, or it would never be judged at all. But nobody is ``judged`` twice after as many passes, or more
        would be replaced than the quantile says; then there are no trials.
        """
        enough = max(2, math.ceil(ENOUGH * self._selection.population))
        for after in range(epoch, judged, -1):
            entrants = [entrant for m in population if (entrant := m.at(after)) is not None]
            if len(entrants) >= enough:
                return after, ranked(entrants, len(entrants))
        return judged, []

    def _changed(self, params: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        s = self._selection
        fixed = {*s.fixed, *ALWAYS_FIXED, *self._of_strategies}
        for _ in range(_ATTEMPTS):
            sample = explore(self._space, params, resample=s.resample, factor=s.factor, fixed=fixed, rng=rng)
            if self._allowed(sample):
                return sample.params
        return dict(params)

    def _pause_after(self, epoch: int) -> int:
        return (epoch // self._selection.every + 1) * self._selection.every


def _waiting(population: Population) -> list[_Member]:
    """Members whose turn it may be, the least far first; those that failed start again."""
    waiting = [member for member in population if member.state in ("paused", "failed")]
    return sorted(waiting, key=lambda m: (0 if m.state == "failed" else m.epoch, m.trial))
