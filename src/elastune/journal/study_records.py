"""What is recorded of a study or a frontier: its trials from their start to their end, and what was concluded."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from elastune.journal.run_records import Adopted, Regrouped, Reported, RunFinished
from elastune.journal.values import Count, MeansUsed, Number, Settings, Whole

_RULES = ConfigDict(extra="forbid")
Phase = Literal["search", "calibrate", "naive", "confirm", "member"]
"""What a trial is run for; "member": a model of given settings, for an ensemble or a tree of classes."""


@dataclass(frozen=True, config=_RULES)
class StudyStarted:
    """A study begins or is resumed. ``settings`` is the complete, JSON-able request."""

    settings: Settings
    context: dict[str, Any] = field(default_factory=dict)
    resumed: bool = False
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
    context to this study's, from 0 to 1, see ``search.analysis``; ``differs``: in what. ``told``: what samplers take
    for its results; ``proposed``: the parameters of those that are tried first.
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
    steps: list[tuple[Count, Count, Annotated[float, Field(gt=0, le=1e15)]]]
    most: Count
    why: str
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
    means: MeansUsed
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
    ``cost`` so much in all (None: prices were not asked for; see ``job.meter``)."""

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
    reason: str = ""
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
    reason: str = ""
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
    reason: str = ""
    kind: Literal["trial_reallocated"] = "trial_reallocated"


@dataclass(frozen=True, config=_RULES)
class TrialSeen:
    """A running trial has completed ``step`` steps. Its workers have changed: two such looks tell its speed on them."""

    trial: Number
    step: Count
    kind: Literal["trial_seen"] = "trial_seen"


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
    reason: str = ""
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
    """The step-time model of ``plan.step_time``, fitted here. ``errors``: predicted over measured, by what.

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
class FrontierRow:
    """One cell of the trade-off table: settings, workers and how they stand, and what they reach.

    ``quality`` is the mean over ``seeds`` of the quality metric on data the search never saw (``held_out``) or, where
    the program reports none, on its validation data; ``ci`` is its 95 % confidence interval, of seeds and, where the
    number of ``test_samples`` is known, of the test set. ``loss``: by how much it is worse than the baseline's with the
    same ``pairs`` of seeds, ``loss_bound`` its one-sided 95 % bound, compared with ``margin``. ``verdict``: whether it
    is shown to be at the target or, without one, no worse than the baseline's by more than the margin.
    ``quality_label``: measured by trainings on so many workers, or emulated, by trainings on fewer that work as these
    would; ``num_slots`` belongs to the settings, since a slot has its own random stream and batch statistics.
    ``seconds`` is the time of the whole training; the model's may be off by ``seconds_factor`` either way (1.0:
    measured; None: the model could not be checked). ``throughput``: samples a second. ``time_to_target_s``: the mean
    over seeds, None unless all have ``reached`` the target, with its 95 % interval over seeds.
    ``noise_scale``, in samples, is that at the end of training, ``noise_scale_error`` its standard error.
    """

    role: Literal["naive", "tuned"]
    workers: Count
    batch_size: Count
    lr: float
    lr_rule: str
    mechanism: str
    mesh: str
    mode: str
    config: dict[str, Any]
    quality: float
    ci: tuple[float, float] | None
    seeds: Count
    held_out: bool
    validation: float
    seconds: float
    seconds_label: Literal["measured", "modelled"]
    cost: float
    verdict: Literal["holds", "not shown", "falls"] = "not shown"
    loss: float | None = None
    loss_bound: float | None = None
    margin: float | None = None
    pairs: Count = 0
    test_samples: Count | None = None
    seconds_factor: float | None = 1.0
    throughput: float | None = None
    time_to_target_s: float | None = None
    time_to_target_ci: tuple[float, float] | None = None
    reached: Count = 0
    on_front: bool = False
    diverged: Count = 0
    trials: list[Count] = field(default_factory=list)
    noise_scale: float | None = None
    noise_scale_error: float | None = None
    quality_label: Literal["measured", "emulated"] = "measured"
    num_slots: Count = 1

    @property
    def division(self) -> str:
        """How its workers divide the model: "shard=4, zero"; "" where each of them has all of it."""
        return "" if self.mechanism == "replicated" else f"{self.mesh}, {self.mechanism}"


@dataclass(frozen=True, config=_RULES)
class FrontierReason:
    """Why the answer is as it is. ``weight``: it decides, or it is a hint that the trainings outweigh."""

    weight: Literal["decides", "hint"]
    text: str


@dataclass(frozen=True, config=_RULES)
class FrontierFound:
    """The answer of ``elastune frontier``: the rows, the pick among them and the command that trains it.

    ``command`` repeats ``command_trial``, one training of the pick's row, with the same seed: ``command_metrics`` are
    what it reports, ``command_note`` says so.
    ``answer`` is the one conclusion, ``reasons`` what it rests on. ``model_errors``: predicted over measured of the
    step-time model, by what; ``links``: those of the model "within a host" and "across hosts", where there are several
    hosts. Hypervolumes are of naive rows, and of the search's points alone; ``hypervolume_note``
    says at which budget. ``prices_change``: ``price_per_worker_hour`` is that of the beginning.
    """

    quality: str
    direction: Literal["max", "min"]
    target: float | None
    price_per_worker_hour: float
    rows: list[FrontierRow]
    hypervolume_naive: float
    hypervolume_tuned: float
    answer: str
    pick: Count | None = None
    command: str = ""
    command_trial: Count | None = None
    command_metrics: dict[str, float] = field(default_factory=dict)
    command_note: str = ""
    reasons: list[FrontierReason] = field(default_factory=list)
    model_errors: dict[str, float] = field(default_factory=dict)
    hypervolume_note: str = ""
    links: dict[str, LinkFitted] = field(default_factory=dict)
    prices_change: bool = False
    kind: Literal["frontier_found"] = "frontier_found"

    @model_validator(mode="after")
    def _picks_a_row(self) -> FrontierFound:
        if self.pick is not None and self.pick >= len(self.rows):
            raise ValueError("pick: must be the number of a row")
        return self


@dataclass(frozen=True, config=_RULES)
class StudyFinished:
    """The study ended: by its budget, by exhaustion of the space, or on request."""

    reason: str
    seconds: float
    kind: Literal["study_finished"] = "study_finished"
