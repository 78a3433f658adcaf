"""The server's end of all connections of one kind: accepted by handshake, read and written without blocking.

``ConnectionServer.wait`` returns events; nothing is called back. A peer that breaks the protocol is disconnected. The
first refused connection of a kind is reported at once, and further ones once a minute with a count.
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
from elastune.elastic.wire.contact import BUSY, REFUSAL, RESPONSE_BYTES, TokenRefused, admit, challenge, new_nonce
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

HELLO_LIMIT_BYTES = 1 << 12
CONNECTION_CLOSED = "its connection closed"

EVERY_S = 60.0  # between two records of one kind of refusal
KNOWN_LIMIT = 64  # kinds of refusals that are counted separately
OTHERS = "other hosts"

GUEST_LIMIT_S = 5.0
GUESTS_LIMIT = 256  # connections that do not stay (strangers and clients); one more ends the oldest stranger
YOUNG_S, FULL_S = 0.25, 0.02  # the age up to which a stranger is not ended for others; the pause until it has it
ACCEPTED_AT_ONCE = 64  # in one round: fewer than a round admits, if thousands of honest peers connect
BACKLOG = 1 << 14  # the system cuts it to what it allows
OUTPUT_LIMIT_BYTES = 1 << 24
MUTE_S = 0.1
CROWD, CROWD_REST_S = 1024, 0.002  # of so many peers some always send: a short rest lets messages be read together


class Greeting(Protocol):
    """The first message of a peer that has proved that it has the token."""

    @property
    def stays(self) -> bool:
        """Whether the peer stays; a peer that does not is a guest, whose connection ends after a few seconds."""
        ...


class Connection:
    """The server's end of one connection.

    Attributes:
        socket: Its socket, which does not block.
        host: The peer's address.
        born: When it was accepted.
        nonce: The server's nonce, until the peer has proved that it has the token.
        response: What the peer has sent of its proof.
        unauthenticated: Whether the peer has not sent its greeting yet.
        stays: Whether it lasts beyond a request.
        worker: The number that the server's owner gives to the peer; None: it has none.
        dead: Why it is cut off; "": it is not.
        lines: Cuts what is received into lines.
        unread: How many bytes may still be read from a stranger.
        output: What could not be written yet.
        closes_after_output: Close it once its output is written.
    """

    def __init__(self, peer: socket.socket, host: str, born: float) -> None:
        self.socket = peer
        self.host = host
        self.born = born
        self.nonce = new_nonce()
        self.response = b""
        self.unauthenticated = True
        self.stays = False
        self.worker: int | None = None
        self.dead = ""
        self.lines = Lines(HELLO_LIMIT_BYTES)
        self.unread = RESPONSE_BYTES
        self.output = bytearray()
        self.closes_after_output = False


@dataclass(frozen=True)
class Greeted:
    """``connection`` has proved that it has the token; its first message is ``hello``."""

    connection: Connection
    hello: Any


@dataclass(frozen=True)
class Heard:
    """``connection`` has sent ``message``, of ``size_bytes``."""

    connection: Connection
    message: Any
    size_bytes: int


@dataclass(frozen=True)
class Closed:
    """``connection``, which had greeted, is gone. Not reported if the server's owner ended it."""

    connection: Connection
    why: str


HubEvent = Greeted | Heard | Closed | ConnectionsRefused


class ConnectionServer:
    """A listening socket with all its connections, for one thread: it admits peers, reads messages and sends lines.

    Args:
        host: The address to listen on.
        token: The secret that peers have to prove, see ``handshake``.
        bell: Wakes ``wait``.
        purpose: What the server is for, see ``handshake``.
        port: The port; 0 chooses a free one.
        tls: The certificate, if connections are encrypted.
        greeting: The kinds of message that peers may begin with.
        decode: Reads a line of a peer; raises ``ValueError`` if it is no message.

    Raises:
        OSError: The server cannot listen at the address.
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
        self._reads_workers = True
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(bell, selectors.EVENT_READ)

    def fileno(self) -> int:
        """A descriptor that is readable when ``wait`` would return events."""
        return self._selector.fileno()

    # -- input --------------------------------------------------------------------------------------------------------

    def wait(self, timeout_s: float) -> Iterator[HubEvent]:
        """Wait for events, at most ``timeout_s``, and return them. The caller has to exhaust the iterator."""
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
        if newcomers:  # after the older connections: one that has proved itself makes room for another
            for _ in range(ACCEPTED_AT_ONCE):
                if not self._accept():
                    break
        self._expire()
        yield from self._bury()
        yield from self._refusals.due(time.monotonic())

    def read_workers(self, enabled: bool) -> None:
        """Set whether workers are read. Unread messages wait at the workers; lines to them are sent as ever."""
        if enabled != self._reads_workers:
            self._reads_workers = enabled
            for connection in self._connections.values():
                self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        """Have the selector watch ``connection`` for what is to be done with it now."""
        reads = self._reads_workers or not connection.stays
        events = reads * selectors.EVENT_READ | bool(connection.output) * selectors.EVENT_WRITE
        watched = connection.socket in self._selector.get_map()
        if events and watched:
            self._selector.modify(connection.socket, events, connection)
        elif events:
            self._selector.register(connection.socket, events, connection)
        elif watched:
            self._selector.unregister(connection.socket)

    def _patience(self) -> float:
        """Seconds until a guest's time is up, the listener is to be watched again, or a connection is to be closed."""
        if self._cut:
            return 0.0
        now = time.monotonic()
        oldest = next(iter(self._guests.values()), None)
        waits = [oldest.born + GUEST_LIMIT_S - now] if oldest else []
        return min([*waits, *([self._muted_until - now] if self._muted_until else [])], default=GUEST_LIMIT_S)

    def _accept(self) -> bool:
        """Accept a connection. Returns whether more may be waiting."""
        if len(self._guests) >= GUESTS_LIMIT and not self._end_oldest_stranger():
            self._mute(FULL_S)
            return False
        try:
            peer, address = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._end_oldest_stranger()
                self._mute(MUTE_S)
            return False  # any other error: the peer went away again, or no other one waits
        peer.setblocking(False)
        with contextlib.suppress(OSError):
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        repeat_soon(peer)
        if self._tls is not None:
            try:
                peer = served(peer, self._tls)
            except OSError:  # the peer went away again, with data left behind
                peer.close()
                return True
        connection = Connection(peer, address[0].removeprefix("::ffff:"), time.monotonic())
        self._connections[peer.fileno()] = self._guests[peer.fileno()] = connection
        self._selector.register(peer, selectors.EVENT_READ, connection)
        if self._tls is None:
            self.send([connection], challenge(connection.nonce))
        return True

    def _mute(self, seconds: float) -> None:
        """Accept no connection for so long: the loop would spin."""
        self._selector.unregister(self._listener)
        self._muted_until = time.monotonic() + seconds

    def _end_oldest_stranger(self) -> bool:
        """End the oldest stranger.

        Returns False if none is old enough; a peer that has proved itself is never ended.
        """
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
            # From a stranger no byte more is read than a proof, and afterwards a greeting, may have.
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
        """Take ``data`` as more of the proof that ``connection`` has to send first."""
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
        """Read what is left: unread data would reset the connection, and the peer would not receive its last line."""
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

    # -- output -------------------------------------------------------------------------------------------------------

    def send(self, connections: Iterable[Connection], line: bytes) -> None:
        """Send ``line`` to each of ``connections``. A connection whose peer does not read is cut off."""
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
        """Read no more from ``connection``, and close it once all its output is written."""
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
        """Write what can be written at once. Returns its size."""
        try:
            return connection.socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:
            self._cut_off(connection, CONNECTION_CLOSED)
            return 0

    def _cut_off(self, connection: Connection, why: str) -> None:
        """Close ``connection`` at the end of this round, so that a loop over many connections is not disturbed."""
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


@dataclass
class _Count:
    recorded_at: float
    unrecorded: int = 0


class Refusals:
    """Counts refused connections by host and reason, so that a flood of them makes only a few records.

    No more than ``KNOWN_LIMIT`` hosts are counted separately.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], _Count] = {}
        self._new: list[ConnectionsRefused] = []

    def note(self, host: str, why: str, now: float) -> None:
        """Count a connection from ``host`` that was refused at the time ``now``."""
        key = (host, why)
        if key not in self._counts and len(self._counts) >= KNOWN_LIMIT:
            key = (OTHERS, why)
        if key in self._counts:
            self._counts[key].unrecorded += 1
        elif len(self._counts) < 2 * KNOWN_LIMIT:
            self._counts[key] = _Count(now)
            self._new.append(ConnectionsRefused(*key, 1))

    def due(self, now: float) -> list[ConnectionsRefused]:
        """The records to be written now: the first refusal of a kind at once, more of them once a minute."""
        refusals, self._new = self._new, []
        for (host, why), count in list(self._counts.items()):
            if now >= count.recorded_at + EVERY_S:
                if count.unrecorded:
                    refusals.append(ConnectionsRefused(host, why, count.unrecorded))
                    self._counts[host, why] = _Count(now)
                else:
                    del self._counts[host, why]
        return refusals


def refusal_line(refusal: ConnectionsRefused) -> str:
    """The sentence that reports ``refusal``."""
    times = f", {refusal.times} times within a minute" if refusal.times > 1 else ""
    return f"a connection from {refusal.host} was not let in: {refusal.why}{times}"
