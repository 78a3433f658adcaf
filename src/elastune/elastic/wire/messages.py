"""The messages between workers, clients and the coordinator, with the task that a worker receives.

On a connection each message is one line of JSON, checked when it is read. Reading is strict: no number from a
string, no NaN, no unknown field. The messages that change a run's membership are the events of the membership
machine (``elastic.coordinator.machine``).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PlainSerializer, PlainValidator, TypeAdapter
from pydantic.dataclasses import dataclass

from elastune.core.divergence import Divergence
from elastune.core.errors import UserError
from elastune.core.journal.records import Record
from elastune.core.run import Adapt, Elastic, ExecutionSettings, Place, Program, RunSpec, StartFrom
from elastune.core.sync_plan import SyncPlan, SyncSchedule
from elastune.elastic.wire.view import View

# [worker spec] What one worker is to do, and how that is JSON.


@dataclasses.dataclass(frozen=True)
class WorkerSpec:
    """A worker's task, and the surroundings to do it in.

    ``entry`` is the ``module:function`` to call; ``environment`` the whole environment; ``folder`` the working
    directory; ``import_path`` Python's ``sys.path``. They are the controller's, as at the start of the run: what
    started the worker's process may be older. Where ``adds`` is true that process has surroundings of its own, on
    another machine perhaps: environment and import path are what comes to those. ``place.device`` is for the launcher
    to say.
    """

    entry: str
    spec: RunSpec
    place: Place
    environment: dict[str, str]
    folder: str
    import_path: list[str]
    adds: bool = False


def spec_to_json(spec: WorkerSpec | None) -> dict[str, Any] | None:
    """``spec`` as what JSON can hold, but for paths."""
    if spec is None:
        return None
    plain = dataclasses.asdict(spec)
    plain["spec"]["execution"] = spec.spec.execution.to_json()
    plain["spec"]["sync_schedule"] = str(spec.spec.sync_schedule)
    return plain


def spec_from_json(fields: Any) -> WorkerSpec | None:
    """What ``spec_to_json`` was given. Raises ``ValueError`` for anything else."""
    if fields is None or isinstance(fields, WorkerSpec):
        return fields
    try:
        told = dict(fields["spec"])
        data = told["program"]["data"]
        program = Program(Path(told["program"]["path"]), told["program"]["train"], data and Path(data))
        known = {
            "program": program,
            "out": Path(told["out"]),
            "execution": ExecutionSettings.from_json(told["execution"]),
        }
        for name in ("parent", "from_dcp", "spool"):
            known[name] = None if told[name] is None else Path(told[name])
        known["start_from"] = None if told["start_from"] is None else StartFrom.from_json(told["start_from"])
        known["sync"] = SyncPlan(**told["sync"])
        known["sync_schedule"] = SyncSchedule.parse(told["sync_schedule"])
        known["elastic"] = Elastic(**told["elastic"])
        known["adapt"] = Adapt(**{name: tuple(texts) for name, texts in told["adapt"].items()})
        known["divergence"] = Divergence(told["divergence"]["factor"], tuple(told["divergence"]["metrics"]))
        return WorkerSpec(**{**fields, "spec": RunSpec(**{**told, **known}), "place": Place(**fields["place"])})
    except (KeyError, TypeError, AttributeError, UserError) as error:
        raise ValueError(f"no worker's specification: {error!r}") from None


# [messages] What workers, clients and the coordinator say to each other, and what thereby happens to a run's membership.
#
# On a connection: JSON, one object a line, checked when it is read. Reading is strict: no number out of a string, no NaN,
# no field too many. Some messages are events of the membership machine too; with what the controller notices by itself
# (``Connected``, ``Lost``, ``CapacityChanged``) they are what a journal keeps.

_RULES = ConfigDict(extra="forbid", allow_inf_nan=False)
PURPOSE = "run"  # of a coordinator, in handshakes
KEY_LIMIT = 256
VALUE_LIMIT = 1 << 18
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Spec = Annotated[Any, PlainValidator(spec_from_json), PlainSerializer(spec_to_json)]
Doing = Literal[
    "loading", "starting", "computing", "reducing", "gathering", "forming", "handing over", "saving", "done"
]


# -- events: of one worker --------------------------------------------------------------------------------------------
@dataclass(frozen=True, config=_RULES)
class Connected:
    """The worker's process is connected, on ``host``. It is no member yet. (Seen by the coordinator, never sent.)"""

    host: str = ""
    kind: Literal["connected"] = "connected"


@dataclass(frozen=True, config=_RULES)
class Ready:
    """The worker is warm and waits for a view that has it."""

    kind: Literal["ready"] = "ready"


@dataclass(frozen=True, config=_RULES)
class Running:
    """The worker holds its state under view ``version``, whose first step is ``step``."""

    version: Count
    step: Count
    kind: Literal["running"] = "running"


@dataclass(frozen=True, config=_RULES)
class Broken:
    """A collective of view ``version`` failed at the worker."""

    version: Count
    why: str = ""
    kind: Literal["broken"] = "broken"


@dataclass(frozen=True, config=_RULES)
class Noticed:
    """The worker will be taken away in ``seconds``: it has to leave before that."""

    seconds: Seconds
    why: str = ""
    kind: Literal["noticed"] = "noticed"


@dataclass(frozen=True, config=_RULES)
class ReplaceAsked:
    """Another worker is wanted in place of this one, a member, which goes on until that one is there."""

    kind: Literal["replace_asked"] = "replace_asked"


@dataclass(frozen=True, config=_RULES)
class Left:
    """The worker has left at the boundary of a view that does not have it."""

    kind: Literal["left"] = "left"


@dataclass(frozen=True, config=_RULES)
class Done:
    """The training function has ended well; the worker serves others until ``Bye``. Rewound, it may say so again."""

    kind: Literal["done"] = "done"


@dataclass(frozen=True, config=_RULES)
class Lost:
    """The worker is dead, frozen or cut off; or could not be started. (Judged by the coordinator, never sent.)"""

    why: str = ""
    kind: Literal["lost"] = "lost"


# -- events: of the run -----------------------------------------------------------------------------------------------
@dataclass(frozen=True, config=_RULES)
class ResizeAsked:
    """``workers`` workers are wanted; a client that asks is answered by ``Answer``."""

    workers: Count
    why: str = ""
    kind: Literal["resize_asked"] = "resize_asked"


@dataclass(frozen=True, config=_RULES)
class ReshapeAsked:
    """Workers are to stand as ``mesh`` says, as ``Mesh.parse`` reads it, and to be as many as that; see ``Answer``."""

    mesh: Annotated[str, Field(max_length=KEY_LIMIT)]
    why: str = ""
    kind: Literal["reshape_asked"] = "reshape_asked"


@dataclass(frozen=True, config=_RULES)
class LayersFound:
    """The program's model has so many ``layers``: no pipeline has more stages. Views may begin before that is known."""

    layers: Count
    kind: Literal["layers_found"] = "layers_found"


@dataclass(frozen=True, config=_RULES)
class CapacityChanged:
    """``free`` more workers could be started now. (Told by the controller, never sent.)"""

    free: Count
    kind: Literal["capacity_changed"] = "capacity_changed"


@dataclass(frozen=True, config=_RULES)
class WaitedEnough:
    """Who is ready waits no longer for others of its host. (Told by the coordinator, never sent.)"""

    kind: Literal["waited_enough"] = "waited_enough"


@dataclass(frozen=True, config=_RULES)
class Progressed:
    """The run has come to ``step``, further than ever. (Seen by the coordinator in records, never sent.)"""

    step: Count
    kind: Literal["progressed"] = "progressed"


OfRun = ResizeAsked | ReshapeAsked | LayersFound | CapacityChanged | WaitedEnough | Progressed
Said = Ready | Running | Broken | Noticed | ReplaceAsked | Left | Done | ResizeAsked | ReshapeAsked | LayersFound
"""Events that are sent."""
Event = Connected | Lost | Said | OfRun


# -- the rest of a connection -----------------------------------------------------------------------------------------
@dataclass(frozen=True, config=_RULES)
class Hello:
    """The first line of every connection, once its handshake is over.

    ``worker``: the number of a worker of this run; None: a client that has a request. ``returns``: the worker has
    outlived its coordinator; if this one takes it, it says next where it stands (``Returned``).
    """

    worker: Count | None = None
    host: str = ""
    returns: bool = False
    kind: Literal["hello"] = "hello"

    @property
    def stays(self) -> bool:
        """Whether the connection lasts: that of a client ends with the answer."""
        return self.worker is not None


@dataclass(frozen=True, config=_RULES)
class Welcome:
    """You are let in, to do ``spec``. ``joins``: training goes on already, so be warm before you are ``Ready``.

    Beat every ``beat_s``, or as often as a quorum's grace, but ``least_beat_s`` apart. Who hears nothing for
    ``silence_s`` and ten beats is cut off and ends; it looks for its coordinator, or the next one, for ``grace_s``.
    """

    joins: bool
    beat_s: Seconds
    least_beat_s: Seconds = 0.5
    silence_s: Seconds = 30.0
    grace_s: Seconds = 0.0
    spec: Spec = None  # a WorkerSpec; pydantic cannot follow the recursion in the type of its configuration
    kind: Literal["welcome"] = "welcome"


@dataclass(frozen=True, config=_RULES)
class InstallView:
    """A new view; sent to every connected worker, members or not."""

    view: View
    kind: Literal["install_view"] = "install_view"


@dataclass(frozen=True, config=_RULES)
class Confirmed:
    """The joiner that reads this is a member of ``version`` for good."""

    version: int
    kind: Literal["confirmed"] = "confirmed"


@dataclass(frozen=True, config=_RULES)
class Report:
    """A record of this worker's, for its run's controller: its ``nth``, where it is to hear that it was kept."""

    record: Record
    nth: Count = 0
    kind: Literal["report"] = "report"


@dataclass(frozen=True, config=_RULES)
class RecordsKept:
    """This worker's records up to its ``nth`` are in the journal: nobody will ask for them again."""

    nth: Count
    kind: Literal["records_kept"] = "records_kept"


@dataclass(frozen=True, config=_RULES)
class Returned:
    """Where a worker stands that has outlived its coordinator. All that it had said before is in this, or said again.

    ``member``: it holds the run's state; else ``ready``: it is warm. ``heard``: the newest view that it knows.
    ``version``, ``step``: of its newest ``Running`` (0: none); ``broken``: the version of its newest ``Broken``;
    ``layers``: as in ``LayersFound``, 0 where it is not known. ``noticed_s``: until it will be taken away. ``stops``:
    it was told ``Stop``. ``records``: how many it has reported so far.
    """

    member: bool = False
    ready: bool = False
    heard: View | None = None
    version: Count = 0
    step: Count = 0
    layers: Count = 0
    broken: Count = 0
    done: bool = False
    stops: bool = False
    noticed_s: Seconds | None = None
    records: Count = 0
    kind: Literal["returned"] = "returned"


@dataclass(frozen=True, config=_RULES)
class Stop:
    """The run is to write a checkpoint and end at its next step boundary."""

    kind: Literal["stop"] = "stop"


@dataclass(frozen=True, config=_RULES)
class Exit:
    """This worker's entry point has ended with ``code``, and so will its process.

    The last words: a process that ends without them was killed, has crashed or has called ``os._exit``. The
    coordinator answers by ``Bye`` and the end of the connection, so the worker knows that all it ever said was read.
    """

    code: int
    kind: Literal["exit"] = "exit"


@dataclass(frozen=True, config=_RULES)
class Bye:
    """The run is over, or goes on without this worker: end."""

    kind: Literal["bye"] = "bye"


@dataclass(frozen=True, config=_RULES)
class Beat:
    """This worker lives: ``doing`` that since ``since_s`` seconds, in step ``step``, with ``size_bytes`` in flight.

    ``operation``: how many operations it has completed, and so the number of the one it waits in, under view ``view``;
    ``what`` that is; ``line``: its program's; ``every_s``: to the next one (0: as usual). Of the coordinator: it lives.
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


@dataclass(frozen=True, config=_RULES)
class RoundTaken:
    """So many ``learners`` here have taken the round after ``step``, in ``took_s``; no worker has more than ``most``.
    Once ``quorum`` have, the rest has ``grace_s`` or longer (``latecomers.patience_s``)."""

    version: Count
    step: Count
    learners: Annotated[int, Field(ge=1)]
    quorum: Count
    grace_s: Seconds
    most: Count
    took_s: Seconds
    kind: Literal["round_taken"] = "round_taken"


@dataclass(frozen=True, config=_RULES)
class Publish:
    """An address of this worker, for the members of a view to find. ``key`` begins with the view's number and a
    slash; ``value`` is base64."""

    key: Annotated[str, Field(pattern=r"^[0-9]{1,18}/", max_length=KEY_LIMIT)]
    value: Annotated[str, Field(max_length=VALUE_LIMIT)]
    kind: Literal["publish"] = "publish"


@dataclass(frozen=True, config=_RULES)
class Answer:
    """To a client: whether its request was taken, and a sentence about it."""

    taken: bool
    detail: str
    members: list[int] = field(default_factory=list)
    kind: Literal["answer"] = "answer"


Message = Annotated[
    Said
    | Hello
    | Welcome
    | InstallView
    | Confirmed
    | Report
    | RecordsKept
    | Returned
    | Stop
    | Exit
    | Bye
    | Beat
    | RoundTaken
    | Publish
    | Answer,
    Field(discriminator="kind"),
]
_MESSAGES: TypeAdapter[Message] = TypeAdapter(Message)
_EVENTS: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="kind")])
_WORKERS: TypeAdapter[int | None] = TypeAdapter(Count | None)


def encode(message: Message) -> bytes:
    """One line of JSON, with its line end. Raises ``TypeError`` where a run's configuration holds what JSON cannot.

    Half a surrogate pair, which some program's error message may hold and no reader would take, becomes "?".
    """
    fields = _MESSAGES.dump_python(message)
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False, default=_path_as_text)
    return text.encode("utf-8", "replace") + b"\n"


def _path_as_text(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} is not JSON")


def decode(line: bytes) -> Message:
    """The message in ``line``. Raises ``pydantic.ValidationError`` (a ``ValueError``) where it is none."""
    return _MESSAGES.validate_json(line, strict=True)


def encode_event(worker: int | None, event: Event) -> dict[str, Any]:
    """``event`` of ``worker`` (None: of the run) as a journal keeps it."""
    fields = asdict(event)
    return {"event": fields.pop("kind"), **({} if worker is None else {"worker": worker}), **fields}


def decode_event(kept: dict[str, Any]) -> tuple[int | None, Event]:
    """What ``encode_event`` was given. Raises ``ValueError`` for anything that it did not make."""
    if not isinstance(kept, dict):
        raise ValueError(f"no event: {kept!r:.200}")
    fields = dict(kept)
    kind, worker = fields.pop("event", None), fields.pop("worker", None)
    event = _EVENTS.validate_json(json.dumps({**fields, "kind": kind}), strict=True)
    if (worker is None) != isinstance(event, OfRun):
        raise ValueError(f"no event: {kept!r:.200}")
    return _WORKERS.validate_python(worker, strict=True), event
