"""Agents and workers that only speak: thousands of them in one process, without torch, for ``agents.py``.

They speak the product's protocol (its handshake, its messages), each over a connection of its own. An agent says what
room it has, "starts" workers by connecting them, and beats with a sight of each. A worker is ready at once, runs a view
as soon as the first of its members has published a group's identifier (NCCL's members wait for one, too), and beats.
What is left out: training, and reading each view whole, as a real worker does on its own machine (one in ``READERS``
does it here, too). Commands come as lines of JSON on the standard input, what happened goes out likewise.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from elastune.elastic.wire import messages as run
from elastune.elastic.wire.contact import CHALLENGE_BYTES, PROOF_BYTES, derived, new_nonce, respond, verify
from elastune.elastic.wire.transport import ProtocolError
from elastune.runtime.agents import messages as agents

SLICES = 50  # of a second, or of a worker's time between beats: in each, as many of the fakes beat
READERS = 64
AGAIN_S = 0.1
COMING = 16  # that connect before those are answered who have
SIGHT = "step 1234, loss 0.1234"
IDENTIFIER = "A" * 172  # as long as NCCL's, in base64


@dataclass(frozen=True)
class Door:
    """Where one comes in, and with what words."""

    address: tuple[str, int]
    token: str
    purpose: str
    words: bytes


@dataclass(eq=False)
class Peer:
    """A fake's end of its connection. ``agent``: it is that, or its worker ``worker`` with that ``key``."""

    socket: socket.socket
    door: Door
    agent: Agent
    worker: int | None = None
    key: int = 0
    proof: bytes = b""  # that its server owes
    data: bytearray = field(default_factory=bytearray)
    output: bytearray = field(default_factory=bytearray)
    let_in: bool = False
    gone: bool = False


@dataclass(eq=False)
class Agent:
    """What is behind an agent's connection."""

    number: int
    host: str
    room: int
    peer: Peer | None = None
    workers: dict[int, Peer] = field(default_factory=dict)  # by their keys


@dataclass(eq=False)
class Seen:
    """A view, and which of its members have it."""

    members: frozenset[int]
    leader: int
    told: set[int] = field(default_factory=set)


class Fakes:
    """All agents and workers of this process. ``door``: that of the controller, without words."""

    def __init__(self, door: Door, versions: dict[str, str]) -> None:
        self._door, self._versions = door, versions
        self._selector = selectors.DefaultSelector()
        self._agents: dict[int, Agent] = {}
        self._workers: dict[int, Peer] = {}
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._coming: deque[Peer] = deque()
        self._number, self._seen = 0, Seen(frozenset(), -1)  # the newest view
        self._beat_s = 1.0
        self.pushed_out = 0
        os.set_blocking(0, False)
        self._selector.register(0, selectors.EVENT_READ)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Until the standard input ends."""
        rest, ticks = b"", [0, 0]
        next_s = [time.monotonic()] * 2
        while True:
            for _ in range(min(COMING, len(self._coming))):  # a machine of its own would answer at once
                self._open(self._coming.popleft())
            waits = [*next_s, *(at for at, _ in self._later), *([0.0] if self._coming else [])]
            for key, mask in self._selector.select(max(0.0, min(waits) - time.monotonic())):
                if key.fileobj == 0:
                    data = os.read(0, 1 << 16)
                    if not data:
                        return
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        self._obey(json.loads(line))
                    continue
                peer: Peer = key.data
                if mask & selectors.EVENT_WRITE and not peer.gone:
                    self._flush(peer)
                if mask & selectors.EVENT_READ and not peer.gone:
                    self._read(peer)
            now = time.monotonic()
            due = [call for at, call in self._later if at <= now]
            self._later = [(at, call) for at, call in self._later if at > now]
            for call in due:
                call()
            for kind, (beat, every_s) in enumerate(((self._agents_beat, 1.0), (self._workers_beat, self._beat_s))):
                while now >= next_s[kind]:
                    next_s[kind] += every_s / SLICES
                    ticks[kind] = (ticks[kind] + 1) % SLICES
                    beat(ticks[kind], now)

    def _obey(self, command: dict[str, Any]) -> None:
        match command:
            case {"come": [first, last], "room": room}:
                for number in range(first, last):
                    agent = self._agents[number] = Agent(number, f"host{number:04d}", room)
                    self._agent_comes(agent)
            case {"die": number}:
                agent = self._agents.pop(number)
                tell(died=number, at=time.monotonic())
                for peer in [agent.peer, *agent.workers.values()]:
                    if peer is not None:
                        self._drop(peer)

    def _workers_beat(self, at: int, now: float) -> None:
        step = int(now * 4)
        doing = run.Beat(step, "reducing", 0.1, 1 << 20, self._number, 3 * step, "the reduction", "train.py:34")
        line = run.encode(doing)
        for peer in [peer for number, peer in self._workers.items() if number % SLICES == at and peer.let_in]:
            self._send(peer, line)

    def _agents_beat(self, at: int, now: float) -> None:
        for agent in [agent for number, agent in self._agents.items() if number % SLICES == at]:
            if agent.peer is not None and agent.peer.let_in:
                sights = [agents.WorkerSeen(key, "S", now, SIGHT) for key in agent.workers]
                self._send(agent.peer, agents.FROM_AGENT.encode(agents.AgentBeat(sights)))

    # -- what they are told -------------------------------------------------------------------------------------------

    def _agent_comes(self, agent: Agent) -> None:
        words = agents.FROM_AGENT.encode(agents.AgentHello(self._versions, agent.host, agent.room))
        agent.peer = self._connect(Peer(socket.socket(), replace(self._door, words=words), agent))

    def _worker_comes(self, door: Door, agent: Agent, worker: int, key: int) -> None:
        peer = self._connect(Peer(socket.socket(), door, agent, worker, key))
        agent.workers[key] = self._workers[worker] = peer

    def _agent_told(self, agent: Agent, line: bytes) -> None:
        assert agent.peer is not None
        match agents.FROM_CONTROLLER.decode(line):
            case agents.StartWorker(key=key, bootstrap=start):
                host, _, port = start.coordinator.rpartition(":")
                words = run.encode(run.Hello(start.worker, agent.host))
                door = Door((host, int(port)), derived(self._door.token, start.token), run.PURPOSE, words)
                self._worker_comes(door, agent, start.worker, key)
                self._send(agent.peer, agents.FROM_AGENT.encode(agents.WorkerStarted(key, 100_000 + start.worker)))
            case agents.EndWorker(key=key) if key in agent.workers:
                self._drop(agent.workers.pop(key))
                self._send(agent.peer, agents.FROM_AGENT.encode(agents.WorkerEnded(key, -9)))

    def _worker_told(self, peer: Peer, worker: int, line: bytes) -> None:
        if line.endswith(b'"kind":"beat"}'):
            return
        if line.endswith(b'"kind":"install_view"}'):
            number = int(line.split(b'"number":', 1)[1].split(b",", 1)[0])
            if number > self._number or worker % READERS == 0:
                self._read_view(line)
            if number == self._number:
                self._enter_view(peer, worker)
            return
        match run.decode(line):
            case run.Welcome(beat_s=beat_s):
                self._beat_s = beat_s
                self._send(peer, run.encode(run.Ready()))
            case run.Publish(key=key) if int(key.partition("/")[0]) == self._number:
                self._runs(peer, worker)

    def _read_view(self, line: bytes) -> None:
        installed = run.decode(line)
        assert isinstance(installed, run.InstallView)
        view = installed.view
        if view.number > self._number:
            self._number, self._seen = view.number, Seen(frozenset(view.members), view.members[0])
            tell(view=view.number, first=time.monotonic(), members=len(view.members), bytes=len(line))

    def _enter_view(self, peer: Peer, worker: int) -> None:
        if worker not in self._seen.members:
            return
        self._seen.told.add(worker)
        if worker == self._seen.leader:
            self._send(peer, run.encode(run.Publish(f"{self._number}/id", IDENTIFIER)))
            self._runs(peer, worker)
        if len(self._seen.told) == len(self._seen.members):
            tell(view=self._number, last=time.monotonic())

    def _runs(self, peer: Peer, worker: int) -> None:
        if worker in self._seen.members:
            self._send(peer, run.encode(run.Running(self._number, 100 * self._number)))

    # -- connections --------------------------------------------------------------------------------------------------

    def _connect(self, peer: Peer) -> Peer:
        self._coming.append(peer)
        return peer

    def _open(self, peer: Peer) -> None:
        if peer.gone:
            return
        peer.socket.setblocking(False)
        peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.socket.connect_ex(peer.door.address)
        self._selector.register(peer.socket, selectors.EVENT_READ, peer)

    def _read(self, peer: Peer) -> None:
        try:
            data = peer.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost(peer)
            return
        peer.data += data
        if not peer.let_in and not self._enter(peer):
            return
        *lines, peer.data = peer.data.split(b"\n")
        for line in lines:
            if not peer.gone and peer.worker is None:
                self._agent_told(peer.agent, bytes(line))
            elif not peer.gone and peer.worker is not None:
                self._worker_told(peer, peer.worker, bytes(line))

    def _enter(self, peer: Peer) -> bool:
        """Whether the handshake is over; go on with it."""
        try:
            if not peer.proof and len(peer.data) >= CHALLENGE_BYTES:
                challenged = bytes(peer.data[:CHALLENGE_BYTES])
                del peer.data[:CHALLENGE_BYTES]
                response, peer.proof = respond(peer.door.token, peer.door.purpose, challenged, new_nonce())
                self._send(peer, response + peer.door.words)
            if peer.proof and len(peer.data) >= PROOF_BYTES:
                verify(bytes(peer.data[:PROOF_BYTES]), peer.proof)
                del peer.data[:PROOF_BYTES]
                peer.let_in = True
        except ProtocolError:
            self._lost(peer)
        return peer.let_in

    def _lost(self, peer: Peer) -> None:
        """Its server has closed the connection: who was not let in comes again, as the product's agents and workers."""
        if peer.gone:
            return
        self._drop(peer)
        if peer.let_in:
            return
        self.pushed_out += 1
        tell(pushed_out=self.pushed_out)

        def again() -> None:
            if peer.worker is None:
                self._agent_comes(peer.agent)
            elif peer.key in peer.agent.workers:
                self._worker_comes(peer.door, peer.agent, peer.worker, peer.key)

        self._later.append((time.monotonic() + AGAIN_S * (1 + peer.agent.number % 7), again))

    def _drop(self, peer: Peer) -> None:
        if not peer.gone:
            peer.gone = True
            if peer.socket in self._selector.get_map():
                self._selector.unregister(peer.socket)
            peer.socket.close()
            if peer.worker is not None and self._workers.get(peer.worker) is peer:
                del self._workers[peer.worker]

    def _send(self, peer: Peer, line: bytes) -> None:
        if not peer.gone:
            peer.output += line
            if len(peer.output) == len(line):
                self._flush(peer)

    def _flush(self, peer: Peer) -> None:
        try:
            sent = peer.socket.send(peer.output)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._lost(peer)
            return
        del peer.output[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.output else 0)
        if self._selector.get_key(peer.socket).events != events:
            self._selector.modify(peer.socket, events, peer)


def tell(**facts: Any) -> None:
    """One line to whoever has started this process."""
    print(json.dumps(facts), flush=True)


def main() -> int:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    line = b""
    while not line.endswith(b"\n"):  # what follows is the loop's to read
        line += os.read(0, 1)
    told = json.loads(line)
    Fakes(Door((told["host"], told["port"]), told["token"], agents.PURPOSE, b""), told["versions"]).serve()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
