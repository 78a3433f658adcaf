"""The default process group of ``torch.distributed``, for engines of other packages that know no other one."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from elastune.comm.group import Group
from elastune.comm.interfaces import address_of


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
        server = _serve_store(own_address())
        told = f"{server.host} {server.port}"
    else:
        server, told = None, ""
    rows = everyone.gather_tensors(torch.frombuffer(bytearray(told.encode() or b"-"), dtype=torch.uint8))
    host, port = rows[0].numpy().tobytes().decode().split()
    store = server or TCPStore(host, int(port), is_master=False)
    dist.init_process_group(everyone.backend, store=store, rank=everyone.rank, world_size=everyone.size)


def _serve_store(address: str) -> TCPStore:
    """A store that listens at ``address`` alone: torch's own listener would on every interface."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def own_address() -> str:
    """Of the interface that the run's groups use."""
    return address_of(os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
