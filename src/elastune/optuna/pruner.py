"""``Pruner``: the early stopping of ``elastune tune`` for trials of Optuna, with one objective or several.

Reports stand in the system attributes of their trials, each with its time. Every process that shares the storage, and
every resumed study, reads the same events in the same order, and so judges alike.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optuna
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from elastune.core.errors import UserError
from elastune.core.options import check
from elastune.optuna.sampler import ESTIMATE, Sampler, objectives_of
from elastune.tuning.search.halving import Halving, SuccessiveHalving
from elastune.tuning.search.history import quiet
from elastune.tuning.search.schedule import IntermediateResult

REASON = "elastune:reason"
"""The user attribute of a stopped trial: why it was stopped."""
ESTIMATED = "elastune:estimated"
"""The constraint that trials with estimated values break in ``with_estimates``."""
_REPORT = "elastune:report:"


@dataclass(frozen=True)
class _Report:
    """One report: what ``values`` a trial had ``at`` a time after ``step``, and its largest violation by then."""

    at: float
    trial: int
    step: int
    violation: float
    values: tuple[float, ...]


@dataclass(frozen=True)
class _End:
    """The end of a trial."""

    at: float
    trial: FrozenTrial


class Pruner:
    """Stops trials as ``elastune tune --stopping asha`` does, in any storage of Optuna.

    At the rungs (``min_resource`` epochs, ``eta`` times as many, and so on) the best 1/``eta`` of the trials so far go
    on. With several objectives trials are compared by constrained domination. Once five trials have ended, a trial
    also goes on if its forecast may still reach the front, and is stopped if it cannot.

    ``elastune tune`` pauses trials, and promotes some later. A trial of Optuna cannot go on, so the best of the first
    ``eta`` - 1 trials at a rung is not stopped.

    If the study's sampler is a ``Sampler``, it learns from the forecasts of running and stopped trials.

    Args:
        study: The study. Names of ``study.set_metric_names`` say which objectives grow with every epoch: ``seconds``,
            ``cost`` and ``time``.
        epochs: How many steps a whole training reports. None: as many as the first complete trial; none is stopped
            before.
        eta: At each rung one of ``eta`` trials goes on.
        min_resource: Steps before the first rung; None: 1/eta^2 of ``epochs``.

    Raises:
        UserError: For an option out of its range.

    Example:
        >>> pruner = Pruner(study, epochs=30)
        >>> def objective(trial):
        ...     for epoch in range(30):
        ...         error, seconds = train_one_epoch(trial.params)
        ...         pruner.report(trial, (error, seconds), epoch)
        ...         if pruner.should_prune(trial):
        ...             raise optuna.TrialPruned
        ...     return error, seconds
    """

    def __init__(
        self, study: Study, *, epochs: int | None = None, eta: int = 3, min_resource: int | None = None
    ) -> None:
        if epochs is not None and not _is_whole(epochs, least=1):
            raise UserError("a pruner's epochs are a whole number from 1 on", repr(epochs), "or leave them out")
        halving = Halving(eta=eta, min_resource=min_resource)
        check("a pruner", halving)
        self._study = study
        self._epochs = epochs
        self._schedule = SuccessiveHalving(objectives_of(study), halving, resumes=False)
        self._lock = threading.RLock()
        self._own: dict[int, set[int]] = {}  # by trial, the steps that were reported here
        self._heard: dict[int, set[int]] = {}  # by trial, the steps that the schedule knows
        self._ended: set[int] = set()
        self._verdicts: dict[int, str] = {}
        if isinstance(study.sampler, Sampler):
            study.sampler.use_estimates(self.estimates)

    def report(self, trial: Trial, values: float | Sequence[float], step: int) -> None:
        """Report what ``trial`` has reached; a second report of a step is ignored, as in Optuna.

        With one objective the value is reported to Optuna, too, whose plots show it.

        Args:
            trial: A running trial of the study.
            values: One number per objective, in the order of the study's directions.
            step: The number of the epoch that has ended; the first is 0, as in Optuna.

        Raises:
            UserError: For a trial of another study, another number of values, or a step out of range.
        """
        if trial.study.study_name != self._study.study_name:
            raise UserError("a pruner takes reports of its own study's trials", trial.study.study_name, "make another")
        numbers = _numbers(values)
        if len(numbers) != len(self._study.directions):
            rule = f"a report has a number for each of {len(self._study.directions)} objectives"
            raise UserError(rule, repr(values), "report them in the order of the study's directions")
        if not _is_whole(step, least=0) or step > (self._epochs or math.inf):
            last = "" if self._epochs is None else f" to {self._epochs - 1}"
            raise UserError(f"a step is a whole number from 0{last}", repr(step), "report the epoch that has ended")
        with self._lock:
            own = self._own.setdefault(trial.number, set())
            if step in own:
                return
            own.add(step)
        violation = max(trial.constraints.values(), default=0.0)
        storage = trial.storage
        study_id = storage.get_study_id_from_name(trial.study.study_name)
        trial_id = storage.get_trial_id_from_study_id_trial_number(study_id, trial.number)
        storage.set_trial_system_attr(trial_id, f"{_REPORT}{step}", [time.time(), violation, *numbers])
        if len(numbers) == 1:
            trial.report(numbers[0], step)

    def should_prune(self, trial: Trial) -> bool:
        """Return whether ``trial`` should end now: raise ``optuna.TrialPruned`` then.

        A trial that is stopped keeps what it would have ended with, and why it was stopped, in its user attributes
        ``elastune:estimate`` and ``elastune:reason``.
        """
        with self._lock:
            self._listen()
            reason = self._verdicts.get(trial.number, "")
            estimate = self._schedule.estimates().get(trial.number) if reason else None
        if reason and REASON not in trial.user_attrs:
            trial.set_user_attr(REASON, reason)
            if estimate is not None:
                trial.set_user_attr(ESTIMATE, list(estimate))
        return bool(reason)

    def estimates(self) -> Mapping[int, tuple[float, ...]]:
        """Return, by trial, what running and stopped trials that have come to a rung would end with."""
        with self._lock:
            self._listen()
            return self._schedule.estimates()

    def _listen(self) -> None:
        """Tell the schedule what has happened since the last call, in the order in which it happened."""
        trials = self._study.get_trials(deepcopy=False)
        if self._epochs is None:
            self._epochs = _learnt_epochs(trials)
        if self._epochs is None:
            return
        events: list[_Report | _End] = []
        for trial in trials:
            if trial.state != TrialState.WAITING and trial.number not in self._ended:
                if trial.number not in self._heard:
                    self._heard[trial.number] = set()
                    self._schedule.started(trial.number, trial.params)
                events += self._news(trial)
        for event in sorted(events, key=lambda event: event.at):
            if isinstance(event, _Report):
                self._reported(event, self._epochs)
            else:
                self._end(event.trial)

    def _news(self, trial: FrozenTrial) -> Iterator[_Report | _End]:
        heard = self._heard[trial.number]
        for report in _reports(trial):
            if report.step not in heard:
                heard.add(report.step)
                yield report
        if trial.state.is_finished():
            self._ended.add(trial.number)
            done = trial.datetime_complete
            yield _End(math.inf if done is None else done.timestamp(), trial)

    def _reported(self, report: _Report, epochs: int) -> None:
        number = report.trial
        if number in self._verdicts and number not in self._own:  # another process let it go on
            self._schedule.resumed(number)
            del self._verdicts[number]
        result = IntermediateResult(number, report.step + 1, epochs, report.values, report.violation)
        if reason := self._schedule.reported(result):
            self._verdicts[number] = reason

    def _end(self, trial: FrozenTrial) -> None:
        if trial.state == TrialState.PRUNED:
            self._schedule.paused(trial.number, max(self._heard[trial.number], default=-1) + 1)
            return
        values = tuple(trial.values) if trial.state == TrialState.COMPLETE else None
        self._schedule.ended(trial.number, values, max(trial.constraints.values(), default=0.0))


def with_estimates(study: Study) -> Study:
    """Return a copy of ``study``, in memory, in which stopped trials have the values that they would have ended with.

    They break the constraint ``elastune:estimated``, so that Optuna's plots show them as infeasible, in grey.

    Example:
        >>> optuna.visualization.plot_pareto_front(with_estimates(study))
    """
    with quiet():
        copy = optuna.create_study(study_name=study.study_name, directions=study.directions)
        if study.metric_names is not None:
            copy.set_metric_names(study.metric_names)
        for trial in study.trials:
            estimate = trial.user_attrs.get(ESTIMATE)
            if trial.state == TrialState.PRUNED and estimate is not None:
                trial = create_trial(
                    values=estimate,
                    params=trial.params,
                    distributions=trial.distributions,
                    user_attrs=trial.user_attrs,
                    constraints={**trial.constraints, ESTIMATED: 1.0},
                )
            copy.add_trial(trial)
    return copy


def _reports(trial: FrozenTrial) -> list[_Report]:
    """The reports of ``trial`` by step; none is earlier than the one before it, even if the clock was set back."""
    kept = {int(key.removeprefix(_REPORT)): note for key, note in trial.system_attrs.items() if key.startswith(_REPORT)}
    found: list[_Report] = []
    for step, (at, violation, *values) in sorted(kept.items()):
        latest = found[-1].at if found else -math.inf
        found.append(_Report(max(at, latest), trial.number, step, violation, tuple(values)))
    return found


def _learnt_epochs(trials: Sequence[FrozenTrial]) -> int | None:
    """The steps that the first complete trial reported; None: none has."""
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE and trial.datetime_complete is not None]
    for trial in sorted(complete, key=lambda trial: trial.datetime_complete or 0):
        if reports := _reports(trial):
            return max(report.step for report in reports) + 1
    return None


def _numbers(values: Any) -> tuple[float, ...]:
    """``values``, one number or several, as numbers; empty where they are none."""
    if isinstance(values, str):
        return ()
    try:
        return tuple(map(float, values)) if isinstance(values, Iterable) else (float(values),)
    except (TypeError, ValueError):
        return ()


def _is_whole(number: object, *, least: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= least
