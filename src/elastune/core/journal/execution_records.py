"""Records of how a run was executed: sync strategy, network links, topology, division of the model, compilation.

Every ``*_s`` or ``seconds`` is a duration.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from elastune.core.journal.run_records import Count, Number, Whole, Words

# Records of sync strategies.

_RULES = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_RULES)
class SyncChanged:
    """``sync`` replaced the sync strategy after ``step`` steps and ``seconds`` of training.

    ``why``: "schedule", "session.set_sync", or "policy" and its name.
    """

    step: Count
    sync: str
    why: Words
    seconds: float
    kind: Literal["sync_changed"] = "sync_changed"


@dataclass(frozen=True, config=_RULES)
class RoundsShortened:
    """A round of ``sync`` is longer than a pass over the data, of ``steps`` steps, so it ends with the pass."""

    sync: str
    steps: Count
    kind: Literal["rounds_shortened"] = "rounds_shortened"


@dataclass(frozen=True, config=_RULES)
class SyncChangesUnreached:
    """The run's schedule has ``changes`` of strategy after its end, which is planned, or was, after ``steps`` steps.

    ``changes`` are written as for ``--sync-schedule``.
    """

    changes: str
    steps: Count
    kind: Literal["sync_changes_unreached"] = "sync_changes_unreached"


@dataclass(frozen=True, config=_RULES)
class LearnerLeftOut:
    """A round ended without ``learner``, because its ``worker`` was lost or came too late (see its ``WorkerGone``).

    Attributes:
        worker: The worker of the learner; -1 where it is not known.
        version: The membership view of the round.
        first_step, last_step: The steps of the round, counted from 1.
        places: The samples that the learner should have used, as first and last place (exclusive) of the order of
            samples of ``epoch``. No step uses them.
    """

    learner: Count
    worker: Whole
    version: Count
    epoch: Count
    first_step: Count
    last_step: Count
    places: list[tuple[Count, Count]]
    kind: Literal["learner_left_out"] = "learner_left_out"

    @model_validator(mode="after")
    def _ascending(self) -> LearnerLeftOut:
        if self.first_step > self.last_step or any(start > stop for start, stop in self.places):
            raise ValueError("its first step and places must not come after its last")
        return self

    @property
    def samples(self) -> int:
        """The number of samples that were left out."""
        return sum(stop - start for start, stop in self.places)


# Records of the network and of the topology.

BY_CHECKPOINT = "the checkpoint"
"""The ``cause`` of a topology that a resumed run has from its checkpoint."""


@dataclass(frozen=True, config=_RULES)
class LinkMeasured:
    """One all-reduce among ``workers`` on ``hosts`` takes about ``latency_s + bytes * seconds_per_byte``."""

    workers: Count
    latency_s: float
    seconds_per_byte: float
    hosts: Count = 1
    kind: Literal["link_measured"] = "link_measured"


@dataclass(frozen=True, config=_RULES)
class TopologyChanged:
    """The sums of ``workers`` travel by ``topology`` after ``step`` steps and ``seconds`` of training.

    ``cause``: who asked for it, and why another topology was taken where that one was impossible.
    """

    step: Count
    topology: str
    workers: Count
    cause: str
    seconds: float
    kind: Literal["topology_changed"] = "topology_changed"


# Records of how a model is divided among the workers of a replica.


@dataclass(frozen=True, config=_RULES)
class StagesDivided:
    """The stages of a pipeline, in the order of layers.

    Attributes:
        names: The layer with which each stage begins.
        shares: The share of each stage in the whole cost.
        weighed: The kind of costs, such as "counted operations".
    """

    names: list[str]
    shares: list[float]
    weighed: str
    kind: Literal["stages_divided"] = "stages_divided"


@dataclass(frozen=True, config=_RULES)
class LayersDivided:
    """What the tensor axis divides, each layer into so many virtual ``blocks``.

    Attributes:
        divided: The trained numbers in divided blocks.
        whole: The trained numbers that every worker along the axis holds whole.
        apart: Outside of divided layers, each of these workers runs slots of its own.
    """

    blocks: Count
    divided: Count
    whole: Count
    apart: bool
    kind: Literal["layers_divided"] = "layers_divided"


# Records of compilers that run in a worker.


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Compiled:
    """``worker`` compiled parts of its model for ``seconds`` up to the end of ``step``, since its record before this
    one.

    The times of steps leave out steps with a compilation.
    """

    step: Count
    worker: Count
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    kind: Literal["compiled"] = "compiled"


# What is recorded of proofs that a program trains as its plain loop.


@dataclass(frozen=True, config=_RULES)
class Proved:
    """The ``proof`` that a run has: "checked" by ``elastune check``, or in its "first_step", which took ``seconds``.

    ``loss``: "mean" where it is a mean over samples; "unknown", "unequal mean" or "samples" where the proof could not
    tell, or where it is no certain mistake; "" for a check.
    """

    proof: Literal["checked", "first_step"]
    loss: Literal["", "mean", "unequal mean", "samples", "unknown"] = ""
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    kind: Literal["proved"] = "proved"


@dataclass(frozen=True, config=_RULES)
class TrialProved:
    """A trial has proved its first step. The proof counts for later trials with the same kind of loss."""

    trial: Number
    proof: Proved
    kind: Literal["trial_proved"] = "trial_proved"


# Records of verification (``core.plan.verification``).


@dataclass(frozen=True, config=_RULES)
class WorkerWrong:
    """A worker computes wrong: it leaves, and training goes back to a state that is known to be good.

    Attributes:
        worker: The worker.
        step: The step in which it was found, counted from 1.
        slot: The slot that several workers computed; None: the state of the workers was compared.
        leaf: The first tensor that differs.
        digests: Worker and digest (16 hexadecimal digits) of each computation, in order of time.
        always: It was wrong each time, and not once.
        host: The worker's host.
        device: The worker's device.
        good_step: Steps up to here were computed before the worker was last found right.
        why: The verdict in words.
    """

    worker: Whole
    step: Count
    slot: Count | None
    leaf: Words
    digests: list[tuple[Whole, Words]]
    always: bool
    host: Words
    device: Words
    good_step: Count
    why: Words
    kind: Literal["worker_wrong"] = "worker_wrong"


@dataclass(frozen=True, config=_RULES)
class VerificationEnded:
    """From ``step`` on no slot is computed twice; ``why`` says what was found, and ``leaf`` where."""

    step: Count
    leaf: Words
    why: Words
    kind: Literal["verification_ended"] = "verification_ended"


@dataclass(frozen=True, config=_RULES)
class StepsVerified:
    """At the end of a run: this many slots were computed twice with equal bits, up to step ``step``."""

    step: Count
    slots: Count
    kind: Literal["steps_verified"] = "steps_verified"
