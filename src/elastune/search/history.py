"""What a search knows, in the form that Optuna's samplers read: an in-memory study, rebuilt where facts change it.

Every sampler learns from failures: a failed trial is told as complete, with a violated constraint and the worst values
known. Gaussian processes want the same constraints from all trials, so the first failure changes what earlier trials
must say, as the first success changes what earlier failures must; then the study is built anew from the facts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import optuna
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import TrialState

from elastune.search.objective import Objective
from elastune.search.space import Sample
from elastune.search.study import new_study, quiet

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
    """Trial ``index`` was opened, told, or closed so that nothing is learnt from it."""

    kind: Literal["open", "tell", "drop"]
    index: int


class History:
    """Trials opened and told, by index. ``measured``: the texts of the constraints on what a trial measures.

    Constraints that a configuration alone decides, and having valid values, are told as two constraints more, from the
    first trial on that breaks one: each constraint costs a Gaussian process of its own.

    ``penalise``, for samplers that ignore constraints: infeasible trials are told the worst values, not their own.
    ``reenact``, for samplers that keep notes in the study: let them act again when it is rebuilt.
    """

    def __init__(
        self, objectives: Sequence[Objective], measured: Sequence[str], *, penalise: bool, reenact: bool
    ) -> None:
        self._objectives = objectives
        self._penalise = penalise
        self._reenact = reenact
        self._samples: list[tuple[Sample, SamplerFactory]] = []
        self._outcomes: dict[int, Outcome] = {}
        self._events: list[_Event] = []
        self._keys = tuple(measured)
        self._worst: tuple[float, ...] | None = None
        self._begin()

    def __len__(self) -> int:
        return len(self._samples)

    def frozen(self) -> list[optuna.trial.FrozenTrial]:
        """The trials as Optuna sees them; not to be changed."""
        return self.study.get_trials(deepcopy=False)

    def ask(self, sampler: SamplerFactory, fill: Callable[[optuna.Trial], Sample]) -> tuple[int, Sample]:
        """Open a trial whose parameters ``fill`` asks of ``sampler``. If ``fill`` raises, nothing is learnt from it."""
        with quiet():
            self.study.sampler = sampler()
            trial = self.study.ask()
            try:
                sample = fill(trial)
            except BaseException:
                self.study.tell(trial, state=TrialState.FAIL)
                raise
        return self._opened(trial, sample, sampler), sample

    def add(self, sample: Sample, sampler: SamplerFactory) -> int:
        """Open a trial whose parameters are given."""
        return self._opened(self._open(sample, sampler), sample, sampler)

    def tell(self, index: int, outcome: Outcome) -> None:
        """Close trial ``index`` with its outcome."""
        first_value = self._worst is None and outcome.values is not None
        if outcome.values is not None:
            self._worst = self._worse(outcome.values)
        new_keys = [key for key in (TRAINED, ALLOWED) if key not in self._keys and _violation(key, outcome) > 0]
        self._keys += tuple(new_keys)
        self._outcomes[index] = outcome
        self._events.append(_Event("tell", index))
        if len(self._outcomes) > 1 and (first_value or new_keys):
            self._rebuild()
        else:
            self._close(index)

    def drop(self, index: int) -> None:
        """Close trial ``index`` so that no sampler learns from it."""
        self._events.append(_Event("drop", index))
        self._close(index)

    def _begin(self) -> None:
        self.study = new_study(self._objectives)
        self._trials: list[optuna.Trial] = []

    def _rebuild(self) -> None:
        self._begin()
        for event in self._events:
            if event.kind == "open":
                self._trials.append(self._open(*self._samples[event.index]))
            else:
                self._close(event.index)

    def _opened(self, trial: optuna.Trial, sample: Sample, sampler: SamplerFactory) -> int:
        self._trials.append(trial)
        self._samples.append((sample, sampler))
        self._events.append(_Event("open", len(self._samples) - 1))
        return len(self._samples) - 1

    def _open(self, sample: Sample, sampler: SamplerFactory) -> optuna.Trial:
        with quiet():
            self.study.sampler = sampler() if self._reenact else RandomSampler(seed=0)
            self.study.enqueue_trial(sample.params)
            trial = self.study.ask(sample.distributions)
            if self._reenact:
                _ = trial.relative_params  # computed on first use, and noted in the study
        return trial

    def _close(self, index: int) -> None:
        trial, outcome = self._trials[index], self._outcomes.get(index)
        with quiet():
            if outcome is None:
                self.study.tell(trial, state=TrialState.FAIL)
                return
            values = None if self._penalise and not outcome.feasible else outcome.values
            if not self._penalise:
                for key in self._keys:
                    trial.set_constraint(key, _violation(key, outcome))
            self.study.tell(trial, list(values or self._worst or [0.0] * len(self._objectives)))

    def _worse(self, values: tuple[float, ...]) -> tuple[float, ...]:
        if self._worst is None:
            return values
        both = zip(self._objectives, self._worst, values, strict=True)
        return tuple(min(a, b) if objective.direction == "max" else max(a, b) for objective, a, b in both)


def _violation(key: str, outcome: Outcome) -> float:
    if key == TRAINED:
        return {True: -1.0, False: 1.0, None: _BORDER}[outcome.trained]
    if key == ALLOWED:
        return _BORDER if outcome.forbidden is None else outcome.forbidden
    return outcome.violations.get(key, _BORDER)
