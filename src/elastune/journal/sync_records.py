"""What is recorded of how a run's workers agree."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, model_validator
from pydantic.dataclasses import dataclass

from elastune.journal.values import Count, Whole, Words

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
class RoundsCut:
    """A round of ``sync`` would be longer than a pass over the data, of ``steps`` steps, and ends where that does."""

    sync: str
    steps: Count
    kind: Literal["rounds_cut"] = "rounds_cut"


@dataclass(frozen=True, config=_RULES)
class ChangesUnreached:
    """The run's schedule has ``changes`` of strategy, written as ``--sync-schedule``, that come when it is over: it is
    planned to have ``steps`` steps, or had them.
    """

    changes: str
    steps: Count
    kind: Literal["changes_unreached"] = "changes_unreached"


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
