"""The default process group of ``torch.distributed``, for engines of other packages that know no other one."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from elastune.comm.group import Group

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of a network interface


def open_default_group(everyone: Group) -> None:
    """Make the workers of ``everyone`` torch's default process group, with the same ranks and backend; all call this.

    A static run has one already. It lasts as long as the process, which must end by ``os._exit`` (``comm.join``).
    Rank 0 keeps the store by which they meet, and tells its address through ``everyone``.
    """
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (everyone.rank, everyone.size):
            raise RuntimeError("this process has a default process group of other workers")
        return
    if everyone.size == 1:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        return
    if everyone.rank == 0:
        server = TCPStore(own_address(), 0, is_master=True, wait_for_workers=False)
        told = f"{server.host} {server.port}"
    else:
        server, told = None, ""
    rows = everyone.gather_tensors(torch.frombuffer(bytearray(told.encode() or b"-"), dtype=torch.uint8))
    host, port = rows[0].numpy().tobytes().decode().split()
    store = server or TCPStore(host, int(port), is_master=False)
    dist.init_process_group(everyone.backend, store=store, rank=everyone.rank, world_size=everyone.size)


def own_address() -> str:
    """Of the interface that the run's groups use."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo").encode()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        found = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", interface[:15]))
    return socket.inet_ntoa(found[20:24])
