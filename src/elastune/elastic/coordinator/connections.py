"""A controller's end of all connections of a kind: let in by token, read and written without ever blocking.

What peers do comes out as events of ``ConnectionServer.wait``; nothing is called back. A
peer that breaks the protocol is cut off.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from elastune.comm.sockets import repeat_soon
from elastune.elastic.protocol import messages
from elastune.elastic.protocol.transport import (
    LINE_LIMIT_BYTES,
    READ_BYTES,
    Lines,
    ProtocolError,
    WakeupPipe,
)

HELLO_LIMIT_BYTES = 1 << 12
GUEST_LIMIT_S = 5.0
GUESTS_LIMIT = 256  # those who do not stay: strangers and clients; one more ends the oldest
CONNECTIONS_LIMIT = 1024
OUTPUT_LIMIT_BYTES = 1 << 24
MUTE_S = 0.1
GONE = "its connection closed"


class Greeting(Protocol):
    """A peer's first message. Nothing else is read before its ``token`` was found right."""

    @property
    def token(self) -> str:
        """What lets it in."""
        ...

    @property
    def stays(self) -> bool:
        """Whether it is no guest, who is gone after a few seconds."""
        ...


class Connection:
    """One peer. ``worker``: the number that its owner gives it; None: it has none. ``dead``: why it is cut off."""

    def __init__(self, peer: socket.socket, born: float) -> None:
        self.socket = peer
        self.born = born
        self.stranger = True
        self.stays = False
        self.worker: int | None = None
        self.dead = ""
        self.lines = Lines(HELLO_LIMIT_BYTES)
        self.unread = HELLO_LIMIT_BYTES
        self.output = bytearray()
        self.last_words = False  # close it once its output is written


@dataclass(frozen=True)
class Greeted:
    """``connection`` has shown the token."""

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


HubEvent = Greeted | Heard | Closed


class ConnectionServer:
    """A listening socket and everybody who came. Used by one thread.

    ``port``: 0 for any that is free. ``greeting``: the kind of message that peers begin with; ``decode`` reads a line
    of theirs, and raises ``ValueError`` for what is no message. Raises ``OSError`` where it cannot listen there.
    """

    def __init__(
        self,
        host: str,
        token: str,
        bell: WakeupPipe,
        *,
        port: int = 0,
        greeting: type[Greeting] = messages.Hello,
        decode: Callable[[bytes], object] = messages.decode,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=CONNECTIONS_LIMIT)
        self._greeting, self._decode = greeting, decode
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._token = token.encode()
        self._bell = bell
        self._connections: dict[int, Connection] = {}
        self._guests: dict[int, Connection] = {}  # oldest first
        self._cut: list[Connection] = []
        self._muted_until = 0.0
        self._hears = True
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(bell, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Readable when ``wait`` would find something."""
        return self._selector.fileno()

    # -- what comes in ------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float) -> Iterator[HubEvent]:
        """Wait for anything at all, at most ``timeout_s``, and say what came. The caller exhausts it."""
        for key, mask in self._selector.select(max(0.0, min(timeout_s, self._patience()))):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._bell:
                self._bell.quiet()
            else:
                connection: Connection = key.data
                if mask & selectors.EVENT_WRITE and not connection.dead:
                    self._flush(connection)
                if mask & selectors.EVENT_READ and not connection.dead:
                    yield from self._read(connection)
        self._expire()
        yield from self._bury()

    def hear_workers(self, hears: bool) -> None:
        """Whether workers are read. What they say meanwhile waits with them; they are sent to as ever."""
        if hears != self._hears:
            self._hears = hears
            for connection in self._connections.values():
                self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        """Have the selector look for what is to be done with it now."""
        reads = self._hears or not connection.stays
        events = reads * selectors.EVENT_READ | bool(connection.output) * selectors.EVENT_WRITE
        watched = connection.socket in self._selector.get_map()
        if events and watched:
            self._selector.modify(connection.socket, events, connection)
        elif events:
            self._selector.register(connection.socket, events, connection)
        elif watched:
            self._selector.unregister(connection.socket)

    def _patience(self) -> float:
        """Seconds until a guest's time is up, the listener is to be heard again, or somebody is to be buried."""
        if self._cut:
            return 0.0
        now = time.monotonic()
        oldest = next(iter(self._guests.values()), None)
        waits = [oldest.born + GUEST_LIMIT_S - now] if oldest else []
        return min([*waits, *([self._muted_until - now] if self._muted_until else [])], default=GUEST_LIMIT_S)

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._end_oldest_guest()
                self._selector.unregister(self._listener)  # or the loop would spin
                self._muted_until = time.monotonic() + MUTE_S
            return  # else: it went away again, or a spurious wake-up
        if len(self._guests) >= GUESTS_LIMIT:
            self._end_oldest_guest()
        if len(self._connections) >= CONNECTIONS_LIMIT:
            peer.close()
            return
        peer.setblocking(False)
        with contextlib.suppress(OSError):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        repeat_soon(peer)
        connection = Connection(peer, time.monotonic())
        self._connections[peer.fileno()] = self._guests[peer.fileno()] = connection
        self._selector.register(peer, selectors.EVENT_READ, connection)

    def _end_oldest_guest(self) -> None:
        if oldest := next(iter(self._guests.values()), None):
            self._close(oldest)

    def _read(self, connection: Connection) -> Iterator[HubEvent]:
        try:
            # Of a stranger no byte more is read than a greeting may have.
            data = connection.socket.recv(connection.unread if connection.stranger else READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._cut_off(connection, GONE)
            return
        try:
            if connection.stranger:
                connection.unread -= len(data)
                lines = connection.lines.feed(data)
                if lines:
                    yield Greeted(connection, self._greet(connection, lines.pop(0)))
                elif not connection.unread:
                    raise ProtocolError("no greeting")
            else:
                lines = connection.lines.feed(data)
            for line in lines:
                if connection.dead or connection.last_words:  # by its owner, meanwhile
                    return
                yield Heard(connection, self._decode(line), len(line))
        except ValueError:
            self._cut_off(connection, "it sent what is no message")
        except ProtocolError as error:
            self._cut_off(connection, f"it broke the protocol: {error}")

    def _greet(self, connection: Connection, line: bytes) -> Greeting:
        hello = self._decode(line)
        if not isinstance(hello, self._greeting) or not hmac.compare_digest(hello.token.encode(), self._token):
            raise ProtocolError("no right greeting")
        connection.stranger = False
        connection.stays = hello.stays
        connection.lines.limit_bytes = LINE_LIMIT_BYTES
        if hello.stays:
            del self._guests[connection.socket.fileno()]
            self._watch(connection)
        return hello

    def _expire(self) -> None:
        now = time.monotonic()
        for connection in list(self._guests.values()):
            if now < connection.born + GUEST_LIMIT_S:
                break
            self._close(connection)
        if self._muted_until and now >= self._muted_until:
            self._muted_until = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _bury(self) -> Iterator[Closed]:
        cut, self._cut = self._cut, []
        for connection in cut:
            missed = not connection.stranger and not connection.last_words
            self._close(connection)
            if missed:
                yield Closed(connection, connection.dead)

    # -- what goes out ------------------------------------------------------------------------------------------------

    def send(self, connections: Iterable[Connection], line: bytes) -> None:
        """Send ``line`` to each. Who does not read is cut off."""
        for connection in connections:
            if connection.dead or connection.last_words:
                continue
            connection.output += line
            if len(connection.output) == len(line):
                self._flush(connection)
            elif len(connection.output) > OUTPUT_LIMIT_BYTES:
                self._cut_off(connection, "it does not read what it is sent")

    def end(self, connection: Connection) -> None:
        """Hear no more of it, and close it once it has been sent everything."""
        connection.last_words = True
        if not connection.output:
            self._close(connection)

    def close(self) -> None:
        """Close everything. Idempotent."""
        for connection in list(self._connections.values()):
            self._close(connection)
        self._listener.close()
        self._selector.close()

    def _flush(self, connection: Connection) -> None:
        try:
            sent = connection.socket.send(connection.output)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self._cut_off(connection, GONE)
            return
        del connection.output[:sent]
        if connection.last_words and not connection.output:
            self._close(connection)
            return
        self._watch(connection)

    def _cut_off(self, connection: Connection, why: str) -> None:
        """Close it at the end of this round: whoever sends to many must not meet the consequences half-way."""
        if not connection.dead:
            connection.dead = why
            self._cut.append(connection)

    def _close(self, connection: Connection) -> None:
        descriptor = connection.socket.fileno()
        if descriptor < 0:
            return
        connection.dead = connection.dead or GONE
        del self._connections[descriptor]
        self._guests.pop(descriptor, None)
        if connection.socket in self._selector.get_map():
            self._selector.unregister(connection.socket)
        connection.socket.close()
