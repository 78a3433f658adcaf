"""The typed records of runs and studies, and an entry of a journal: one JSON object a line, in order of time.

Reports, resumption and simulations read only these records.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, TypeAdapter

from elastune.core.journal.act_records import ActAsked, ActDone
from elastune.core.journal.execution_records import (
    Compiled,
    LayersDivided,
    LearnerLeftOut,
    LinkMeasured,
    Proved,
    RoundsShortened,
    StagesDivided,
    StepsVerified,
    SyncChanged,
    SyncChangesUnreached,
    TopologyChanged,
    TrialProved,
    VerificationEnded,
    WorkerWrong,
)
from elastune.core.journal.frontier_records import (
    Conclusion,
    ExecutionTimed,
    FrontierAnswer,
    FrontierFound,
    FrontierReason,
    FrontierRow,
    FrontierVolumes,
    Gain,
    OwnMachine,
    ReferencePoint,
    ScalingPoint,
    SideVolume,
    ThroughputTuned,
)
from elastune.core.journal.run_records import (
    LONGEST_DETAIL,
    Adopted,
    ChangePart,
    ChangesAccepted,
    ChangeTimed,
    Checkpointed,
    CheckpointFailed,
    ConnectionsRefused,
    DataContext,
    Decided,
    FaultInjected,
    HostsHeld,
    Measured,
    MembershipEvent,
    NotMeasured,
    PolicyFailed,
    PredictionsAdded,
    PredictionsKept,
    Reason,
    Regrouped,
    Reported,
    Restarted,
    RunContext,
    RunFailed,
    RunFinished,
    RunStarted,
    StartedFrom,
    StateLost,
    StepsCompleted,
    StepsPlanned,
    StragglerDetected,
    StreamPriced,
    TrialStartedFrom,
    WorkerGone,
    WorkerMemory,
    WorkerSteps,
    check_at,
)
from elastune.core.journal.study_records import (
    ArtifactKept,
    ArtifactRemoved,
    AssetMade,
    AssetMember,
    AssetPart,
    EarlierTrial,
    LinkFitted,
    Phase,
    PhasesPlanned,
    PlanMade,
    ProposalAsked,
    ScalingPredicted,
    SingleScore,
    StudyFinished,
    StudyStarted,
    TimesFitted,
    TrialAdopted,
    TrialFinished,
    TrialPaused,
    TrialProgressed,
    TrialReallocated,
    TrialRegrouped,
    TrialReported,
    TrialResumed,
    TrialStarted,
    WarmStarted,
)

# All kinds of records.

__all__ = [
    "LONGEST_DETAIL",
    "ActAsked",
    "ActDone",
    "Adopted",
    "ArtifactKept",
    "ArtifactRemoved",
    "AssetMade",
    "AssetMember",
    "AssetPart",
    "ChangePart",
    "ChangeTimed",
    "ChangesAccepted",
    "CheckpointFailed",
    "Checkpointed",
    "Compiled",
    "Conclusion",
    "ConnectionsRefused",
    "DataContext",
    "Decided",
    "EarlierTrial",
    "ExecutionTimed",
    "FaultInjected",
    "FrontierAnswer",
    "FrontierFound",
    "FrontierReason",
    "FrontierRow",
    "FrontierVolumes",
    "Gain",
    "HostsHeld",
    "LayersDivided",
    "LearnerLeftOut",
    "LinkFitted",
    "LinkMeasured",
    "Measured",
    "MembershipEvent",
    "NotMeasured",
    "OwnMachine",
    "Phase",
    "PhasesPlanned",
    "PlanMade",
    "PolicyFailed",
    "PredictionsAdded",
    "PredictionsKept",
    "ProposalAsked",
    "Proved",
    "Reason",
    "Record",
    "ReferencePoint",
    "Regrouped",
    "Reported",
    "Restarted",
    "RoundsShortened",
    "RunContext",
    "RunFailed",
    "RunFinished",
    "RunStarted",
    "ScalingPoint",
    "ScalingPredicted",
    "SideVolume",
    "SingleScore",
    "StagesDivided",
    "StartedFrom",
    "StateLost",
    "StepsCompleted",
    "StepsPlanned",
    "StepsVerified",
    "StragglerDetected",
    "StreamPriced",
    "StudyFinished",
    "StudyStarted",
    "SyncChanged",
    "SyncChangesUnreached",
    "ThroughputTuned",
    "TimesFitted",
    "TopologyChanged",
    "TrialAdopted",
    "TrialFinished",
    "TrialPaused",
    "TrialProgressed",
    "TrialProved",
    "TrialReallocated",
    "TrialRegrouped",
    "TrialReported",
    "TrialResumed",
    "TrialStarted",
    "TrialStartedFrom",
    "VerificationEnded",
    "WarmStarted",
    "WorkerGone",
    "WorkerMemory",
    "WorkerSteps",
    "WorkerWrong",
    "decode",
    "encode",
]
Record = Annotated[
    RunStarted
    | ActAsked
    | ActDone
    | ChangesAccepted
    | Adopted
    | Reported
    | Checkpointed
    | CheckpointFailed
    | Compiled
    | PredictionsKept
    | PredictionsAdded
    | AssetMade
    | StartedFrom
    | StagesDivided
    | LayersDivided
    | LinkMeasured
    | Proved
    | TrialProved
    | WorkerWrong
    | VerificationEnded
    | StepsVerified
    | RunFinished
    | RunFailed
    | StepsCompleted
    | StepsPlanned
    | Regrouped
    | ChangeTimed
    | Measured
    | NotMeasured
    | Decided
    | PolicyFailed
    | Restarted
    | SyncChanged
    | RoundsShortened
    | SyncChangesUnreached
    | LearnerLeftOut
    | StateLost
    | MembershipEvent
    | WorkerGone
    | StragglerDetected
    | StreamPriced
    | TopologyChanged
    | ConnectionsRefused
    | HostsHeld
    | FaultInjected
    | StudyStarted
    | WarmStarted
    | ScalingPredicted
    | ProposalAsked
    | TrialStarted
    | TrialReported
    | TrialAdopted
    | TrialStartedFrom
    | TrialFinished
    | TrialRegrouped
    | TrialReallocated
    | TrialProgressed
    | TrialResumed
    | TrialPaused
    | ArtifactKept
    | ArtifactRemoved
    | TimesFitted
    | ThroughputTuned
    | PhasesPlanned
    | FrontierFound
    | PlanMade
    | StudyFinished,
    Field(discriminator="kind"),
]
AFTERWARDS = (PredictionsAdded, AssetMade)
"""Records that may come long after a study's end. They take none of the study's time."""
_ADAPTER: TypeAdapter[Record] = TypeAdapter(Record)


def encode(record: Record) -> bytes:
    """Return one line of JSON, without its line end. Infinities and NaN are kept, as Python's ``json`` writes them.

    Half a surrogate pair, which a program's error message may hold, becomes "?": no reader would accept it.
    """
    text = json.dumps(_ADAPTER.dump_python(record), separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "replace")


def decode(line: bytes | str) -> Record:
    """Return the record in ``line``. Raises ``pydantic.ValidationError`` (a ``ValueError``) for any other text."""
    return _ADAPTER.validate_json(line)


# One line of a journal: a record and its time.

OPENING = b'{"at":'
_STAMP = re.compile(rb'\s*\{\s*"at"\s*:\s*(-?\d[\d.eE+-]*)\s*,')


@dataclass(frozen=True)
class Entry:
    """A ``record``, written ``at`` seconds since the epoch."""

    at: float
    record: Record


def encode_entry(entry: Entry) -> bytes:
    """Return the record's JSON with a leading key ``at``, without its line end.

    Real times are in microseconds. Simulated times keep all their digits, because a simulation goes on from them.
    """
    at = f"{entry.at:.6f}"
    return b"%s%s,%s" % (OPENING, (at if float(at) == entry.at else repr(entry.at)).encode(), encode(entry.record)[1:])


def decode_entry(line: bytes) -> Entry:
    """Return the entry in ``line``. Raises ``ValueError`` for any other text."""
    stamp = _STAMP.match(line)
    if stamp is None:
        raise ValueError('a line must be a JSON object that starts with "at"')
    return Entry(check_at(float(stamp[1])), decode(b"{" + line[stamp.end() :]))
