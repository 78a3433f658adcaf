"""The typed records of a run and of a study: what happened, in order, one JSON object a line.

Reports read only these.
"""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import Field, TypeAdapter

from elastune.journal.run_records import (
    LONGEST_DETAIL,
    Checkpointed,
    DataContext,
    Decided,
    FaultInjected,
    LinkMeasured,
    Measured,
    MembershipEvent,
    NotMeasured,
    PolicyFailed,
    Reason,
    Regrouped,
    Reported,
    Restarted,
    RunContext,
    RunFailed,
    RunFinished,
    RunStarted,
    StateLost,
    StepsCompleted,
    Straggling,
    WorkerGone,
    WorkerMemory,
    WorkerSteps,
)
from elastune.journal.study_records import (
    ArtifactKept,
    ArtifactRemoved,
    EarlierTrial,
    FrontierFound,
    FrontierReason,
    FrontierRow,
    Phase,
    StudyFinished,
    StudyStarted,
    TimesFitted,
    TrialFinished,
    TrialPaused,
    TrialReallocated,
    TrialRegrouped,
    TrialReported,
    TrialResumed,
    TrialStarted,
    WarmStarted,
)

__all__ = [
    "LONGEST_DETAIL",
    "ArtifactKept",
    "ArtifactRemoved",
    "Checkpointed",
    "DataContext",
    "Decided",
    "EarlierTrial",
    "FaultInjected",
    "FrontierFound",
    "FrontierReason",
    "FrontierRow",
    "LinkMeasured",
    "Measured",
    "MembershipEvent",
    "NotMeasured",
    "Phase",
    "PolicyFailed",
    "Reason",
    "Record",
    "Regrouped",
    "Reported",
    "Restarted",
    "RunContext",
    "RunFailed",
    "RunFinished",
    "RunStarted",
    "StateLost",
    "StepsCompleted",
    "Straggling",
    "StudyFinished",
    "StudyStarted",
    "TimesFitted",
    "TrialFinished",
    "TrialPaused",
    "TrialReallocated",
    "TrialRegrouped",
    "TrialReported",
    "TrialResumed",
    "TrialStarted",
    "WarmStarted",
    "WorkerGone",
    "WorkerMemory",
    "WorkerSteps",
    "decode",
    "encode",
]

Record = Annotated[
    RunStarted
    | Reported
    | Checkpointed
    | LinkMeasured
    | RunFinished
    | RunFailed
    | StepsCompleted
    | Regrouped
    | Measured
    | NotMeasured
    | Decided
    | PolicyFailed
    | Restarted
    | StateLost
    | MembershipEvent
    | WorkerGone
    | Straggling
    | FaultInjected
    | StudyStarted
    | WarmStarted
    | TrialStarted
    | TrialReported
    | TrialFinished
    | TrialRegrouped
    | TrialReallocated
    | TrialResumed
    | TrialPaused
    | ArtifactKept
    | ArtifactRemoved
    | TimesFitted
    | FrontierFound
    | StudyFinished,
    Field(discriminator="kind"),
]
_ADAPTER: TypeAdapter[Record] = TypeAdapter(Record)


def encode(record: Record) -> bytes:
    """One line of JSON, without its line end. Infinities and NaN are kept (as Python's ``json`` writes them).

    Half a surrogate pair, which some program's error message may hold and no reader would take, becomes "?".
    """
    text = json.dumps(_ADAPTER.dump_python(record), separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "replace")


def decode(line: bytes | str) -> Record:
    """The record in ``line``. Raises ``pydantic.ValidationError`` (a ``ValueError``) where it is none."""
    return _ADAPTER.validate_json(line)
