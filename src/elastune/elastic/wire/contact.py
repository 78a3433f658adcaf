"""How a process finds a run's coordinator and proves that it may talk to it: the contact file, and the handshake.

The file that names the host of the next controller is not trusted: the process that listens there must prove that it
has the token.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import random
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from elastune.core.errors import UserError
from elastune.core.journal.files import atomic_write
from elastune.elastic.wire.messages import PURPOSE, Answer, Hello, Message, decode, encode
from elastune.elastic.wire.transport import (
    DIAL_LIMIT_S,
    MARK,
    Lines,
    ProtocolError,
    Unreachable,
    dial,
    fingerprint_of,
    first_line,
    pinned,
    split_address,
)

# The handshake: each side proves that it has the token, and neither side sends it.
#
#     server  elastune-2 NONCE
#     client  NONCE PROOF          followed at once by its first message
#     server  PROOF                followed at once by its answer
#
# A proof is the HMAC-SHA256, by the token, of the proving side, the purpose of the server and both nonces. So it
# holds for one connection, one side and one kind of server, and cannot be replayed or reflected. All lines have fixed
# length in ASCII: a server reads no byte more from a stranger.
#
# A server looks at a limited number of new connections at a time. Where thousands of clients connect at once, the
# server turns some of them away, and they try again.

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


# How another process finds a run's coordinator: its address and token, and the host of the next controller.

LOOK_S = 1.0  # between two looks at the file, which may lie on a network file system
HOST_FILE_LIMIT_BYTES = 4096
CONTACT_NAME = ".coordinator.json"
ANSWER_LIMIT_S = 10.0
ASK_DIAL_LIMIT_S = 1.0
CONTACT_LIMIT_BYTES = 4096


def _is_address(text: str) -> str:
    split_address(text)
    return text


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Contact:
    """How to reach a run's coordinator. A process that has it may change the run, so only the run's owner can read it.

    Attributes:
        address: The coordinator's address, "host:port".
        token: The secret of the run.
        grace_s: The workers look for the next coordinator for this long, should this one die.
    """

    address: Annotated[str, AfterValidator(_is_address)]
    token: str
    grace_s: float = 0.0


_CONTACT_ADAPTER = TypeAdapter(Contact)


def write_contact(folder: Path, address: str, token: str, grace_s: float = 0.0) -> None:
    """Write the file by which ``ask`` finds the coordinator of the run in ``folder``.

    The next controller finds the run's workers by it, too.
    """
    contact = json.dumps({"address": address, "token": token, "grace_s": grace_s}).encode()
    atomic_write(folder / CONTACT_NAME, contact, mode=0o600)


def remove_contact(folder: Path) -> None:
    """Remove that file, as the run in ``folder`` has ended. Idempotent."""
    with contextlib.suppress(FileNotFoundError):
        (folder / CONTACT_NAME).unlink()


def read_contact(folder: Path) -> Contact:
    """Read how to reach the run in ``folder``. Raises ``UserError`` if it does not run, or may not be asked."""
    path = folder / CONTACT_NAME
    try:
        with path.open("rb") as file:
            return _CONTACT_ADAPTER.validate_json(file.read(CONTACT_LIMIT_BYTES), strict=True)
    except (FileNotFoundError, NotADirectoryError):
        raise _not_running(folder) from None
    except PermissionError:
        fix = "ask as the user who started it"
        raise UserError("a run can be changed by its owner only", folder, fix) from None
    except (ValidationError, OSError):
        fix = "remove that file: a run that still trains goes on, but can no longer be asked or taken over"
        raise UserError("the file must hold the address of a coordinator", path, fix) from None


def left_behind(folder: Path) -> Contact | None:
    """The contact of a run whose workers may have outlived their coordinator; None if they cannot have."""
    if not (folder / CONTACT_NAME).is_file():
        return None
    contact = read_contact(folder)
    return contact if contact.grace_s > 0 else None


def ask(folder: Path, message: Message, contact: Contact | None = None) -> Answer:
    """Send ``message``, a request, to the coordinator of the run in ``folder``, and return its answer.

    ``contact``: how to reach it, if the folder is on another machine. Raises ``UserError``.
    """
    contact = contact or read_contact(folder)
    lines = encode(Hello()) + encode(message)
    try:
        entered = enter_at(
            contact.address, Lines(), contact.token, PURPOSE, lines, ANSWER_LIMIT_S, dial_s=ASK_DIAL_LIMIT_S
        )
        entered.connection.close()
        answer = decode(entered.line)
    except ServerBusy as error:
        raise UserError("a run must have room for a question", f"{folder}: {error}", "ask again") from None
    except (Unreachable, ConnectionError, TokenRefused):  # the port may belong to another run's coordinator now
        raise _not_running(folder) from None
    except (OSError, ValueError, ProtocolError) as error:
        why = f"{folder}: {error}"
        raise UserError("a run must answer", why, "look at its log; if it hangs, end it and use --resume") from None
    if not isinstance(answer, Answer):
        raise UserError("a run must answer", f"{folder}: {answer.kind}", "use the same version of elastune as the run")
    return answer


def _looked_up(host: str) -> str:
    host.encode("idna")  # as ``socket`` does, which raises ``UnicodeError`` for a part that is empty or too long
    return host


HostName = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[^\s/]+$"), AfterValidator(_looked_up)]
"""The name or address of a host, in a form that can be looked up."""


@checked_dataclass(frozen=True, config=ConfigDict(extra="ignore"))
class _HostFile:
    address: HostName


_HOST_ADAPTER = TypeAdapter(_HostFile)


class ControllerLocator:
    """Finds the address of the next controller, which may run on another host than the one before.

    Args:
        home: The address ("host:port") of the controller until now. The port stays the same.
        file: A JSON file with the host of the next controller as ``address``; "": the host stays the same, too.
    """

    def __init__(self, home: str, file: str = "") -> None:
        self._where, self._file = home, file
        self._next_look = 0.0

    @property
    def now(self) -> str:
        """The address ("host:port"). The file is read once a second at most."""
        if self._file and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            try:
                with Path(self._file).open("rb") as file:
                    content = _HOST_ADAPTER.validate_json(file.read(HOST_FILE_LIMIT_BYTES), strict=True)
            except (OSError, ValueError):  # no file yet, half of a file, or no host in it
                return self._where
            self._where = at_host(self._where, content.address)
        return self._where


def at_host(address: str, host: str) -> str:
    """The address of the port of ``address`` ("host:port") at another ``host``."""
    port = address.rpartition(":")[2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _not_running(folder: Path) -> UserError:
    return UserError("the run must be running", folder, "start it, or go on with it: elastune run ... --resume")
