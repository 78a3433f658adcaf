"""Connecting to a coordinator."""

from __future__ import annotations

import socket
import time

from elastune.core.errors import UserError
from elastune.elastic.protocol.frames import Lines
from elastune.elastic.protocol.messages import Message, decode

DIAL_LIMIT_S = 10.0
RETRY_S = 0.05
READ_BYTES = 1 << 16


def dial(address: str, limit_s: float = DIAL_LIMIT_S) -> socket.socket:
    """A connection to ``address`` ("host:port"), tried for ``limit_s``: its host may start later.

    Raises ``UserError`` for what is no address, ``OSError`` where nobody answers.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UserError("a coordinator's address must be HOST:PORT", address, "take the one that the run announced")
    until = time.monotonic() + limit_s
    while True:
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), max(0.1, until - time.monotonic()))
            break
        except OSError:
            if time.monotonic() + RETRY_S >= until:
                raise
            time.sleep(RETRY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def first_message(connection: socket.socket, lines: Lines, limit_s: float) -> tuple[Message, list[bytes]]:
    """The first message on ``connection`` and the lines that came with it.

    Raises ``OSError`` where the other side closes or says nothing in ``limit_s``, ``ValueError`` or ``ProtocolError``
    for rubbish.
    """
    until = time.monotonic() + limit_s
    while True:
        connection.settimeout(max(0.001, until - time.monotonic()))
        data = connection.recv(READ_BYTES)
        if not data:
            raise ConnectionError("the other side closed the connection")
        if found := lines.feed(data):
            return decode(found[0]), found[1:]
