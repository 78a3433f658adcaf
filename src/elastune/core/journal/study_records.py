"""Records of a study: its trials, its plan, the fitted times, and the models made of its trials."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from elastune.core.journal.run_records import (
    EXACT,
    JOURNAL_FORMAT,
    Adopted,
    Count,
    ExecutionValues,
    Format,
    Number,
    Regrouped,
    Reported,
    RunFinished,
    Settings,
    Whole,
    Words,
)
from elastune.core.run import CommandLine

# Records of a study or a frontier: its trials from start to end, and fitted times.

_RULES = ConfigDict(extra="forbid")
_Some = Annotated[int, Field(ge=1, le=EXACT)]
Phase = Literal["search", "calibrate", "throughput", "naive", "policy", "confirm", "member"]
"""The purpose of a trial. "throughput": only its steps are timed. "policy": the naive rule under a requested policy.
"member": a model of fixed settings, for an ensemble or a tree of classes.
"""


@dataclass(frozen=True, config=_RULES)
class StudyStarted:
    """A study begins or is resumed. ``settings`` is the complete request as JSON values; ``command`` and ``format``:
    as in ``RunStarted``.
    """

    settings: Settings
    context: dict[str, Any] = field(default_factory=dict)
    resumed: bool = False
    command: CommandLine | None = None
    format: Format = JOURNAL_FORMAT
    kind: Literal["study_started"] = "study_started"


@dataclass(frozen=True, config=_RULES)
class EarlierTrial:
    """A trial of an earlier study that fits into this one: its parameters, and the metrics that this study
    judges by.
    """

    params: dict[str, Any]
    metrics: dict[str, float]


@dataclass(frozen=True, config=_RULES)
class WarmStarted:
    """What a study takes over from an earlier one in the folder ``source``, whose journal is not needed again.

    Attributes:
        taken: The number of its ended trials, of all ``of``, that fit.
        similarity: The similarity of its context to this study's, from 0 to 1 (``tuning.search.importance``).
        left_out: The number of trials that do not fit, by reason.
        differs: The differences of the contexts.
        results: The trials that samplers learn from.
        proposed: The parameters that are tried first.
    """

    source: str
    taken: Count
    of: Count
    similarity: float
    left_out: dict[str, Count] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)
    results: list[EarlierTrial] = field(default_factory=list)
    proposed: list[dict[str, Any]] = field(default_factory=list)
    kind: Literal["warm_started"] = "warm_started"


@dataclass(frozen=True, config=_RULES)
class ScalingPredicted:
    """What the cluster's plan in the folder ``source`` predicts of this study's trials before any has run.

    Attributes:
        steps: Samples of a step, workers and seconds, all modelled.
        most: With more workers no trial's step is noticeably shorter, so no trial gets more.
        why: The reason for ``most``, in words.
    """

    source: str
    steps: Annotated[list[tuple[_Some, _Some, Annotated[float, Field(gt=0, le=1e15)]]], Field(min_length=1)]
    most: Count
    why: Words
    kind: Literal["scaling_predicted"] = "scaling_predicted"


@dataclass(frozen=True, config=_RULES)
class ProposalAsked:
    """The study asks the search for the settings of trial number ``trial``.

    The search knows the records before this one, and no later ones, however long it takes.
    """

    trial: Number
    kind: Literal["proposal_asked"] = "proposal_asked"


@dataclass(frozen=True, config=_RULES)
class TrialStarted:
    """A trial is about to run, for the reason ``phase``.

    Attributes:
        params, distributions: Optuna's, as JSON values.
        parent: The trial from whose checkpoint it goes on.
        until_epoch: It pauses after so many epochs.
        dismissed: Proposals before ``params`` that break a constraint; samplers learn from them, too.
    """

    trial: Number
    config: dict[str, Any]
    execution: ExecutionValues
    seed: Whole
    phase: Phase = "search"
    params: dict[str, Any] = field(default_factory=dict)
    distributions: dict[str, str] = field(default_factory=dict)
    tags: dict[str, Any] = field(default_factory=dict)
    parent: Count | None = None
    until_epoch: Count | None = None
    dismissed: list[dict[str, Any]] = field(default_factory=list)
    kind: Literal["trial_started"] = "trial_started"


@dataclass(frozen=True, config=_RULES)
class TrialReported:
    """A report of a running trial.

    Attributes:
        workers: The mean number of its workers so far; None: as at its start.
        cost: Its cost so far; None without prices (``runtime.job.pool``).
    """

    trial: Number
    report: Reported
    workers: float | None = None
    cost: float | None = None
    kind: Literal["trial_reported"] = "trial_reported"


@dataclass(frozen=True, config=_RULES)
class TrialPaused:
    """A trial gave its workers back and may go on later, from the checkpoint in its folder.

    Attributes:
        seconds: Its running time since it was started or resumed; ``worker_seconds``: of all its workers together.
        cut_off: The search did not decide it, so the trial goes on before all others.
        held: It is among the longest trials, and goes on once workers are idle.
        cost: As of a report.
    """

    trial: Number
    epoch: Count
    seconds: float
    worker_seconds: float
    reason: Words = ""
    cut_off: bool = False
    cost: float | None = None
    held: bool = False
    kind: Literal["trial_paused"] = "trial_paused"


@dataclass(frozen=True, config=_RULES)
class TrialResumed:
    """A trial goes on, on ``workers`` workers, until it has completed ``until_epoch`` (None: to its end).

    ``cut_off``: it had been paused or lost without a decision of the search.
    """

    trial: Number
    workers: Count
    reason: Words = ""
    until_epoch: Count | None = None
    cut_off: bool = False
    kind: Literal["trial_resumed"] = "trial_resumed"


@dataclass(frozen=True, config=_RULES)
class TrialAdopted:
    """A running trial goes on with its workers after the death of its controller. None of its work is repeated."""

    trial: Number
    adopted: Adopted
    kind: Literal["trial_adopted"] = "trial_adopted"


@dataclass(frozen=True, config=_RULES)
class TrialReallocated:
    """A running trial is to go on with ``after`` workers instead of ``before``."""

    trial: Number
    before: Count
    after: Count
    reason: Words = ""
    kind: Literal["trial_reallocated"] = "trial_reallocated"


@dataclass(frozen=True, config=_RULES)
class TrialProgressed:
    """A running trial has completed ``step`` steps, since its workers changed: two such records give its speed."""

    trial: Number
    step: Count
    kind: Literal["trial_progressed"] = "trial_progressed"


@dataclass(frozen=True, config=_RULES)
class TrialRegrouped:
    """The workers of a running trial changed."""

    trial: Number
    change: Regrouped
    kind: Literal["trial_regrouped"] = "trial_regrouped"


@dataclass(frozen=True, config=_RULES)
class TrialFinished:
    """The end of a trial.

    Attributes:
        state: "infeasible": it ran and diverged, crashed or broke a constraint. "rejected": it broke one before its
            start.
        values: One number per objective, if complete.
        violations: At most 0 where the constraint holds.
        seconds: The time from its start to its end, without pauses; ``worker_seconds``: of all its workers together.
        cost: As of a report, whatever the outcome.
    """

    trial: Number
    state: Literal["complete", "infeasible", "rejected"]
    values: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    violations: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    reason: Words = ""
    run: RunFinished | None = None
    worker_seconds: float | None = None
    cost: float | None = None
    kind: Literal["trial_finished"] = "trial_finished"


@dataclass(frozen=True, config=_RULES)
class ArtifactKept:
    """The kept files of a trial that is over: its checkpoint after ``step`` steps, at ``path`` in the
    study's folder.

    Attributes:
        sha256: The digest of the run's final state, however it is divided into files.
        seal: The digest of the checkpoint's ``state.json``, which has the digests of its other files.
        artifact: "state": everything that a run needs to go on.
        size: The bytes of all kept files of the trial.
        predictions: The SHA-256 of the files of ``session.predictions``, by name.
    """

    trial: Number
    step: Count
    path: str
    sha256: str
    size: Count = 0
    predictions: dict[str, str] = field(default_factory=dict)
    artifact: Literal["state"] = "state"
    seal: str = ""
    kind: Literal["artifact_kept"] = "artifact_kept"


@dataclass(frozen=True, config=_RULES)
class ArtifactRemoved:
    """The kept files of a trial were removed, because others have overtaken it."""

    trial: Number
    kind: Literal["artifact_removed"] = "artifact_removed"


@dataclass(frozen=True, config=_RULES)
class LinkFitted:
    """A link of the step-time model: the seconds of a message of any size, and of each byte."""

    latency_s: float
    seconds_per_byte: float


@dataclass(frozen=True, config=_RULES)
class TimesFitted:
    """The model of ``core.plan.data_parallel``, fitted here.

    Attributes:
        errors: Predicted over measured values, by quantity.
        latency_s, seconds_per_byte: The link within a host.
        across: The link between hosts, where there are several.
        workers_per_host: The workers that fit on each host.
    """

    base_s: float
    per_sample_s: float
    latency_s: float
    seconds_per_byte: float
    grad_bytes: Count
    measured_workers: list[Count]
    errors: dict[str, float] = field(default_factory=dict)
    across: LinkFitted | None = None
    workers_per_host: Count = 0
    kind: Literal["times_fitted"] = "times_fitted"

    @model_validator(mode="after")
    def _hosts_have_room(self) -> TimesFitted:
        if self.across is not None and self.workers_per_host < 1:
            raise ValueError("workers_per_host: must be at least 1 where there are several hosts")
        return self


@dataclass(frozen=True, config=_RULES)
class PhasesPlanned:
    """The budget of a frontier, by phase; written again at the end, with the time that each phase took.

    Attributes:
        budget_s: Seconds for everything: as requested, or chosen by the first steps.
        planned: Seconds of each phase, by its name.
        took: The seconds that each phase took, once all are over.
        seeds: Trainings of each cell of the table.
        left_out: What was shortened or left out, and why.
    """

    budget_s: float
    planned: dict[str, float]
    seeds: Count
    took: dict[str, float] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    kind: Literal["phases_planned"] = "phases_planned"


@dataclass(frozen=True, config=_RULES)
class StudyFinished:
    """The study ended: by its budget, by exhaustion of the space, or on request."""

    reason: Words
    seconds: float
    kind: Literal["study_finished"] = "study_finished"


# Records of a cluster's plan.


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class PlanMade:
    """``elastune plan`` has answered ``request`` with ``answer``, which is what ``--json`` prints.

    ``constants``: of the fitted step model, in seconds, by the names of ``core.plan.step_time``.
    """

    program: str
    request: dict[str, Any]
    answer: dict[str, Any]
    constants: dict[str, float]
    kind: Literal["plan_made"] = "plan_made"


# Records of models made of kept trials: ensembles, soups, joined and stacked models.


@dataclass(frozen=True, config=_RULES)
class AssetMember:
    """A trial, and its weight in the model."""

    trial: Number
    weight: Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, config=_RULES)
class SingleScore:
    """The score of a trial by itself, and the number of its model's parameters."""

    trial: Number
    score: float
    parameters: Count


@dataclass(frozen=True, config=_RULES)
class AssetPart:
    """A trial of the study in the folder ``study``."""

    study: str
    trial: Count


@dataclass(frozen=True, config=_RULES)
class AssetMade:
    """An ensemble, a soup, a joined or a stacked model was written to ``file``.

    Attributes:
        sha256: The SHA-256 of the file.
        method: The method that made it.
        score: Its score by ``objective`` (``direction``: max or min), on the predictions ``data`` by which
            it was chosen.
        singles: The same score of each candidate trial.
        test: Its score on data that no choice has seen.
        parameters: The number of parameters that one inference uses.
        parts: Trials of other studies that are part of it.
        parts_s: The worker-seconds of their training and of their initial weights, as far as journals recorded them by
            then.
        unrecorded: Initial weights whose training no journal records.
    """

    form: Literal["ensemble", "soup", "joined", "stacked"]
    method: str
    members: Annotated[list[AssetMember], Field(max_length=100_000)]
    data: str
    objective: str
    direction: Literal["max", "min"]
    score: float
    test: float | None
    parameters: Count
    singles: list[SingleScore]
    file: str
    sha256: str
    parts: Annotated[list[AssetPart], Field(max_length=100_000)] = field(default_factory=list)
    parts_s: Annotated[float, Field(ge=0)] = 0.0
    unrecorded: list[str] = field(default_factory=list)
    kind: Literal["asset_made"] = "asset_made"

    @model_validator(mode="after")
    def _made_of_something(self) -> AssetMade:
        if not self.members and not self.parts:
            raise ValueError("members: there must be one, or a part of another study")
        return self
