"""This process's TCP connections, found by their addresses, and the network interfaces of this machine.

Some libraries do not give access to their connections. They are found by address, so that they can be shut down.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import stat
import struct
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from elastune.core.errors import UserError

# [interfaces] The network interface by which a machine's workers are reached, and its address.

SIOCGIFADDR = 0x8915  # <linux/sockios.h>
LINK_LOCAL_SCOPE = "20"  # <net/ipv6.h>, as /proc/net/if_inet6 tells it


def addresses() -> dict[str, list[str]]:
    """The addresses of each interface of this machine, IPv4 before IPv6; link-local ones of IPv6 are left out."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name in found:
            with suppress(OSError):  # it has none
                answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name].append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope != LINK_LOCAL_SCOPE and name in found:
                found[name].append(str(ipaddress.IPv6Address(int(digits, 16))))
    return found


def interface_with(address: str) -> str:
    """The interface that has ``address``. Raises ``UserError``."""
    wanted = ipaddress.ip_address(address)
    mapped = getattr(wanted, "ipv4_mapped", None)
    known = addresses()
    for name, own in known.items():
        if str(mapped or wanted) in own or (wanted.is_loopback and name == "lo"):
            return name
    raise UserError("an address must be this machine's", address, f"choose by --interface: {', '.join(known)}")


def address_of(interface: str) -> str:
    """The first address of ``interface``. Raises ``UserError``."""
    known = addresses()
    if not known.get(interface):
        having = ", ".join(name for name, own in known.items() if own)
        raise UserError("--interface must name one of this machine's with an address", interface, f"such as {having}")
    return known[interface][0]


# [sockets] This process's TCP connections, found by their addresses: for libraries that do not give theirs away.

Address = tuple[str, int]
TCP_RTO_MAX_MS = 44  # <linux/tcp.h>
GIVEN_UP_AFTER_MS = 600_000


class SocketRef(NamedTuple):
    """A socket of this process: its number may be another's by now, its inode not."""

    fd: int
    inode: int


def sockets() -> frozenset[SocketRef]:
    """All sockets: who looks for new ones later need not look at these again."""
    return frozenset(_sockets())


def listeners(but: Collection[SocketRef] = ()) -> dict[SocketRef, Address]:
    """The TCP sockets that listen, and where; ``but`` for these."""
    found = {}
    for it in _sockets(but):
        with borrowed(it) as sock, contextlib.suppress(OSError):  # closed by another thread just now
            if sock is not None and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found[it] = _address(sock.getsockname())
    return found


def connections(own: Address, others: Collection[Address], but: Collection[SocketRef] = ()) -> list[SocketRef]:
    """The connections that came in at ``own``, or go out to one of ``others``; ``but`` for these."""
    found = []
    for it in _sockets(but):
        with borrowed(it) as sock, contextlib.suppress(OSError):  # not connected, or not any more
            if sock is not None and (_address(sock.getpeername()) in others or _address(sock.getsockname()) == own):
                found.append(it)
    return found


class Endpoints(NamedTuple):
    """A connection's two ends; the other process that has it calls them the other way round."""

    own: Address
    other: Address


def ends(found: Collection[SocketRef]) -> dict[SocketRef, Endpoints]:
    """Both ends of each, of those that are connected still."""
    known = {}
    for it in found:
        with borrowed(it) as sock, contextlib.suppress(OSError):
            if sock is not None:
                known[it] = Endpoints(_address(sock.getsockname()), _address(sock.getpeername()))
    return known


class Connections:
    """Connections that a library has opened and will close."""

    def __init__(self, found: Collection[SocketRef]) -> None:
        self.found = found

    def sever(self) -> None:
        """End them; from any thread, at any time."""
        sever(self.found)

    def all_closed(self) -> bool:
        """Whether the library has closed them all: it will neither read nor write any more."""
        return not any(_is(it) for it in self.found)


def sever(found: Collection[SocketRef]) -> None:
    """End these connections in both directions at once; who reads or writes them sees an error."""
    for it in found:
        with borrowed(it) as sock, contextlib.suppress(OSError):
            if sock is not None:
                sock.shutdown(socket.SHUT_RDWR)


def _is(it: SocketRef) -> bool:
    try:
        return os.fstat(it.fd).st_ino == it.inode
    except OSError:
        return False


def _sockets(but: Collection[SocketRef] = ()) -> Iterator[SocketRef]:
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError):  # closed in the meantime
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode) and (it := SocketRef(int(name), status.st_ino)) not in but:
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
def borrowed(it: SocketRef) -> Iterator[socket.socket | None]:
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
