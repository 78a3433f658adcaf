"""Records of a study: its trials, its plan, the fitted times, and the models made of its trials."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from elastune.core.journal.run_records import (
    EXACT,
    Adopted,
    Count,
    ExecutionValues,
    Number,
    Regrouped,
    Reported,
    RunFinished,
    Settings,
    Whole,
    Words,
)
from elastune.core.run import CommandLine

# What is recorded of a study or a frontier: its trials from their start to their end, and fitted times.

_RULES = ConfigDict(extra="forbid")
_Some = Annotated[int, Field(ge=1, le=EXACT)]
Phase = Literal["search", "calibrate", "throughput", "naive", "policy", "confirm", "member"]
"""What a trial is run for; "throughput": its steps are timed, and nothing else; "policy": the naive rule under a policy
that was given; "member": a model of given settings, for an ensemble or a tree of classes."""


@dataclass(frozen=True, config=_RULES)
class StudyStarted:
    """A study begins or is resumed. ``settings`` is the complete, JSON-able request; ``command``: as in a run's."""

    settings: Settings
    context: dict[str, Any] = field(default_factory=dict)
    resumed: bool = False
    command: CommandLine | None = None
    kind: Literal["study_started"] = "study_started"


@dataclass(frozen=True, config=_RULES)
class EarlierTrial:
    """A trial of an earlier study that fits into this one: its parameters, and the metrics that this one judges by."""

    params: dict[str, Any]
    metrics: dict[str, float]


@dataclass(frozen=True, config=_RULES)
class WarmStarted:
    """What a study takes over from an earlier one in the folder ``source``, whose journal is not needed again.

    ``taken`` of its ``of`` ended trials fit; ``left_out``: why others do not, and how many. ``similarity`` of its
    context to this study's, from 0 to 1, see ``tuning.search.importance``; ``differs``: in what. ``told``: what
    samplers take for its results; ``proposed``: the parameters of those that are tried first.
    """

    source: str
    taken: Count
    of: Count
    similarity: float
    left_out: dict[str, Count] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)
    told: list[EarlierTrial] = field(default_factory=list)
    proposed: list[dict[str, Any]] = field(default_factory=list)
    kind: Literal["warm_started"] = "warm_started"


@dataclass(frozen=True, config=_RULES)
class ScalingPredicted:
    """What a cluster's plan, in the folder ``source``, says of this study's trials before any has run, all modelled.

    ``steps``: (samples of a step, workers, seconds). ``most``: on more workers than so many no trial's step is shorter
    by anything that counts, so none gets more; ``why``, in words.
    """

    source: str
    steps: Annotated[list[tuple[_Some, _Some, Annotated[float, Field(gt=0, le=1e15)]]], Field(min_length=1)]
    most: Count
    why: Words
    kind: Literal["scaling_predicted"] = "scaling_predicted"


@dataclass(frozen=True, config=_RULES)
class ProposalAsked:
    """The search is asked what trial number ``trial`` should try. It knows what the journal has told by now, no more,
    however long it takes."""

    trial: Number
    kind: Literal["proposal_asked"] = "proposal_asked"


@dataclass(frozen=True, config=_RULES)
class TrialStarted:
    """A trial is about to run, for the reason ``phase``. ``params`` and ``distributions`` are Optuna's, as JSON.

    ``parent``: the trial from whose checkpoint it goes on. ``until_epoch``: it pauses after so many. ``dismissed``:
    what was proposed before ``params`` and breaks a constraint, from which samplers learn, too.
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
    """A report of a running trial, which had ``workers`` on average so far (None: those it began with), and has
    ``cost`` so much in all (None: prices were not asked for; see ``runtime.job.pool``)."""

    trial: Number
    report: Reported
    workers: float | None = None
    cost: float | None = None
    kind: Literal["trial_reported"] = "trial_reported"


@dataclass(frozen=True, config=_RULES)
class TrialPaused:
    """A trial gave its workers back and may go on later, from the checkpoint in its folder.

    ``seconds``: what it ran since it was started or resumed; ``worker_seconds``: of all its workers together.
    ``cut_off``: it was no decision of the search, so it goes on before all others. ``held``: it is among the longest,
    and goes on once workers are idle. ``cost``: as of a report.
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

    ``cut_off``: it had been paused, or lost, by no decision of the search.
    """

    trial: Number
    workers: Count
    reason: Words = ""
    until_epoch: Count | None = None
    cut_off: bool = False
    kind: Literal["trial_resumed"] = "trial_resumed"


@dataclass(frozen=True, config=_RULES)
class TrialAdopted:
    """A running trial, whose controller had died, goes on with the workers that it had: nothing of it is done again."""

    trial: Number
    found: Adopted
    kind: Literal["trial_adopted"] = "trial_adopted"


@dataclass(frozen=True, config=_RULES)
class TrialReallocated:
    """A running trial was told to go on with ``after`` workers instead of ``before``."""

    trial: Number
    before: Count
    after: Count
    reason: Words = ""
    kind: Literal["trial_reallocated"] = "trial_reallocated"


@dataclass(frozen=True, config=_RULES)
class TrialProgressed:
    """A running trial has completed ``step`` steps. Its workers have changed: two such looks tell its speed on them."""

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
    """A trial's end. ``values``: one number per objective if complete. ``violations``: <= 0 where the constraint holds.

    infeasible: it ran and diverged, crashed or broke a constraint; rejected: it broke one before it was started.
    ``seconds``: from its start to its end, without pauses; ``worker_seconds``: of all its workers together. ``cost``:
    as of a report, whatever became of it.
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
    """What stays of a trial that is over: its checkpoint after ``step`` steps, at ``path`` in the study's folder.

    ``sha256``: of the run's final state, whatever files it lies in. ``seal``: of the checkpoint's ``state.json``, which
    has the digests of its other files ("": one of before this was told). ``artifact``: "state", all that a run goes on
    with. ``size``: bytes of all that stays in the trial's folder. ``predictions``: the SHA-256 of the files of
    ``session.predictions`` there, by name.
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
    """What was kept of a trial has gone: others have overtaken it."""

    trial: Number
    kind: Literal["artifact_removed"] = "artifact_removed"


@dataclass(frozen=True, config=_RULES)
class LinkFitted:
    """A link of the step-time model: seconds of one message, however small, and of each byte."""

    latency_s: float
    seconds_per_byte: float


@dataclass(frozen=True, config=_RULES)
class TimesFitted:
    """The model of ``core.plan.data_parallel``, fitted here. ``errors``: predicted over measured, by what.

    ``latency_s`` and ``seconds_per_byte`` are of the link within a host. Where there are several hosts, ``across`` is
    the link between them, and ``workers_per_host`` how many fit each.
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
    """How a frontier's budget is split among its phases; told again at the end, with what each took.

    Attributes:
        budget_s: Seconds for everything: as asked for, or chosen by the first steps.
        planned: Seconds of each phase, by its name.
        took: The seconds that each took, once all are over.
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


# What is recorded of a cluster's plan: what was asked, and the whole answer.


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class PlanMade:
    """``elastune plan`` has answered. ``asked``: the request; ``found``: what ``--json`` prints; both JSON-able.

    ``constants``: of the fitted step model, in seconds, by the names of ``core.plan.step_time``.
    """

    program: str
    asked: dict[str, Any]
    found: dict[str, Any]
    constants: dict[str, float]
    kind: Literal["plan_made"] = "plan_made"


# What is recorded of models that are made of a study's kept trials: ensembles, soups, joined and stacked ones.


@dataclass(frozen=True, config=_RULES)
class AssetMember:
    """A trial, and its part of the whole."""

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
        method: How it was found.
        score: Its score by ``objective`` (``direction`` says which way is better), on the predictions ``data`` that it
            was chosen by.
        singles: The same score of each trial that there was to choose from.
        test: Its score on data that no choice has seen.
        parameters: The number of parameters that one inference uses.
        parts: Trials of other studies that it is made of.
        parts_s: The worker-seconds of their training, and of that of the weights they began with, as far as journals
            told when this was written.
        untold: Weights whose training no journal told.
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
    untold: list[str] = field(default_factory=list)
    kind: Literal["asset_made"] = "asset_made"

    @model_validator(mode="after")
    def _made_of_something(self) -> AssetMade:
        if not self.members and not self.parts:
            raise ValueError("members: there must be one, or a part of another study")
        return self
