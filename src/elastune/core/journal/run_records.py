"""Records of a run, from its start to its end, and the types of values that a record may have.

Workers send these records to their controller, so each is checked when it is read. A journal may be read years later
on another machine, so values are bounded. Every ``*_s`` or ``seconds`` is a duration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from elastune.core.formatting import printable
from elastune.core.run import CommandLine

JOURNAL_FORMAT: Literal[1] = 1
"""The format of journals that this release writes and reads; each start of a run or a study states it."""

# The types of values in records.

EXACT = 2**53  # up to here every whole number is a float, too
LAST_AT = 253_402_214_400.0  # 9999-12-31 in seconds since 1970: calendars go no further
Count = Annotated[int, Field(ge=0, le=EXACT)]
Number = Annotated[int, Field(ge=-1, le=EXACT)]
"""The number of a trial; -1 stands for a trial of another study."""
Words = Annotated[str, AfterValidator(printable)]
"""A reason or an error. It may hold the user's names and texts, and people read it on a terminal."""
Whole = Annotated[int, Field(ge=-(2**64), le=2**64)]
"""A seed, an exit code or a rank: a number for no arithmetic."""
Format = Literal[1]
"""``JOURNAL_FORMAT``: a start with another number is refused."""


def _having(kinds: Mapping[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Validate the values of a dict that ``kinds`` names, and leave the dict as it is."""
    adapters = {name: TypeAdapter(kind) for name, kind in kinds.items()}

    def check(values: dict[str, Any]) -> dict[str, Any]:
        for name in adapters.keys() & values.keys():
            try:
                adapters[name].validate_python(values[name])
            except ValidationError as error:
                first = error.errors(include_url=False, include_input=False)[0]
                raise ValueError(f"{'.'.join(map(str, (name, *first['loc'])))}: {first['msg']}") from None
        return values

    return check


ExecutionValues = Annotated[
    dict[str, Any],
    AfterValidator(
        _having({"workers": Count, "mechanism": str, "mesh": str | None, "sync": str, "sync_schedule": str})
    ),
]
"""The fields of ``core.run.ExecutionSettings``, and what else decided how a training was run."""
Settings = Annotated[
    dict[str, Any],
    AfterValidator(
        _having(
            {
                "kind": Literal["tune", "frontier"],
                "program": str | dict[str, str],
                "data": str | None,
                "arguments": list[str],
                "objectives": dict[str, Literal["max", "min"]],
                "workers": Count | list[Count],
                "trial_workers": tuple[Count, Count] | None,
                "seed": Whole,
                "epochs": Count | None,
                "stopping": str,
                "allocation": str,
                "execution": ExecutionValues,
                "defaults": dict[str, Any],
                "target": float | str | None,  # of a frontier the quality, of a study a comparison
                "until": list[str] | tuple[str, ...],
                "patience": Count | None,
                "divergence": float | None,
                "prices": str | None,
                "price_per_worker_hour": Annotated[float, Field(gt=0, le=1e15)],
            }
        )
    ),
]
"""What a study was asked: more than these keys, and not all of them."""


def check_at(at: float) -> float:
    """Return seconds since 1970 within the range of calendars. Raises ``ValueError``."""
    if not 0 <= at <= LAST_AT:
        raise ValueError(f"at: must be from 0 to {LAST_AT:.0f} seconds since 1970")
    return at


# Records of a run.

_RULES = ConfigDict(extra="forbid")
Reason = Literal["diverged", "exception", "out_of_memory", "worker_lost", "user_error", "timeout", "interrupted"]


@dataclass(frozen=True, config=_RULES)
class RunStarted:
    """A run begins or, with ``resumed_step``, goes on from a checkpoint.

    Attributes:
        adapt: Its policies and monitors.
        damaged: The damage of each newer checkpoint, from which it therefore did not go on.
        data: The folder of data sets that the user gave.
        sync: The sync strategy.
        start_from, from_dcp: The sources of its initial weights.
        command: The command line that began it; None: a Python program began it.
        source: The digests of its program (``train.program.source``); empty: not known.
        arguments: The program's own command line.
        defaults: The program's own config, of which ``config`` has the changed values.
        format: The format of the journal.
    """

    program: str
    config: dict[str, Any]
    seed: Whole
    execution: ExecutionValues
    context: dict[str, Any] = field(default_factory=dict)
    epochs: Count | None = None
    resumed_step: Count | None = None
    adapt: dict[str, list[str]] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    data: str | None = None
    sync: str = "allreduce"
    sync_schedule: str = ""
    max_steps: Count | None = None
    start_from: dict[str, Any] | None = None
    from_dcp: str | None = None
    command: CommandLine | None = None
    source: dict[str, dict[str, str]] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    defaults: dict[str, Any] = field(default_factory=dict)
    format: Format = JOURNAL_FORMAT
    kind: Literal["run_started"] = "run_started"


@dataclass(frozen=True, config=_RULES)
class Adopted:
    """A new controller took over a run whose controller had died.

    Attributes:
        workers: The workers that came back within ``seconds`` of the new controller's start, in or after step ``step``.
        lost: Members of the newest view that did not come back.
        grace_s: The seconds for which workers looked for a controller; 0: not known.
    """

    workers: list[Count]
    step: Count
    seconds: float
    lost: list[Count] = field(default_factory=list)
    grace_s: Annotated[float, Field(ge=0)] = 0.0
    kind: Literal["adopted"] = "adopted"


@dataclass(frozen=True, config=_RULES)
class Reported:
    """``session.report``: metrics averaged over workers, after ``step`` steps and ``seconds`` of training.

    ``epoch``: the completed epochs of ``epochs`` planned ones (0: not known).
    """

    epoch: Count
    step: Count
    samples: Count
    seconds: float
    metrics: dict[str, float]
    nth: Count = 0  # of several reports at one position
    epochs: Count = 0
    kind: Literal["reported"] = "reported"


@dataclass(frozen=True, config=_RULES)
class Checkpointed:
    """A checkpoint was written completely.

    Attributes:
        dropped: The steps of the checkpoints that were deleted for it (``core.checkpoint_keeping``).
        low: Why the disk may have no room for further ones; "": it has room.
    """

    step: Count
    path: str
    dropped: list[Count] = field(default_factory=list)
    low: Words = ""
    kind: Literal["checkpointed"] = "checkpointed"


@dataclass(frozen=True, config=_RULES)
class CheckpointFailed:
    """A checkpoint was not written: a disk, or the connection to it, had no room, or a worker was lost (``why``).

    The run goes on, and older checkpoints stay. ``newest``: the step of the newest of them; None: not known.
    """

    step: Count
    why: Words
    newest: Count | None = None
    kind: Literal["checkpoint_failed"] = "checkpoint_failed"


@dataclass(frozen=True, config=_RULES)
class DataContext:
    """The training data of a run.

    Attributes:
        samples: The number of samples.
        digest: The digest of the contents of some samples; "": not known.
        sample: The form of a sample, such as "float32[1, 8, 8], int64[]".
        classes: The number of integer targets.
        largest_class: The share of the most frequent target; 0: not known.
    """

    samples: Count = 0
    digest: str = ""
    sample: str = ""
    classes: Count = 0
    largest_class: float = 0.0


@dataclass(frozen=True, config=_RULES)
class RunContext:
    """The machine and the data of a run. A worker reports its own device; the number of workers stands in other
    records.

    Attributes:
        data: The training set.
        parameters: The trainable parameters of the model; 0: none were seen.
        device: "cpu" or "cuda".
        processor: The name of the processor that computes.
        cores: The cores that the worker may use, by affinity and control group.
        link: The interface by which workers reach each other.
    """

    data: DataContext
    parameters: Count
    device: str
    processor: str
    cores: Count
    link: str = ""
    software: dict[str, str] = field(default_factory=dict)

    @property
    def hardware(self) -> str:
        """Everything that decides the time of a step here, in words."""
        return f"{self.device}, {self.processor}, {self.cores} cores, {self.link or 'no known link'}"


@dataclass(frozen=True, config=_RULES)
class WorkerSteps:
    """The steps of the worker of ``rank`` at a run's end: mean seconds, with and without the wait for the reduction.

    ``share``: its ``busy_s`` over that of the slowest worker.
    """

    rank: Count
    step_s: float
    busy_s: float
    share: float


@dataclass(frozen=True, config=_RULES)
class WorkerMemory:
    """Bytes in the memory of the worker of ``rank``, measured in one step.

    Attributes:
        parameters: Parameters and buffers.
        optimizer: Optimizer state. ``copies`` of it serve as a reserve if another worker dies.
        activations: The most that the step needed beside these: activations, buffers of the reduction, and memory of
            the optimizer's step; None: the system does not report it.
        peak: The most of the whole process, or on a GPU of torch's allocator, so far.
    """

    rank: Count
    parameters: Count
    gradients: Count
    optimizer: Count
    copies: Count
    activations: Count | None = None
    peak: Count = 0


@dataclass(frozen=True, config=_RULES)
class RunFinished:
    """A run ended well.

    Attributes:
        metrics: The last value of each reported metric.
        seconds: Training time.
        step_s: The median time of a step.
        wait_s: The part of it in which the worker waited for the reduction.
        signals: The monitors' last signals, by name: (value, standard error or None).
        context: The machine and the data; None where the run was simulated.
        epoch: Completed epochs.
        evaluated_on: The number of samples behind the metrics, where the program reported it.
        hosts: The number of hosts of its workers at the end.
        sent_bytes: The bytes of all workers' collectives for a step, on average.
        stop_why: The reason that the program gave to ``session.stop``, or which worker got notice and from whom.
    """

    sha256: str
    workers: Count
    steps: Count
    samples: Count
    seconds: float
    metrics: dict[str, float]
    step_s: float | None = None
    wait_s: float | None = None
    grad_bytes: Count = 0
    stopped: Literal["complete", "max_steps", "until_epoch", "requested", "notice", "policy", "program"] = "complete"
    signals: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    context: RunContext | None = None
    epoch: Count = 0
    evaluated_on: dict[str, Count] = field(default_factory=dict)
    worker_steps: list[WorkerSteps] = field(default_factory=list)
    memory: list[WorkerMemory] = field(default_factory=list)
    hosts: Count = 1
    sent_bytes: float = 0.0
    stop_why: Words = ""
    kind: Literal["run_finished"] = "run_finished"


LONGEST_DETAIL = 10_000
"""Characters of an error that a record keeps: a worker's connection carries no line of any length."""


@dataclass(frozen=True, config=_RULES)
class RunFailed:
    """A run ended badly: ``detail`` is the last line of the error, ``log`` the tail of the worker's log.

    ``wanted_bytes``: the size of the failed allocation, where memory ran out and the error names it.
    """

    reason: Reason
    detail: Words
    rank: Whole
    exit_code: Whole | None = None
    log: str = ""
    wanted_bytes: Count | None = None
    kind: Literal["run_failed"] = "run_failed"


@dataclass(frozen=True, config=_RULES)
class StepsCompleted:
    """Worker ``worker`` claims: steps ``first_step`` to ``last_step`` (from 1) were completed under view
    ``version``.

    They used the places ``start`` to ``stop`` (exclusive) of the order of samples of ``epoch``. An epoch uses
    ``length`` of them: all, or all but those that ``drop_last`` leaves out; 0: not known, as of a stream. Each step's
    reduction brought the number and the checksum of its samples from all workers, and they were right. Every member of
    a view makes this claim for itself. A worker that takes over another's state also makes the claims that the other
    had not sent, so a death loses no claim.
    """

    worker: Whole
    version: Count
    workers: Count
    epoch: Count
    start: Count
    stop: Count
    length: Count
    first_step: Count
    last_step: Count
    kind: Literal["steps_taken"] = "steps_taken"

    @model_validator(mode="after")
    def _ascending(self) -> StepsCompleted:
        if not (self.first_step <= self.last_step and self.start <= self.stop):
            raise ValueError("its first step and place must not come after its last")
        return self


@dataclass(frozen=True, config=_RULES)
class Regrouped:
    """Rank 0 of a view reports the cost of the change.

    Attributes:
        pause_s: The time from the last step before the change to the first step after it, less a median step.
        discarded: The steps that had begun and were repeated.
        mesh: The mesh of the view, where a replica lies on several workers.
    """

    version: Count
    members: list[Count]
    planned: bool
    step: Count
    pause_s: float
    discarded: Count
    mesh: str = ""
    kind: Literal["regrouped"] = "regrouped"


ChangePart = Literal[
    "noticed", "view known", "old group left", "connected", "compared", "state in place", "formed anew", "first step"
]


@dataclass(frozen=True, config=_RULES)
class ChangeTimed:
    """What a worker did between its last step before a change of workers and its first one after it.

    Every worker that trained before and after the change sends one, by its own clock.

    Attributes:
        version: The number of the view.
        worker: The number of the worker.
        step: The first step in the view.
        parts_ms: Milliseconds that each part took, in order. ``noticed``: until the worker notices that its group is
            broken, or reaches the step boundary of a planned change. ``view known``: until the coordinator's view
            arrives. ``old group left``: until no operation of the old group runs. ``connected``: until the new group
            has formed. ``compared``: until all members know how far each is. ``state in place``: until results and
            state have moved. ``formed anew``: the same again, where a newer view came meanwhile. ``first step``: until
            the sum of the first step is here.
    """

    version: Count
    worker: Count
    step: Count
    parts_ms: dict[ChangePart, float]
    kind: Literal["change_timed"] = "change_timed"


@dataclass(frozen=True, config=_RULES)
class Measured:
    """The signals of a run's monitors after ``step`` steps: name -> (value, standard error or None).

    Written at most a few times a second, and with every decision. ``lr`` belongs to the first parameter group.
    """

    step: Count
    epoch: Count
    samples: Count
    seconds: float
    workers: Count
    batch_size: Count
    lr: float
    signals: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    kind: Literal["measured"] = "measured"


@dataclass(frozen=True, config=_RULES)
class NotMeasured:
    """``monitor`` was to measure from step ``step`` on and cannot. ``why``: what would have to differ."""

    monitor: str
    step: Count
    why: Words
    kind: Literal["not_measured"] = "not_measured"


@dataclass(frozen=True, config=_RULES)
class Decided:
    """A decision of ``policy``, and its outcome at the boundary after ``step`` steps.

    ``decision`` holds the changes (the fields of ``core.decisions.Decision``), ``cause`` the values that the policy
    read. disagreed: workers decided differently, so nothing changed. refused: it was impossible, and ``detail`` has the
    reason.
    """

    policy: str
    step: Count
    decision: dict[str, Any]
    cause: Measured
    outcome: Literal["applied", "disagreed", "refused"]
    detail: Words = ""
    kind: Literal["decided"] = "decided"


@dataclass(frozen=True, config=_RULES)
class PolicyFailed:
    """``hook`` of ``policy`` raised on ``worker``; the run went on unchanged. ``off``: the policy is not called any
    more.
    """

    policy: str
    hook: str
    step: Count
    worker: Whole
    detail: Words
    off: bool = False
    kind: Literal["policy_failed"] = "policy_failed"


@dataclass(frozen=True, config=_RULES)
class Restarted:
    """No worker with the run's state was left: the run went on from the checkpoint of ``step``, or from the start.

    Attributes:
        step: The last step that was not repeated.
        repeated: How many completed steps were lost, and are done again.
        pause_s: The time from the loss of the last worker until others held the state; 0.0 where it is not known.
    """

    step: Count
    repeated: Count = 0
    pause_s: float = 0.0
    kind: Literal["restarted"] = "restarted"


@dataclass(frozen=True, config=_RULES)
class StateLost:
    """All workers that held a piece of the state after ``step`` steps are lost: all go back to the newest
    checkpoint.

    ``names``: the tensors of these pieces (the first of them, in order of their names).
    """

    step: Count
    names: list[str]
    kind: Literal["state_lost"] = "state_lost"


@dataclass(frozen=True, config=_RULES)
class MembershipEvent:
    """An event of the membership machine, as the machine reads it back: the whole history replays."""

    event: dict[str, Any]
    kind: Literal["membership_event"] = "membership_event"


@dataclass(frozen=True, config=_RULES)
class WorkerGone:
    """A worker of an elastic run has ended, and the run went on. ``log`` is the tail of what it printed."""

    worker: Whole
    how: Literal["lost", "left"]
    why: Words
    code: Whole | None = None
    log: str = ""
    kind: Literal["worker_gone"] = "worker_gone"


@dataclass(frozen=True, config=_RULES)
class StragglerDetected:
    """A worker keeps the others waiting: one line for people."""

    worker: Whole
    line: Words
    kind: Literal["straggler_detected"] = "straggler_detected"


@dataclass(frozen=True, config=_RULES)
class StreamPriced:
    """A stream lacks what would let workers read parts of it, or go on in the middle of one; ``line``: the price."""

    line: Words
    kind: Literal["stream_priced"] = "stream_priced"


@dataclass(frozen=True, config=_RULES)
class ConnectionsRefused:
    """``count`` connections from ``host`` to a run's coordinator were refused for the same reason."""

    host: str
    why: Words
    times: Count
    kind: Literal["connections_refused"] = "connections_refused"


@dataclass(frozen=True, config=_RULES)
class FaultInjected:
    """A chaos test did this to ``worker`` (None: to the run as a whole)."""

    fault: Words
    worker: Whole | None = None
    kind: Literal["fault_injected"] = "fault_injected"


# Records of initial weights.


@dataclass(frozen=True, config=_RULES)
class StartedFrom:
    """A model begins with tensors of another model.

    Attributes:
        source: The folder or file of the tensors.
        sha256: Its digest.
        taken: The number of tensors taken.
        fresh: Names of this model that keep their initial values, and why.
        unused: The number of the source's tensors that were not taken.
        begins: The SHA-256 of the complete initial state; "" where it was not computed.
        worker_seconds: The worker-seconds of the source's training; None: no journal beside it records them.
    """

    source: str
    sha256: str
    taken: Count
    fresh: dict[str, str] = field(default_factory=dict)
    unused: Count = 0
    begins: str = ""
    worker_seconds: float | None = None
    kind: Literal["started_from"] = "started_from"


@dataclass(frozen=True, config=_RULES)
class TrialStartedFrom:
    """A trial took another model's weights: by its own program, or because its study began so."""

    trial: Number
    start: StartedFrom
    kind: Literal["trial_started_from"] = "trial_started_from"


# Records of accepted changes.


@dataclass(frozen=True, config=_RULES)
class ChangesAccepted:
    """``--accept-changes``: from here on a run or a study goes on with another program or other data.

    Attributes:
        what: The changes, a text each: "train.py, line 12, in build", "data: 960 samples, had 1,920".
        step: Of a run: the last step before them.
        epoch: Of a run: the completed epochs by then.
        first_trial: Of a study: trials with lower numbers began before them.
    """

    what: list[str] = field(default_factory=list)
    step: Count = 0
    epoch: Count = 0
    first_trial: Count = 0
    kind: Literal["changes_accepted"] = "changes_accepted"


# Records of paid hosts and planned steps.


@dataclass(frozen=True, config=_RULES)
class StepsPlanned:
    """The run will have taken ``steps`` steps in all at the end of its epochs, if its batch stays the same."""

    steps: Count
    kind: Literal["steps_planned"] = "steps_planned"


@dataclass(frozen=True, config=_RULES)
class HostsHeld:
    """The hosts that cost money from now on, by their kind ("" where hosts report none).

    Attributes:
        workers: The workers of the run, starting ones included.
        room: The room for workers on all hosts that it may use, these workers included.
    """

    workers: dict[str, Count]
    room: dict[str, Count]
    kind: Literal["hosts_held"] = "hosts_held"


# Records of predictions: by the run itself, and by kept trials long after it.


@dataclass(frozen=True, config=_RULES)
class PredictionsKept:
    """The model's outputs on the data set ``name`` lie in the run's folder, after ``step`` steps.

    The file has ``samples`` outputs, ``size`` bytes and this ``sha256``. Newer outputs under the same name replace it.
    """

    name: str
    step: Count
    samples: Count
    size: Count
    sha256: str
    kind: Literal["predictions_kept"] = "predictions_kept"


@dataclass(frozen=True, config=_RULES)
class PredictionsAdded:
    """The outputs of a kept trial's model on the data set ``name`` were stored, long after its training.

    The file has this ``sha256``. With it, the kept files of the trial have ``size`` bytes.
    """

    trial: Number
    name: str
    samples: Count
    size: Count
    sha256: str
    kind: Literal["predictions_added"] = "predictions_added"
