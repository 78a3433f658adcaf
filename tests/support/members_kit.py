"""For tests of membership: coordinators that are closed again, peers that may misbehave, waits that end."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, TypeVar

from elastune.core.journal.records import MembershipEvent
from elastune.elastic.coordinator.controller_interface import ListenOptions, Timeouts, WorkerBounds, WorkerLookups
from elastune.elastic.coordinator.coordinator import Coordinator
from elastune.elastic.wire.contact import (
    CHALLENGE_BYTES,
    PROOF_BYTES,
    RESPONSE_BYTES,
    admit,
    challenge,
    exactly,
    new_nonce,
    respond,
    verify,
)
from elastune.elastic.wire.messages import PURPOSE, Hello, Message, decode, encode
from elastune.elastic.wire.transport import Lines
from elastune.elastic.worker.client import CoordinatorClient

LIMIT_S = 60.0
T = TypeVar("T")


def eventually(found: Callable[[], T], what: str = "") -> T:
    """``found``'s first value that is true. Fails after ``LIMIT_S``."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        if value := found():
            return value
        time.sleep(0.002)
    raise AssertionError(f"not within {LIMIT_S} s: {what}")


@contextlib.contextmanager
def coordinating(workers: int = 3, **changed: Any) -> Iterator[Coordinator]:
    """A coordinator of workers 0.. that is closed again. ``changed``: fields of what it gets from its controller."""
    given = {"low": 1, "high": 8, "heartbeat_s": 5.0, **changed}
    nouns = [_made(noun, given) for noun in (WorkerBounds, Timeouts, ListenOptions, WorkerLookups)]
    assert not given, f"a coordinator is given nothing like {given}"
    coordinator = Coordinator(range(workers), *nouns)
    try:
        yield coordinator
    finally:
        coordinator.close()


def _made(noun: type[Any], given: dict[str, Any]) -> Any:
    """A ``noun`` with those of its fields that are ``given``, and no longer are then."""
    return noun(**{field.name: given.pop(field.name) for field in fields(noun) if field.name in given})


@contextlib.contextmanager
def members(coordinator: Coordinator, *workers: int) -> Iterator[list[CoordinatorClient]]:
    """These workers, connected from this process."""
    found: list[CoordinatorClient] = []
    try:
        for worker in workers:
            found.append(CoordinatorClient(coordinator.address, coordinator.token, worker, host="here"))
            found[-1].on_orphaned = lambda why: None
        yield found
    finally:
        for member in found:
            member.close()


def begun(found: list[CoordinatorClient]) -> int:
    """Let the first version begin; its number."""
    for member in found:
        member.ready()
    number = found[0].await_view(0, LIMIT_S).number
    for member in found:
        assert member.await_view(0, LIMIT_S).number == number
        member.running(number, 0)
    return number


def let_in(connection: socket.socket, token: str, purpose: str = PURPOSE) -> None:
    """Be the server of one client, up to the end of the handshake."""
    nonce = new_nonce()
    connection.sendall(challenge(nonce))
    response = exactly(connection, RESPONSE_BYTES, time.monotonic() + LIMIT_S)
    connection.sendall(admit(token, purpose, nonce, response))


class Events:
    """The machine's events of a coordinator, as its records tell them."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self.all: list[dict[str, Any]] = []

    def text(self) -> str:
        self.all += [r.event for r in self._coordinator.take_records() if isinstance(r, MembershipEvent)]
        return "\n".join(map(str, self.all))


class Raw:
    """A peer that says what it likes, once the coordinator has asked it for its proof."""

    def __init__(self, coordinator: Coordinator) -> None:
        host, port = coordinator.address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=LIMIT_S)
        self.challenge = exactly(self.socket, CHALLENGE_BYTES, time.monotonic() + LIMIT_S)
        self._lines = Lines()
        self._heard: list[bytes] = []

    def send(self, *messages: Message) -> None:
        self.socket.sendall(b"".join(map(encode, messages)))

    def hello(self, coordinator: Coordinator, worker: int | None) -> None:
        """Be honest so far."""
        self.prove(coordinator.token)
        self.send(Hello(worker))

    def prove(self, token: str) -> None:
        """Raises ``ProtocolError`` where the coordinator has another token."""
        response, proof = respond(token, PURPOSE, self.challenge, new_nonce())
        self.socket.sendall(response)
        verify(exactly(self.socket, PROOF_BYTES, time.monotonic() + LIMIT_S), proof)

    def receive(self) -> Message | None:
        """The next message; None at the end of the connection."""
        while not self._heard:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionError:
                data = b""
            if not data:
                return None
            self._heard += self._lines.feed(data)
        return decode(self._heard.pop(0))

    def ended(self) -> bool:
        """Whether the other side closes the connection; reads all that comes before. Fails after ``LIMIT_S``."""
        while self.receive() is not None:
            pass
        return True

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
