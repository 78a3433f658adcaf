"""The sockets of this process: its TCP connections by address, the machine's interfaces, and a filter for listeners.

Some libraries do not give access to their connections. This module finds them by address, to shut them down.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import os
import socket
import stat
import struct
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from elastune.core.errors import UserError

SIOCGIFADDR = 0x8915  # <linux/sockios.h>
LINK_LOCAL_SCOPE = "20"  # <net/ipv6.h>, as in /proc/net/if_inet6
TCP_RTO_MAX_MS = 44  # <linux/tcp.h>
GIVEN_UP_AFTER_MS = 600_000
Address = tuple[str, int]


# --- interfaces ------------------------------------------------------------------------------------------------------
def addresses() -> dict[str, list[str]]:
    """The addresses of each interface of this machine, IPv4 before IPv6, without link-local addresses of IPv6."""
    by_interface: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name in by_interface:
            with suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                by_interface[name].append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope != LINK_LOCAL_SCOPE and name in by_interface:
                by_interface[name].append(str(ipaddress.IPv6Address(int(digits, 16))))
    return by_interface


def interface_with(address: str) -> str:
    """The interface that has ``address``. Raises ``UserError``."""
    wanted = ipaddress.ip_address(address)
    mapped = getattr(wanted, "ipv4_mapped", None)
    by_interface = addresses()
    for name, interface_addresses in by_interface.items():
        if str(mapped or wanted) in interface_addresses or (wanted.is_loopback and name == "lo"):
            return name
    raise UserError("an address must be this machine's", address, f"choose by --interface: {', '.join(by_interface)}")


def address_of(interface: str) -> str:
    """The first address of ``interface``. Raises ``UserError``."""
    by_interface = addresses()
    if not by_interface.get(interface):
        usable = ", ".join(name for name, interface_addresses in by_interface.items() if interface_addresses)
        raise UserError("--interface must name one of this machine's with an address", interface, f"such as {usable}")
    return by_interface[interface][0]


# --- sockets ---------------------------------------------------------------------------------------------------------
class SocketRef(NamedTuple):
    """A socket of this process. Its number ``fd`` may belong to another socket by now, its ``inode`` cannot."""

    fd: int
    inode: int


def open_sockets() -> frozenset[SocketRef]:
    """All sockets of this process. A later search for new sockets can leave these out (``but``)."""
    return frozenset(_sockets())


def listeners(but: Collection[SocketRef] = ()) -> dict[SocketRef, Address]:
    """The TCP sockets that listen, with their addresses, except the sockets ``but``."""
    listening = {}
    for ref in _sockets(but):
        with borrowed(ref) as sock, suppress(OSError):  # closed by another thread just now
            if sock is not None and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening[ref] = _address(sock.getsockname())
    return listening


def connections(listening: Address, others: Collection[Address], but: Collection[SocketRef] = ()) -> list[SocketRef]:
    """The connections that came in at ``listening`` or go out to one of ``others``, except the sockets ``but``."""
    connected = []
    for ref in _sockets(but):
        with borrowed(ref) as sock, suppress(OSError):  # not connected, or not any more
            if sock is not None and (
                _address(sock.getpeername()) in others or _address(sock.getsockname()) == listening
            ):
                connected.append(ref)
    return connected


class Endpoints(NamedTuple):
    """A connection's two ends; in the other process the two ends are exchanged."""

    local: Address
    other: Address


def ends(refs: Collection[SocketRef]) -> dict[SocketRef, Endpoints]:
    """Both ends of each connection that is still open."""
    endpoints = {}
    for ref in refs:
        with borrowed(ref) as sock, suppress(OSError):
            if sock is not None:
                endpoints[ref] = Endpoints(_address(sock.getsockname()), _address(sock.getpeername()))
    return endpoints


class Connections:
    """Connections that a library has opened and will close; a ``Group`` ends them (``GroupConnections``)."""

    def __init__(self, refs: Collection[SocketRef]) -> None:
        self._refs = refs

    def sever(self) -> None:
        """End them; from any thread, at any time."""
        sever(self._refs)

    def all_closed(self) -> bool:
        """Whether the library has closed them all: it will neither read nor write any more."""
        return not any(_is_same(ref) for ref in self._refs)


def sever(refs: Collection[SocketRef]) -> None:
    """End these connections in both directions at once; a read or write on them raises an error."""
    for ref in refs:
        with borrowed(ref) as sock, suppress(OSError):
            if sock is not None:
                sock.shutdown(socket.SHUT_RDWR)


def _is_same(ref: SocketRef) -> bool:
    """Whether the number ``ref.fd`` still belongs to the same socket."""
    try:
        return os.fstat(ref.fd).st_ino == ref.inode
    except OSError:
        return False


def _sockets(but: Collection[SocketRef] = ()) -> Iterator[SocketRef]:
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # closed in the meantime
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode) and (ref := SocketRef(int(name), status.st_ino)) not in but:
                yield ref


def repeat_soon(sock: socket.socket) -> None:
    """Make the kernel repeat unacknowledged segments at least once a second, if it can (Linux 6.15).

    Without this the pauses between repeats double: after a network outage of 40 s no segment would arrive for another
    20 s. The kernel then gives a connection up after ``GIVEN_UP_AFTER_MS``, and not after a number of repeats.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GIVEN_UP_AFTER_MS)
            sock.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, 1000)


@contextmanager
def borrowed(ref: SocketRef) -> Iterator[socket.socket | None]:
    """The socket of ``ref``, still owned by the library; None if its number has another owner, or it is not TCP."""
    sock = None
    with suppress(OSError):
        if _is_same(ref):
            sock = socket.socket(fileno=ref.fd)
    try:
        tcp = sock is not None and sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6)
        yield sock if tcp else None
    finally:
        if sock is not None:
            sock.detach()


def _address(name: tuple[str, int] | tuple[str, int, int, int]) -> Address:
    return name[0], name[1]


# A filter in the Linux kernel that decides which connections may reach a library's listening socket, and when.
#
# A listener that cannot check who connects (gloo's) is closed except while its peers connect. Other systems have no
# such filters: there the listener stays open, and ``parallel.comm.backends`` detects intruders afterwards.

# <asm-generic/socket.h>
SO_ATTACH_FILTER = 26
SO_DETACH_FILTER = 27
SO_MEMINFO, MEMINFO_BYTES, MEMINFO_DROPPED = 55, 36, 32  # nine numbers of four bytes; the last counts dropped segments
# <linux/tcp.h>
INFO_BYTES, INFO_WAITING = 28, 24  # of struct tcp_info: how many connections a listener has not accepted yet
# <linux/bpf_common.h>: the instructions of these programs; a program sees a segment from its TCP header on.
LENGTH, BYTE, TO_X, SHIFT_RIGHT, SHIFT_LEFT, IF_EQUALS_X, RETURN = 0x80, 0x30, 0x07, 0x74, 0x64, 0x1D, 0x06
ALL, NONE = 0xFFFFFFFF, 0
Program = Sequence[tuple[int, int, int, int]]
"""Instructions: the code, how many to skip if true, how many if false, and an operand."""
NOTHING: Program = [(RETURN, 0, 0, NONE)]
SILENCE: Program = [
    (LENGTH, 0, 0, 0),
    (TO_X, 0, 0, 0),
    (BYTE, 0, 0, 12),  # its upper half is the number of words of the header
    (SHIFT_RIGHT, 0, 0, 4),
    (SHIFT_LEFT, 0, 0, 2),
    (IF_EQUALS_X, 0, 1, 0),
    (RETURN, 0, 0, ALL),
    (RETURN, 0, 0, NONE),
]
"""Connections are accepted, but no byte arrives on them: each inherits this program, until ``remove_filter``."""


def refuse_connections(ref: SocketRef) -> None:
    """Accept no more connections on listener ``ref``; existing connections stay."""
    _filter(ref, NOTHING)


def drop_input(ref: SocketRef) -> None:
    """Read no byte of a new connection before ``remove_filter`` of it. Bytes sent until then arrive 0.2 s later."""
    _filter(ref, SILENCE)


def has_dropped_input(ref: SocketRef) -> bool:
    """Whether the filter of ``ref`` has dropped any segment."""
    with borrowed(ref) as sock:
        if sys.platform != "linux" or sock is None:
            return False
        counts = sock.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, MEMINFO_BYTES)
        return bool(struct.unpack_from("I", counts, MEMINFO_DROPPED)[0])


def entered(ref: SocketRef, listening: Address, but: Collection[SocketRef] = ()) -> bool:
    """Whether a process has connected to ``ref``, which listens at ``listening``. The connection may wait for accept.

    ``but``: sockets that existed before ``ref``.
    """
    with borrowed(ref) as sock:
        if sys.platform == "linux" and sock is not None:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
            if struct.unpack_from("I", info, INFO_WAITING)[0]:
                return True
    return bool(connections(listening, [], but))  # after the waiting ones: one accepted in between is in one of the two


def remove_filter(ref: SocketRef) -> None:
    """Let all segments of ``ref`` through. Idempotent."""
    if sys.platform == "linux":
        with borrowed(ref) as sock:
            if sock is not None:
                try:
                    sock.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
                except FileNotFoundError:  # it has no filter
                    return


def _filter(ref: SocketRef, program: Program) -> None:
    if sys.platform == "linux":
        with borrowed(ref) as sock:
            if sock is not None:
                code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
                fprog = struct.pack("HP", len(program), ctypes.addressof(code))
                sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, fprog)
