"""The server's end of all connections of one kind: accepted by handshake, read and written without blocking.

``ConnectionServer.wait`` returns events; nothing is called back. A peer that breaks the protocol is disconnected. A
refused connection is reported at once the first time and then once a minute with a count, so a flood of them makes
a few lines.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from elastune.core.journal.records import ConnectionsRefused
from elastune.elastic.wire import messages
from elastune.elastic.wire.handshake import BUSY, REFUSAL, RESPONSE_BYTES, TokenRefused, admit, challenge, new_nonce
from elastune.elastic.wire.transport import (
    LINE_LIMIT_BYTES,
    READ_BYTES,
    Lines,
    ProtocolError,
    TlsSocket,
    WakeupPipe,
    decrypted,
    served,
)
from elastune.parallel.comm.sockets import repeat_soon

# [connection] One peer of a controller, and what it does as events of ``connections.ConnectionServer``.

HELLO_LIMIT_BYTES = 1 << 12
CONNECTION_CLOSED = "its connection closed"


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
        self.unauthenticated = True  # until its greeting
        self.stays = False
        self.worker: int | None = None
        self.dead = ""
        self.lines = Lines(HELLO_LIMIT_BYTES)
        self.unread = RESPONSE_BYTES
        self.output = bytearray()
        self.closes_after_output = False  # close it once its output is written


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


HubEvent = Greeted | Heard | Closed | ConnectionsRefused


# [refusals] Who was not let in, and why: told at once the first time, then once a minute how often, so a flood is a few lines.

EVERY_S = 60.0
KNOWN_LIMIT = 64
OTHERS = "other hosts"


@dataclass
class _Count:
    told_at: float
    untold: int = 0


class Refusals:
    """Counts by host and reason; of no more than ``KNOWN_LIMIT`` of them apart, however many hosts come."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], _Count] = {}
        self._new: list[ConnectionsRefused] = []

    def note(self, host: str, why: str, now: float) -> None:
        """A connection from ``host`` was not let in, at the time ``now``."""
        key = (host, why)
        if key not in self._counts and len(self._counts) >= KNOWN_LIMIT:
            key = (OTHERS, why)
        if key in self._counts:
            self._counts[key].untold += 1
        elif len(self._counts) < 2 * KNOWN_LIMIT:
            self._counts[key] = _Count(now)
            self._new.append(ConnectionsRefused(*key, 1))

    def due(self, now: float) -> list[ConnectionsRefused]:
        """What is to be told now."""
        found, self._new = self._new, []
        for (host, why), count in list(self._counts.items()):
            if now >= count.told_at + EVERY_S:
                if count.untold:
                    found.append(ConnectionsRefused(host, why, count.untold))
                    self._counts[host, why] = _Count(now)
                else:
                    del self._counts[host, why]
        return found


def refusal_line(refusal: ConnectionsRefused) -> str:
    """In words."""
    times = f", {refusal.times} times within a minute" if refusal.times > 1 else ""
    return f"a connection from {refusal.host} was not let in: {refusal.why}{times}"


# [connections] A controller's end of all connections of a kind: let in by handshake, read and written without ever blocking.
#
# What peers do comes out as events of ``ConnectionServer.wait``; nothing is called back. A
# peer that breaks the protocol is cut off.

GUEST_LIMIT_S = 5.0
GUESTS_LIMIT = 256  # those who do not stay: strangers and clients; one more ends the oldest stranger
YOUNG_S, FULL_S = 0.25, 0.02  # so long nobody is ended for others, who wait in the system's queue and are looked for
ACCEPTED_AT_ONCE = 64  # in one round: fewer than are let in by it, where all are honest and thousands come
BACKLOG = 1 << 14  # the system cuts it to what it allows
OUTPUT_LIMIT_BYTES = 1 << 24
MUTE_S = 0.1
CROWD, CROWD_REST_S = 1024, 0.002  # of so many peers some always have something to say: it is heard together


class ConnectionServer:
    """A listening socket and everybody who came. Used by one thread.

    ``token``, ``purpose``: see ``protocol.handshake``; ``tls``: see ``protocol.tls``. ``port``: 0 for any that is free.
    ``greeting``: the kinds of message that peers begin with; ``decode`` reads a line of theirs, and raises
    ``ValueError`` for what is no message. Raises ``OSError`` where it cannot listen there.
    """

    def __init__(
        self,
        host: str,
        token: str,
        bell: WakeupPipe,
        *,
        purpose: str = messages.PURPOSE,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        greeting: type[Greeting] | tuple[type[Greeting], ...] = messages.Hello,
        decode: Callable[[bytes], object] = messages.decode,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._greeting, self._decode = greeting, decode
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._token, self._purpose, self._tls = token, purpose, tls
        self._bell = bell
        self._connections: dict[int, Connection] = {}
        self._guests: dict[int, Connection] = {}  # oldest first
        self._cut: list[Connection] = []
        self._refusals = Refusals()
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
        newcomers = False
        if timeout_s > CROWD_REST_S and len(self._connections) > CROWD:
            time.sleep(CROWD_REST_S)
            timeout_s -= CROWD_REST_S
        for key, mask in self._selector.select(max(0.0, min(timeout_s, self._patience()))):
            if key.fileobj is self._listener:
                newcomers = True
            elif key.fileobj is self._bell:
                self._bell.quiet()
            else:
                connection: Connection = key.data
                if mask & selectors.EVENT_WRITE and not connection.dead:
                    self._flush(connection)
                if mask & selectors.EVENT_READ and not connection.dead:
                    yield from self._read(connection)
                    while not connection.dead and decrypted(connection.socket):
                        yield from self._read(connection)
        if newcomers:  # after those who were there: one who has proved itself makes room for another
            for _ in range(ACCEPTED_AT_ONCE):
                if not self._accept():
                    break
        self._expire()
        yield from self._bury()
        yield from self._refusals.due(time.monotonic())

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

    def _accept(self) -> bool:
        """Whether there may be more to accept."""
        if len(self._guests) >= GUESTS_LIMIT and not self._end_oldest_stranger():
            self._mute(FULL_S)
            return False
        try:
            peer, address = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._end_oldest_stranger()
                self._mute(MUTE_S)
            return False  # else: it went away again, or nobody else is there
        peer.setblocking(False)
        with contextlib.suppress(OSError):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        repeat_soon(peer)
        if self._tls is not None:
            try:
                peer = served(peer, self._tls)
            except OSError:  # it went away again, with words left behind
                peer.close()
                return True
        connection = Connection(peer, address[0].removeprefix("::ffff:"), time.monotonic())
        self._connections[peer.fileno()] = self._guests[peer.fileno()] = connection
        self._selector.register(peer, selectors.EVENT_READ, connection)
        if self._tls is None:
            self.send([connection], challenge(connection.nonce))
        return True

    def _mute(self, seconds: float) -> None:
        """Accept nobody for so long: the loop would spin."""
        self._selector.unregister(self._listener)
        self._muted_until = time.monotonic() + seconds

    def _end_oldest_stranger(self) -> bool:
        """Whether there was one that had its time; nobody is ended who has proved that it has the token."""
        oldest = next((guest for guest in self._guests.values() if guest.nonce), None)
        if oldest is None or time.monotonic() < oldest.born + YOUNG_S:
            return False
        self._refuse(oldest, "too many came at once")
        if not isinstance(oldest.socket, TlsSocket) or oldest.socket.version():
            self._drain(oldest)
            self.send([oldest], BUSY)
        self._close(oldest)
        return True

    def _refuse(self, connection: Connection, why: str) -> None:
        if connection.unauthenticated:
            self._refusals.note(connection.host, why, time.monotonic())

    def _read(self, connection: Connection) -> Iterator[HubEvent]:
        try:
            if isinstance(connection.socket, TlsSocket) and not connection.socket.version():
                connection.socket.do_handshake()
                self.send([connection], challenge(connection.nonce))
                return
            # Of a stranger no byte more is read than a proof has, and then a greeting may have.
            data = connection.socket.recv(connection.unread if connection.unauthenticated else READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            gone = isinstance(error, ssl.SSLEOFError)
            if connection.unauthenticated and isinstance(error, ssl.SSLError) and not gone:
                self._cut_off(connection, "it does not encrypt (TLS 1.3)")
                return
            data = b""
        if not data:
            self._cut_off(connection, CONNECTION_CLOSED)
            return
        try:
            if connection.nonce:
                self._examine(connection, data)
                return
            lines = connection.lines.feed(data)
            if connection.unauthenticated:
                connection.unread -= len(data)
                if lines:
                    yield Greeted(connection, self._greet(connection, lines.pop(0)))
                elif not connection.unread:
                    raise ProtocolError("no greeting")
            for line in lines:
                if connection.dead or connection.closes_after_output:  # by its owner, meanwhile
                    return
                yield Heard(connection, self._decode(line), len(line))
        except ValueError:
            self._cut_off(connection, "it sent what is no message")
        except ProtocolError as error:
            self._cut_off(connection, f"it broke the protocol: {error}")

    def _examine(self, connection: Connection, data: bytes) -> None:
        """``data`` is more of the proof that ``connection`` has to give first."""
        connection.response += data
        connection.unread -= len(data)
        if connection.unread and b"\n" not in data:
            return
        try:
            proof = admit(self._token, self._purpose, connection.nonce, connection.response)
        except TokenRefused as refused:
            self._drain(connection)
            self.send([connection], REFUSAL)
            self._cut_off(connection, str(refused))
            return
        connection.nonce = connection.response = b""
        connection.unread = HELLO_LIMIT_BYTES
        self.send([connection], proof)

    def _drain(self, connection: Connection) -> None:
        """What is left unread of it would reset the connection, and it would not read its last line."""
        with contextlib.suppress(OSError):
            connection.socket.recv(HELLO_LIMIT_BYTES)

    def _greet(self, connection: Connection, line: bytes) -> Greeting:
        hello = self._decode(line)
        if not isinstance(hello, self._greeting):
            raise ProtocolError("no right greeting")
        connection.unauthenticated = False
        connection.stays = hello.stays
        connection.lines.limit_bytes = LINE_LIMIT_BYTES
        if hello.stays:
            del self._guests[connection.socket.fileno()]
            self._watch(connection)
        return hello

    def _expire(self) -> None:
        now = time.monotonic()
        while (connection := next(iter(self._guests.values()), None)) and now >= connection.born + GUEST_LIMIT_S:
            self._refuse(connection, f"it has not proved within {GUEST_LIMIT_S:g} s that it has the token")
            self._close(connection)
        if self._muted_until and now >= self._muted_until:
            self._muted_until = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _bury(self) -> Iterator[Closed]:
        cut, self._cut = self._cut, []
        for connection in cut:
            if connection.dead != CONNECTION_CLOSED:
                self._refuse(connection, connection.dead)
            missed = not connection.unauthenticated and not connection.closes_after_output
            self._close(connection)
            if missed:
                yield Closed(connection, connection.dead)

    # -- what goes out ------------------------------------------------------------------------------------------------

    def send(self, connections: Iterable[Connection], line: bytes) -> None:
        """Send ``line`` to each. Who does not read is cut off."""
        for connection in connections:
            if connection.dead or connection.closes_after_output:
                continue
            sent = 0 if connection.output else self._write(connection, line)
            if sent == len(line):
                continue
            if not connection.output:
                connection.output += line[sent:]
                self._watch(connection)
            elif len(connection.output) + len(line) > OUTPUT_LIMIT_BYTES:
                self._cut_off(connection, "it does not read what it is sent")
            else:
                connection.output += line

    def end(self, connection: Connection) -> None:
        """Hear no more of it, and close it once it has been sent everything."""
        connection.closes_after_output = True
        if not connection.output:
            self._close(connection)

    def close(self) -> None:
        """Close everything. Idempotent."""
        for connection in list(self._connections.values()):
            self._close(connection)
        self._listener.close()
        self._selector.close()

    def _flush(self, connection: Connection) -> None:
        del connection.output[: self._write(connection, connection.output)]
        if connection.output or connection.dead:
            return
        if connection.closes_after_output:
            self._close(connection)
        else:
            self._watch(connection)

    def _write(self, connection: Connection, data: bytes | bytearray) -> int:
        """How much of ``data`` could be sent at once."""
        try:
            return connection.socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self._cut_off(connection, CONNECTION_CLOSED)
            return 0

    def _cut_off(self, connection: Connection, why: str) -> None:
        """Close it at the end of this round: whoever sends to many must not meet the consequences half-way."""
        if not connection.dead:
            connection.dead = why
            self._cut.append(connection)

    def _close(self, connection: Connection) -> None:
        descriptor = connection.socket.fileno()
        if descriptor < 0:
            return
        connection.dead = connection.dead or CONNECTION_CLOSED
        del self._connections[descriptor]
        self._guests.pop(descriptor, None)
        if connection.socket in self._selector.get_map():
            self._selector.unregister(connection.socket)
        connection.socket.close()
