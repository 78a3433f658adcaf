"""Messages between agents and their controller; ``elastic.wire.transport`` gives their form."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from elastune.elastic.wire.transport import Count, MessageCodec, Seconds, message
from elastune.runtime.launcher import Bootstrap

PURPOSE = "agents"  # of a controller that listens for them, in handshakes
TEXT_LIMIT = 1 << 16
Text = Annotated[str, Field(max_length=TEXT_LIMIT)]
Name = Annotated[str, Field(min_length=1, max_length=256)]


# -- messages of an agent ---------------------------------------------------------------------------------------------
@message
class AgentHello:
    """The first message of an agent: what it offers.

    Attributes:
        versions: The versions of the packages with which its workers would train.
        host: The name of its machine.
        workers: The number of workers that it has room for.
        host_kind: Whether the machine may be taken away at any time.
        kept: The number of workers that it has kept from an earlier controller. A ``WorkerKept`` follows for each.
        label: The name that the process which started the agent uses for it; "": none.
    """

    versions: dict[str, Name]
    host: Name
    workers: Annotated[int, Field(ge=1, le=1 << 16)]
    host_kind: Literal["spot", "on-demand"] = "on-demand"
    kept: Annotated[int, Field(ge=0, le=1 << 16)] = 0
    label: Annotated[str, Field(max_length=256)] = ""
    kind: Literal["agent_hello"] = "agent_hello"

    @property
    def stays(self) -> bool:
        """Whether the connection lasts: an agent stays."""
        return True


@message
class RunAsked:
    """The only message of a command that has the token but does not see the folder ``out`` of a run.

    It asks for the address of the run's coordinator.
    """

    out: Annotated[str, Field(min_length=1, max_length=2048)]
    kind: Literal["run_asked"] = "run_asked"

    @property
    def stays(self) -> bool:
        """Whether the connection lasts: this one ends with the answer."""
        return False


@message
class WorkerStarted:
    """The worker ``key`` runs, as process ``pid`` on the agent's machine."""

    key: Count
    pid: Count
    kind: Literal["worker_started"] = "worker_started"


@message
class WorkerKept:
    """The worker ``bootstrap`` was started for an earlier controller; ``key`` names it.

    ``pid`` is its process; None: the process has ended. As in ``StartWorker``, the bootstrap holds only the salt of the
    worker's token.
    """

    key: Count
    bootstrap: Bootstrap
    pid: Count | None
    kind: Literal["worker_kept"] = "worker_kept"


@message
class WorkerEnded:
    """The process of the worker ``key`` has ended or could not be started; see ``runtime.launcher.ProcessEnded``."""

    key: Count
    code: int | None
    log: Text = ""
    why: Text = ""
    kind: Literal["worker_ended"] = "worker_ended"


@message
class WorkerSeen:
    """The state of the worker ``key``: its ``ProcessStatus`` (state and processor time) and its last line of output."""

    key: Count
    state: Annotated[str, Field(min_length=1, max_length=1)]
    cpu_s: Seconds
    line: Text = ""


@message
class AgentBeat:
    """A heartbeat. An agent's beat has the state of its workers; the controller's beat has none."""

    sights: list[WorkerSeen] = Field(default_factory=list)
    kind: Literal["agent_beat"] = "agent_beat"


@message
class PreemptionNoticed:
    """The agent's machine will be taken away in ``seconds``: no more workers may start on it."""

    seconds: Seconds
    why: Text = ""
    kind: Literal["preemption_noticed"] = "preemption_noticed"


@message
class HostFacts:
    """The properties of the agent's machine.

    Attributes:
        devices: Its devices.
        interface: The network interface of its workers.
        clock_s: Its time, in seconds since 1970.
        shared: Whether it sees the file of the request; None: the request named no file.
    """

    devices: Annotated[list[Name], Field(max_length=1024)]
    interface: Annotated[str, Field(max_length=256)]
    clock_s: float
    shared: bool | None
    kind: Literal["host_facts"] = "host_facts"


@message
class FolderProbeResult:
    """The answer to ``FolderProbeRequest``.

    Attributes:
        sees: Whether the agent sees the file; None: the request named no file.
        ip: The version of the addresses by which workers of that machine reach others; 0: unknown.
    """

    sees: bool | None
    ip: Literal[0, 4, 6] = 0
    kind: Literal["folder_probe_result"] = "folder_probe_result"


# -- messages of the controller ---------------------------------------------------------------------------------------
@message
class AgentWelcome:
    """The controller admits the agent.

    Attributes:
        beat_s: The agent has to send a heartbeat this often.
        silence_s: After a silence of this length the agent takes the controller for dead.
        grace_s: Then it keeps its workers for this long, and looks for the next controller.
        files_port: The port at which the controller receives the files of workers; 0: workers see the runs' folders.
    """

    beat_s: Seconds
    silence_s: Seconds
    grace_s: Seconds = 0.0
    files_port: Annotated[int, Field(ge=0, lt=1 << 16)] = 0
    kind: Literal["agent_welcome"] = "agent_welcome"


@message
class AgentRefused:
    """The controller cannot use the agent, and says ``why``."""

    why: Text
    kind: Literal["agent_refused"] = "agent_refused"


@message
class RunFound:
    """The run's coordinator listens at ``address``. ``salt`` derives the run's token from the agents' token."""

    address: Name
    salt: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    kind: Literal["run_found"] = "run_found"


@message
class StartWorker:
    """The agent is to start a worker.

    Attributes:
        key: Names the worker in later messages.
        bootstrap: What the worker needs to reach its coordinator. In place of the token it holds the token's salt: the
            agent derives the token (``elastic.wire.contact.derived``).
        device: The kind of device.
        logs: The folder for the worker's log, if the agent sees it.
    """

    key: Count
    bootstrap: Bootstrap
    device: Name
    logs: Text
    kind: Literal["start_worker"] = "start_worker"


@message
class EndWorker:
    """The agent is to kill the worker ``key`` and all processes that it has started. The log will say ``why``."""

    key: Count
    why: Text = ""
    kind: Literal["end_worker"] = "end_worker"


@message
class HostFactsRequest:
    """Asks for the ``HostFacts`` of the machine, and whether its file ``path`` ("": none) holds ``text``."""

    path: Text
    text: Name
    kind: Literal["host_facts_request"] = "host_facts_request"


@message
class FolderProbeRequest:
    """Asks whether the file ``path`` ("": none) holds ``text`` on that machine, and how its workers reach others."""

    path: Text
    text: Annotated[str, Field(max_length=256)]
    kind: Literal["folder_probe_request"] = "folder_probe_request"


@message
class TakeFiles:
    """Workers that start from now on see no run's folder: the controller receives their files at ``port``."""

    port: Annotated[int, Field(ge=1, lt=1 << 16)]
    kind: Literal["take_files"] = "take_files"


@message
class AgentBye:
    """The agent is to end, with everything that it has started."""

    kind: Literal["agent_bye"] = "agent_bye"


Greeting = AgentHello | RunAsked
AgentMessage = (
    Greeting | WorkerStarted | WorkerKept | WorkerEnded | AgentBeat | PreemptionNoticed | HostFacts | FolderProbeResult
)
_Orders = StartWorker | EndWorker | AgentBye | AgentBeat | HostFactsRequest | FolderProbeRequest | TakeFiles
ControllerMessage = AgentWelcome | AgentRefused | RunFound | _Orders
FROM_AGENT: MessageCodec[AgentMessage] = MessageCodec(AgentMessage)
FROM_CONTROLLER: MessageCodec[ControllerMessage] = MessageCodec(ControllerMessage)
