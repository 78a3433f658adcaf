"""The handshake: each side proves that it has the token, and neither side sends it.

    server  elastune-1 NONCE
    client  NONCE PROOF          followed at once by its first message
    server  PROOF                followed at once by its answer

A server looks at a limited number of new connections at a time. Where thousands of clients connect at once, the
server turns some of them away, and they try again.
"""

from __future__ import annotations

import hashlib
import hmac
import random
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

from elastune.elastic.wire.transport import (
    DIAL_LIMIT_S,
    MARK,
    Lines,
    ProtocolError,
    dial,
    fingerprint_of,
    first_line,
    pinned,
)

# [handshake] Who may come, settled without telling the secret: each side proves that it has the token, and neither sends it.
#
#     server  elastune-1 NONCE
#     client  NONCE PROOF          and at once what it has to say
#     server  PROOF                and at once its answer
#
# A proof is the HMAC-SHA256, by the token, of the side that proves, what its server is for, and both nonces. So it holds
# for one connection, one side and one kind of server: it cannot be replayed, reflected, or carried elsewhere. All is
# ASCII of fixed length, so no byte more than that is read of a stranger. Bytes in, bytes out: connections are others'.

PROTOCOL = b"elastune-1"
NONCE_DIGITS, PROOF_DIGITS = 32, 64
SALT_DIGITS = 32
CHALLENGE_BYTES = len(PROTOCOL) + 1 + NONCE_DIGITS + 1
RESPONSE_BYTES = NONCE_DIGITS + 1 + PROOF_DIGITS + 1
PROOF_BYTES = PROOF_DIGITS + 1
REFUSAL = b"this is not the token".ljust(PROOF_DIGITS) + b"\n"
"""What a server says in place of its proof, to who has another token."""
BUSY = b"too many came at once".ljust(PROOF_DIGITS) + b"\n"
"""Likewise, to one whose proof it has not looked at: come again."""
DIGITS = frozenset(b"0123456789abcdef")


class TokenRefused(ProtocolError):
    """The other side has another token."""


def new_nonce() -> bytes:
    """For one connection, never again."""
    return secrets.token_hex(NONCE_DIGITS // 2).encode()


def challenge(nonce: bytes) -> bytes:
    """The server's first line."""
    return b"%b %b\n" % (PROTOCOL, nonce)


def respond(token: str, purpose: str, challenged: bytes, nonce: bytes) -> tuple[bytes, bytes]:
    """What a client says to the line ``challenged``, and what none but its server can say then.

    ``purpose``: what the server is for; ``nonce``: the client's. Raises ``ProtocolError`` for what is no challenge.
    """
    theirs = challenged[len(PROTOCOL) + 1 : -1]
    if challenged != challenge(theirs) or not _is_nonce(theirs):
        raise ProtocolError(f"it does not speak {PROTOCOL.decode()}")
    response = b"%b %b\n" % (nonce, _proof(token, "client", purpose, theirs, nonce))
    return response, _proof(token, "server", purpose, theirs, nonce) + b"\n"


def admit(token: str, purpose: str, nonce: bytes, response: bytes) -> bytes:
    """The server's proof, for a client that has answered its ``nonce`` with ``response``.

    Raises ``TokenRefused`` for who has another token, ``ProtocolError`` for what is no response.
    """
    theirs, proof = response[:NONCE_DIGITS], response[NONCE_DIGITS + 1 : -1]
    if response != b"%b %b\n" % (theirs, proof) or len(proof) != PROOF_DIGITS or not _is_nonce(theirs):
        raise ProtocolError(f"it does not speak {PROTOCOL.decode()}")
    if not hmac.compare_digest(proof, _proof(token, "client", purpose, nonce, theirs)):
        raise TokenRefused("it has another token")
    return _proof(token, "server", purpose, nonce, theirs) + b"\n"


def verify(said: bytes, expected: bytes) -> None:
    """Whether what a server ``said`` is the proof that was ``expected``. Raises ``ProtocolError`` where it is not."""
    if said == REFUSAL:
        raise TokenRefused("it has another token")
    if not hmac.compare_digest(said, expected):
        raise ProtocolError("it has not proved that it has the token")


def derived(token: str, salt: str = "") -> str:
    """A token that begins with ``salt`` (by default a new one), by which alone all who have ``token`` can make it.

    Its server has the same certificate, where ``token`` names one.
    """
    salt = salt or secrets.token_hex(SALT_DIGITS // 2)
    text = b"%b derived %b" % (PROTOCOL, salt.encode())
    certificate = fingerprint_of(token)
    return salt + hmac.new(token.encode(), text, hashlib.sha256).hexdigest() + (certificate and MARK + certificate)


def _proof(token: str, side: str, purpose: str, servers: bytes, clients: bytes) -> bytes:
    # No part but the first two can vary in length, and those are words of our own without a space.
    text = b" ".join((PROTOCOL, side.encode(), purpose.encode(), servers, clients))
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest().encode()


def _is_nonce(text: bytes) -> bool:
    return len(text) == NONCE_DIGITS and DIGITS.issuperset(text)


# [entry] Being let in by a server: encryption, the client's part of the handshake, the first answer.
#
# A server looks at so many newcomers at a time and no more. Where thousands come at once some have to come again.

AGAIN_S, MOST_S = 0.05, 1.0  # between two tries to be let in: doubled each time, and never quite the same


class ServerBusy(ConnectionError):
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
        except ServerBusy:
            again_s = pause_s * random.uniform(0.5, 1.5)
            if time.monotonic() + again_s >= until:
                raise
        time.sleep(again_s)
        pause_s = min(2 * pause_s, MOST_S)


def enter(connection: socket.socket, lines: Lines, token: str, purpose: str, words: bytes, limit_s: float) -> Entered:
    """The handshake with a server for ``purpose``, then ``words``; encrypted where ``token`` says so.

    Nothing of what the server says is read as a message before it has proved itself. Raises ``OSError`` where it closes
    or is silent for ``limit_s`` (``ServerBusy`` where too many came), ``ProtocolError`` for a stranger; the connection
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
            raise ServerBusy("too many came at once")
        verify(said, proof)
        return Entered(connection, *first_line(connection, lines, until - time.monotonic()))
    except BaseException:
        connection.close()
        raise


def _encrypted(connection: socket.socket, wanted: str, limit_s: float) -> socket.socket:
    try:
        return pinned(connection, wanted, limit_s)
    except ConnectionError as error:  # nothing can be said before it is encrypted
        raise ServerBusy(str(error)) from None


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
