"""Byte streams between a worker or client and its coordinator: lines of bounded length, connecting, waking up."""

from __future__ import annotations

import contextlib
import re
import socket
import time

from elastune.comm.sockets import repeat_soon
from elastune.core.errors import UserError

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
