"""All groups that one worker is in: the choice of a backend, and how the groups are formed.

Only code that knows the membership forms groups; a mechanism never makes its own.
In a static run another launcher has started the workers, and ``join`` meets them.
Engines of other packages know only torch's default process group; ``open_default_group`` opens it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Literal, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from elastune.core.errors import UserError
from elastune.core.mesh import AXES, Axis, Mesh
from elastune.core.run import Place
from elastune.parallel.comm.exact import host_levels, level_ranks
from elastune.parallel.comm.gloo import GlooFactory
from elastune.parallel.comm.group import Group, drop
from elastune.parallel.comm.sockets import address_of

# [comms] The groups that one worker is in. Whoever knows the membership forms them; a mechanism never makes its own.


class GroupFactory(Protocol):
    """Forms groups over one backend: ``comm.gloo.GlooFactory``, ``comm.nccl.NcclFactory``."""

    @property
    def backend(self) -> str:
        """The backend's name."""
        ...

    def form(
        self, store: Store, name: str, rank: int, size: int, *, superseded: Callable[[], bool] = lambda: False
    ) -> Group:
        """The group ``name`` of ``size`` workers that all call this, with ``rank`` 0 to ``size`` - 1; blocks.

        ``store`` is where they find each other. Raises ``GroupBroken`` where it fails, and at once when ``superseded``
        turns true.
        """
        ...


@dataclass(frozen=True)
class Comms:
    """One worker's groups: ``everyone``, and for each axis the workers that differ from it in this axis alone.

    ``batch``: those that compute with the same part of the model on other samples (the axes data and shard together).
    ``hosts``: where each worker of the mesh runs, by rank; empty where nobody has asked.
    """

    mesh: Mesh
    everyone: Group
    groups: Mapping[Axis, Group]
    batch: Group
    hosts: tuple[str, ...] = ()

    def group(self, axis: Axis) -> Group:
        """The group along ``axis``; of one worker where the mesh has no more."""
        return self.groups[axis]

    @property
    def rank(self) -> int:
        """This worker's rank in the mesh."""
        return self.everyone.rank

    @cached_property
    def formed(self) -> tuple[Group, ...]:
        """The groups of several workers, each once."""
        found = {id(group): group for group in (self.everyone, self.batch, *self.groups.values()) if group.size > 1}
        return tuple(found.values())

    def abandon(self) -> None:
        """Give all of them up; see ``Group.abandon``."""
        for group in self.formed:
            group.abandon()


def replicated(everyone: Group) -> Comms:
    """The groups where each worker carries a replica of its own."""
    groups = {axis: everyone if axis == "data" else Group() for axis in AXES}
    return Comms(Mesh(data=everyone.size), everyone, groups, everyone)


def form_comms(
    factory: GroupFactory,
    store: Store,
    name: str,
    rank: int,
    mesh: Mesh,
    hosts: Sequence[str] = (),
    *,
    climbs: bool = False,
    superseded: Callable[[], bool] = lambda: False,
) -> Comms:
    """The groups of worker ``rank`` of ``mesh``, which all its workers form together; see ``GroupFactory.form``.

    Axes with the same members share a group. ``hosts``: where each worker runs, by rank; empty where that is one
    machine. ``climbs``: sums go by levels, where several workers are on each of several hosts and each of them carries
    a replica of its own; forming these takes as long again.
    """
    formed: dict[tuple[int, ...], Group] = {}

    def group_of(what: str, members: tuple[int, ...]) -> Group:
        """One group for each set of members."""
        if members not in formed:
            part = name if len(members) == mesh.workers else f"{name}/{what}/{members[0]}"
            formed[members] = factory.form(store, part, members.index(rank), len(members), superseded=superseded)
        return formed[members]

    try:
        everyone = group_of("everyone", tuple(range(mesh.workers)))
        if climbs and mesh.replica == 1:
            everyone.levels = form_levels(factory, store, name, rank, hosts, superseded=superseded)
        batch = group_of("batch", mesh.batch_group(rank))
        along = {axis: group_of(axis, mesh.group(axis, rank)) for axis in AXES}
    except BaseException:
        drop_all(formed.values())
        raise
    return Comms(mesh, everyone, along, batch, tuple(hosts))


def form_levels(
    factory: GroupFactory,
    store: Store,
    name: str,
    rank: int,
    hosts: Sequence[str],
    *,
    superseded: Callable[[], bool] = lambda: False,
) -> tuple[Group, ...]:
    """The groups by which the sums of worker ``rank`` climb (``Group.levels``); none where they need not.

    All workers call this, each of which carries a replica of its own; arguments as those of ``form_comms``.
    """
    if factory.backend != "gloo":  # NCCL is not tried
        return ()
    formed: list[Group] = []
    try:
        for i, members in enumerate(level_ranks(host_levels(hosts), rank)):
            part, own = f"{name}/level{i}/{members[0]}", members.index(rank)
            formed.append(factory.form(store, part, own, len(members), superseded=superseded))
    except BaseException:
        drop_all(formed)
        raise
    return tuple(formed)


def drop_all(groups: Iterable[Group]) -> None:
    """Let go of each of ``groups``; see ``drop``."""
    for group in groups:
        drop(group)


# [backend] Which backend a run's workers reduce over.

Backend = Literal["gloo", "nccl"]


def backend_for(device: str, *, own_device: bool) -> Backend:
    """NCCL for workers that have a GPU each (``own_device``); it does not work for two on one. Else gloo."""
    nccl = device.startswith("cuda") and own_device and dist.is_nccl_available()
    return "nccl" if nccl else "gloo"


def factory_for(device: str, *, own_device: bool, interface: str, timeout_s: float) -> GroupFactory:
    """What forms the groups of a run whose workers come and go."""
    if backend_for(device, own_device=own_device) == "gloo":
        return GlooFactory(interface, timeout_s)
    from elastune.parallel.comm.nccl import NcclFactory  # a torch without CUDA has no NCCL

    return NcclFactory(torch.device(device), timeout_s)


# [join] The group of a static run, whose workers another launcher has started.


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


def rendezvous_store() -> Store:
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


# [default group] The default process group of ``torch.distributed``, for engines of other packages that know no other one.


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
