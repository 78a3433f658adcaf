"""The group of a static run, whose workers another launcher has started."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from elastune.comm.backend import backend_for
from elastune.comm.comms import Comms
from elastune.comm.group import Group
from elastune.core.errors import UserError
from elastune.core.mesh import AXES, Mesh
from elastune.core.run import Place


def join(place: Place, timeout_s: float = 1800.0) -> Group:
    """Meet the other workers of a static run at ``place.rendezvous``; no collective may last longer than ``timeout_s``.

    The process must end by ``os._exit``: a process group that is destroyed while Python holds its lock may wait for a
    thread that waits for the lock (seen with gloo: its finished collectives free tensors on a thread of their own).
    """
    if place.world == 1:
        return Group()
    device = torch.device(place.device)
    _refuse_unknown_host(place.rendezvous)
    backend = backend_for(place.device, own_device=place.own_device)
    dist.init_process_group(
        backend,
        init_method=place.rendezvous,
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=timeout_s),
    )
    return Group(place.rank, place.world, dist.group.WORLD, backend, device)


def stand(group: Group, place: Place, mesh: Mesh) -> Comms:
    """The groups of a static run whose workers, all in ``group``, stand as ``mesh`` says; all must call this.

    Raises:
        UserError: Where the mesh has other workers than the run.
    """
    if mesh.workers != group.size:
        value = f"{mesh} ({mesh.workers}) of {group.size}"
        raise UserError("workers and mesh must agree", value, "leave --mesh out, or start as many workers")
    formed: dict[tuple[int, ...], Group] = {tuple(range(group.size)): group}

    def group_of(groups: Sequence[tuple[int, ...]]) -> Group:
        """This worker's of ``groups``; torch wants every worker to take part in making each of them."""
        own = next(members for members in groups if group.rank in members)
        for members in groups:
            if len(members) > 1 and members not in formed:
                pg = dist.new_group(list(members))
                if members == own:
                    device = torch.device(place.device)
                    formed[own] = Group(own.index(group.rank), len(own), pg, group.backend, device)
                else:
                    formed[members] = Group()
        return formed[own] if len(own) > 1 else Group()

    along = {axis: group_of(mesh.groups(axis)) for axis in AXES}
    batch = group_of([mesh.batch_group(rank) for rank in range(mesh.replica // mesh.shard)])
    return Comms(mesh, group, along, batch)


def meeting_place() -> Store:
    """The store by which the workers that have joined found each other."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def _refuse_unknown_host(rendezvous: str) -> None:
    """Torch would go on trying for half an hour."""
    host = urlsplit(rendezvous).hostname if rendezvous.startswith("tcp://") else None
    if host is not None:
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            fix = "set MASTER_ADDR to an address of rank 0's machine"
            raise UserError("workers must be able to look up where they meet", f"{host}: {error}", fix) from None
