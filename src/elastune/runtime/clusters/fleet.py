"""A cluster that starts agents as its runs need them, and ends idle agents.

A ``Starter`` (Slurm jobs, Slurm steps, Ray actors) starts the agents. ``plan`` is pure and decides how many. ``Fleet``
executes the decision in a thread of its own, because batch systems may answer late. A file beside the token keeps the
address of the controller and the name of its agents. The next controller may run on another machine. It writes its own
address into the file, and the agents that see the file, and their workers, connect to it.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass as checked

from elastune.core.errors import UserError
from elastune.core.journal.files import atomic_write
from elastune.core.run import RunSpec
from elastune.elastic.wire.contact import PROTOCOL, HostName, exactly
from elastune.elastic.wire.transport import ProtocolError, of_anybody
from elastune.runtime.clusters.base import Handle, SurvivingRun
from elastune.runtime.clusters.hosts import LOOK_S, HostsCluster
from elastune.runtime.elastic_run import ElasticRun
from elastune.runtime.spot import SpotWatch

QUEUE_LOOK_S = 10.0  # between two readings of the queue, which others share; a change is read at once
RETRY_S = 60.0  # after a refused start
TRIES = 3  # after so many starts in a row without an agent, no more are started
JOIN_LIMIT_S = 30.0
Phase = Literal["waiting", "running"]


@dataclass(frozen=True)
class NeverStarts:
    """A start that will never bring an agent: ``value`` says which and why, ``fix`` what to do."""

    value: str
    fix: str


class NotStarted(Exception):
    """The batch system did not do what it was asked to do. The message says why, in one line."""


class Starter(ABC):
    """Starts agents, such as by Slurm jobs or Ray actors.

    Each agent has its own label (``elastune agent --label``). One thread uses a starter at a time. Every method raises
    ``NotStarted`` if it fails.
    """

    @abstractmethod
    def start(self, count: int) -> None:
        """Start ``count`` more agents."""

    @abstractmethod
    def look(self) -> dict[str, Phase]:
        """Return the starts that have not ended, by label, oldest first."""

    @abstractmethod
    def cancel(self, labels: Sequence[str]) -> None:
        """End these starts, which still wait."""

    @abstractmethod
    def why(self, label: str) -> str:
        """Say why the start ``label`` has ended without an agent, as far as it is known."""

    @abstractmethod
    def waits(self) -> str:
        """Say what the starts wait for, as of the last ``look``; "" if none waits."""

    def never(self) -> NeverStarts | None:
        """Say why the waiting starts will never begin, as of the last ``look``; None if they may."""
        return None

    @abstractmethod
    def close(self) -> None:
        """End all starts that are left. Idempotent."""


@dataclass(frozen=True)
class AgentStatus:
    """A connected agent.

    Attributes:
        idle_s: How long it has had no workers; 0 if it has some.
        going: Whether it will end soon.
    """

    idle_s: float = 0.0
    going: bool = False


@dataclass(frozen=True)
class ScalingDecision:
    """What a fleet does next.

    Attributes:
        start: The number of agents to start.
        cancel: Waiting starts that are no longer needed.
        dismiss: Agents to end.
    """

    start: int = 0
    cancel: tuple[str, ...] = ()
    dismiss: tuple[str, ...] = ()


def plan(
    needed: int, starts: Mapping[str, Phase], agents: Mapping[str, AgentStatus], came: Collection[str], idle_s: float
) -> ScalingDecision:
    """Decide how the fleet gets ``needed`` agents.

    Args:
        needed: The number of agents.
        starts: The starts that have not ended.
        agents: The connected agents, by label.
        came: The labels of all agents that ever connected. A start whose agent is gone brings no other agent, whatever
            the queue says.
        idle_s: How long an agent stays without workers.
    """
    staying = {label: agent for label, agent in agents.items() if not agent.going}
    coming = [label for label in starts if label not in agents and label not in came]
    surplus = len(staying) + len(coming) - needed
    if surplus <= 0:
        return ScalingDecision(start=-surplus)
    cancel = [label for label in coming if starts[label] == "waiting"][-surplus:]
    idle = sorted(
        (label for label in staying if staying[label].idle_s >= idle_s), key=lambda name: -staying[name].idle_s
    )
    most = min(surplus - len(cancel), len(staying) - needed)
    return ScalingDecision(cancel=tuple(cancel), dismiss=tuple(idle[: max(0, most)]))


class Fleet:
    """Keeps as many agents as are needed. One thread calls its methods; another one starts the agents.

    Args:
        starter: Starts agents.
        idle_s: How long a surplus agent stays without workers.
    """

    def __init__(self, starter: Starter, idle_s: float) -> None:
        self._starter = starter
        self._idle_s = idle_s
        self._needed = 0
        self._agents: Mapping[str, AgentStatus] = {}
        self._came: frozenset[str] = frozenset()
        self._starts: dict[str, Phase] = {}
        self._news: deque[str] = deque()
        self._last_line = ""
        self._failed = 0  # starts in a row without an agent
        self._cancelled: set[str] = set()
        self._retry_at = 0.0
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve, name="fleet", daemon=True)

    def begin(self, needed: int) -> None:
        """Start the first agents, beside those of the earlier controller.

        Raises:
            NotStarted: If nothing could be started and no earlier start is left.
        """
        self._needed = needed
        try:
            self._starter.start(max(0, needed - len(self._starter.look())))
        except NotStarted as error:
            if not self._starter.look():
                raise
            self._news.append(str(error))
        self._starts = self._starter.look()
        self._thread.start()

    def steer(self, needed: int, agents: Mapping[str, AgentStatus]) -> tuple[str, ...]:
        """Set how many agents are ``needed`` and which are connected. Return the labels of the agents to end."""
        changed = needed != self._needed or agents.keys() != self._agents.keys()
        changed = changed or any(agents[label].going != self._agents[label].going for label in agents)
        if agents.keys() - self._came:
            self._failed = 0
        self._needed, self._agents, self._came = needed, dict(agents), self._came | agents.keys()
        if changed:
            self._wake.set()
        return plan(needed, self._starts, agents, self._came, self._idle_s).dismiss

    @property
    def given_up(self) -> bool:
        """Whether no more agents are started, because too many starts brought none."""
        return self._failed >= TRIES

    def waits(self) -> str:
        """Say what the missing agents wait for."""
        return self._starter.waits()

    def never(self) -> NeverStarts | None:
        """Say why they will never start, if that is known."""
        return self._starter.never()

    def news(self) -> list[str]:
        """Return new lines for the user, each line once."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def stop(self) -> None:
        """Start no more agents. Idempotent."""
        self._closing.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_LIMIT_S)

    def close(self) -> None:
        """Start no more agents, and end all starts. Raises ``NotStarted`` if some may be left."""
        self.stop()
        self._starter.close()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                self._round()
            except NotStarted as error:
                self._retry_at = time.monotonic() + RETRY_S
                self._add_news(str(error))
            self._wake.wait(QUEUE_LOOK_S)
            self._wake.clear()

    def _round(self) -> None:
        before, self._starts = self._starts, self._starter.look()
        for label in before.keys() - self._starts.keys() - self._came - self._cancelled:
            self._failed += 1
            self._news.append(f"{label} has ended before its agent came: {self._starter.why(label)}")
            if self._failed == TRIES:
                self._news.append(f"no more agents are started: {TRIES} starts in a row brought none")
        orders = plan(self._needed, self._starts, self._agents, self._came, self._idle_s)
        if orders.cancel:
            self._starter.cancel(orders.cancel)
            self._cancelled.update(orders.cancel)
        if orders.start and not self.given_up and time.monotonic() >= self._retry_at and not self._closing.is_set():
            self._starter.start(orders.start)
            self._starts = self._starter.look()
        self._add_news(self._starter.waits())

    def _add_news(self, line: str) -> None:
        if line and line != self._last_line:
            self._news.append(line)
        self._last_line = line


# --- the address of the controller, for its agents and for the next controller ---

NAME = "controller.json"
LIMIT_BYTES = 4096
REACH_S = 2.0


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class ControllerAddress:
    """A controller of Slurm jobs or Ray actors, for the next controller.

    Attributes:
        name: The name of all its jobs or actors.
        address: The address to which their agents connect.
        port: The port.
    """

    name: Annotated[str, Field(pattern=r"^elastune-[0-9a-f]{8}$")]
    address: HostName
    port: Annotated[int, Field(ge=1, le=65535)]


_ADAPTER = TypeAdapter(ControllerAddress)


def new_name() -> str:
    """Return a name that the jobs or actors of no other controller have."""
    return f"elastune-{secrets.token_hex(4)}"


def write_controller_address(folder: Path, name: str, where: str) -> None:
    """Note for the next controller that agents ``name`` connect to ``where`` ("host:port"). Raises ``UserError``."""
    address, _, port = where.rpartition(":")
    controller = ControllerAddress(name, address.strip("[]"), int(port))
    text = json.dumps({"name": controller.name, "address": controller.address, "port": controller.port})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / NAME, text.encode() + b"\n", mode=0o600)
    except OSError as error:
        why = f"{folder}: {error.strerror}"
        raise UserError("the next controller must find the agents of this one", why, "choose another --out") from None


def read_controller_address(folder: Path) -> ControllerAddress | None:
    """Return the address of the earlier controller in ``folder``; None if there is none that can be used."""
    try:
        with (folder / NAME).open("rb") as file:
            return _ADAPTER.validate_json(file.read(LIMIT_BYTES), strict=True)
    except (OSError, ValueError):
        return None


def file_in(folder: Path) -> Path:
    """The file in which agents and their workers look for the next controller."""
    return folder / NAME


def can_take_over(left: ControllerAddress, address: str, port: int) -> bool:
    """Whether a controller at ``address`` and ``port`` (0: any) can listen on the port that agents of ``left`` know."""
    if port not in (0, left.port):
        return False
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        socket.create_server((address, left.port), family=family).close()
    except OSError:
        return False
    return True


def check_no_controller(left: ControllerAddress) -> None:
    """Raise ``UserError`` if the controller ``left`` still listens, encrypted or not."""
    if not any(_greeting(left, encrypted=encrypted) == PROTOCOL for encrypted in (False, True)):
        return
    where = f"one listens at {left.address}:{left.port}"
    raise UserError("a run has one controller at a time", where, "end that one first, or let it go on")


def _greeting(left: ControllerAddress, *, encrypted: bool) -> bytes:
    """Return the first bytes that a server at that address sends; empty if none answers."""
    try:
        with socket.create_connection((left.address, left.port), REACH_S) as plain:
            if not encrypted:
                return exactly(plain, len(PROTOCOL), time.monotonic() + REACH_S)
            with of_anybody(plain, REACH_S) as connection:
                return exactly(connection, len(PROTOCOL), time.monotonic() + REACH_S)
    except (OSError, ProtocolError):
        return b""


def forget(folder: Path) -> None:
    """Remove the file of the controller's address. Idempotent."""
    (folder / NAME).unlink(missing_ok=True)


STEER_S = 0.5


@dataclass(frozen=True)
class FleetSize:
    """How many agents a cluster may have.

    Attributes:
        most: The most agents.
        workers_each: The room of each agent; None: as much as its host has. All hosts are used then.
        least: The number of agents that are always kept.
        idle_s: How long the others stay without workers.
    """

    most: int
    workers_each: int | None = None
    least: int = 0
    idle_s: float = 60.0

    def agents(self, workers: int) -> int:
        """The number of agents for ``workers`` workers."""
        if self.workers_each is None:
            return self.most
        return max(self.least, min(self.most, math.ceil(workers / self.workers_each)))


class FleetCluster(HostsCluster):
    """A ``HostsCluster`` that starts its agents itself.

    Args:
        address: As of ``HostsCluster``, like all arguments that are not listed here.
        starter: Makes the starter of agents, from the address of this cluster ("host:port").
        size: How many agents the cluster may have.
        expected: The number of workers to have room for until a run begins; then the target of the run counts. If the
            caller distributes the workers (not ``grows``), it counts always.

    Raises:
        UserError: If no agent can be started.
    """

    def __init__(
        self,
        address: str,
        port: int,
        token: str,
        *,
        starter: Callable[[str], Starter],
        size: FleetSize,
        expected: int,
        tls: ssl.SSLContext | None = None,
        grows: bool = True,
        grace_s: float = 0.0,
        gather_s: float = 0.0,
        notify: Callable[[str], None] = lambda line: None,
        spot: SpotWatch | None = None,
        out: Path | None = None,
        own_folders: bool | None = False,
    ) -> None:
        super().__init__(
            address, port, token, tls=tls, grows=grows, grace_s=grace_s, gather_s=gather_s, notify=notify,
            spot=spot, out=out, own_folders=own_folders,
        )  # fmt: skip
        self._size, self._expected = size, expected
        self._idle_since: dict[str, float] = {}
        self._next_steer = 0.0
        where = f"[{address}]" if ":" in address else address
        try:
            starts = starter(f"{where}:{self.launcher.port}")
        except BaseException:
            super().close()
            raise
        self._fleet = Fleet(starts, size.idle_s)
        try:
            self._fleet.begin(size.agents(expected))
        except BaseException as error:
            self.close()
            if isinstance(error, NotStarted):
                raise UserError("agents must be started", error, "see elastune doctor") from None
            raise

    def start(self, spec: RunSpec) -> ElasticRun:
        run = super().start(spec)
        if self._grows:
            self._expected = 0
        return run

    def adopt(self, left: Sequence[SurvivingRun]) -> list[Handle | None]:
        adopted = super().adopt(left)
        if self._grows and any(run is not None for run in adopted):
            self._expected = 0
        return adopted

    @property
    def needed_workers(self) -> int:
        """The number of workers that the cluster should have room for."""
        return max(
            self._expected, sum(run.coordinator.membership.target for run in self._runs.values() if not run.over)
        )

    def pump(self, timeout_s: float) -> None:
        super().pump(timeout_s)
        now = time.monotonic()
        if self._closed or now < self._next_steer:
            return
        self._next_steer = now + STEER_S
        agents = {agent.label or f"#{number}": (number, agent) for number, agent in self.launcher.agents.items()}
        if self._spot is not None:  # agents without a label may be on on-demand hosts, and replace no spot host
            agents = {label: (number, agent) for label, (number, agent) in agents.items() if agent.label}
        idle = {label for label, (_, agent) in agents.items() if not (agent.workers or agent.unnamed)}
        self._idle_since = {label: self._idle_since.get(label, now) for label in idle}
        seen = {
            label: AgentStatus(now - self._idle_since.get(label, now), agent.notice is not None)
            for label, (_, agent) in agents.items()
        }
        for label in self._fleet.steer(self._size.agents(self.needed_workers), seen):
            self.launcher.dismiss(agents[label][0])
        for line in self._fleet.news():
            self._notify(line)

    def gather(self, workers: int, limit_s: float, ends: Callable[[], bool] = lambda: False) -> int:
        until = time.monotonic() + limit_s
        while self.free < workers and not ends():
            waits = self._fleet.waits()
            if time.monotonic() >= until:
                rule = f"agents with room for {workers} workers must come within {limit_s:g} s"
                fix = "wait longer with --gather, or ask for less"
                raise UserError(rule, f"room for {self.free}" + (f", {waits}" if waits else ""), fix)
            if (never := self._fleet.never()) is not None:
                raise UserError("agents must be able to start", never.value, never.fix)
            if self._fleet.given_up:
                raise UserError("started agents must connect", f"room for {self.free}", "see the lines above")
            self.pump(LOOK_S)
        return self.free

    def close(self) -> None:
        if self._closed or os.getpid() != self._owner:
            return
        self._fleet.stop()
        super().close()
        try:
            self._fleet.close()
        except NotStarted as error:
            self._notify(f"started agents may be left: {error}")
