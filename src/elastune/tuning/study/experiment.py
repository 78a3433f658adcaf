"""What a study loop runs: the ``Experiment`` contract, and ``Tuning``, the experiment of ``elastune tune``.

An experiment turns a suggestion into a prepared trial, and the end of a trial into the result that the search sees.
``elastune frontier`` has an experiment of its own. ``TrialProofs`` decides which trials prove their first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from elastune.adapt.policies.library.registry import NO_POLICY
from elastune.core.checkpoint_keeping import KeepCheckpoints
from elastune.core.divergence import Divergence
from elastune.core.errors import UserError
from elastune.core.journal.folds import TrialSummary, fold
from elastune.core.journal.records import (
    ChangesAccepted,
    Entry,
    Record,
    TrialFinished,
    TrialPaused,
    TrialProved,
    TrialResumed,
    TrialStarted,
)
from elastune.core.run import Elastic, RunSpec, StartFrom
from elastune.core.sync_plan import SYNC_NAMES, SyncChoice, chooses, strategy_settings
from elastune.elastic.wire.contact import left_behind
from elastune.runtime.clusters.base import RunFiles
from elastune.runtime.clusters.command import values_of
from elastune.runtime.job.pool import JobEvent
from elastune.runtime.job.validation import check_adapt, check_execution
from elastune.tuning.search.objective import Objective
from elastune.tuning.search.schedule import FixedTrial, IntermediateResult
from elastune.tuning.search.suggester import Suggestion
from elastune.tuning.study.retention import trial_folder
from elastune.tuning.study.trial_results import execution_settings_of, intermediate_result, judge, known, settings
from elastune.tuning.study.validate import Plan

LIKE, SOURCE, FRESH = "like", "source", "fresh"  # tags of a fixed trial: whose settings it has, and whose weights


@dataclass(frozen=True)
class PreparedTrial:
    """A trial that will start or resume as soon as workers are free.

    Attributes:
        number: The number of the trial.
        spec: Its run.
        record: The record of its start or resumption.
        refused: The reason why it cannot run, known before a worker starts; "": it can.
        last: Whether it is held back, and resumes with idle workers only.
    """

    number: int
    spec: RunSpec
    record: TrialStarted | TrialResumed
    refused: str = ""
    last: bool = False

    @property
    def is_new(self) -> bool:
        return isinstance(self.record, TrialStarted)

    def on(self, workers: int) -> PreparedTrial:
        """Return the same trial on ``workers`` workers."""
        spec = replace(self.spec, execution=self.spec.execution.on(workers))
        if isinstance(self.record, TrialResumed):
            return PreparedTrial(self.number, spec, replace(self.record, workers=workers))
        execution = {**self.record.execution, **spec.execution.to_json()}
        return PreparedTrial(self.number, spec, replace(self.record, execution=execution))


class Experiment(Protocol):
    """The contract: how trials run and how they are judged. ``objectives`` are those of the search."""

    @property
    def objectives(self) -> Sequence[Objective]: ...

    def new(
        self, suggestion: Suggestion, until_epoch: int | None, parent: int | None = None
    ) -> PreparedTrial | TrialFinished:
        """Return a trial of a proposal, which begins with the newest checkpoint of ``parent``, if any.

        If the same configuration was trained already, return its result instead.
        """
        ...

    def fixed(self, number: int, trial: FixedTrial) -> PreparedTrial:
        """Return a trial with fixed settings."""
        ...

    def again(
        self, life: TrialSummary, reason: str, until_epoch: int | None = None, cut_off: bool = False
    ) -> PreparedTrial:
        """Return a trial that resumes from its last checkpoint, or from its beginning without one."""
        ...

    def left(self, life: TrialSummary) -> RunSpec | None:
        """Return the run of a trial whose workers may have survived its controller; None: they cannot have."""
        ...

    def intermediate(self, life: TrialSummary) -> IntermediateResult | None:
        """Return what early stopping sees of a trial's newest report; None: nothing."""
        ...

    def result(self, life: TrialSummary, ended: JobEvent) -> TrialFinished:
        """Return the result of a trial whose job has ended. Raises ``UserError`` if no trial could succeed."""
        ...

    def for_search(self, life: TrialSummary) -> TrialFinished:
        """Return what the search learns from a trial that has ended."""
        ...


class Tuning:
    """The experiment of ``elastune tune``: trains proposals of the search, and judges them by the objectives.

    Args:
        plan: The checked request.
        files: The files of runs on the cluster.
        checkpoints: Whether trials write checkpoints, since they may pause, or their weights are kept.
    """

    def __init__(self, plan: Plan, files: RunFiles, *, checkpoints: bool) -> None:
        self._plan = plan
        self._files = files
        self._checkpoints = checkpoints

    @property
    def objectives(self) -> Sequence[Objective]:
        return self._plan.pricing.objectives

    def new(self, suggestion: Suggestion, until_epoch: int | None, parent: int | None = None) -> PreparedTrial:
        values, refused = suggestion.values, ""
        try:
            agreed = self._sync(values).to_json()
        except UserError as error:
            agreed, refused = {name: str(values[name]) for name in SYNC_NAMES if name in values}, str(error)
            without = {*SYNC_NAMES, *strategy_settings(values, self._plan.config)}
            values = {name: value for name, value in values.items() if name not in without}
        spec = self._spec(suggestion.number, values)
        chosen = {
            **spec.execution.to_json(),
            "policy": values["policy"],
            **(agreed if chooses(suggestion.values) else {}),
        }
        record = TrialStarted(
            trial=suggestion.number,
            config=spec.config,
            execution=chosen,
            seed=spec.seed,
            params=suggestion.params,
            distributions=suggestion.distributions,
            parent=parent,
            until_epoch=until_epoch,
            dismissed=list(suggestion.dismissed),
        )
        folder = None if parent is None else self._folder(parent)
        spec = replace(spec, until_epoch=until_epoch, parent=folder)
        return PreparedTrial(suggestion.number, spec, record, refused or self._refused(spec))

    def _refused(self, spec: RunSpec) -> str:
        """The reason why a run cannot start; "": it can."""
        try:
            check_execution(spec)
            check_adapt(spec.adapt, self._plan.program, spec)
            if spec.program.command is not None:
                spec.program.command.filled(values_of(spec))
        except UserError as error:
            return str(error)
        return ""

    def _sync(self, values: Mapping[str, object]) -> SyncChoice:
        """The training strategy of a trial. Raises ``UserError``."""
        return SyncChoice.of({**self._plan.request.sync.to_json(), **values}, self._plan.config)

    def fixed(self, number: int, trial: FixedTrial) -> PreparedTrial:
        if trial.phase == "member":
            return self._member(number, trial)
        spec = RunSpec(
            self._plan.request.program,
            self._folder(number),
            trial.config,
            trial.seed,
            trial.execution,
            epochs=self._plan.request.epochs,
            max_steps=trial.max_steps,
            checkpoint_every_steps=0,
            elastic=self._elastic,
            divergence=self._divergence,
            source=self._plan.source,
        )
        record = TrialStarted(number, trial.config, trial.execution.to_json(), trial.seed, trial.phase)
        return PreparedTrial(number, spec, record)

    def _member(self, number: int, trial: FixedTrial) -> PreparedTrial:
        """A trial that runs as if the search had proposed ``trial.config``."""
        inherited = {} if trial.like is None else known(trial.like)
        tags: dict[str, Any] = {} if trial.like is None else {LIKE: trial.like.trial}
        tags |= {} if trial.source is None else {SOURCE: trial.source, FRESH: list(trial.fresh)}
        spec = replace(self._spec(number, {**inherited, **trial.config}), start_from=self._initial_weights(tags))
        execution = {"policy": NO_POLICY} if trial.like is None else trial.like.execution
        record = TrialStarted(
            number, spec.config, {**execution, **spec.execution.to_json()}, spec.seed, trial.phase, tags=tags
        )
        return PreparedTrial(number, spec, record, self._refused(spec))

    def _initial_weights(self, tags: Mapping[str, Any]) -> StartFrom | None:
        """The weights with which a trial begins."""
        if SOURCE not in tags:
            return self._plan.request.start_from
        folder = self._folder(int(tags[SOURCE])).resolve()
        return StartFrom(folder, fresh=tuple(map(str, tags[FRESH])))

    def again(
        self, life: TrialSummary, reason: str, until_epoch: int | None = None, cut_off: bool = False
    ) -> PreparedTrial:
        folder = self._folder(life.number)
        self._files.set_aside(folder, self._files.damaged(folder))
        spec = self._resumed_spec(life, until_epoch)
        record = TrialResumed(life.number, spec.execution.workers, reason, until_epoch, cut_off)
        return PreparedTrial(life.number, spec, record)

    def left(self, life: TrialSummary) -> RunSpec | None:
        if not self._plan.request.simulated and left_behind(self._folder(life.number)) is None:
            return None
        recorded = execution_settings_of(life.started.execution)
        shared = self._plan.request.trial_workers is not None
        execution = recorded.on(life.workers if shared else life.first_workers)
        return replace(self._resumed_spec(life, life.until_epoch), execution=execution)

    def _resumed_spec(self, life: TrialSummary, until_epoch: int | None) -> RunSpec:
        parent = life.started.parent
        return replace(
            self._spec(life.number, known(life.started)),
            start_from=self._initial_weights(life.started.tags),
            resume=True,
            until_epoch=until_epoch,
            parent=None if parent is None else self._folder(parent),
        )

    def intermediate(self, life: TrialSummary) -> IntermediateResult | None:
        return intermediate_result(life, self._plan.pricing)

    def result(self, life: TrialSummary, ended: JobEvent) -> TrialFinished:
        return judge(life, ended, self._plan.pricing)

    def for_search(self, life: TrialSummary) -> TrialFinished:
        assert life.finished is not None
        return life.finished

    def _spec(self, number: int, values: Mapping[str, object]) -> RunSpec:
        request, bounds = self._plan.request, self._plan.request.trial_workers
        config, execution, adapt = settings(values, self._plan.config, request.execution, request.workers)
        adapt = replace(adapt, monitors=tuple(request.monitors))
        check_adapt(adapt, self._plan.program)
        elastic = replace(self._elastic, grace_s=request.grace_s)
        if bounds is not None:
            execution = replace(execution.on(bounds[0]), num_slots=max(execution.num_slots, bounds[1]))
            elastic = replace(elastic, low=bounds[0], high=bounds[1])
        agreed = self._sync(values)
        several = max(execution.workers, elastic.high or 0) > 1  # one worker has nobody who verifies it
        return RunSpec(
            program=request.program,
            out=self._folder(number),
            config=config,
            seed=request.seed,
            execution=replace(execution, num_slots=agreed.slots(execution.num_slots)),
            sync=agreed.sync,
            sync_schedule=agreed.schedule,
            epochs=request.epochs,
            start_from=request.start_from,
            checkpoint_every_steps=None if self._checkpoints else 0,
            keep_checkpoints=self._keep_checkpoints,
            elastic=elastic,
            adapt=adapt,
            divergence=self._divergence,
            source=self._plan.source,
            accept_changes=request.accept_changes,
            verify=request.verify_plan if several else None,
        )

    @property
    def _elastic(self) -> Elastic:
        return Elastic(collective_timeout_s=self._plan.request.collective_timeout_s)

    @property
    def _keep_checkpoints(self) -> KeepCheckpoints:
        """Which checkpoints of a trial stay. The best is by the direction of the objective."""
        directions = {o.name: o.direction for o in self.objectives}
        return KeepCheckpoints.parse(self._plan.request.keep_checkpoints).directed(directions)

    @property
    def _divergence(self) -> Divergence:
        """The divergence rule; metrics to minimise may explode like the training loss."""
        falling = [o.name for o in self.objectives if o.direction == "min" and o.clock is None]
        return Divergence(self._plan.request.divergence, tuple(falling))

    def _folder(self, number: int) -> Path:
        return trial_folder(self._plan.request.out, number)


def trials_left(out: Path, before: Sequence[Entry]) -> bool:
    """Return whether workers of the study in ``out`` with the journal ``before`` may have survived its controller."""
    return any(left_behind(trial_folder(out, number)) is not None for number in fold(before).of("running"))


# --- which trials prove their first step ---

ProofKind = tuple[str, bool]
"""What chooses the loss of a trial, and whether it has several workers."""


class TrialProofs:
    """The proofs of a study, from its journal.

    One proof counts for all trials that the same program trains with the same kind of loss. Numbers of a config change
    its size; a text or a switch, such as ``loss="focal"``, may choose another loss. With one worker a proof cannot show
    gradients that depend on the worker, so the first trial on several workers proves its own.

    Args:
        unchecked: No trial proves anything.

    Example:
        >>> proofs = TrialProofs()
        >>> proofs.wanted(4, spec)
        True
        >>> proofs.observe(TrialProved(4, Proved("first_step", "mean")))
        >>> proofs.wanted(5, spec)
        False
    """

    def __init__(self, *, unchecked: bool = False) -> None:
        self._unchecked = unchecked
        self._proved: set[ProofKind] = set()
        self._asked: dict[int, ProofKind] = {}  # trials that run, and are to prove their first step
        self._started: dict[int, TrialStarted] = {}  # under this or an earlier controller

    def wanted(self, trial: int, spec: RunSpec) -> bool:
        """Return whether ``trial`` is to prove its first step, and remember that it was asked to."""
        kind = kind_of(spec.config, spec.execution.workers)
        if self._unchecked or not spec.shares_batches or self._covered(kind):
            return False
        self._asked[trial] = kind
        return True

    def observe(self, record: Record) -> None:
        """Take the next record of the journal. After an accepted change of the program nothing is proved."""
        match record:
            case ChangesAccepted():
                self._proved.clear()
            case TrialStarted(trial=trial):
                self._started[trial] = record
            case TrialProved(trial=trial) if trial in self._started:
                started = self._started[trial]
                workers = int(started.execution.get("workers", 1))
                self._proved.add(self._asked.pop(trial, kind_of(started.config, workers)))
            case TrialFinished(trial=trial) | TrialPaused(trial=trial):
                self._asked.pop(trial, None)  # it has proved nothing: another trial may

    def _covered(self, kind: ProofKind) -> bool:
        known = {*self._proved, *self._asked.values()}
        return kind in known or (kind[0], True) in known


def kind_of(config: Mapping[str, Any], workers: int) -> ProofKind:
    """Return what decides whether one proof counts for two trainings of a program.

    Args:
        config: The program's settings.
        workers: The workers of the training.

    Example:
        >>> kind_of({"lr": 0.1, "loss": "focal"}, 2) == kind_of({"lr": 0.2, "loss": "focal"}, 4)
        True
    """
    return repr(sorted(_choices("", config))), workers > 1


def _choices(name: str, value: Any) -> list[tuple[str, str]]:
    """The texts and switches of a config, and where it has numbers, by name."""
    if isinstance(value, Mapping):
        return [each for key, inner in value.items() for each in _choices(f"{name}.{key}", inner)]
    if isinstance(value, list | tuple):
        return [each for nth, inner in enumerate(value) for each in _choices(f"{name}[{nth}]", inner)]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return [(name, "number" if is_number else repr(value))]
