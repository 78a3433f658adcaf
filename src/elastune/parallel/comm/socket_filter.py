"""A filter in the Linux kernel that decides which connections may reach a library's listening socket, and when.

A listener that cannot check who connects (gloo's) is closed except while its peers connect. Other systems have no such
filters: there the listener stays open, and ``parallel.comm.gloo`` detects intruders afterwards.
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
