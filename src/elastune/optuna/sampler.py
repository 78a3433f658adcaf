"""``Sampler``: the search of ``elastune tune`` as a sampler of Optuna.

Each proposal is made by a fresh sampler on elastune's view of the study (``History``): failed trials count as failures,
stopped and running ones by their estimates, and values lie on scales that suit them. A proposal is a function of the
seed, the number of its trial and the trials in the storage. Nothing that is kept here could change one.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from elastune.core.run import derive
from elastune.train.program.space import Sample
from elastune.tuning.search.history import History, Outcome, quiet
from elastune.tuning.search.objective import Objective
from elastune.tuning.search.registry import make_sampler, resolve

ESTIMATE = "elastune:estimate"
"""The user attribute of a stopped trial: the values that it would have ended with."""
Estimates = Callable[[], Mapping[int, Sequence[float]]]
_one_at_a_time = threading.Lock()  # so that each proposal of threads (n_jobs) knows those before it


@dataclass(frozen=True)
class _Proposal:
    """A trial's proposal: who makes it, on which view of the study, and the parameters that were proposed together."""

    sampler: BaseSampler
    study: Study
    trial: FrozenTrial
    space: dict[str, BaseDistribution]
    params: dict[str, Any]


class Sampler(BaseSampler):
    """Proposes trials as ``elastune tune`` does, for one objective or several, in any storage of Optuna.

    It is a Gaussian process that learns on which scale each parameter works. It learns from constraints
    (``trial.set_constraint``), from failed trials, and from trials that still run or that a ``Pruner`` stopped. It
    draws the first ten trials at random. Where parameters depend on others, for more than three objectives, and from
    200 complete trials on it is TPE, which does as well there.

    Args:
        seed: The same seed and the same trials give the same proposal. None: drawn at random.

    Example:
        >>> study = optuna.create_study(directions=["minimize", "minimize"], sampler=elastune.optuna.Sampler(seed=1))
        >>> study.optimize(objective, n_trials=50)
    """

    def __init__(self, seed: int | None = None) -> None:
        self._seed = secrets.randbits(32) if seed is None else seed
        self._proposals: dict[tuple[str, int], _Proposal] = {}  # of trials that run, by study and number
        self._estimates: Estimates = dict

    def use_estimates(self, estimates: Estimates) -> None:
        """Take the values of running and stopped trials from ``estimates()``. A ``Pruner`` calls it."""
        self._estimates = estimates

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return dict(self._proposal(study, trial).space)  # callers may take parameters out

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        proposal = self._proposal(study, trial)
        if search_space == proposal.space:
            return proposal.params
        with quiet():  # a part of it: the caller fixes the others
            params = proposal.sampler.sample_relative(proposal.study, proposal.trial, search_space)
        self._proposals[study.study_name, trial.number] = replace(proposal, space=search_space, params=params)
        return params

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        proposal = self._proposal(study, trial)
        with quiet():
            return proposal.sampler.sample_independent(proposal.study, proposal.trial, param_name, param_distribution)

    def after_trial(self, study: Study, trial: FrozenTrial, state: TrialState, values: Sequence[float] | None) -> None:
        self._proposals.pop((study.study_name, trial.number), None)

    def __getstate__(self) -> dict[str, Any]:
        return {"_seed": self._seed, "_proposals": {}, "_estimates": dict}

    def _proposal(self, study: Study, trial: FrozenTrial) -> _Proposal:
        key = study.study_name, trial.number
        if key not in self._proposals:
            with _one_at_a_time, quiet():
                self._proposals[key] = self._propose(study, trial.number)
        return self._proposals[key]

    def _propose(self, study: Study, number: int) -> _Proposal:
        estimates = self._estimates()
        trials = [trial for trial in study.get_trials(deepcopy=False) if trial.number != number]
        for trial in trials:
            if trial.state.is_finished():  # ended in another process
                self._proposals.pop((study.study_name, trial.number), None)
        objectives = objectives_of(study)
        history = self._history(study, objectives, trials, estimates)
        known = history.frozen()
        name = resolve("auto", objectives, known, trained=history.trained)
        inner = history.study
        inner.sampler = sampler = make_sampler(name, derive(self._seed, "sampler", number), known)
        asked = inner.ask()
        params = asked.relative_params
        shown = inner.get_trials(deepcopy=False)[asked.number]
        return _Proposal(sampler, inner, shown, asked.relative_search_space or {}, params)

    def _history(
        self,
        study: Study,
        objectives: Sequence[Objective],
        trials: Sequence[FrozenTrial],
        estimates: Mapping[int, Sequence[float]],
    ) -> History:
        """elastune's view of ``trials``."""
        constraints = dict.fromkeys(key for trial in trials for key in trial.constraints)
        history = History(objectives, list(constraints), penalise=False, reenact=False, scaled=True, lazy=True)
        for trial in trials:
            sample = self._sample(study, trial)
            if not sample.params:
                continue  # it waits, or has not asked for any yet
            index = history.add(sample, _no_notes)
            values = trial.values if trial.state == TrialState.COMPLETE else _expected(trial, estimates)
            if values is not None and all(map(math.isfinite, values)):
                learn = history.tell if trial.state == TrialState.COMPLETE else history.estimate
                learn(index, Outcome(tuple(values), trial.constraints, True))
            elif trial.state.is_finished():
                history.tell(index, Outcome(None, trial.constraints, False))
        return history

    def _sample(self, study: Study, trial: FrozenTrial) -> Sample:
        """The configuration of a trial; of one that runs, with what was proposed and not asked for yet."""
        params, distributions = dict(trial.params), dict(trial.distributions)
        proposal = self._proposals.get((study.study_name, trial.number))
        if proposal is not None and not trial.state.is_finished():
            params = {**proposal.params, **params}
            distributions = {**{name: proposal.space[name] for name in proposal.params}, **distributions}
        return Sample(params, distributions, params)


def objectives_of(study: Study) -> tuple[Objective, ...]:
    """Return the objectives of ``study``; a name of ``study.set_metric_names`` says which of them is a time."""
    names = study.metric_names or [f"objective_{i}" for i in range(len(study.directions))]
    return tuple(
        Objective(name, "max" if direction == StudyDirection.MAXIMIZE else "min")
        for name, direction in zip(names, study.directions, strict=True)
    )


def _expected(trial: FrozenTrial, estimates: Mapping[int, Sequence[float]]) -> Sequence[float] | None:
    """The values that a running or stopped trial would end with; None: unknown."""
    if trial.state == TrialState.PRUNED:
        kept: Sequence[float] | None = trial.user_attrs.get(ESTIMATE, trial.values)
        return estimates.get(trial.number, kept)
    return estimates.get(trial.number) if trial.state == TrialState.RUNNING else None


def _no_notes() -> BaseSampler:
    return RandomSampler(seed=0)
