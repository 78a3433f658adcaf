"""What is recorded of a run. Workers send these to their controller over a pipe, so each is checked when it is read.

Times: every ``*_s`` or ``seconds`` is a duration.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

_RULES = ConfigDict(extra="forbid")
Reason = Literal["diverged", "exception", "out_of_memory", "worker_lost", "user_error", "timeout"]


@dataclass(frozen=True, config=_RULES)
class RunStarted:
    """A run begins (or, with ``resumed_step``, goes on from a checkpoint). ``adapt``: its policies and monitors.

    ``damaged``: what is wrong with each newer checkpoint, from which it did therefore not go on.
    """

    program: str
    config: dict[str, Any]
    seed: int
    means: dict[str, Any]
    context: dict[str, Any] = field(default_factory=dict)
    epochs: int | None = None
    resumed_step: int | None = None
    adapt: dict[str, list[str]] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)
    kind: Literal["run_started"] = "run_started"


@dataclass(frozen=True, config=_RULES)
class Reported:
    """``session.report``: metrics averaged over workers, after ``step`` steps, ``seconds`` of training so far.

    ``epoch``: completed training passes, of ``epochs`` that are planned (0: not known).
    """

    epoch: int
    step: int
    samples: int
    seconds: float
    metrics: dict[str, float]
    nth: int = 0  # of several reports at one position
    epochs: int = 0
    kind: Literal["reported"] = "reported"


@dataclass(frozen=True, config=_RULES)
class Checkpointed:
    """A checkpoint was written completely."""

    step: int
    path: str
    kind: Literal["checkpointed"] = "checkpointed"


@dataclass(frozen=True, config=_RULES)
class LinkMeasured:
    """One all-reduce among ``workers`` takes about ``latency_s + bytes * seconds_per_byte``."""

    workers: int
    latency_s: float
    seconds_per_byte: float
    kind: Literal["link_measured"] = "link_measured"


@dataclass(frozen=True, config=_RULES)
class DataContext:
    """Which data a run was trained on: ``samples`` of them, ``digest`` of the contents of some ("": not known).

    ``sample``: how one is made, such as "float32[1, 8, 8], int64[]". ``classes``: how many integer targets there are,
    ``largest_class``: the share of the most frequent one (0: not known).
    """

    samples: int = 0
    digest: str = ""
    sample: str = ""
    classes: int = 0
    largest_class: float = 0.0


@dataclass(frozen=True, config=_RULES)
class RunContext:
    """What a run could not choose. A worker tells of the device that it had; how many there were is told beside it.

    ``data``: the training set, ``parameters``: trainable ones of the model (0: none were seen). ``device``:
    "cpu" or "cuda"; ``processor``: the name of the one that computes; ``cores`` that the worker may use, by affinity
    and control group. ``link``: what workers would reach each other by.
    """

    data: DataContext
    parameters: int
    device: str
    processor: str
    cores: int
    link: str = ""
    software: dict[str, str] = field(default_factory=dict)

    @property
    def hardware(self) -> str:
        """All that decides how long a step takes here, in words."""
        return f"{self.device}, {self.processor}, {self.cores} cores, {self.link or 'no known link'}"


@dataclass(frozen=True, config=_RULES)
class RunFinished:
    """A run ended well. ``step_s`` is the median step, ``wait_s`` its part spent waiting for the reduction.

    ``evaluated_on``: how many samples metrics were measured on, where the program told.
    ``signals``: what its monitors said last, name -> (value, standard error or None). ``context`` is None where the run
    was simulated. ``epoch``: completed passes.
    """

    sha256: str
    workers: int
    steps: int
    samples: int
    seconds: float
    metrics: dict[str, float]
    step_s: float | None = None
    wait_s: float | None = None
    grad_bytes: int = 0
    stopped: Literal["complete", "max_steps", "until_epoch", "requested", "notice", "policy"] = "complete"
    signals: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    context: RunContext | None = None
    epoch: int = 0
    evaluated_on: dict[str, int] = field(default_factory=dict)
    kind: Literal["run_finished"] = "run_finished"


LONGEST_DETAIL = 10_000
"""Characters of an error that a record keeps: a worker's connection carries no line of any length."""


@dataclass(frozen=True, config=_RULES)
class RunFailed:
    """A run ended badly: ``detail`` is the last line of the error, ``log`` the tail of the worker's log."""

    reason: Reason
    detail: str
    rank: int
    exit_code: int | None = None
    log: str = ""
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

    worker: int
    version: int
    workers: int
    epoch: int
    start: int
    stop: int
    length: int
    first_step: int
    last_step: int
    kind: Literal["steps_taken"] = "steps_taken"


@dataclass(frozen=True, config=_RULES)
class Regrouped:
    """Rank 0 of a view tells what the change cost: ``pause_s``, the gap between the last step before it and the first
    step under it, less a median step; ``discarded`` steps had been begun and were done again."""

    version: int
    members: list[int]
    planned: bool
    step: int
    pause_s: float
    discarded: int
    kind: Literal["regrouped"] = "regrouped"


@dataclass(frozen=True, config=_RULES)
class Measured:
    """What a run's monitors said after ``step`` steps. ``signals``: name -> (value, standard error or None).

    Written at most a few times a second, and whenever something was decided. ``lr`` is the first parameter group's.
    """

    step: int
    epoch: int
    samples: int
    seconds: float
    workers: int
    batch_size: int
    lr: float
    signals: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    kind: Literal["measured"] = "measured"


@dataclass(frozen=True, config=_RULES)
class NotMeasured:
    """``monitor`` was to measure from step ``step`` on and cannot: ``why`` says what would have to differ."""

    monitor: str
    step: int
    why: str
    kind: Literal["not_measured"] = "not_measured"


@dataclass(frozen=True, config=_RULES)
class Decided:
    """What ``policy`` decided, and what became of it at the boundary after ``step`` steps.

    ``decision`` holds what is to change (the fields of ``core.signals.Decision``), ``cause`` what the policy saw.
    disagreed: workers decided differently, so nothing changed; refused: it could not be done, ``detail`` says why.
    """

    policy: str
    step: int
    decision: dict[str, Any]
    cause: Measured
    outcome: Literal["applied", "disagreed", "refused"]
    detail: str = ""
    kind: Literal["decided"] = "decided"


@dataclass(frozen=True, config=_RULES)
class PolicyFailed:
    """``hook`` of ``policy`` raised on ``worker``; the run went on unchanged. ``off``: it is not called any more."""

    policy: str
    hook: str
    step: int
    worker: int
    detail: str
    off: bool = False
    kind: Literal["policy_failed"] = "policy_failed"


@dataclass(frozen=True, config=_RULES)
class Restarted:
    """No worker was left that held the run's state: it went on from the checkpoint of ``step``, or from the start."""

    step: int
    kind: Literal["restarted"] = "restarted"


@dataclass(frozen=True, config=_RULES)
class MembershipEvent:
    """An event of the membership machine, as the machine reads it back: the whole history replays."""

    event: dict[str, Any]
    kind: Literal["membership_event"] = "membership_event"


@dataclass(frozen=True, config=_RULES)
class WorkerGone:
    """A worker of an elastic run has ended, and the run went on. ``log`` is the tail of what it printed."""

    worker: int
    how: Literal["lost", "left"]
    why: str
    code: int | None = None
    log: str = ""
    kind: Literal["worker_gone"] = "worker_gone"


@dataclass(frozen=True, config=_RULES)
class Straggling:
    """A worker keeps the others waiting: one line for people."""

    worker: int
    line: str
    kind: Literal["straggling"] = "straggling"


@dataclass(frozen=True, config=_RULES)
class FaultInjected:
    """Chaos did this to ``worker`` (None: to the run as a whole)."""

    fault: str
    worker: int | None = None
    kind: Literal["fault_injected"] = "fault_injected"
