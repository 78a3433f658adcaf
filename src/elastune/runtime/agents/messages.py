"""Messages between agents and their controller: JSON, one object a line, checked when it is read."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from elastune.runtime.launcher import Bootstrap

_RULES = ConfigDict(extra="forbid", allow_inf_nan=False)
PURPOSE = "agents"  # of a controller that listens for them, in handshakes
TEXT_LIMIT = 1 << 16
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(max_length=TEXT_LIMIT)]
Name = Annotated[str, Field(min_length=1, max_length=256)]


# -- messages of an agent ---------------------------------------------------------------------------------------------
@dataclass(frozen=True, config=_RULES)
class AgentHello:
    """An agent's first line. ``versions``: of what it would train with; ``host``: its machine's name; ``workers``: how
    many there is room for; ``host_kind``: whether the machine may be taken away at any time; ``kept``: how many workers
    it has kept from a controller before, and names next; ``label``: what whoever started it calls it, where that
    needs to know it again."""

    versions: dict[str, Name]
    host: Name
    workers: Annotated[int, Field(ge=1, le=1 << 16)]
    host_kind: Literal["spot", "on-demand"] = "on-demand"
    kept: Annotated[int, Field(ge=0, le=1 << 16)] = 0
    label: Annotated[str, Field(max_length=256)] = ""
    kind: Literal["agent_hello"] = "agent_hello"

    @property
    def stays(self) -> bool:
        """An agent is no guest."""
        return True


@dataclass(frozen=True, config=_RULES)
class RunAsked:
    """The only line of a command that has the token but not the folder ``out`` of a run: how is that run reached?"""

    out: Annotated[str, Field(min_length=1, max_length=2048)]
    kind: Literal["run_asked"] = "run_asked"

    @property
    def stays(self) -> bool:
        """It is gone with the answer."""
        return False


@dataclass(frozen=True, config=_RULES)
class WorkerStarted:
    """The worker that ``key`` names runs, as ``pid`` on the agent's machine."""

    key: Count
    pid: Count
    kind: Literal["worker_started"] = "worker_started"


@dataclass(frozen=True, config=_RULES)
class WorkerKept:
    """The worker ``bootstrap``, which ``key`` names, was started for a controller before; None: it has no ``pid`` now.

    As in ``StartWorker`` there is only the salt of its token.
    """

    key: Count
    bootstrap: Bootstrap
    pid: Count | None
    kind: Literal["worker_kept"] = "worker_kept"


@dataclass(frozen=True, config=_RULES)
class WorkerEnded:
    """Its process has ended, or was never there; see ``runtime.launcher.ProcessEnded``."""

    key: Count
    code: int | None
    log: Text = ""
    why: Text = ""
    kind: Literal["worker_ended"] = "worker_ended"


@dataclass(frozen=True, config=_RULES)
class WorkerSeen:
    """A worker as its agent sees it: its ``ProcessStatus`` (state and processor time) and its last line."""

    key: Count
    state: Annotated[str, Field(min_length=1, max_length=1)]
    cpu_s: Seconds
    line: Text = ""


@dataclass(frozen=True, config=_RULES)
class AgentBeat:
    """The agent lives, and sees this of its workers. Of the controller: it lives."""

    sights: list[WorkerSeen] = Field(default_factory=list)
    kind: Literal["agent_beat"] = "agent_beat"


@dataclass(frozen=True, config=_RULES)
class PreemptionNoticed:
    """The agent's machine will be taken away in ``seconds``: nothing more is to be started there."""

    seconds: Seconds
    why: Text = ""
    kind: Literal["host_noticed"] = "host_noticed"


@dataclass(frozen=True, config=_RULES)
class HostFacts:
    """What the agent's machine is like. ``clock_s``: its time since the epoch; ``shared``: whether it sees the file
    that it was asked about, None: it was asked about none."""

    devices: Annotated[list[Name], Field(max_length=1024)]
    interface: Annotated[str, Field(max_length=256)]
    clock_s: float
    shared: bool | None
    kind: Literal["host_facts"] = "host_facts"


@dataclass(frozen=True, config=_RULES)
class FolderProbeResult:
    """``sees``: whether the file is there that the agent was to look for, None: there was none; ``ip``: the kind of
    address by which workers there reach others, 0: not known."""

    sees: bool | None
    ip: Literal[0, 4, 6] = 0
    kind: Literal["host_looked"] = "host_looked"


# -- messages of the controller ---------------------------------------------------------------------------------------
@dataclass(frozen=True, config=_RULES)
class AgentWelcome:
    """The agent is let in. It beats every ``beat_s``, and may take a controller for gone after ``silence_s``; then it
    keeps its workers for ``grace_s`` and looks for the next one. ``files_port``: where the controller takes the files
    that workers write; 0: they see their runs' folders."""

    beat_s: Seconds
    silence_s: Seconds
    grace_s: Seconds = 0.0
    files_port: Annotated[int, Field(ge=0, lt=1 << 16)] = 0
    kind: Literal["agent_welcome"] = "agent_welcome"


@dataclass(frozen=True, config=_RULES)
class AgentRefused:
    """The agent cannot be used: ``why``."""

    why: Text
    kind: Literal["agent_refused"] = "agent_refused"


@dataclass(frozen=True, config=_RULES)
class RunFound:
    """The run's coordinator listens at ``address``; its token is the one that is derived with ``salt``."""

    address: Name
    salt: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    kind: Literal["run_found"] = "run_found"


@dataclass(frozen=True, config=_RULES)
class StartWorker:
    """Start one, on a ``device`` of that kind. ``logs``: the folder of its log, where that can be had.

    For its ``bootstrap`` the agent makes the token by itself (``protocol.handshake.derived``): here is its salt alone.
    """

    key: Count
    bootstrap: Bootstrap
    device: Name
    logs: Text
    kind: Literal["start_worker"] = "start_worker"


@dataclass(frozen=True, config=_RULES)
class EndWorker:
    """Kill it, with all that it has started; ``why`` is for its log."""

    key: Count
    why: Text = ""
    kind: Literal["end_worker"] = "end_worker"


@dataclass(frozen=True, config=_RULES)
class HostFactsRequest:
    """Tell what your machine is like, and whether the file ``path`` ("": none) holds ``text`` there."""

    path: Text
    text: Name
    kind: Literal["probe_host"] = "probe_host"


@dataclass(frozen=True, config=_RULES)
class FolderProbeRequest:
    """Tell whether the file ``path`` ("": none) holds ``text`` there, and how workers there reach others."""

    path: Text
    text: Annotated[str, Field(max_length=256)]
    kind: Literal["look_for"] = "look_for"


@dataclass(frozen=True, config=_RULES)
class TakeFiles:
    """From now on workers that are started see no run's folder: the controller takes their files at ``port``."""

    port: Annotated[int, Field(ge=1, lt=1 << 16)]
    kind: Literal["take_files"] = "take_files"


@dataclass(frozen=True, config=_RULES)
class AgentBye:
    """Nothing more is wanted: end, and everything with you."""

    kind: Literal["agent_bye"] = "agent_bye"


Greeting = AgentHello | RunAsked
AgentMessage = (
    Greeting | WorkerStarted | WorkerKept | WorkerEnded | AgentBeat | PreemptionNoticed | HostFacts | FolderProbeResult
)
_Orders = StartWorker | EndWorker | AgentBye | AgentBeat | HostFactsRequest | FolderProbeRequest | TakeFiles
ControllerMessage = AgentWelcome | AgentRefused | RunFound | _Orders
_SAID: TypeAdapter[AgentMessage] = TypeAdapter(Annotated[AgentMessage, Field(discriminator="kind")])
_TOLD: TypeAdapter[ControllerMessage] = TypeAdapter(Annotated[ControllerMessage, Field(discriminator="kind")])


def encode(message: AgentMessage | ControllerMessage) -> bytes:
    """One line of JSON, with its line end."""
    text = json.dumps(asdict(message), separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "replace") + b"\n"


def decode_from_agent(line: bytes) -> AgentMessage:
    """Decode a message of an agent. Raises ``ValueError`` for anything else."""
    return _SAID.validate_json(line, strict=True)


def decode_from_controller(line: bytes) -> ControllerMessage:
    """Decode a message of the controller. Raises ``ValueError`` for anything else."""
    return _TOLD.validate_json(line, strict=True)
