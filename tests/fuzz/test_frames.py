"""Whatever arrives on a coordinator's socket: it lives, and serves those who are honest."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz_journals import KINDS, ODD, as_line, places, put
from fuzz_kit import FUZZ, fuzz
from hypothesis import given
from hypothesis import strategies as st
from tests.support.members_kit import Raw, coordinating, members

from elastune.core.journal.records import ConnectionsRefused
from elastune.core.run import Place, Program, RunSpec
from elastune.elastic.coordinator.coordinator import Coordinator
from elastune.elastic.wire.contact import RESPONSE_BYTES, TokenRefused, admit, challenge, new_nonce, respond, verify
from elastune.elastic.wire.messages import (
    Answer,
    Beat,
    Broken,
    Done,
    Exit,
    Hello,
    Publish,
    Ready,
    RecordsKept,
    Report,
    ResizeAsked,
    Returned,
    Running,
    Stop,
    Welcome,
    WorkerSpec,
    decode,
    encode,
)
from elastune.elastic.wire.server import ConnectionServer
from elastune.elastic.wire.transport import LINE_LIMIT_BYTES, Lines, ProtocolError, WakeupPipe
from elastune.elastic.wire.view import View
from elastune.runtime.agents.credentials import credentials

SPEC = WorkerSpec("m:f", RunSpec(Program(Path("p")), Path("o")), Place(), {"A": "1"}, "/", [""])
HONEST = [
    json.loads(encode(message))
    for message in (
        *(Hello(1, "here", returns=True), Returned(True, True, latest_view=View(3, (0, 1)), version=3), RecordsKept(7)),
        *(Hello(1, "here"), Hello(), Ready(), Running(1, 4), Broken(1, "a hiccup"), Done()),
        *(Beat(3, "starting", 0.1, 5), Publish("1/a", "AAAA"), Exit(0), Stop()),
        *(ResizeAsked(2, "why"), Answer(True, "yes", [1]), Welcome(False, 0.5, spec=SPEC)),
        *(Report(record) for record in KINDS["run"]()),
    )
]
GARBAGE = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01",
    b"[" * 5000,
    b"{}",
    b"null",
    b"\x00" * 300,
)


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """One line of a peer's, its end included or not."""
    match draw(st.sampled_from(["honest", "changed", "changed", "changed", "garbage", "bytes"])):
        case "honest":
            line = as_line(draw(st.sampled_from(HONEST)))
        case "changed":
            message = draw(st.sampled_from(HONEST))
            line = as_line(put(message, draw(st.sampled_from(places(message))), draw(st.sampled_from(ODD))))
        case "garbage":
            line = draw(st.sampled_from(GARBAGE))
        case _:
            line = draw(st.binary(max_size=200))
    return line + draw(st.sampled_from([b"\n", b"\n", b"\n", b""]))


@fuzz(200)
@given(line=frames())
def test_a_line_is_a_message_or_a_value_error(line: bytes) -> None:
    with contextlib.suppress(ValueError):
        message = decode(line)
        assert decode(encode(message)[:-1]) is not None


@fuzz(50)
@given(pieces=st.lists(st.binary(max_size=400), max_size=40), limit=st.integers(1, 300))
def test_no_more_than_a_line_is_kept(pieces: list[bytes], limit: int) -> None:
    lines = Lines(limit)
    with contextlib.suppress(ProtocolError):
        for piece in pieces:
            assert all(len(line) <= limit for line in lines.feed(piece))
            assert len(lines._rest) <= limit
    assert len(lines._rest) <= limit


SECRET = "the secret of this test"


@fuzz(200)
@given(line=st.binary(max_size=120), at=st.integers(0, RESPONSE_BYTES - 2), byte=st.integers(0, 255))
def test_no_proof_but_the_right_one_lets_in(line: bytes, at: int, byte: int) -> None:
    """Whatever is said is refused in words; what is right but for one byte, too."""
    nonce = new_nonce()
    response, proof = respond(SECRET, "run", challenge(nonce), new_nonce())
    verify(admit(SECRET, "run", nonce, response), proof)
    for said in (line, response[:at] + bytes([byte]) + response[at + 1 :]):
        with contextlib.suppress(ProtocolError):
            assert admit(SECRET, "run", nonce, said) == proof
            assert said == response
        with contextlib.suppress(ProtocolError):
            verify(said, proof)
            assert said == proof
        with contextlib.suppress(ProtocolError):
            respond(SECRET, "run", said, nonce)
            assert said == challenge(said[-33:-1])


@pytest.fixture(scope="module")
def coordinator() -> Iterator[Coordinator]:
    with coordinating(4, high=4) as one:
        yield one
        assert one._thread.is_alive()


@fuzz(30)
@given(
    said=st.lists(frames(), min_size=1, max_size=5),
    greeting=st.sampled_from(["none", "wrong", "proved", "client", "worker"]),
    cut=st.integers(1, 50),
)
def test_a_coordinator_serves_the_honest(coordinator: Coordinator, said: list[bytes], greeting: str, cut: int) -> None:
    """Of strangers, of clients, and of a worker that lost its mind."""
    with Raw(coordinator) as peer, contextlib.suppress(OSError, TokenRefused):
        match greeting:
            case "wrong":
                peer.prove("no such token")
            case "proved":
                peer.prove(coordinator.token)
            case "client" | "worker":
                peer.hello(coordinator, 3 if greeting == "worker" else None)
        stream = b"".join(said)
        peer.socket.sendall(stream[:cut])
        peer.socket.sendall(stream[cut:])
    assert coordinator._thread.is_alive()
    with Raw(coordinator) as client:
        client.hello(coordinator, None)
        client.send(ResizeAsked(2, "still there?"))
        assert isinstance(client.receive(), Answer)


def test_memory_for_strangers_is_bounded() -> None:
    """Of those without the token no more is kept than a proof has, however much they send."""
    server = ConnectionServer("127.0.0.1", "right", WakeupPipe())
    strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20 * max(1, FUZZ))]
    try:
        for stranger in strangers:
            stranger.setblocking(False)
        for _ in range(5 * len(strangers)):
            for stranger in strangers:
                with contextlib.suppress(OSError):
                    stranger.send(b"x" * LINE_LIMIT_BYTES)
            assert all(isinstance(event, ConnectionsRefused) for event in server.wait(0.001))
            assert all(len(each.response) <= RESPONSE_BYTES for each in server._connections.values())
            assert not any(each.lines._rest for each in server._connections.values())
    finally:
        for stranger in strangers:
            stranger.close()
        server.close()


def test_who_is_gone_before_anybody_looked_is_no_error(tmp_path: Path) -> None:
    """Python's ssl raises at once for a connection that was reset with words left in it."""
    own = credentials(tmp_path / "token", tls=True)
    for tls in (None, own.tls):
        server = ConnectionServer("127.0.0.1", own.token, WakeupPipe(), tls=tls)
        for words in (b"", b"x" * 50):
            with socket.create_connection(("127.0.0.1", server.port)) as stranger:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a reset
                stranger.sendall(words)
            for _ in range(3):
                assert list(server.wait(0.05)) == []
            assert server._connections == {}
        server.close()


def test_an_honest_member_outlives_all_that(coordinator: Coordinator) -> None:
    with members(coordinator, 0) as (member,):
        member.ready()
        assert coordinator._thread.is_alive()
