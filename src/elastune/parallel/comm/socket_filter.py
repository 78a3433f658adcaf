"""A filter in the Linux kernel that decides who may send to a library's listening socket, and when.

A listener that cannot check who connects (gloo's) is closed except while its peers connect.
Other systems have no such filters: there the listener stays open, and ``comm.gloo`` detects intruders afterwards.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
from collections.abc import Collection, Sequence

from elastune.parallel.comm.sockets import Address, SocketRef, borrowed, connections

# <asm-generic/socket.h>
SO_ATTACH_FILTER = 26
SO_DETACH_FILTER = 27
SO_MEMINFO, MEMINFO_BYTES, MEMINFO_DROPPED = 55, 36, 32  # nine numbers of four bytes; the last counts what was dropped
# <linux/tcp.h>
INFO_BYTES, INFO_WAITING = 28, 24  # of struct tcp_info: of a listener, how many connections it has not accepted yet
# <linux/bpf_common.h>: what each instruction of these programs is; a program sees a segment from its TCP header on.
LENGTH, BYTE, TO_X, SHIFT_RIGHT, SHIFT_LEFT, IF_EQUALS_X, RETURN = 0x80, 0x30, 0x07, 0x74, 0x64, 0x1D, 0x06
ALL, NONE = 0xFFFFFFFF, 0
Program = Sequence[tuple[int, int, int, int]]
"""Instructions: the code, how many to skip if true, if false, and a number."""
NOTHING: Program = [(RETURN, 0, 0, NONE)]
SILENCE: Program = [
    (LENGTH, 0, 0, 0),
    (TO_X, 0, 0, 0),
    (BYTE, 0, 0, 12),  # its upper half: how many words the header has
    (SHIFT_RIGHT, 0, 0, 4),
    (SHIFT_LEFT, 0, 0, 2),
    (IF_EQUALS_X, 0, 1, 0),
    (RETURN, 0, 0, ALL),
    (RETURN, 0, 0, NONE),
]
"""Connections come about, but no byte arrives on them: each has this program too, until it is ``open``."""


def refuse_connections(it: SocketRef) -> None:
    """Nobody can connect any more; who has connected stays."""
    _filter(it, NOTHING)


def drop_input(it: SocketRef) -> None:
    """Who connects is not heard before its own connection is opened. What it says until then arrives 0.2 s later."""
    _filter(it, SILENCE)


def has_dropped_input(it: SocketRef) -> bool:
    """Whether anything came to it that was not let through."""
    with borrowed(it) as sock:
        if sys.platform != "linux" or sock is None:
            return False
        counts = sock.getsockopt(socket.SOL_SOCKET, SO_MEMINFO, MEMINFO_BYTES)
        return bool(struct.unpack_from("I", counts, MEMINFO_DROPPED)[0])


def entered(it: SocketRef, own: Address, but: Collection[SocketRef] = ()) -> bool:
    """Whether anybody has connected to ``it``, which listens at ``own``: who was accepted, and who waits for that.

    ``but``: sockets that were there before it.
    """
    with borrowed(it) as sock:
        if sys.platform == "linux" and sock is not None:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
            if struct.unpack_from("I", info, INFO_WAITING)[0]:
                return True
    return bool(connections(own, [], but))  # after those that wait: who is accepted in between is in one of the two


def remove_filter(it: SocketRef) -> None:
    """Let everything through. Idempotent."""
    if sys.platform == "linux":
        with borrowed(it) as sock:
            if sock is not None:
                try:
                    sock.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
                except FileNotFoundError:  # it was open
                    return


def _filter(it: SocketRef, program: Program) -> None:
    if sys.platform == "linux":
        with borrowed(it) as sock:
            if sock is not None:
                code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
                fprog = struct.pack("HP", len(program), ctypes.addressof(code))
                sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, fprog)
