"""Being let in by a server: encryption, the client's part of the handshake, the first answer.

A server looks at so many newcomers at a time and no more. Where thousands come at once some have to come again.
"""

from __future__ import annotations

import random
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

from elastune.elastic.protocol.handshake import BUSY, CHALLENGE_BYTES, PROOF_BYTES, new_nonce, respond, verify
from elastune.elastic.protocol.tls import fingerprint_of, pinned
from elastune.elastic.protocol.transport import DIAL_LIMIT_S, Lines, ProtocolError, dial, first_line

AGAIN_S, MOST_S = 0.05, 1.0  # between two tries to be let in: doubled each time, and never quite the same


class PushedOut(ConnectionError):
    """Too many came at once, and this one was not looked at: it may come again."""


@dataclass(frozen=True)
class Entered:
    """``connection`` is to be used from now on. ``line``: what the server said first; ``early``: what it said since."""

    connection: socket.socket
    line: bytes
    early: list[bytes]


def enter_at(
    address: str, lines: Lines, token: str, purpose: str, words: bytes, limit_s: float, *, dial_s: float = DIAL_LIMIT_S
) -> Entered:
    """``dial`` the server at ``address`` and ``enter``; who is pushed out comes again, until ``dial_s`` have passed.

    Raises as those two.
    """
    until, pause_s = time.monotonic() + dial_s, AGAIN_S
    while True:
        connection = dial(address, until - time.monotonic())
        try:
            return enter(connection, lines, token, purpose, words, limit_s)
        except PushedOut:
            again_s = pause_s * random.uniform(0.5, 1.5)
            if time.monotonic() + again_s >= until:
                raise
        time.sleep(again_s)
        pause_s = min(2 * pause_s, MOST_S)


def enter(connection: socket.socket, lines: Lines, token: str, purpose: str, words: bytes, limit_s: float) -> Entered:
    """The handshake with a server for ``purpose``, then ``words``; encrypted where ``token`` says so.

    Nothing of what the server says is read as a message before it has proved itself. Raises ``OSError`` where it closes
    or is silent for ``limit_s`` (``PushedOut`` where too many came), ``ProtocolError`` for a stranger; the connection
    is closed then.
    """
    until = time.monotonic() + limit_s
    try:
        if wanted := fingerprint_of(token):
            connection = _encrypted(connection, wanted, limit_s)
        response, proof = respond(token, purpose, exactly(connection, CHALLENGE_BYTES, until), new_nonce())
        with suppress(ConnectionResetError, BrokenPipeError):  # it is closed: what it has said can be read all the same
            connection.sendall(response + words)
        said = exactly(connection, PROOF_BYTES, until)
        if said == BUSY:
            raise PushedOut("too many came at once")
        verify(said, proof)
        return Entered(connection, *first_line(connection, lines, until - time.monotonic()))
    except BaseException:
        connection.close()
        raise


def _encrypted(connection: socket.socket, wanted: str, limit_s: float) -> socket.socket:
    try:
        return pinned(connection, wanted, limit_s)
    except ConnectionError as error:  # nothing can be said before it is encrypted
        raise PushedOut(str(error)) from None


def exactly(connection: socket.socket, size: int, until: float) -> bytes:
    """So many bytes, before the time ``until``; or all up to a line's end that comes before, which is a stranger's.

    Raises ``OSError`` and ``ProtocolError``.
    """
    data = b""
    while len(data) < size and b"\n" not in data:
        connection.settimeout(max(0.001, until - time.monotonic()))
        got = connection.recv(size - len(data))
        if not got:
            if data:
                raise ProtocolError("it closed the connection in the middle of a line")
            raise ConnectionError("the other side closed the connection")
        data += got
    return data
