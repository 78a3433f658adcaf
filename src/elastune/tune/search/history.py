"""The trials that a search knows, as an in-memory Optuna study that samplers read.

Every sampler learns from failures: a failed trial is recorded as complete, with a violated constraint and the worst
values known. Gaussian processes need the same constraints from all trials, so the first failure changes what earlier
trials report, and a new worst value changes what failures report. The Optuna study is then rebuilt from the facts.
Trials that still run may have estimates: samplers treat them as complete, and the values change until the trial ends.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import optuna
from optuna.samplers import BaseSampler, RandomSampler
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial

from elastune.train.program.space import Sample
from elastune.tune.search.objective import RAW, Objective, Scale, scale_of

# [optuna study] Optuna studies: made for our objectives, and used without Optuna's own messages.

NAME = "elastune"


def new_study(objectives: Sequence[Objective], storage: BaseStorage | None = None) -> optuna.Study:
    """An empty study, in memory unless a ``storage`` is given. Its sampler draws at random until it gets another."""
    directions = [StudyDirection.MAXIMIZE if o.direction == "max" else StudyDirection.MINIMIZE for o in objectives]
    with quiet():
        return optuna.create_study(
            study_name=NAME, storage=storage, directions=directions, sampler=RandomSampler(seed=0)
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without Optuna's warnings (experimental parts, clipped infinities) and notes, on which no caller can act.

    By the levels of its handlers: to change that of a logger, as its verbosity, empties the caches of all loggers.
    """
    levels = [(handler, handler.level) for handler in logging.getLogger("optuna").handlers]
    for handler, level in levels:
        handler.setLevel(max(level, logging.ERROR))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler, level in levels:
            handler.setLevel(level)


# [history] What a search knows, in the form that Optuna's samplers read: an in-memory study, rebuilt where facts change it.
#
# Every sampler learns from failures: a failed trial is told as complete, with a violated constraint and the worst values
# known. Gaussian processes want the same constraints from all trials, so the first failure changes what earlier trials
# must say, as the worst value does what failures must; then the study is built again from the facts. Trials that are not
# over may be estimated: samplers take them for complete, with values that change until the trial ends.

TRAINED = "trained"  # broken by a trial without valid values
ALLOWED = "allowed"  # broken by a configuration that breaks a constraint decided before a run
_BORDER = 0.0  # the violation told where it is not known: counts neither way
SamplerFactory = Callable[[], BaseSampler]


@dataclass(frozen=True)
class Outcome:
    """A trial's end. ``values`` is None where there are none that count; ``trained`` None where it was never run.

    ``violations``: of constraints on what it measured, by text. ``forbidden``: the largest violation of the constraints
    that its configuration alone decides; None where there are none.
    """

    values: tuple[float, ...] | None
    violations: Mapping[str, float]
    trained: bool | None
    forbidden: float | None = None

    @property
    def feasible(self) -> bool:
        broken = any(violation > 0 for violation in self.violations.values())
        return self.values is not None and not broken and (self.forbidden or 0.0) <= 0


@dataclass(frozen=True)
class _Event:
    """Trial ``index`` was opened, or closed: told, first estimated, or given up."""

    kind: Literal["open", "close"]
    index: int


class History:
    """Trials opened and told, by index. ``measured``: the texts of the constraints on what a trial measures.

    Constraints that a configuration alone decides, and having valid values, are told as two constraints more, from the
    first trial on that breaks one: each constraint costs a Gaussian process of its own.

    ``penalise``, for samplers that ignore constraints: infeasible trials are told the worst values, not their own.
    ``reenact``, for samplers that keep notes in the study: let them act again when it is rebuilt. ``scaled``, for
    samplers that model values: each objective is told on the scale that suits what is known of it.
    """

    def __init__(
        self,
        objectives: Sequence[Objective],
        measured: Sequence[str],
        *,
        penalise: bool,
        reenact: bool,
        scaled: bool = False,
    ) -> None:
        self._objectives = objectives
        self._penalise = penalise
        self._reenact = reenact
        self._scaled = scaled
        self._scales: tuple[Scale, ...] = (RAW,) * len(objectives)
        self._samples: list[tuple[Sample, SamplerFactory]] = []
        self._outcomes: dict[int, Outcome] = {}
        self._estimates: dict[int, Outcome] = {}
        self._events: list[_Event] = []
        self._keys = tuple(measured)
        self._worst: tuple[float, ...] | None = None
        self._begin()

    def _begin(self) -> None:
        self._stale = False
        self._revised: set[int] = set()  # closed trials of which the study does not yet say what is known
        self._told_worst: set[int] = set()  # trials that were told the worst values for want of their own
        self._study = new_study(self._objectives)
        self._trials: list[optuna.Trial | None] = []  # None for those that are closed

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def trained(self) -> int:
        """Trials that were told with valid values, estimates left out."""
        return sum(outcome.values is not None for outcome in self._outcomes.values())

    @property
    def study(self) -> optuna.Study:
        """The study as it should be by now."""
        if self._revised and self._worst != (worst := self._worst_known()):
            self._worst = worst
            self._revised |= self._told_worst
        self._rescale()
        if self._stale:
            self._rebuild()
        for index in sorted(self._revised):
            told = self._told(index)
            assert told is not None, "a trial that was estimated, or told the worst, has values"
            self._study.get_trials(deepcopy=False)[index].values = told[0]  # in memory, a study lends its own trials
        self._revised.clear()
        return self._study

    def _rescale(self) -> None:
        """Choose scales by all that is known now; where one changes, all that was told is told anew."""
        known = [outcome.values for outcome in self._all_known() if outcome.values is not None]
        if not self._scaled or not known:
            return
        scales = tuple(map(scale_of, zip(*known, strict=True)))
        if scales != self._scales:
            self._scales = scales
            self._revised |= {index for index, trial in enumerate(self._trials) if trial is None and self._known(index)}

    def frozen(self) -> list[optuna.trial.FrozenTrial]:
        """The trials as Optuna sees them; not to be changed."""
        return self.study.get_trials(deepcopy=False)

    def ask(self, sampler: SamplerFactory, fill: Callable[[optuna.Trial], Sample]) -> tuple[int, Sample]:
        """Open a trial whose parameters ``fill`` asks of ``sampler``. If ``fill`` raises, nothing is learnt from it."""
        with quiet():
            study = self.study
            study.sampler = sampler()
            trial = study.ask()
            try:
                _ = trial.relative_params  # computed on first use: a sampler's error is no error of the space
                sample = fill(trial)
            except BaseException:
                self._stale = True  # without this trial
                raise
        return self._opened(trial, sample, sampler), sample

    def add(self, sample: Sample, sampler: SamplerFactory) -> int:
        """Open a trial whose parameters are given."""
        return self._opened(None if self._stale else self._open(sample, sampler), sample, sampler)

    def tell(self, index: int, outcome: Outcome) -> None:
        """Close trial ``index`` with its outcome."""
        new_keys = [key for key in (TRAINED, ALLOWED) if key not in self._keys and _violation(key, outcome) > 0]
        self._keys += tuple(new_keys)
        before = self._known(index)
        self._estimates.pop(index, None)
        self._outcomes[index] = outcome
        self._stale = self._stale or (len(self._outcomes) + len(self._estimates) > 1 and bool(new_keys))
        self._learn(index, before)

    def estimate(self, index: int, outcome: Outcome) -> None:
        """Let samplers learn from what trial ``index`` is expected to reach, until it is told or estimated again."""
        before = self._estimates.get(index)
        if outcome != before:
            self._estimates[index] = outcome
            self._learn(index, before)

    def drop(self, index: int) -> None:
        """Close trial ``index`` so that no sampler learns from it."""
        if self._estimates.pop(index, None) is not None:
            self._stale = True
            return
        self._events.append(_Event("close", index))
        if not self._stale:
            self._close(index)

    def _learn(self, index: int, before: Outcome | None) -> None:
        """Close a trial of which nothing was known ``before``, or revise what was."""
        self._rescale()  # first: a scale that was chosen without these values may not take them
        if before is None:
            self._events.append(_Event("close", index))
            if self._worsen(index):
                self._revised |= self._told_worst
            if not self._stale:
                self._close(index)
            return
        self._revised.add(index)
        after = self._known(index)
        self._stale = self._stale or after is None or replace(after, values=before.values) != before

    def _rebuild(self) -> None:
        self._begin()
        self._worst = self._worst_known()
        if self._reenact:
            for event in self._events:
                if event.kind == "open":
                    self._trials.append(self._open(*self._samples[event.index]))
                else:
                    self._close(event.index)
            return
        closed = {event.index for event in self._events if event.kind == "close"}
        for index, (sample, sampler) in enumerate(self._samples):
            if index in closed:
                self._study.add_trial(self._frozen(index, sample))
            self._trials.append(None if index in closed else self._open(sample, sampler))

    def _opened(self, trial: optuna.Trial | None, sample: Sample, sampler: SamplerFactory) -> int:
        self._trials.append(trial)
        self._samples.append((sample, sampler))
        self._events.append(_Event("open", len(self._samples) - 1))
        return len(self._samples) - 1

    def _open(self, sample: Sample, sampler: SamplerFactory) -> optuna.Trial:
        with quiet():
            self._study.sampler = sampler() if self._reenact else RandomSampler(seed=0)
            self._study.enqueue_trial(sample.params)
            trial = self._study.ask(sample.distributions)
            if self._reenact:
                _ = trial.relative_params  # computed on first use, and noted in the study
        return trial

    def _close(self, index: int) -> None:
        trial, self._trials[index] = self._trials[index], None
        assert trial is not None, "a trial is closed once"
        told = self._told(index)
        with quiet():
            if told is None:
                self._study.tell(trial, state=TrialState.FAIL)
                return
            values, constraints = told
            for key, violation in constraints.items():
                trial.set_constraint(key, violation)
            self._study.tell(trial, values)

    def _frozen(self, index: int, sample: Sample) -> optuna.trial.FrozenTrial:
        told = self._told(index)
        params, distributions = sample.params, sample.distributions
        if told is None:
            return create_trial(state=TrialState.FAIL, params=params, distributions=distributions)
        return create_trial(values=told[0], params=params, distributions=distributions, constraints=told[1])

    def _told(self, index: int) -> tuple[list[float], dict[str, float]] | None:
        """Values and constraints of a closed trial, as samplers see them; None where nothing is learnt from it."""
        outcome = self._known(index)
        if outcome is None:
            return None
        values = None if self._penalise and not outcome.feasible else outcome.values
        (self._told_worst.add if values is None else self._told_worst.discard)(index)
        constraints = {} if self._penalise else {key: _violation(key, outcome) for key in self._keys}
        if shown := values or self._worst:
            return [scale(value) for scale, value in zip(self._scales, shown, strict=True)], constraints
        return [0.0] * len(self._objectives), constraints

    def _all_known(self) -> list[Outcome]:
        return [*self._outcomes.values(), *self._estimates.values()]

    def _known(self, index: int) -> Outcome | None:
        return self._outcomes.get(index, self._estimates.get(index))

    def _worsen(self, index: int) -> bool:
        """Whether what is known of a trial makes the worst values worse."""
        outcome, before = self._known(index), self._worst
        if outcome is not None and outcome.values is not None:
            self._worst = _worse(self._objectives, before, outcome.values)
        return self._worst != before

    def _worst_known(self) -> tuple[float, ...] | None:
        worst = None
        for outcome in self._all_known():
            if outcome.values is not None:
                worst = _worse(self._objectives, worst, outcome.values)
        return worst


def _worse(
    objectives: Sequence[Objective], one: tuple[float, ...] | None, other: tuple[float, ...]
) -> tuple[float, ...]:
    """The worse of both, objective by objective."""
    if one is None:
        return other
    return tuple(
        max(a, b) if o.direction == "min" else min(a, b) for o, a, b in zip(objectives, one, other, strict=True)
    )


def _violation(key: str, outcome: Outcome) -> float:
    if key == TRAINED:
        return {True: -1.0, False: 1.0, None: _BORDER}[outcome.trained]
    if key == ALLOWED:
        return _BORDER if outcome.forbidden is None else outcome.forbidden
    return outcome.violations.get(key, _BORDER)
