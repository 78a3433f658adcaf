"""Byte streams between a worker or client and its server: lines of bounded length, TLS, waking a selector.

No certificate authority is asked. A token that ends in ``:sha256:`` and 64 digits belongs to a server whose
certificate has that SHA-256, and its clients accept no other certificate.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import ssl
import threading
import time
from pathlib import Path

from elastune.core.errors import UserError
from elastune.parallel.comm.sockets import repeat_soon

# [transport] Byte streams between a worker or client and its coordinator: lines of bounded length, connecting, waking up.

LINE_LIMIT_BYTES = 1 << 20
DIAL_LIMIT_S = 10.0
RETRY_S = 0.05
READ_BYTES = 1 << 16


class ProtocolError(Exception):
    """The other side sent what no honest peer sends."""


class Unreachable(OSError):
    """Nobody answers at an address."""


class Lines:
    """Cuts a byte stream into lines of at most ``limit_bytes``."""

    def __init__(self, limit_bytes: int = LINE_LIMIT_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that ``data`` completes, without their ends. Raises ``ProtocolError`` where one is too long."""
        if not self._rest and data.find(b"\n") == len(data) - 1 and 0 < len(data) <= self.limit_bytes:
            return [data[:-1]]  # as nearly always: thousands of beats a second come so
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
    """A file descriptor that a selector finds readable from ``ring`` to ``quiet``. Any thread may ring."""

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
        """Idempotent."""
        self._reader.close()
        self._writer.close()


_BRACKETED = re.compile(r"\[([0-9A-Fa-f:.]+(?:%[^\]\s]+)?)\]")


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
    """A connection to ``address`` ("host:port"), tried for ``limit_s``: its host may start later.

    Raises ``UserError`` for what is no address, ``Unreachable`` where nobody answers.
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
        except UnicodeError:  # of looking its name up: it has an empty part, or one that is too long
            fix = "take the one that the run announced"
            raise UserError("a coordinator's address must name a host", address, fix) from None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    repeat_soon(connection)
    return connection


def first_line(connection: socket.socket, lines: Lines, limit_s: float) -> tuple[bytes, list[bytes]]:
    """The first line on ``connection`` and those that came with it.

    Raises ``OSError`` where the other side closes or says nothing in ``limit_s``, ``ProtocolError`` for rubbish.
    """
    until = time.monotonic() + limit_s
    while True:
        connection.settimeout(max(0.001, until - time.monotonic()))
        data = connection.recv(READ_BYTES)
        if not data:
            raise ConnectionError("the other side closed the connection")
        if found := lines.feed(data):
            return found[0], found[1:]


# [tls] Encrypted connections, where a token says by which certificate its server is known. No authority is asked.
#
# A token that ends in ``:sha256:`` and 64 digits is of a server that has the certificate with that SHA-256. Its clients
# go on with no other one, and nothing is said before. Python's own ``ssl`` does all the rest: TLS 1.3, nothing else.

MARK = ":sha256:"
_NAMED = re.compile(f"{MARK}([0-9a-f]{{64}})")


class TlsSocket(ssl.SSLSocket):
    """An encrypted connection that is used as a plain one: by two threads, one that reads and one that writes.

    Where it does not block, ``recv`` raises ``BlockingIOError`` for half of what was encrypted, too.
    """

    using = threading.Lock()  # OpenSSL allows one call at a time; each has its own, once it is made

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
        socket.socket.shutdown(self, how)  # that of SSLSocket would let another thread write on in clear


def fingerprint_of(token: str) -> str:
    """The SHA-256 of the certificate that ``token`` names; "" for none: connections are not encrypted."""
    found = _NAMED.search(token)
    return found[1] if found and found.end() == len(token) else ""


def fingerprint(certificate: bytes) -> str:
    """Of ``certificate`` in DER, as tokens name it."""
    return hashlib.sha256(certificate).hexdigest()


def server_context(path: Path) -> ssl.SSLContext:
    """For ``served``: with the key and the certificate in the PEM file ``path``. Raises ``OSError``."""
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    context.num_tickets = 0  # nobody resumes, and a ticket would look like news that has nothing to read
    return context


def served(connection: socket.socket, context: ssl.SSLContext) -> TlsSocket:
    """The server's end of ``connection``; ``do_handshake`` is still to be called until it does not raise."""
    return _wrapped(context, connection, server=True)


def pinned(connection: socket.socket, wanted: str, limit_s: float) -> TlsSocket:
    """The client's end, to a server with the certificate of this fingerprint; in place of ``connection``.

    Raises ``OSError`` where the server closes or is silent, ``ProtocolError`` where it is another.
    """
    secured = of_anybody(connection, limit_s)
    if fingerprint(secured.getpeercert(binary_form=True) or b"") != wanted:
        secured.close()
        raise ProtocolError("its certificate is not the one that the token names")
    return secured


def of_anybody(connection: socket.socket, limit_s: float) -> TlsSocket:
    """As ``pinned``, with whatever certificate: nothing may be believed of such a server, nor said to it."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # by no authority: by what the token names, in ``pinned``
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
    """Bytes that were received, decrypted and not yet read: no selector tells of them."""
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


# [host name] What a worker's machine is called, by itself and by those who tell of it.

HOST = "ELASTUNE_HOST"  # the name that whoever started this process gave its machine


def host_name() -> str:
    """What this machine is called: where each has a name of its own, copies of state are kept on different ones."""
    return os.environ.get(HOST) or os.environ.get("SLURMD_NODENAME") or socket.gethostname()
