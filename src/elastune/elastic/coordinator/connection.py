"""One peer of a controller, and what it does as events of ``connections.ConnectionServer``."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any, Protocol

from elastune.elastic.protocol.handshake import RESPONSE_BYTES, new_nonce
from elastune.elastic.protocol.transport import Lines
from elastune.journal.records import NotLetIn

HELLO_LIMIT_BYTES = 1 << 12
GONE = "its connection closed"


class Greeting(Protocol):
    """The first message of a peer that has proved that it has the token."""

    @property
    def stays(self) -> bool:
        """Whether it is no guest, who is gone after a few seconds."""
        ...


class Connection:
    """One peer. ``worker``: the number that its owner gives it; None: it has none. ``dead``: why it is cut off."""

    def __init__(self, peer: socket.socket, host: str, born: float) -> None:
        self.socket = peer
        self.host = host
        self.born = born
        self.nonce = new_nonce()  # until its proof has answered it
        self.response = b""
        self.stranger = True  # until its greeting
        self.stays = False
        self.worker: int | None = None
        self.dead = ""
        self.lines = Lines(HELLO_LIMIT_BYTES)
        self.unread = RESPONSE_BYTES
        self.output = bytearray()
        self.last_words = False  # close it once its output is written


@dataclass(frozen=True)
class Greeted:
    """``connection`` has proved that it has the token, and begins with ``hello``."""

    connection: Connection
    hello: Any


@dataclass(frozen=True)
class Heard:
    """``connection`` says ``message``, in ``size_bytes``."""

    connection: Connection
    message: Any
    size_bytes: int


@dataclass(frozen=True)
class Closed:
    """``connection``, which had been greeted, is gone. Not said of those that the hub's owner cut off."""

    connection: Connection
    why: str


HubEvent = Greeted | Heard | Closed | NotLetIn
