"""Records of how a run was executed: sync strategy, network links, topology, division of the model, compilation.

Every ``*_s`` or ``seconds`` is a duration.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from elastune.core.journal.run_records import Count, Whole, Words

# What is recorded of how a run's workers agree.

_RULES = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_RULES)
class SyncChanged:
    """After ``step`` steps and ``seconds`` of training ``sync`` took the place of how workers had agreed.

    ``why``: "schedule", "session.set_sync", or "policy" and its name.
    """

    step: Count
    sync: str
    why: Words
    seconds: float
    kind: Literal["sync_changed"] = "sync_changed"


@dataclass(frozen=True, config=_RULES)
class RoundsShortened:
    """A round of ``sync`` would be longer than a pass over the data, of ``steps`` steps, and ends where that does."""

    sync: str
    steps: Count
    kind: Literal["rounds_shortened"] = "rounds_shortened"


@dataclass(frozen=True, config=_RULES)
class SyncChangesUnreached:
    """The run's schedule has ``changes`` of strategy, written as ``--sync-schedule``, that come when it is over: it is
    planned to have ``steps`` steps, or had them.
    """

    changes: str
    steps: Count
    kind: Literal["sync_changes_unreached"] = "sync_changes_unreached"


@dataclass(frozen=True, config=_RULES)
class LearnerLeftOut:
    """The round of the steps ``first_step`` to ``last_step`` (counted from 1) ended without ``learner``, whose
    ``worker`` was lost in it or came too late (its ``WorkerGone`` says why; -1: nobody knows which it was), under
    ``version``.

    ``places``: what it should have trained on, each from the first to the last place (exclusive) of the order of
    samples of ``epoch``. No step used them, and none will.
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
        """How many were left out."""
        return sum(stop - start for start, stop in self.places)


# What is recorded of the network of a run's workers, and of how their sums travel on it.
#
# Times: every ``*_s`` is a duration.

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
    """After ``step`` steps and ``seconds`` of training the sums of ``workers`` began to travel by the routes of
    ``topology``; ``cause``: who asked for it, and where it could not be had what was asked for."""

    step: Count
    topology: str
    workers: Count
    cause: str
    seconds: float
    kind: Literal["topology_changed"] = "topology_changed"


# What is recorded of how a model is divided among the workers of a replica.


@dataclass(frozen=True, config=_RULES)
class StagesDivided:
    """A pipeline's stages, in the order of layers: ``names`` of the layers that they begin with, and their ``shares``
    of the whole cost. ``weighed``: by what costs were told ("counted operations").
    """

    names: list[str]
    shares: list[float]
    weighed: str
    kind: Literal["stages_divided"] = "stages_divided"


@dataclass(frozen=True, config=_RULES)
class LayersDivided:
    """What the tensor axis divides, each layer into so many virtual ``blocks``, in numbers that are trained: those that
    are in ``divided`` blocks, and those that lie ``whole`` on every worker along the axis. ``apart``: these workers run
    what is outside of divided layers each on slots of its own.
    """

    blocks: Count
    divided: Count
    whole: Count
    apart: bool
    kind: Literal["layers_divided"] = "layers_divided"


# What is recorded of compilers that run in a worker. Times: every ``*_s`` or ``seconds`` is a duration.


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Compiled:
    """``worker`` has compiled parts of its model for ``seconds`` since it told so last, or began, up to the end of
    ``step``. Times of steps are told without such as it did so in.
    """

    step: Count
    worker: Count
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    kind: Literal["compiled"] = "compiled"


# What is recorded of proofs that a program trains as its plain loop.


@dataclass(frozen=True, config=_RULES)
class Proved:
    """The ``proof`` that a run has: "checked" by ``elastune check``, or in its "first_step", which took ``seconds``.

    ``found``: "mean" where the loss is a mean over samples; "unknown", "unequal mean" or "samples" where the proof
    could not tell or found what is no certain mistake; "same" for a check.
    """

    proof: Literal["checked", "first_step"]
    found: Literal["same", "mean", "unequal mean", "samples", "unknown"]
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    kind: Literal["proved"] = "proved"
