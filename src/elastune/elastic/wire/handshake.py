"""The handshake: each side proves that it has the token, and neither side sends it.

    server  elastune-2 NONCE
    client  NONCE PROOF          followed at once by its first message
    server  PROOF                followed at once by its answer

A proof is the HMAC-SHA256, by the token, of the proving side, the purpose of the server and both nonces. So it holds
for one connection, one side and one kind of server, and cannot be replayed or reflected. All lines have fixed length in
ASCII: a server reads no byte more from a stranger.

A server looks at a limited number of new connections at a time. Where thousands of clients connect at once, the server
turns some of them away, and they try again.
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

PROTOCOL = b"elastune-2"
"""The version of this protocol. It rises whenever other bytes travel, so that two versions never meet."""
NONCE_DIGITS, PROOF_DIGITS = 32, 64
SALT_DIGITS = 32
CHALLENGE_BYTES = len(PROTOCOL) + 1 + NONCE_DIGITS + 1
RESPONSE_BYTES = NONCE_DIGITS + 1 + PROOF_DIGITS + 1
PROOF_BYTES = PROOF_DIGITS + 1

REFUSAL = b"this is not the token".ljust(PROOF_DIGITS) + b"\n"
"""The server's line in place of its proof, if the client has another token."""

BUSY = b"too many came at once".ljust(PROOF_DIGITS) + b"\n"
"""The server's line in place of its proof, if it had no room to check the client's proof."""

DIGITS = frozenset(b"0123456789abcdef")

AGAIN_S, MOST_S = 0.05, 1.0  # the pause between two tries: doubled each time, with a random factor


class TokenRefused(ProtocolError):
    """The other side has another token."""


class ServerBusy(ConnectionError):
    """The server had no room to look at this connection: the client may try again."""


@dataclass(frozen=True)
class Entered:
    """A connection that a server has admitted.

    Attributes:
        connection: The socket to use from now on; it may be encrypted.
        line: The server's first line after the handshake.
        early: Lines that came together with it.
    """

    connection: socket.socket
    line: bytes
    early: list[bytes]


def enter_at(
    address: str, lines: Lines, token: str, purpose: str, words: bytes, limit_s: float, *, dial_s: float = DIAL_LIMIT_S
) -> Entered:
    """Connect to the server at ``address`` and ``enter``. While the server is busy, try again for ``dial_s``.

    For the other arguments and the errors see ``dial`` and ``enter``.
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


def enter(connection: socket.socket, lines: Lines, token: str, purpose: str, message: bytes, limit_s: float) -> Entered:
    """Do the client's part of the handshake, then send ``message``, the first one. Encrypted if ``token`` demands it.

    Nothing from the server is read as a message before the server has proved itself. If this fails, the connection is
    closed.

    Args:
        connection: The connection to the server.
        lines: Cuts what follows the handshake into lines.
        token: The secret.
        purpose: What the server is for.
        message: The first message, with its line end.
        limit_s: The server may be silent for this long.

    Raises:
        OSError: The server closes or is silent; ``ServerBusy`` if it has no room.
        ProtocolError: The server does not speak this protocol, or has another token.
    """
    until = time.monotonic() + limit_s
    try:
        if wanted := fingerprint_of(token):
            connection = _encrypted(connection, wanted, limit_s)
        response, proof = respond(token, purpose, exactly(connection, CHALLENGE_BYTES, until), new_nonce())
        with suppress(ConnectionResetError, BrokenPipeError):  # even if it is closed, its last line can be read
            connection.sendall(response + message)
        line = exactly(connection, PROOF_BYTES, until)
        if line == BUSY:
            raise ServerBusy("too many came at once")
        verify(line, proof)
        return Entered(connection, *first_line(connection, lines, until - time.monotonic()))
    except BaseException:
        connection.close()
        raise


# --- the three lines of the handshake ---


def new_nonce() -> bytes:
    """A random value for one connection."""
    return secrets.token_hex(NONCE_DIGITS // 2).encode()


def challenge(nonce: bytes) -> bytes:
    """The server's first line."""
    return b"%b %b\n" % (PROTOCOL, nonce)


def respond(token: str, purpose: str, challenged: bytes, nonce: bytes) -> tuple[bytes, bytes]:
    """The client's line after ``challenged``, and the proof that only its server can send afterwards.

    Args:
        token: The secret.
        purpose: What the server is for.
        challenged: The server's first line.
        nonce: The client's nonce.

    Raises:
        ProtocolError: ``challenged`` is no challenge.
    """
    theirs = challenged[len(PROTOCOL) + 1 : -1]
    if challenged != challenge(theirs) or not _is_nonce(theirs):
        raise ProtocolError(f"it does not speak {PROTOCOL.decode()}")
    response = b"%b %b\n" % (nonce, _proof(token, "client", purpose, theirs, nonce))
    return response, _proof(token, "server", purpose, theirs, nonce) + b"\n"


def admit(token: str, purpose: str, nonce: bytes, response: bytes) -> bytes:
    """The server's proof, for a client that has answered its ``nonce`` with ``response``.

    Raises ``TokenRefused`` if the client has another token, ``ProtocolError`` if ``response`` is no response.
    """
    theirs, proof = response[:NONCE_DIGITS], response[NONCE_DIGITS + 1 : -1]
    if response != b"%b %b\n" % (theirs, proof) or len(proof) != PROOF_DIGITS or not _is_nonce(theirs):
        raise ProtocolError(f"it does not speak {PROTOCOL.decode()}")
    if not hmac.compare_digest(proof, _proof(token, "client", purpose, nonce, theirs)):
        raise TokenRefused("it has another token")
    return _proof(token, "server", purpose, nonce, theirs) + b"\n"


def verify(received: bytes, expected: bytes) -> None:
    """Check that the line ``received`` from a server is the ``expected`` proof.

    Raises ``ProtocolError`` if it is not.
    """
    if received == REFUSAL:
        raise TokenRefused("it has another token")
    if not hmac.compare_digest(received, expected):
        raise ProtocolError("it has not proved that it has the token")


def derived(token: str, salt: str = "") -> str:
    """A token that begins with ``salt`` (by default a new one). Only a process that has ``token`` can compute it.

    If ``token`` names a certificate, the derived token names the same one.
    """
    salt = salt or secrets.token_hex(SALT_DIGITS // 2)
    text = b"%b derived %b" % (PROTOCOL, salt.encode())
    certificate = fingerprint_of(token)
    return salt + hmac.new(token.encode(), text, hashlib.sha256).hexdigest() + (certificate and MARK + certificate)


def _proof(token: str, side: str, purpose: str, servers: bytes, clients: bytes) -> bytes:
    # Only the first two parts vary in length, and both are fixed words without a space.
    text = b" ".join((PROTOCOL, side.encode(), purpose.encode(), servers, clients))
    return hmac.new(token.encode(), text, hashlib.sha256).hexdigest().encode()


def _is_nonce(text: bytes) -> bool:
    return len(text) == NONCE_DIGITS and DIGITS.issuperset(text)


def exactly(connection: socket.socket, size: int, until: float) -> bytes:
    """Read ``size`` bytes before the time ``until``, or up to an earlier line end, which only a stranger sends.

    Raises ``OSError`` and ``ProtocolError``.
    """
    data = b""
    while len(data) < size and b"\n" not in data:
        connection.settimeout(max(0.001, until - time.monotonic()))
        received = connection.recv(size - len(data))
        if not received:
            if data:
                raise ProtocolError("it closed the connection in the middle of a line")
            raise ConnectionError("the other side closed the connection")
        data += received
    return data


def _encrypted(connection: socket.socket, wanted: str, limit_s: float) -> socket.socket:
    try:
        return pinned(connection, wanted, limit_s)
    except ConnectionError as error:  # before encryption a busy server can send no reason
        raise ServerBusy(str(error)) from None
