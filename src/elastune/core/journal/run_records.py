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

# What values of a record may be: a journal is read years later, elsewhere, by programs that reckon with them.

EXACT = 2**53  # up to here every whole number is a float, too
LAST_AT = 253_402_214_400.0  # 9999-12-31 in seconds since 1970: calendars go no further
Count = Annotated[int, Field(ge=0, le=EXACT)]
Number = Annotated[int, Field(ge=-1, le=EXACT)]
"""Of a trial; -1 stands for one of another study."""
Words = Annotated[str, AfterValidator(printable)]
"""A reason, an error: names and texts of the user's may be in it, and people read it on a terminal."""
Whole = Annotated[int, Field(ge=-(2**64), le=2**64)]
"""A seed, an exit code, a rank: not to be reckoned with."""


def _having(kinds: Mapping[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Leaves a dict as it is, once those of its values that ``kinds`` names are of their kinds."""
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
    """Seconds since 1970 that a calendar has. Raises ``ValueError`` for others."""
    if not 0 <= at <= LAST_AT:
        raise ValueError(f"at: must be from 0 to {LAST_AT:.0f} seconds since 1970")
    return at


# What is recorded of a run. Workers send these to their controller over a pipe, so each is checked when it is read.
#
# Times: every ``*_s`` or ``seconds`` is a duration.

_RULES = ConfigDict(extra="forbid")
Reason = Literal["diverged", "exception", "out_of_memory", "worker_lost", "user_error", "timeout", "interrupted"]


@dataclass(frozen=True, config=_RULES)
class RunStarted:
    """A run begins (or, with ``resumed_step``, goes on from a checkpoint). ``adapt``: its policies and monitors.

    ``damaged``: what is wrong with each newer checkpoint, from which it did therefore not go on. ``data``: the folder
    of data sets that it was told. ``sync``: how its workers agree. ``start_from``, ``from_dcp``: with whose weights it
    began. ``command``: the command line that it was begun by; None: a Python program. ``source``: its program's, see
    ``train.program.source``; empty: not known. ``arguments``: the program's own command line.
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
    kind: Literal["run_started"] = "run_started"


@dataclass(frozen=True, config=_RULES)
class Adopted:
    """A controller has taken over a run that goes on, whose controller had died: ``workers`` came back within
    ``seconds`` of its start, in or after step ``step``. ``lost``: members of the newest view that did not; ``grace_s``:
    for how long they would have looked for it (0: not told)."""

    workers: list[Count]
    step: Count
    seconds: float
    lost: list[Count] = field(default_factory=list)
    grace_s: Annotated[float, Field(ge=0)] = 0.0
    kind: Literal["adopted"] = "adopted"


@dataclass(frozen=True, config=_RULES)
class Reported:
    """``session.report``: metrics averaged over workers, after ``step`` steps, ``seconds`` of training so far.

    ``epoch``: completed training passes, of ``epochs`` that are planned (0: not known).
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
    """A checkpoint was written completely."""

    step: Count
    path: str
    kind: Literal["checkpointed"] = "checkpointed"


@dataclass(frozen=True, config=_RULES)
class CheckpointFailed:
    """There was no room for a checkpoint, on a disk or on the way (``why``); the run goes on, and older ones stay."""

    step: Count
    why: Words
    kind: Literal["checkpoint_failed"] = "checkpoint_failed"


@dataclass(frozen=True, config=_RULES)
class DataContext:
    """Which data a run was trained on: ``samples`` of them, ``digest`` of the contents of some ("": not known).

    ``sample``: how one is made, such as "float32[1, 8, 8], int64[]". ``classes``: how many integer targets there are,
    ``largest_class``: the share of the most frequent one (0: not known).
    """

    samples: Count = 0
    digest: str = ""
    sample: str = ""
    classes: Count = 0
    largest_class: float = 0.0


@dataclass(frozen=True, config=_RULES)
class RunContext:
    """What a run could not choose. A worker tells of the device that it had; how many there were is told beside it.

    ``data``: the training set, ``parameters``: trainable ones of the model (0: none were seen). ``device``:
    "cpu" or "cuda"; ``processor``: the name of the one that computes; ``cores`` that the worker may use, by affinity
    and control group. ``link``: what workers would reach each other by.
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
        """All that decides how long a step takes here, in words."""
        return f"{self.device}, {self.processor}, {self.cores} cores, {self.link or 'no known link'}"


@dataclass(frozen=True, config=_RULES)
class WorkerSteps:
    """Steps of the worker of ``rank`` at a run's end: mean seconds, and without what it waited for the reduction.

    ``share``: ``busy_s`` over that of the slowest worker.
    """

    rank: Count
    step_s: float
    busy_s: float
    share: float


@dataclass(frozen=True, config=_RULES)
class WorkerMemory:
    """Bytes in the memory of the worker of ``rank``, measured in one step.

    ``parameters``: with buffers. ``optimizer``: its state, of which ``copies`` are there in case another worker dies.
    ``activations``: the most that the step needed beside all these: activations, buffers of the reduction, what the
    optimizer's step sets up (None: the system does not tell). ``peak``: the most that the whole process, or on a GPU
    torch's allocator, ever had.
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
        wait_s: The part of it that was spent waiting for the reduction.
        signals: The monitors' last signals, by name: (value, standard error or None).
        context: What the run could not choose; None where the run was simulated.
        epoch: Completed training passes.
        evaluated_on: How many samples metrics were measured on, where the program told.
        hosts: On how many hosts its workers were at the end.
        sent_bytes: What the collectives of all its workers sent for a step, on average.
        stop_why: What the program gave to ``session.stop``.
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

    ``wanted_bytes``: of the allocation that failed, where memory ran out and the error tells.
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
    """Worker ``worker`` says: steps ``first_step`` to ``last_step`` (counted from 1) were completed under ``version``.

    They used the places ``start`` to ``stop`` (exclusive) of the order of samples of ``epoch``, whose training pass
    uses ``length`` of them (all, or all but what ``drop_last`` leaves out; 0: nobody knows, as of a stream). Each
    step's reduction brought the number and the checksum of its samples from all workers, and they were right. Every
    member of a version says this for itself, and who takes over a worker's state says what that one had not told yet,
    so a death loses no claim.
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
    """Rank 0 of a view tells what the change cost: ``pause_s``, the gap between the last step before it and the first
    step under it, less a median step; ``discarded`` steps had been begun and were done again. ``mesh``: how they stand,
    where a replica lies on several."""

    version: Count
    members: list[Count]
    planned: bool
    step: Count
    pause_s: float
    discarded: Count
    mesh: str = ""
    kind: Literal["regrouped"] = "regrouped"


@dataclass(frozen=True, config=_RULES)
class Measured:
    """What a run's monitors said after ``step`` steps. ``signals``: name -> (value, standard error or None).

    Written at most a few times a second, and whenever something was decided. ``lr`` is the first parameter group's.
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
    """``monitor`` was to measure from step ``step`` on and cannot: ``why`` says what would have to differ."""

    monitor: str
    step: Count
    why: Words
    kind: Literal["not_measured"] = "not_measured"


@dataclass(frozen=True, config=_RULES)
class Decided:
    """What ``policy`` decided, and what became of it at the boundary after ``step`` steps.

    ``decision`` holds what is to change (the fields of ``core.signals.Decision``), ``cause`` what the policy saw.
    disagreed: workers decided differently, so nothing changed; refused: it could not be done, ``detail`` says why.
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
    """``hook`` of ``policy`` raised on ``worker``; the run went on unchanged. ``off``: it is not called any more."""

    policy: str
    hook: str
    step: Count
    worker: Whole
    detail: Words
    off: bool = False
    kind: Literal["policy_failed"] = "policy_failed"


@dataclass(frozen=True, config=_RULES)
class Restarted:
    """No worker was left that held the run's state: it went on from the checkpoint of ``step``, or from the start."""

    step: Count
    kind: Literal["restarted"] = "restarted"


@dataclass(frozen=True, config=_RULES)
class StateLost:
    """Every worker that held some piece of the state after ``step`` steps has gone: all go back to the newest
    checkpoint. ``names``: of which tensors (the first of them, in order of their names)."""

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
class ConnectionsRefused:
    """Connections from ``host`` to a run's coordinator were refused: so many, for the same reason."""

    host: str
    why: Words
    times: Count
    kind: Literal["connections_refused"] = "connections_refused"


@dataclass(frozen=True, config=_RULES)
class FaultInjected:
    """Chaos did this to ``worker`` (None: to the run as a whole)."""

    fault: Words
    worker: Whole | None = None
    kind: Literal["fault_injected"] = "fault_injected"


# What is recorded of a training that begins with another model's weights.


@dataclass(frozen=True, config=_RULES)
class StartedFrom:
    """A model begins with tensors of another model.

    Attributes:
        source: The folder or file that they are from.
        sha256: Its digest.
        taken: How many tensors were taken.
        fresh: Names of this model that keep their initial values, and why.
        unused: How many of the source's tensors were not taken.
        begins: The SHA-256 of all that the model has then; "" where it was not computed.
        worker_seconds: The worker-seconds of the source's training; None: no journal beside it tells.
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
    """A trial has taken another model's weights, by itself or because its study was begun so."""

    trial: Number
    told: StartedFrom
    kind: Literal["trial_started_from"] = "trial_started_from"


# What is recorded where a run or a study goes on with another program or other data than it was begun with.


@dataclass(frozen=True, config=_RULES)
class ChangesAccepted:
    """``--accept-changes``: from here on a run or a study goes on with what had changed.

    Attributes:
        what: The changes, a text each: "train.py, line 12, in build", "data: 960 samples, had 1,920".
        step: Of a run: the last step before them.
        epoch: Of a run: how many epochs were completed by then.
        first_trial: Of a study: trials with lower numbers began before them.
    """

    what: list[str] = field(default_factory=list)
    step: Count = 0
    epoch: Count = 0
    first_trial: Count = 0
    kind: Literal["changes_accepted"] = "changes_accepted"


# What is recorded of what a run holds and is to take: hosts that are paid for, steps that are planned.


@dataclass(frozen=True, config=_RULES)
class StepsPlanned:
    """The run will have taken ``steps`` steps in all when its epochs are over, if its batch stays as it is."""

    steps: Count
    kind: Literal["steps_planned"] = "steps_planned"


@dataclass(frozen=True, config=_RULES)
class HostsHeld:
    """What is paid for from now on, by the kind of host ("" where hosts do not tell theirs): ``workers`` of the run,
    those that are starting included, and ``room`` for workers on all hosts that it may use, theirs included."""

    workers: dict[str, Count]
    room: dict[str, Count]
    kind: Literal["hosts_held"] = "hosts_held"


# What is recorded of models' predictions: of the run that makes them, and of kept trials long after it.


@dataclass(frozen=True, config=_RULES)
class PredictionsKept:
    """The model's outputs on the ``samples`` of the data set ``name``, after ``step`` steps, lie in the run's folder:
    a file of ``size`` bytes with this ``sha256``. Later ones of the same name have taken its place."""

    name: str
    step: Count
    samples: Count
    size: Count
    sha256: str
    kind: Literal["predictions_kept"] = "predictions_kept"


@dataclass(frozen=True, config=_RULES)
class PredictionsAdded:
    """A kept trial's model has been asked about the data set ``name``, whoever trained it long before: the file has
    this ``sha256``, and with it all that stays of the trial has ``size`` bytes."""

    trial: Number
    name: str
    samples: Count
    size: Count
    sha256: str
    kind: Literal["predictions_added"] = "predictions_added"
