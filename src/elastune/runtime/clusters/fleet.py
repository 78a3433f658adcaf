"""A cluster that has its agents started as its runs need them, and lets idle agents go.

A ``Starter`` (Slurm jobs, Slurm steps, Ray actors) starts the agents. ``plan`` decides how many, purely; ``Fleet``
does it in a thread of its own, because batch systems may answer late. A file beside the token keeps the address of
the controller and the name of its agents. The next controller may run on another machine: it writes its own address
there (``moved``), and the agents that see the file, and their workers, come to it.
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
from elastune.elastic.wire.contact import HostName
from elastune.elastic.wire.handshake import PROTOCOL, exactly
from elastune.elastic.wire.transport import ProtocolError, of_anybody
from elastune.runtime.clusters.base import Handle, SurvivingRun
from elastune.runtime.clusters.hosts import LOOK_S, HostsCluster
from elastune.runtime.elastic_run import ElasticRun
from elastune.runtime.spot import SpotWatch

# ``plan`` decides, purely, which agents to start and which idle agents to end. A thread executes the decision,
# because batch systems may answer late.

QUEUE_LOOK_S = 10.0  # between looks, but for those that news ask for: a queue is shared with others
RETRY_S = 60.0  # after a start was refused
TRIES = 3  # starts in a row of which no agent has come, before there are no more
JOIN_LIMIT_S = 30.0
Phase = Literal["waiting", "running"]


@dataclass(frozen=True)
class NeverStarts:
    """What was started will never come, however long one waits: ``value`` says what it is, ``fix`` what to do."""

    value: str
    fix: str


class NotStarted(Exception):
    """Whatever starts agents did not do what it was asked for; why, in one line."""


class Starter(ABC):
    """Starts agents somewhere, each with a label of its own, which the agent shows (``elastune agent --label``).

    One thread uses it at a time. Every method raises ``NotStarted`` where it cannot do its work.
    """

    @abstractmethod
    def start(self, count: int) -> None:
        """Have ``count`` more agents started."""

    @abstractmethod
    def look(self) -> dict[str, Phase]:
        """What was started and has not ended, by label, oldest first."""

    @abstractmethod
    def cancel(self, labels: Sequence[str]) -> None:
        """End these, which wait."""

    @abstractmethod
    def why(self, label: str) -> str:
        """What is known of the end of ``label``, of which no agent has come."""

    @abstractmethod
    def waits(self) -> str:
        """What those that wait are waiting for, as of the last look; "" where none waits."""

    def never(self) -> NeverStarts | None:
        """Why those that wait will never start, as of the last look; None where they may."""
        return None

    @abstractmethod
    def close(self) -> None:
        """End all that is left. Idempotent."""


@dataclass(frozen=True)
class AgentStatus:
    """An agent that is there. ``idle_s``: how long it has had no workers, 0 where it has some; ``going``: it will end
    soon."""

    idle_s: float = 0.0
    going: bool = False


@dataclass(frozen=True)
class ScalingDecision:
    """``start``: how many more; ``cancel``: what waits and is wanted no more; ``dismiss``: agents to be let go."""

    start: int = 0
    cancel: tuple[str, ...] = ()
    dismiss: tuple[str, ...] = ()


def plan(
    needed: int, starts: Mapping[str, Phase], agents: Mapping[str, AgentStatus], came: Collection[str], idle_s: float
) -> ScalingDecision:
    """What makes ``needed`` agents of those that are there and those that come.

    ``starts``: what was started and has not ended; ``came``: the labels of all agents that ever came: a start whose
    agent has gone brings none any more, whatever the queue says. ``idle_s``: how long an agent stays without workers.
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
    """Has ``starter`` keep as many agents as are needed. ``steer``, ``news`` and ``close`` are one thread's.

    ``idle_s``: how long an agent stays without workers where fewer are needed.
    """

    def __init__(self, starter: Starter, idle_s: float) -> None:
        self._starter = starter
        self._idle_s = idle_s
        self._needed = 0
        self._agents: Mapping[str, AgentStatus] = {}
        self._came: frozenset[str] = frozenset()
        self._starts: dict[str, Phase] = {}
        self._news: deque[str] = deque()
        self._last_notice = ""
        self._failed = 0  # starts in a row that came to nothing
        self._cancelled: set[str] = set()
        self._retry_at = 0.0
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._serve, name="fleet", daemon=True)

    def begin(self, needed: int) -> None:
        """Start the first, beside those that the controller before has started.

        Raises ``NotStarted`` where there is none then.
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
        """From now on ``needed`` of them; ``agents`` are there. The labels of those that are to be let go now."""
        news = needed != self._needed or agents.keys() != self._agents.keys()
        news = news or any(agents[label].going != self._agents[label].going for label in agents)
        if agents.keys() - self._came:
            self._failed = 0
        self._needed, self._agents, self._came = needed, dict(agents), self._came | agents.keys()
        if news:
            self._wake.set()
        return plan(needed, self._starts, agents, self._came, self._idle_s).dismiss

    @property
    def given_up(self) -> bool:
        """Whether nothing more is started, because nothing came of it."""
        return self._failed >= TRIES

    def waits(self) -> str:
        """What the missing agents wait for."""
        return self._starter.waits()

    def never(self) -> NeverStarts | None:
        """Why they will never come, where that is known."""
        return self._starter.never()

    def news(self) -> list[str]:
        """Return new lines for the user, each line once."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def stop(self) -> None:
        """Start no more. Idempotent."""
        self._closing.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_LIMIT_S)

    def close(self) -> None:
        """Start no more, and end what has not ended. Raises ``NotStarted`` where something may be left."""
        self.stop()
        self._starter.close()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                self._round()
            except NotStarted as error:
                self._retry_at = time.monotonic() + RETRY_S
                self._notify(str(error))
            self._wake.wait(QUEUE_LOOK_S)
            self._wake.clear()

    def _round(self) -> None:
        before, self._starts = self._starts, self._starter.look()
        for label in before.keys() - self._starts.keys() - self._came - self._cancelled:
            self._failed += 1
            self._news.append(f"{label} has ended before its agent came: {self._starter.why(label)}")
            if self._failed == TRIES:
                self._news.append(f"no more agents are started: {TRIES} in a row came to nothing")
        orders = plan(self._needed, self._starts, self._agents, self._came, self._idle_s)
        if orders.cancel:
            self._starter.cancel(orders.cancel)
            self._cancelled.update(orders.cancel)
        if orders.start and not self.given_up and time.monotonic() >= self._retry_at and not self._closing.is_set():
            self._starter.start(orders.start)
            self._starts = self._starter.look()
        self._notify(self._starter.waits())

    def _notify(self, line: str) -> None:
        if line and line != self._last_notice:
            self._news.append(line)
        self._last_notice = line


# A file named by the token holds the address of the controller, and the name of its jobs or actors. The next
# controller may run on another machine: it writes its address there (``moved``), and agents and workers that see the
# file connect to it.

NAME = "controller.json"
LIMIT_BYTES = 4096
REACH_S = 2.0


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class ControllerAddress:
    """``name``: of all jobs or actors of a controller; their agents come to ``address``:``port``."""

    name: Annotated[str, Field(pattern=r"^elastune-[0-9a-f]{8}$")]
    address: HostName
    port: Annotated[int, Field(ge=1, le=65535)]


_ADAPTER = TypeAdapter(ControllerAddress)


def new_name() -> str:
    """A name that no other controller's jobs or actors have."""
    return f"elastune-{secrets.token_hex(4)}"


def write_controller_address(folder: Path, name: str, where: str) -> None:
    """For the next controller: agents called ``name`` come to ``where`` ("host:port"). Raises ``UserError``."""
    address, _, port = where.rpartition(":")
    controller = ControllerAddress(name, address.strip("[]"), int(port))
    text = json.dumps({"name": controller.name, "address": controller.address, "port": controller.port})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / NAME, text.encode() + b"\n", mode=0o600)
    except OSError as error:
        why = f"{folder}: {error.strerror}"
        raise UserError("the next controller must find this one's agents", why, "see --out") from None


def read_controller_address(folder: Path) -> ControllerAddress | None:
    """What the controller before this one left in ``folder``; None where it left nothing that can be used."""
    try:
        with (folder / NAME).open("rb") as file:
            return _ADAPTER.validate_json(file.read(LIMIT_BYTES), strict=True)
    except (OSError, ValueError):
        return None


def file_in(folder: Path) -> Path:
    """The file that agents, and their workers, look at."""
    return folder / NAME


def can_take_over(left: ControllerAddress, address: str, port: int) -> bool:
    """Whether a controller at ``address``, and at ``port`` (0: any), can have the port that agents of ``left`` know."""
    if port not in (0, left.port):
        return False
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        socket.create_server((address, left.port), family=family).close()
    except OSError:
        return False
    return True


def check_no_controller(left: ControllerAddress) -> None:
    """No controller listens any more where the agents of ``left`` come to, encrypted or not. Raises ``UserError``."""
    if not any(_greeting(left, encrypted=encrypted) == PROTOCOL for encrypted in (False, True)):
        return
    where = f"one listens at {left.address}:{left.port}"
    raise UserError("a run has one controller at a time", where, "end that one first, or let it go on")


def _greeting(left: ControllerAddress, *, encrypted: bool) -> bytes:
    """What is said first at that address; empty where nobody is there, or none who speaks so."""
    try:
        with socket.create_connection((left.address, left.port), REACH_S) as plain:
            if not encrypted:
                return exactly(plain, len(PROTOCOL), time.monotonic() + REACH_S)
            with of_anybody(plain, REACH_S) as connection:
                return exactly(connection, len(PROTOCOL), time.monotonic() + REACH_S)
    except (OSError, ProtocolError):
        return b""


def forget(folder: Path) -> None:
    """Nothing is left that could be found. Idempotent."""
    (folder / NAME).unlink(missing_ok=True)


STEER_S = 0.5


@dataclass(frozen=True)
class FleetSize:
    """How many agents there may be. ``workers_each``: room at each, None: as many as a host has, all hosts are used;
    ``least`` are kept whatever is needed; ``idle_s``: how long the others stay without workers."""

    most: int
    workers_each: int | None = None
    least: int = 0
    idle_s: float = 60.0

    def agents(self, workers: int) -> int:
        """How many it takes for ``workers``."""
        if self.workers_each is None:
            return self.most
        return max(self.least, min(self.most, math.ceil(workers / self.workers_each)))


class FleetCluster(HostsCluster):
    """As ``HostsCluster``, with agents that ``starter`` starts; it is told this cluster's address ("host:port").

    ``expected``: how many workers there is to be room for until a run begins, or always, where somebody else gives
    the workers out (not ``grows``); a run's own target counts from then on. ``grace_s``, ``gather_s``, ``out``,
    ``spot``, ``own_folders``: as there. Raises ``UserError`` where nothing can be started.
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
    def wanted(self) -> int:
        """How many workers there is use for."""
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
        if self._spot is not None:  # those that came by themselves may be on-demand ones, which replace none
            agents = {label: (number, agent) for label, (number, agent) in agents.items() if agent.label}
        idle = {label for label, (_, agent) in agents.items() if not (agent.workers or agent.unnamed)}
        self._idle_since = {label: self._idle_since.get(label, now) for label in idle}
        seen = {
            label: AgentStatus(now - self._idle_since.get(label, now), agent.notice is not None)
            for label, (_, agent) in agents.items()
        }
        for label in self._fleet.steer(self._size.agents(self.wanted), seen):
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
                raise UserError("what starts agents must be able to begin", never.value, never.fix)
            if self._fleet.given_up:
                raise UserError("agents must come from what was started", f"room for {self.free}", "see what it said")
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
            self._notify(f"something may be left of what was started: {error}")
