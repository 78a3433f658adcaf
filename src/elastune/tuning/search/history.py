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
from elastune.tuning.search.front import RAW, Scale, scale_of
from elastune.tuning.search.objective import Objective

NAME = "elastune"  # of the Optuna study
TRAINED = "trained"  # the constraint that a trial without valid values breaks
ALLOWED = "allowed"  # the constraint that stands for all constraints decided before a run
_BORDER = 0.0  # the violation where it is unknown: neither broken nor fulfilled
SamplerFactory = Callable[[], BaseSampler]


@dataclass(frozen=True)
class Outcome:
    """The end of a trial, as a search learns it.

    Attributes:
        values: One value per objective; None where the trial has no valid values.
        violations: Violations of the constraints on measured values, by text.
        trained: Whether it trained; None where it never ran.
        forbidden: The largest violation of the constraints that the configuration alone decides; None: there are none.
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
    """Trial ``index`` was opened or closed. It closes with its first outcome or estimate, or when it is dropped."""

    kind: Literal["open", "close"]
    index: int


class History:
    """All trials of a search and their outcomes, by index, as one Optuna study.

    Two further constraints stand for valid values and for the constraints that a configuration alone decides. Each
    exists only from the first trial on that breaks it, since each constraint costs a Gaussian process of its own.

    Args:
        objectives: The objectives of the study.
        measured: The texts of the constraints on measured values.
        penalise: For samplers that ignore constraints: infeasible trials get the worst values instead of their own.
        reenact: For samplers that keep notes in the study: run them again when the study is rebuilt.
        scaled: For samplers that model values: each objective is on the scale that suits its known values.
        lazy: Make the Optuna study when it is first needed: many trials are then taken over at once, and quickly.
    """

    def __init__(
        self,
        objectives: Sequence[Objective],
        measured: Sequence[str],
        *,
        penalise: bool,
        reenact: bool,
        scaled: bool = False,
        lazy: bool = False,
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
        self._stale = lazy

    def _begin(self) -> None:
        self._stale = False
        self._revised: set[int] = set()  # closed trials whose newest outcome is not in the study yet
        self._worst_shown: set[int] = set()  # trials that have the worst values, for lack of valid ones
        self._study = new_study(self._objectives)
        self._trials: list[optuna.Trial | None] = []  # None for closed trials

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def trained(self) -> int:
        """How many trials ended with valid values; estimates do not count."""
        return sum(outcome.values is not None for outcome in self._outcomes.values())

    @property
    def study(self) -> optuna.Study:
        """The Optuna study, brought up to date."""
        if self._revised and self._worst != (worst := self._find_worst()):
            self._worst = worst
            self._revised |= self._worst_shown
        self._rescale()
        if self._stale:
            self._rebuild()
        for index in sorted(self._revised):
            shown = self._as_shown(index)
            assert shown is not None, "a revised trial has an outcome or an estimate"
            self._study.get_trials(deepcopy=False)[index].values = shown[
                0
            ]  # an in-memory study returns its own trials, not copies
        self._revised.clear()
        return self._study

    def _rescale(self) -> None:
        """Choose scales by all known values. If one changes, all closed trials are revised."""
        values = [outcome.values for outcome in self._all_outcomes() if outcome.values is not None]
        if not self._scaled or not values:
            return
        scales = tuple(map(scale_of, zip(*values, strict=True)))
        if scales != self._scales:
            self._scales = scales
            self._revised |= {
                index for index, trial in enumerate(self._trials) if trial is None and self._outcome_of(index)
            }

    def frozen(self) -> list[optuna.trial.FrozenTrial]:
        """Return the trials as Optuna sees them. Callers must not change them."""
        return self.study.get_trials(deepcopy=False)

    def ask(self, sampler: SamplerFactory, fill: Callable[[optuna.Trial], Sample]) -> tuple[int, Sample]:
        """Open a trial whose parameters ``fill`` requests from ``sampler``; if it raises, the trial is forgotten."""
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
        """Open a trial with the parameters of ``sample``; ``sampler`` only keeps its notes."""
        return self._opened(None if self._stale else self._open(sample, sampler), sample, sampler)

    def tell(self, index: int, outcome: Outcome) -> None:
        """Close trial ``index`` with its outcome."""
        new_keys = [key for key in (TRAINED, ALLOWED) if key not in self._keys and _violation(key, outcome) > 0]
        self._keys += tuple(new_keys)
        before = self._outcome_of(index)
        self._estimates.pop(index, None)
        self._outcomes[index] = outcome
        self._stale = self._stale or (len(self._outcomes) + len(self._estimates) > 1 and bool(new_keys))
        self._learn(index, before)

    def estimate(self, index: int, outcome: Outcome) -> None:
        """Let samplers learn the expected outcome of trial ``index``, until its outcome or next estimate comes."""
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
        """Close a trial that had no outcome ``before``, or revise a closed one."""
        self._rescale()  # first: a scale that was chosen without these values may not take them
        if before is None:
            self._events.append(_Event("close", index))
            if self._update_worst(index):
                self._revised |= self._worst_shown
            if not self._stale:
                self._close(index)
            return
        self._revised.add(index)
        after = self._outcome_of(index)
        self._stale = self._stale or after is None or replace(after, values=before.values) != before

    def _rebuild(self) -> None:
        self._begin()
        self._worst = self._find_worst()
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
                _ = trial.relative_params  # computed on first use, and written into the study
        return trial

    def _close(self, index: int) -> None:
        trial, self._trials[index] = self._trials[index], None
        assert trial is not None, "a trial is closed once"
        shown = self._as_shown(index)
        with quiet():
            if shown is None:
                self._study.tell(trial, state=TrialState.FAIL)
                return
            values, constraints = shown
            for key, violation in constraints.items():
                trial.set_constraint(key, violation)
            self._study.tell(trial, values)

    def _frozen(self, index: int, sample: Sample) -> optuna.trial.FrozenTrial:
        shown = self._as_shown(index)
        params, distributions = sample.params, sample.distributions
        if shown is None:
            return create_trial(state=TrialState.FAIL, params=params, distributions=distributions)
        return create_trial(values=shown[0], params=params, distributions=distributions, constraints=shown[1])

    def _as_shown(self, index: int) -> tuple[list[float], dict[str, float]] | None:
        """Values and constraints of a closed trial, as samplers see them; None if they do not learn from it."""
        outcome = self._outcome_of(index)
        if outcome is None:
            return None
        values = None if self._penalise and not outcome.feasible else outcome.values
        (self._worst_shown.add if values is None else self._worst_shown.discard)(index)
        constraints = {} if self._penalise else {key: _violation(key, outcome) for key in self._keys}
        if visible := values or self._worst:
            return [scale(value) for scale, value in zip(self._scales, visible, strict=True)], constraints
        return [0.0] * len(self._objectives), constraints

    def _all_outcomes(self) -> list[Outcome]:
        return [*self._outcomes.values(), *self._estimates.values()]

    def _outcome_of(self, index: int) -> Outcome | None:
        return self._outcomes.get(index, self._estimates.get(index))

    def _update_worst(self, index: int) -> bool:
        """Include a trial in the worst values. Returns whether they have changed."""
        outcome, before = self._outcome_of(index), self._worst
        if outcome is not None and outcome.values is not None:
            self._worst = _worse(self._objectives, before, outcome.values)
        return self._worst != before

    def _find_worst(self) -> tuple[float, ...] | None:
        worst = None
        for outcome in self._all_outcomes():
            if outcome.values is not None:
                worst = _worse(self._objectives, worst, outcome.values)
        return worst


def _worse(
    objectives: Sequence[Objective], first: tuple[float, ...] | None, second: tuple[float, ...]
) -> tuple[float, ...]:
    """The worse of both values, objective by objective."""
    if first is None:
        return second
    return tuple(
        max(a, b) if o.direction == "min" else min(a, b) for o, a, b in zip(objectives, first, second, strict=True)
    )


def _violation(key: str, outcome: Outcome) -> float:
    if key == TRAINED:
        return {True: -1.0, False: 1.0, None: _BORDER}[outcome.trained]
    if key == ALLOWED:
        return _BORDER if outcome.forbidden is None else outcome.forbidden
    return outcome.violations.get(key, _BORDER)


# --- Optuna studies ---


def new_study(objectives: Sequence[Objective], storage: BaseStorage | None = None) -> optuna.Study:
    """Return an empty study, in memory without ``storage``. It samples at random until the caller sets a sampler."""
    directions = [StudyDirection.MAXIMIZE if o.direction == "max" else StudyDirection.MINIMIZE for o in objectives]
    with quiet():
        return optuna.create_study(
            study_name=NAME, storage=storage, directions=directions, sampler=RandomSampler(seed=0)
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress Optuna's warnings (experimental parts, clipped infinities) and notes, on which no caller can act.

    It sets the levels of Optuna's handlers. Setting the level of a logger would empty the caches of all loggers.
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
