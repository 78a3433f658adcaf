"""The messages between workers, clients and the coordinator, with the task that a worker receives.

``message_codec`` gives their form. The messages that change a run's membership are the events of the membership
machine (``elastic.coordinator.machine``).
"""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, PlainValidator

from elastune.core.checkpoint_keeping import KeepCheckpoints
from elastune.core.divergence import Divergence
from elastune.core.errors import UserError
from elastune.core.journal.records import Record
from elastune.core.run import Adapt, Elastic, ExecutionSettings, Place, Program, RunSpec, StartFrom
from elastune.core.slots import VerifyPlan
from elastune.core.sync_plan import SyncPlan, SyncSchedule
from elastune.elastic.wire.transport import Count, MessageCodec, Seconds, message
from elastune.elastic.wire.view import View

PURPOSE = "run"  # of a coordinator, in handshakes
KEY_LIMIT = 256
VALUE_LIMIT = 1 << 18

# --- the task of a worker ---


@dataclasses.dataclass(frozen=True)
class WorkerSpec:
    """A worker's task, and the surroundings in which it runs.

    Attributes:
        entry: The ``module:function`` to call.
        spec: The run.
        place: Where the worker runs; the launcher sets ``place.device``.
        environment: All environment variables. These and the import path are the controller's at the start of the run:
            the process that started the worker may be older.
        folder: The working directory.
        import_path: Python's ``sys.path``.
        adds: The worker's process has surroundings of its own, perhaps on another machine: environment and import path
            are added to those.
    """

    entry: str
    spec: RunSpec
    place: Place
    environment: dict[str, str]
    folder: str
    import_path: list[str]
    adds: bool = False


def spec_to_json(spec: WorkerSpec | None) -> dict[str, Any] | None:
    """``spec`` as a value that JSON can hold, except for paths."""
    if spec is None:
        return None
    plain = dataclasses.asdict(spec)
    plain["spec"]["execution"] = spec.spec.execution.to_json()
    plain["spec"]["sync_schedule"] = str(spec.spec.sync_schedule)
    plain["spec"]["keep_checkpoints"] = str(spec.spec.keep_checkpoints)
    return plain


def spec_from_json(fields: Any) -> WorkerSpec | None:
    """The argument of ``spec_to_json`` that has this result. Raises ``ValueError`` if there is none."""
    if fields is None or isinstance(fields, WorkerSpec):
        return fields
    try:
        run = dict(fields["spec"])
        plain = run["program"]
        data, arguments = plain["data"], tuple(map(str, plain["arguments"]))
        program = Program(Path(plain["path"]), plain["train"], data and Path(data), arguments)
        values = {
            "program": program,
            "out": Path(run["out"]),
            "execution": ExecutionSettings.from_json(run["execution"]),
        }
        for name in ("parent", "from_dcp", "spool"):
            values[name] = None if run[name] is None else Path(run[name])
        values["start_from"] = None if run["start_from"] is None else StartFrom.from_json(run["start_from"])
        values["sync"] = SyncPlan(**run["sync"])
        values["sync_schedule"] = SyncSchedule.parse(run["sync_schedule"])
        values["keep_checkpoints"] = KeepCheckpoints.parse(run["keep_checkpoints"])
        values["elastic"] = Elastic(**run["elastic"])
        values["adapt"] = Adapt(**{name: tuple(texts) for name, texts in run["adapt"].items()})
        values["verify"] = None if run["verify"] is None else VerifyPlan(**run["verify"])
        values["divergence"] = Divergence(run["divergence"]["factor"], tuple(run["divergence"]["metrics"]))
        return WorkerSpec(**{**fields, "spec": RunSpec(**{**run, **values}), "place": Place(**fields["place"])})
    except (KeyError, TypeError, AttributeError, UserError) as error:
        raise ValueError(f"no worker's specification: {error!r}") from None


Spec = Annotated[Any, PlainValidator(spec_from_json), PlainSerializer(spec_to_json)]


# --- events of one worker: they change the membership of a run ---


Doing = Literal[
    "loading", "starting", "computing", "reducing", "gathering", "forming", "handing over", "saving", "done"
]


@message
class Connected:
    """The worker's process is connected, on ``host``. It is no member yet. (Seen by the coordinator, never sent.)"""

    host: str = ""
    kind: Literal["connected"] = "connected"


@message
class Ready:
    """The worker is warm and waits for a view that has it."""

    kind: Literal["ready"] = "ready"


@message
class Running:
    """The worker holds its state in view number ``version``, whose first step is ``step``."""

    version: Count
    step: Count
    kind: Literal["running"] = "running"


@message
class Broken:
    """A collective of view number ``version`` failed at the worker."""

    version: Count
    why: str = ""
    kind: Literal["broken"] = "broken"


@message
class Noticed:
    """The worker will be taken away in ``seconds``: it has to leave before that."""

    seconds: Seconds
    why: str = ""
    kind: Literal["noticed"] = "noticed"


@message
class NoticeEnding:
    """Of the worker's notice, only the time for a checkpoint is left. (From the coordinator, never sent.)"""

    kind: Literal["notice_ending"] = "notice_ending"


@message
class ReplaceAsked:
    """Another worker is wanted in place of this member, which goes on until the other one joins."""

    kind: Literal["replace_asked"] = "replace_asked"


@message
class Left:
    """The worker has left at the boundary of a view that does not have it."""

    kind: Literal["left"] = "left"


@message
class Done:
    """The training function has ended well; the worker serves others until ``Bye``.

    After a rewind it may be sent again.
    """

    kind: Literal["done"] = "done"


@message
class Lost:
    """The worker is dead, frozen or cut off, or could not be started. (Decided by the coordinator, never sent.)"""

    why: str = ""
    kind: Literal["lost"] = "lost"


# --- events of the run ---


@message
class ResizeAsked:
    """So many ``workers`` are wanted. A client that asks is answered by ``Answer``."""

    workers: Count
    why: str = ""
    kind: Literal["resize_asked"] = "resize_asked"


@message
class ReshapeAsked:
    """As many workers as ``mesh`` has are wanted, in that mesh (``Mesh.parse``). A client is answered by ``Answer``."""

    mesh: Annotated[str, Field(max_length=KEY_LIMIT)]
    why: str = ""
    kind: Literal["reshape_asked"] = "reshape_asked"


@message
class LayersFound:
    """The program's model has so many ``layers``: no pipeline has more stages. Views may begin before that is known."""

    layers: Count
    kind: Literal["layers_found"] = "layers_found"


@message
class CapacityChanged:
    """``free`` more workers could be started now. (From the controller, never sent.)"""

    free: Count
    kind: Literal["capacity_changed"] = "capacity_changed"


@message
class WaitedEnough:
    """A ready worker waits no longer for others of its host. (From the coordinator, never sent.)"""

    kind: Literal["waited_enough"] = "waited_enough"


@message
class Progressed:
    """The run has reached ``step``, further than ever. (Seen by the coordinator in records, never sent.)"""

    step: Count
    kind: Literal["progressed"] = "progressed"


RunEvent = ResizeAsked | ReshapeAsked | LayersFound | CapacityChanged | WaitedEnough | Progressed
SentEvent = Ready | Running | Broken | Noticed | ReplaceAsked | Left | Done | ResizeAsked | ReshapeAsked | LayersFound
"""Events that are sent."""
Event = Connected | Lost | NoticeEnding | SentEvent | RunEvent


# --- messages that are no events ---


@message
class Hello:
    """The first line of every connection after its handshake.

    Attributes:
        worker: The number of a worker of this run; None: a client that has a request.
        host: The host of the worker.
        returns: The worker has outlived its coordinator. If it is admitted, it sends its state next (``Returned``).
    """

    worker: Count | None = None
    host: str = ""
    returns: bool = False
    kind: Literal["hello"] = "hello"

    @property
    def stays(self) -> bool:
        """Whether the connection lasts; that of a client ends with the answer."""
        return self.worker is not None


@message
class Welcome:
    """The coordinator admits the worker.

    Attributes:
        joins: The run trains already, so the worker has to be warm before it is ``Ready``.
        beat_s: The worker has to send a heartbeat this often.
        least_beat_s: Where a quorum's grace demands more frequent heartbeats, this is the shortest interval.
        silence_s: A worker that receives nothing for so long, and for ten heartbeats, is cut off.
        grace_s: Before it ends, it looks for its coordinator, or the next one, for this long.
        spec: The worker's task, a ``WorkerSpec``.
    """

    joins: bool
    beat_s: Seconds
    least_beat_s: Seconds = 0.5
    silence_s: Seconds = 30.0
    grace_s: Seconds = 0.0
    spec: Spec = None  # pydantic cannot follow the recursion in the type of its configuration
    kind: Literal["welcome"] = "welcome"


@message
class InstallView:
    """A new view, sent to every connected worker, also to those that are no members."""

    view: View
    kind: Literal["install_view"] = "install_view"


@message
class Confirmed:
    """The joiner that receives this is a member of view number ``version`` for good."""

    version: int
    kind: Literal["confirmed"] = "confirmed"


@message
class Report:
    """A record of this worker for its run's controller.

    ``nth`` counts the records that ``RecordsKept`` is to confirm.
    """

    record: Record
    nth: Count = 0
    kind: Literal["report"] = "report"


@message
class RecordsKept:
    """This worker's records up to its ``nth`` are in the journal: no coordinator will need them again."""

    nth: Count
    kind: Literal["records_kept"] = "records_kept"


@message
class Returned:
    """The state of a worker that has outlived its coordinator. It covers all its earlier messages but those sent again.

    Attributes:
        member: It holds the run's state.
        ready: It is warm.
        latest_view: The newest view that it knows.
        version: The view of its newest ``Running``; 0: none.
        step: The step of its newest ``Running``.
        layers: As in ``LayersFound``; 0: not known.
        broken: The view of its newest ``Broken``.
        done: Its training function has ended well.
        stops: It has received ``Stop``.
        noticed_s: It will be taken away in so many seconds.
        records: How many records it has reported.
    """

    member: bool = False
    ready: bool = False
    latest_view: View | None = None
    version: Count = 0
    step: Count = 0
    layers: Count = 0
    broken: Count = 0
    done: bool = False
    stops: bool = False
    noticed_s: Seconds | None = None
    records: Count = 0
    kind: Literal["returned"] = "returned"


@message
class Stop:
    """The run is to write a checkpoint and end at its next step boundary."""

    kind: Literal["stop"] = "stop"


@message
class Corrupt:
    """This worker is to make a silent error on purpose (``train.proof.corruption``).

    Attributes:
        what: What gets a wrong bit.
        once: Only the next time, and not each time from now on.
        seed: Decides tensor, element and bit.
    """

    what: Literal["gradient", "weights", "optimizer", "transfer"]
    once: bool
    seed: Count
    kind: Literal["corrupt"] = "corrupt"


@message
class Exit:
    """This worker's entry point has ended with ``code``, and its process ends next.

    It is the worker's last message: a process that ends without it was killed, has crashed or has called ``os._exit``.
    The coordinator answers with ``Bye`` and closes the connection, so the worker knows that all its messages were read.
    """

    code: int
    kind: Literal["exit"] = "exit"


@message
class Bye:
    """The receiver is to end: the run is over, or goes on without this worker."""

    kind: Literal["bye"] = "bye"


@message
class Beat:
    """A heartbeat. From a worker it reports what the worker does; from the coordinator only that it lives.

    Attributes:
        step: The step that the worker is in.
        doing: What it does, since ``since_s`` seconds.
        size_bytes: The size of the values in flight.
        view: The view that it is a member of.
        operation: How many operations it has completed, and so the number of the one that it waits in.
        what: That operation, in words.
        line: The line of its program.
        every_s: The time to its next heartbeat; 0: as usual.
    """

    step: Count = 0
    doing: Doing = "starting"
    since_s: Seconds = 0.0
    size_bytes: Count = 0
    view: Count = 0
    operation: Count = 0
    what: str = ""
    line: str = ""
    every_s: Seconds = 0.0
    kind: Literal["beat"] = "beat"


@message
class RoundTaken:
    """The worker's learners have taken the steps of a round.

    Once ``quorum`` learners have, the others get a grace period.

    Attributes:
        version: The number of the view.
        step: Completed steps before the round.
        learners: How many learners this worker has.
        quorum: So many learners have to be there for the round to end.
        grace_s: The least grace period (``round_quorum.patience_s``).
        most: The largest number of learners that any worker has.
        took_s: How long the steps have taken here.
    """

    version: Count
    step: Count
    learners: Annotated[int, Field(ge=1)]
    quorum: Count
    grace_s: Seconds
    most: Count
    took_s: Seconds
    kind: Literal["round_taken"] = "round_taken"


@message
class Publish:
    """An address of this worker for the other members of a view. ``key`` begins with the view's number and a slash."""

    key: Annotated[str, Field(pattern=r"^[0-9]{1,18}/", max_length=KEY_LIMIT)]
    value: Annotated[str, Field(max_length=VALUE_LIMIT)]  # base64
    kind: Literal["publish"] = "publish"


@message
class Answer:
    """The answer to a client: whether its request was taken, and a sentence about it."""

    taken: bool
    detail: str
    members: list[int] = field(default_factory=list)
    kind: Literal["answer"] = "answer"


Message = (
    SentEvent
    | Hello
    | Welcome
    | InstallView
    | Confirmed
    | Report
    | RecordsKept
    | Returned
    | Stop
    | Corrupt
    | Exit
    | Bye
    | Beat
    | RoundTaken
    | Publish
    | Answer
)
CODEC: MessageCodec[Message] = MessageCodec(Message)
encode, decode = CODEC.encode, CODEC.decode


def encode_event(worker: int | None, event: Event) -> dict[str, Any]:
    """``event`` of ``worker`` (None: of the run) as the journal holds it."""
    fields = asdict(event)
    return {"event": fields.pop("kind"), **({} if worker is None else {"worker": worker}), **fields}
