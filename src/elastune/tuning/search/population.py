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
from elastune.train.program.space import Sample, Space, compose, contains, draw, nth, probe, size
from elastune.tuning.search.objective import Objective
from elastune.tuning.search.schedule import ForkTrial, IntermediateResult, NewTrial, Resume, RungEntry, Schedule, ranked

ALWAYS_FIXED = ("mode", "compress", "workers", "optimizer", *SYNC_NAMES)
"""A run that changes one of these cannot begin with its parent's checkpoint."""
ENOUGH = 0.75
"""The share of a population that a ranking needs. With two of four, half would be replaced instead of a quarter."""
_ATTEMPTS = 20  # to change settings so that constraints allow them
_PROBES = 100  # configurations drawn to find the parameters of the space

# --- explore: how the settings of a child differ from its parent's ---


def explore(
    space: Space,
    params: Mapping[str, Any],
    *,
    resample: float,
    factor: float,
    fixed: Collection[str],
    rng: np.random.Generator,
) -> Sample:
    """Return ``params`` with each parameter drawn afresh with probability ``resample``, else ``pushed``.

    The ``fixed`` parameters stay. A parameter that ``params`` lack is drawn. So is one that is out of range because
    another parameter decides the range. The original paper calls this *resample* and *perturb* (section 4).
    """

    def choose(name: str, distribution: BaseDistribution) -> Any:
        if name not in params or not contains(distribution, params[name]):
            return draw(distribution, rng)
        if name in fixed:
            return params[name]
        fresh, up = rng.random() < resample, rng.random() < 0.5
        return draw(distribution, rng) if fresh else pushed(distribution, params[name], factor, up=up)

    return compose(space, choose)


def pushed(distribution: BaseDistribution, value: Any, factor: float, *, up: bool) -> Any:
    """Return ``value`` times ``factor`` or, not ``up``, divided by it, within the bounds.

    A value on a grid moves to the nearest grid value, but at least one place. A category moves one place if the
    categories are ascending numbers. Other categories have no order, and stay.
    """
    towards = 1 if up else -1
    match distribution:
        case CategoricalDistribution(choices=choices):
            index = choices.index(value)
            return choices[min(max(index + towards, 0), len(choices) - 1)] if _ascends(choices) else value
        case FloatDistribution(step=None, low=low, high=high):
            return min(max(value * factor**towards, low), high)
        case IntDistribution(low=low, step=unit) | FloatDistribution(low=low, step=float() as unit):
            index, target = round((value - low) / unit), round((value * factor**towards - low) / unit)
            if target == index:
                target += towards
            return nth(distribution, min(max(target, 0), int(size(distribution)) - 1))
    raise AssertionError(f"unknown distribution {distribution}")


def _ascends(choices: tuple[Any, ...]) -> bool:
    numbers = [c for c in choices if isinstance(c, (int, float)) and not isinstance(c, bool)]
    return len(numbers) == len(choices) and all(a < b for a, b in pairwise(numbers))


# --- the schedule ---


@dataclass(frozen=True)
class Selection:
    """How a population is selected. Children of the best members replace the worst.

    Attributes:
        population: Number of members.
        every: Passes after which a member pauses.
        quantile: The share of members that count as best, and as worst.
        resample: Probability that a parameter is drawn afresh.
        factor: A parameter that is not drawn afresh is multiplied by it, or divided by it.
        fixed: Parameters that stay. Parameters that decide the shapes of the model must be among them.
    """

    population: Annotated[int, Range(2, 65536)] = 8
    every: Annotated[int, Range(1, 10**6)] = 1
    quantile: Annotated[float, Range(0.01, 0.5)] = 0.25
    resample: Annotated[float, Range(0, 1)] = 0.25
    factor: Annotated[float, Range(1.001, 1000)] = 1.2
    fixed: tuple[str, ...] = ()


@dataclass
class _Member:
    """A trial that is a member of a population.

    ``results``: by passes, the values and the violation that it and its ancestors had reached by then. ``saved``: it
    has paused, so that a checkpoint exists. ``judged``: the passes at its last comparison.
    """

    trial: int
    params: Mapping[str, Any]
    state: Literal["running", "paused", "finished", "failed"] = "running"
    epoch: int = 0
    epochs: int = 0
    saved: bool = False
    judged: int = 0
    results: dict[int, tuple[tuple[float, ...], float]] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        return self.state in ("running", "paused")

    def at(self, epoch: int) -> RungEntry | None:
        """Its values after ``epoch`` passes; None if it is not so far, has not reported, or failed."""
        newest = max((e for e in self.results if e <= epoch), default=None)
        if self.epoch < epoch or newest is None or self.state == "failed":
            return None
        return RungEntry(self.trial, *self.results[newest])


Population = list[_Member]


class PopulationBasedTraining(Schedule):
    """Population-based training. Further populations begin while workers are free and the study has budget.

    Args:
        objectives: The objectives that rank members.
        space: The space in which settings change.
        selection: How members are selected; None: the defaults.
        seed: Decides parents and changes of settings.
        allowed: Whether a configuration may run.

    Raises:
        UserError: If ``selection.fixed`` names a parameter that the space does not have.
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
        names = {name for sample in samples for name in sample.params}
        for name in self._selection.fixed:
            if name not in names:
                raise UserError("what is fixed must be a parameter of the space", name, f"one of {sorted(names)}")

    # -- events --

    def started(self, trial: int, params: Mapping[str, Any], parent: int | None = None) -> None:
        member = _Member(trial, dict(params))
        for population in self._populations if parent is not None else ():
            for other in population:
                if other.trial == parent:
                    member.epoch, member.epochs, member.results = other.epoch, other.epochs, dict(other.results)
                    member.judged = other.epoch  # inherited results are its parent's merit
                    replaced = (m.trial for m in _waiting(population) if self._successor(m, population))
                    self._add_member(member, population, next(replaced, None))
                    return
        for population in self._populations:
            failed = next((m.trial for m in population if m.state == "failed"), None)
            if failed is not None or len(population) < self._selection.population:
                self._add_member(member, population, failed)
                return
        self._populations.append([member])

    def _add_member(self, member: _Member, population: Population, replaced: int | None) -> None:
        population[:] = [other for other in population if other.trial != replaced] + [member]

    def reported(self, intermediate: IntermediateResult) -> str:
        if member := self._find(intermediate.trial):
            oriented = tuple(sign * value for sign, value in zip(self._signs, intermediate.values, strict=True))
            member.results[intermediate.epoch] = oriented, intermediate.violation
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
        """The member; None if another trial replaced it."""
        return next((m for population in self._populations for m in population if m.trial == trial), None)

    # -- decisions --

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
        """No estimates: the result of a member depends on settings that it will get later."""
        return {}

    def _successor(self, member: _Member, population: Population) -> ForkTrial | None:
        """The trial that replaces the member; None if the member goes on, or no other member can be a parent."""
        failed = member.state == "failed"
        after = min((m.epoch for m in population if m.results and m.trains), default=0) if failed else member.epoch
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
        """Rank the members at the latest pass, at most ``epoch``, that enough of them have reached.

        So the first member to arrive is compared at an earlier pass, else it would never be compared. No member is
        compared twice at the same pass (``judged``), else more members than ``quantile`` would be replaced.

        Returns:
            That pass, and the trials, best first; no trials without such a pass.
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
    """Members that may train next, the least advanced first. Failed members come before, since they start again."""
    waiting = [member for member in population if member.state in ("paused", "failed")]
    return sorted(waiting, key=lambda m: (0 if m.state == "failed" else m.epoch, m.trial))
