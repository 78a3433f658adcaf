"""The typed records of a run and of a study: what happened, in order, one JSON object a line.

Reports read only these.
"""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import Field, TypeAdapter

from elastune.journal.asset_records import AssetMade, AssetMember, AssetPart, SingleScore
from elastune.journal.change_records import ChangesAccepted
from elastune.journal.compile_records import Compiled
from elastune.journal.division_records import LayersDivided, StagesCut
from elastune.journal.frontier_records import (
    Conclusion,
    FrontierAnswer,
    FrontierFound,
    FrontierReason,
    FrontierRow,
    FrontierVolumes,
    Gain,
    MeansTimed,
    OwnMachine,
    ReferencePoint,
    ScalingPoint,
    SideVolume,
    ThroughputTuned,
)
from elastune.journal.holdings import HostsHeld, StepsPlanned
from elastune.journal.link_records import LinkMeasured, TopologyLaid
from elastune.journal.plan_records import PlanMade
from elastune.journal.prediction_records import PredictionsAdded, PredictionsKept
from elastune.journal.run_records import (
    LONGEST_DETAIL,
    Adopted,
    Checkpointed,
    CheckpointFailed,
    DataContext,
    Decided,
    FaultInjected,
    Measured,
    MembershipEvent,
    NotLetIn,
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
from elastune.journal.start_records import StartedFrom, TrialBegan
from elastune.journal.study_records import (
    ArtifactKept,
    ArtifactRemoved,
    EarlierTrial,
    LinkFitted,
    Phase,
    PhasesPlanned,
    ProposalAsked,
    ScalingPredicted,
    StudyFinished,
    StudyStarted,
    TimesFitted,
    TrialAdopted,
    TrialFinished,
    TrialPaused,
    TrialReallocated,
    TrialRegrouped,
    TrialReported,
    TrialResumed,
    TrialSeen,
    TrialStarted,
    WarmStarted,
)
from elastune.journal.sync_records import ChangesUnreached, LearnerLeftOut, RoundsCut, SyncChanged

__all__ = [
    "LONGEST_DETAIL",
    "Adopted",
    "ArtifactKept",
    "ArtifactRemoved",
    "AssetMade",
    "AssetMember",
    "AssetPart",
    "ChangesAccepted",
    "ChangesUnreached",
    "CheckpointFailed",
    "Checkpointed",
    "Compiled",
    "Conclusion",
    "DataContext",
    "Decided",
    "EarlierTrial",
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
    "MeansTimed",
    "Measured",
    "MembershipEvent",
    "NotLetIn",
    "NotMeasured",
    "OwnMachine",
    "Phase",
    "PhasesPlanned",
    "PlanMade",
    "PolicyFailed",
    "PredictionsAdded",
    "PredictionsKept",
    "ProposalAsked",
    "Reason",
    "Record",
    "ReferencePoint",
    "Regrouped",
    "Reported",
    "Restarted",
    "RoundsCut",
    "RunContext",
    "RunFailed",
    "RunFinished",
    "RunStarted",
    "ScalingPoint",
    "ScalingPredicted",
    "SideVolume",
    "SingleScore",
    "StagesCut",
    "StartedFrom",
    "StateLost",
    "StepsCompleted",
    "StepsPlanned",
    "Straggling",
    "StudyFinished",
    "StudyStarted",
    "SyncChanged",
    "ThroughputTuned",
    "TimesFitted",
    "TopologyLaid",
    "TrialAdopted",
    "TrialBegan",
    "TrialFinished",
    "TrialPaused",
    "TrialReallocated",
    "TrialRegrouped",
    "TrialReported",
    "TrialResumed",
    "TrialSeen",
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
    | StagesCut
    | LayersDivided
    | LinkMeasured
    | RunFinished
    | RunFailed
    | StepsCompleted
    | StepsPlanned
    | Regrouped
    | Measured
    | NotMeasured
    | Decided
    | PolicyFailed
    | Restarted
    | SyncChanged
    | RoundsCut
    | ChangesUnreached
    | LearnerLeftOut
    | StateLost
    | MembershipEvent
    | WorkerGone
    | Straggling
    | TopologyLaid
    | NotLetIn
    | HostsHeld
    | FaultInjected
    | StudyStarted
    | WarmStarted
    | ScalingPredicted
    | ProposalAsked
    | TrialStarted
    | TrialReported
    | TrialAdopted
    | TrialBegan
    | TrialFinished
    | TrialRegrouped
    | TrialReallocated
    | TrialSeen
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
"""What may be told of a study long after it ended: it takes none of the study's time."""
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
