"""Byte streams between a worker or client and its server, and the form of the messages that travel on them.

No certificate authority is asked. A token that ends in ``:sha256:`` and 64 digits belongs to a server whose
certificate has that SHA-256, and its clients accept no other certificate.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import ssl
import threading
import time
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from elastune.core.errors import UserError
from elastune.parallel.comm.sockets import repeat_soon

# Byte streams between a worker or client and its server: lines of bounded length, TLS, waking a selector.

LINE_LIMIT_BYTES = 1 << 20
DIAL_LIMIT_S = 10.0
RETRY_S = 0.05
READ_BYTES = 1 << 16
_BRACKETED = re.compile(r"\[([0-9A-Fa-f:.]+(?:%[^\]\s]+)?)\]")
MARK = ":sha256:"
_NAMED = re.compile(f"{MARK}([0-9a-f]{{64}})")
HOST = "ELASTUNE_HOST"  # the environment variable in which a launcher names this process's machine


class ProtocolError(Exception):
    """The other side sent what no correct peer sends."""


class Unreachable(OSError):
    """No process answers at an address."""


class Lines:
    """Cuts a byte stream into lines of at most ``limit_bytes``."""

    def __init__(self, limit_bytes: int = LINE_LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` completes, without their ends. Raises ``ProtocolError`` if one is too long."""
        if not self._rest and data.find(b"\n") == len(data) - 1 and 0 < len(data) <= self.limit_bytes:
            return [data[:-1]]  # the usual case: thousands of heartbeats a second come like this
        *ends, rest = data.split(b"\n")
        lines: list[bytes] = []
        for end in ends:
            self._extend(end)
            lines.append(bytes(self._rest))
            self._rest.clear()
        self._extend(rest)
        return lines

    def _extend(self, data: bytes) -> None:
        if len(self._rest) + len(data) > self.limit_bytes:
            raise ProtocolError(f"a message exceeds {self.limit_bytes} bytes")
        self._rest += data


class WakeupPipe:
    """A file descriptor that is readable from ``ring`` to ``quiet``, to wake a selector. Any thread may ring."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """The readable end."""
        return self._reader.fileno()

    def ring(self) -> None:
        """Make it readable. Does nothing once closed."""
        with contextlib.suppress(OSError):  # full: it rings already
            self._writer.send(b"!")

    def quiet(self) -> None:
        """Make it unreadable."""
        with contextlib.suppress(OSError):
            while self._reader.recv(READ_BYTES):
                pass

    def close(self) -> None:
        """Release the file descriptors. Idempotent."""
        self._reader.close()
        self._writer.close()


def split_address(address: str) -> tuple[str, int]:
    """The host, without brackets, and the port of "host:port", "[::1]:port" or "::1:port". Raises ``ValueError``."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{address} is not HOST:PORT")
    bracketed = _BRACKETED.fullmatch(host)
    if bracketed is None and ("[" in host or "]" in host):
        raise ValueError(f"the brackets of {address} do not enclose an IPv6 address")
    return host if bracketed is None else bracketed[1], int(port)


def dial(address: str, limit_s: float = DIAL_LIMIT_S) -> socket.socket:
    """Connect to ``address`` ("host:port"). Retries for ``limit_s``, as the other host may start later.

    Raises ``UserError`` if it is no address, ``Unreachable`` if no process answers.
    """
    try:
        host, port = split_address(address)
    except ValueError:
        fix = "take the one that the run announced, such as login1:7070 or [::1]:7070"
        raise UserError("a coordinator's address must be HOST:PORT", address, fix) from None
    until = time.monotonic() + limit_s
    while True:
        try:
            connection = socket.create_connection((host, port), max(0.1, until - time.monotonic()))
            break
        except OSError as error:
            if time.monotonic() + RETRY_S >= until:
                raise Unreachable(*error.args) from None
            time.sleep(RETRY_S)
        except UnicodeError:  # from the lookup: the name has an empty part, or one that is too long
            fix = "take the one that the run announced"
            raise UserError("a coordinator's address must name a host", address, fix) from None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    repeat_soon(connection)
    return connection


def first_line(connection: socket.socket, lines: Lines, limit_s: float) -> tuple[bytes, list[bytes]]:
    """The first line on ``connection``, and the lines that came with it.

    Raises ``OSError`` if the other side closes or sends nothing in ``limit_s``, ``ProtocolError`` for an invalid line.
    """
    until = time.monotonic() + limit_s
    while True:
        connection.settimeout(max(0.001, until - time.monotonic()))
        data = connection.recv(READ_BYTES)
        if not data:
            raise ConnectionError("the other side closed the connection")
        if received := lines.feed(data):
            return received[0], received[1:]


# --- encryption ---
class TlsSocket(ssl.SSLSocket):
    """An encrypted connection that is used like a plain one: one thread may read while another one writes.

    If it does not block, ``recv`` raises ``BlockingIOError`` also for half of an encrypted block.
    """

    using = threading.Lock()  # OpenSSL allows one call at a time; each connection gets its own lock

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        try:
            with self.using:
                return super().recv(buflen, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def send(self, data: bytes | bytearray | memoryview, flags: int = 0) -> int:  # type: ignore[override]
        try:
            with self.using:
                return super().send(data, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def do_handshake(self, block: bool = False) -> None:
        try:
            super().do_handshake(block)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def shutdown(self, how: int) -> None:
        socket.socket.shutdown(self, how)  # SSLSocket's own would let another thread go on writing in clear


def fingerprint_of(token: str) -> str:
    """The SHA-256 of the certificate that ``token`` names; "" if it names none: then connections are not encrypted."""
    match = _NAMED.search(token)
    return match[1] if match and match.end() == len(token) else ""


def fingerprint(certificate: bytes) -> str:
    """The SHA-256 of ``certificate`` (DER), as tokens name it."""
    return hashlib.sha256(certificate).hexdigest()


def server_context(path: Path) -> ssl.SSLContext:
    """The context for ``served``, with the key and the certificate in the PEM file ``path``. Raises ``OSError``."""
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    context.num_tickets = 0  # no client resumes, and a ticket would wake the reader for nothing
    return context


def served(connection: socket.socket, context: ssl.SSLContext) -> TlsSocket:
    """The server's end of ``connection``. Call its ``do_handshake`` until that no longer raises."""
    return _wrapped(context, connection, server=True)


def pinned(connection: socket.socket, wanted: str, limit_s: float) -> TlsSocket:
    """The client's end of ``connection``, encrypted, to a server whose certificate has the fingerprint ``wanted``.

    Raises ``OSError`` if the server closes or is silent, ``ProtocolError`` if it has another certificate.
    """
    secured = of_anybody(connection, limit_s)
    if fingerprint(secured.getpeercert(binary_form=True) or b"") != wanted:
        secured.close()
        raise ProtocolError("its certificate is not the one that the token names")
    return secured


def of_anybody(connection: socket.socket, limit_s: float) -> TlsSocket:
    """As ``pinned``, with any certificate: trust nothing that such a server sends, and send it nothing secret."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # ``pinned`` compares it with the token's
    secured = _wrapped(context, connection, server=False)
    try:
        secured.settimeout(limit_s)
        secured.do_handshake()
    except ssl.SSLEOFError:
        secured.close()
        raise ConnectionError("the other side closed the connection") from None
    except ssl.SSLError:
        secured.close()
        raise ProtocolError("it does not encrypt, as the token says (TLS 1.3)") from None
    except BaseException:
        secured.close()
        raise
    return secured


def decrypted(connection: socket.socket) -> int:
    """The number of bytes that were decrypted and not read yet; a selector does not report them."""
    return connection.pending() if isinstance(connection, TlsSocket) else 0


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslsocket_class = TlsSocket
    return context


def _wrapped(context: ssl.SSLContext, connection: socket.socket, *, server: bool) -> TlsSocket:
    secured = context.wrap_socket(connection, server_side=server, do_handshake_on_connect=False)
    assert isinstance(secured, TlsSocket)
    secured.using = threading.Lock()
    return secured


# --- the name of this machine ---
def host_name() -> str:
    """The name of this machine. Copies of state are placed on machines of different names."""
    return os.environ.get(HOST) or os.environ.get("SLURMD_NODENAME") or socket.gethostname()


# The form of all messages: frozen dataclasses with a ``kind``, one line of JSON each, checked when they are read.
#
# Every connection has this form: workers and their coordinator (``elastic.wire.messages``), agents and their
# controller (``runtime.agents.messages``), and the files of agents (``runtime.agents.transfer_messages``).
#
# Reading is strict. No number comes from a string, no typed number is NaN or infinite, and no field is unknown. Text
# is written as UTF-8, because paths and logs in other scripts would grow threefold as escapes. Half a surrogate pair,
# as in some file names and error messages, becomes "?": no JSON reader would take it.

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
RULES = ConfigDict(extra="forbid", allow_inf_nan=False)
Class = TypeVar("Class", bound=type)
M = TypeVar("M")


@dataclass_transform(frozen_default=True, field_specifiers=(field, Field))
def message(cls: Class) -> Class:
    """Make ``cls`` a message, or a part of one: a frozen dataclass whose fields are checked.

    A message has a field ``kind`` with its class's name in small letters, by which a reader knows its class.

    Example:
        >>> @message
        ... class Stopped:
        ...     step: Count
        ...     kind: Literal["stopped"] = "stopped"
    """
    made: Class = dataclass(frozen=True, config=RULES)(cls)  # type: ignore[assignment]
    return made


class MessageCodec(Generic[M]):
    """Writes messages as lines of JSON, and reads them.

    Args:
        messages: The union of all messages that one side may send.

    Example:
        >>> codec: MessageCodec[Stopped | Started] = MessageCodec(Stopped | Started)
        >>> codec.decode(codec.encode(Stopped(3)))
        Stopped(step=3, kind='stopped')
    """

    def __init__(self, messages: Any) -> None:
        self._adapter: TypeAdapter[M] = TypeAdapter(Annotated[messages, Field(discriminator="kind")])

    def encode(self, message: M) -> bytes:
        """Return ``message`` as one line, with its line end.

        Raises:
            TypeError: If a run's configuration holds a value that JSON cannot hold.
        """
        fields = self._adapter.dump_python(message)
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False, default=_path_as_text)
        return text.encode("utf-8", "replace") + b"\n"

    def decode(self, line: bytes) -> M:
        """Return the message in ``line``.

        Raises:
            ValueError: If ``line`` is not one of the messages (a ``pydantic.ValidationError``).
        """
        return self._adapter.validate_json(line, strict=True)


def _path_as_text(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} is not JSON")
