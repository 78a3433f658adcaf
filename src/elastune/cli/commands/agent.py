"""``elastune agent`` offers this machine to a controller; ``elastune deploy`` writes files for other systems."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from elastune.cli.groups import LogOptions, NoticeOptions, flatten
from elastune.cli.output import FAILED, OK, TRY_AGAIN, print_error
from elastune.core import notation
from elastune.core.cost import ON_DEMAND
from elastune.core.errors import UserError
from elastune.runtime.settings import NetworkSettings

if TYPE_CHECKING:
    from elastune.elastic.wire.contact import ControllerLocator
    from elastune.runtime.agents.agent import Link
    from elastune.runtime.agents.messages import AgentHello


# --- elastune agent ---

Room = Annotated[int | None, typer.Option(help="Most workers on this machine. [default: the number of its cores]")]
REJOIN_LIMIT_S = 0.5  # of one try to reach the next controller
JOIN_LIMIT_S = 5.0  # of one try to reach the first controller


@dataclasses.dataclass(frozen=True)
class MachineOptions(NetworkSettings):
    """The number of workers, the name and the kind of this machine."""

    workers: Room = None
    name: Annotated[
        str | None, typer.Option(help="Name by which the controller calls this machine. [default: its own name]")
    ] = None
    kind: Annotated[
        str,
        typer.Option(
            metavar="spot|on-demand", help="Kind of this machine: spot machines may be taken away at any time."
        ),
    ] = ON_DEMAND

    def hello(self, label: str) -> AgentHello:
        """The first message of this machine's agent. Raises ``UserError``."""
        from elastune.runtime.agents.agent import hello_of
        from elastune.train.machine import cores, software

        host = self.name or os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        return hello_of(software(), host, cores() if self.workers is None else self.workers, self.kind, label)


@dataclasses.dataclass(frozen=True)
class AgentOriginOptions:
    """Hidden options that a launcher gives to the agents that it starts."""

    label: Annotated[str, typer.Option(help="What whoever starts this agent calls it.", hidden=True)] = ""
    moves: Annotated[
        str, typer.Option(help="The file that says on which host the next controller listens.", hidden=True)
    ] = ""
    parent: Annotated[
        int | None, typer.Option(help="The process that has started this one, which dies with it.", hidden=True)
    ] = None


@flatten
def agent(
    join: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address where the controller listens for agents.")],
    token_file: Annotated[Path, typer.Option(metavar="FILE", help="The controller's token file, or a copy of it.")],
    notices: NoticeOptions,
    machine: MachineOptions,
    started: AgentOriginOptions,
    logging: LogOptions,
    patience: Annotated[
        str, typer.Option(metavar="TIME", help="How long to look for the controller before giving up.")
    ] = "10m",
    grace: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="How long workers may take to leave their runs after a SIGTERM to the agent."
        ),
    ] = "30s",
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder for logs and checkpoints of runs whose output folder is not on this machine. "
            "[default: a new temporary folder]"
        ),
    ] = None,
) -> int:
    """Offer this machine's workers to a controller elsewhere.

    The controller is, for example, elastune run --cluster hosts:PORT on another machine. See docs/clusters.md.

    The agent ends with the controller, with exit code 0. If the controller is lost, it ends with code 1. A controller
    with --grace may be lost: the agent keeps its workers for that time and serves the next controller at HOST:PORT. If
    none comes, the workers end at a checkpoint, and the exit code is 75.

    On SIGTERM, SIGUSR1 or another notice that this machine is about to be taken away, the workers leave their runs.
    Then the agent ends with exit code 75.
    """
    from elastune.elastic.wire.contact import ControllerLocator
    from elastune.elastic.wire.transport import HOST
    from elastune.parallel.comm.sockets import address_of, interface_with
    from elastune.runtime.agents import agent as agents
    from elastune.runtime.agents.agent import Agent
    from elastune.runtime.agents.credentials import read_token
    from elastune.runtime.clusters.fork import PRELOAD, ForkLauncher
    from elastune.runtime.clusters.fork_server import die_with
    from elastune.runtime.worker import WORK

    if started.parent is not None:
        die_with(started.parent)
    patience_s, grace_s = notation.duration(patience, "--patience"), notation.duration(grace, "--grace")
    if machine.interface is not None:
        address_of(machine.interface)
    token, hello = read_token(token_file), machine.hello(started.label)
    logging.begin(host=hello.host)
    sources = notices.sources()
    where = ControllerLocator(join, started.moves)
    try:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, _stop_joining)
        link = _join(where, token, hello, patience_s)
        leave_within_s: list[float] = []  # requests to leave: the seconds that each leaves
        signal.signal(signal.SIGTERM, lambda *_: leave_within_s.append(grace_s))
        signal.signal(signal.SIGUSR1, lambda *_: leave_within_s.append(notices.notice_seconds))
    except JoiningStopped:
        print_error(f"host {hello.host}: asked to end before the controller at {where.now} had this agent")
        return TRY_AGAIN
    interface = machine.interface or interface_with(link.socket.getsockname()[0])
    os.environ.update({HOST: hello.host, "GLOO_SOCKET_IFNAME": interface})  # workers begin with this environment
    logs = folder or Path(tempfile.mkdtemp(prefix="elastune-agent-"))
    launcher = ForkLauncher(hello.workers, preload=(*PRELOAD, WORK.partition(":")[0]))
    try:
        print_error(f"host {hello.host}: serving {where.now} by {interface}, room for {hello.workers} workers")
        served = Agent(
            link,
            launcher,
            logs,
            notices=sources,
            leaving=lambda: min(leave_within_s, default=None),
            again=lambda kept: agents.join(where.now, token, dataclasses.replace(hello, kept=kept), REJOIN_LIMIT_S),
            moves=started.moves,
            notify=print_error,
        )
        why = served.serve()
    finally:
        launcher.close()
        for source in sources:
            source.close()
        if folder is None:
            with contextlib.suppress(OSError):  # logs are in it
                logs.rmdir()
    if why:
        print_error(f"the controller was lost: {why}")
        return TRY_AGAIN if link.welcome.grace_s else FAILED
    return TRY_AGAIN if served.leaves else OK


class JoiningStopped(Exception):
    """A signal asks the agent to end, and it has no workers yet."""


def _stop_joining(number: int, _: FrameType | None) -> None:
    raise JoiningStopped(signal.Signals(number).name)


def _join(where: ControllerLocator, token: str, hello: AgentHello, patience_s: float) -> Link:
    from elastune.runtime.agents.agent import join

    until = time.monotonic() + patience_s
    while True:
        address, left_s = where.now, max(0.0, until - time.monotonic())
        try:
            return join(address, token, hello, min(left_s, JOIN_LIMIT_S))
        except OSError as error:
            if left_s > JOIN_LIMIT_S:  # the controller may have moved: look again
                continue
            why = f"{address}: {error.strerror or error}, after {patience_s - max(0.0, until - time.monotonic()):.0f} s"
        raise UserError("a controller must listen there", why, "start it, or see the address and firewalls") from None


# --- elastune deploy ---


def deploy(
    system: Annotated[str, typer.Argument(help="The system: jobset (Kubernetes) or skypilot.")],
    command: Annotated[
        list[str],
        typer.Argument(help="The program, as a path in the image, and options of elastune run. Put -- before it."),
    ],
    image: Annotated[str, typer.Option(help="Container image with elastune, torch, the program and its data.")],
    name: Annotated[str, typer.Option(help="Name of the job.")] = "train",
    hosts: Annotated[int, typer.Option(help="Number of hosts. Each runs one agent.")] = 2,
    workers: Annotated[int, typer.Option(help="Number of workers on each host.")] = 1,
    gpus: Annotated[int, typer.Option(help="Number of GPUs of each host.")] = 0,
    accelerator: Annotated[str, typer.Option(help="What SkyPilot calls the GPUs, such as H100.")] = "H100",
    port: Annotated[int, typer.Option(help="Port where the controller listens for agents.")] = 7070,
    volume: Annotated[
        str, typer.Option(help="Name of a volume that all hosts share, for checkpoints and results.")
    ] = "results",
) -> int:
    """Print a file that starts a job on Kubernetes or SkyPilot.

    The job is elastune run with COMMAND, on workers of several hosts. Such as: elastune deploy jobset --image IMAGE --
    train.py --epochs 10

    The file's first lines tell what it needs and how to start it. The file is checked, but was not run by us.
    """
    from elastune.runtime.deployment import deployment, known, render

    wanted = deployment(
        command, image=image, name=name, hosts=hosts, workers=workers, gpus=gpus, accelerator=accelerator, port=port,
        volume=volume,
    )  # fmt: skip
    print(render(known(system), wanted), end="")
    return OK
