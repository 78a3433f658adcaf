"""This process's TCP connections, found by their addresses: for libraries that do not give theirs away."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

Address = tuple[str, int]
TCP_RTO_MAX_MS = 44  # <linux/tcp.h>
GIVEN_UP_AFTER_MS = 600_000


class Found(NamedTuple):
    """A socket of this process: its number may be another's by now, its inode not."""

    fd: int
    inode: int


def sockets() -> frozenset[Found]:
    """All sockets: who looks for new ones later need not look at these again."""
    return frozenset(_sockets())


def listeners(but: Collection[Found] = ()) -> dict[Found, Address]:
    """The TCP sockets that listen, and where; ``but`` for these."""
    found = {}
    for it in _sockets(but):
        with borrowed(it) as sock, contextlib.suppress(OSError):  # closed by another thread just now
            if sock is not None and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found[it] = _address(sock.getsockname())
    return found


def connections(own: Address, others: Collection[Address], but: Collection[Found] = ()) -> list[Found]:
    """The connections that came in at ``own``, or go out to one of ``others``; ``but`` for these."""
    found = []
    for it in _sockets(but):
        with borrowed(it) as sock, contextlib.suppress(OSError):  # not connected, or not any more
            if sock is not None and (_address(sock.getpeername()) in others or _address(sock.getsockname()) == own):
                found.append(it)
    return found


class Ends(NamedTuple):
    """A connection's two ends; the other process that has it calls them the other way round."""

    own: Address
    other: Address


def ends(found: Collection[Found]) -> dict[Found, Ends]:
    """Both ends of each, of those that are connected still."""
    known = {}
    for it in found:
        with borrowed(it) as sock, contextlib.suppress(OSError):
            if sock is not None:
                known[it] = Ends(_address(sock.getsockname()), _address(sock.getpeername()))
    return known


class Connections:
    """Connections that a library has opened and will close."""

    def __init__(self, found: Collection[Found]) -> None:
        self.found = found

    def sever(self) -> None:
        """End them; from any thread, at any time."""
        sever(self.found)

    def all_closed(self) -> bool:
        """Whether the library has closed them all: it will neither read nor write any more."""
        return not any(_is(it) for it in self.found)


def sever(found: Collection[Found]) -> None:
    """End these connections in both directions at once; who reads or writes them sees an error."""
    for it in found:
        with borrowed(it) as sock, contextlib.suppress(OSError):
            if sock is not None:
                sock.shutdown(socket.SHUT_RDWR)


def _is(it: Found) -> bool:
    try:
        return os.fstat(it.fd).st_ino == it.inode
    except OSError:
        return False


def _sockets(but: Collection[Found] = ()) -> Iterator[Found]:
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # closed in the meantime
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode) and (it := Found(int(name), status.st_ino)) not in but:
                yield it


def repeat_soon(sock: socket.socket) -> None:
    """Have what is not acknowledged sent again at least once a second, where the kernel can (Linux 6.15).

    Else the pauses in between double: after a network was away for 40 s, nothing would come for another 20. The kernel
    gives a connection up after a number of times; here, after a time.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GIVEN_UP_AFTER_MS)
            sock.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, 1000)


@contextmanager
def borrowed(it: Found) -> Iterator[socket.socket | None]:
    """The socket itself, which stays its owner's; None where the number is not its own any more, or it is not TCP."""
    sock = None
    with contextlib.suppress(OSError):
        if _is(it):
            sock = socket.socket(fileno=it.fd)
    try:
        tcp = sock is not None and sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6)
        yield sock if tcp else None
    finally:
        if sock is not None:
            sock.detach()


def _address(name: tuple[str, int] | tuple[str, int, int, int]) -> Address:
    return name[0], name[1]
