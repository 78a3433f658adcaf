"""All groups that one worker is in: the choice of a backend, and how the groups are formed.

Only code that knows the membership forms groups; a mechanism never makes its own.
``form_comms`` forms the groups of a run whose workers come and go.
In a static run another launcher has started the workers: ``static_groups`` forms their groups, and releases them.
Engines of other packages know only torch's default process group; ``open_default_group`` opens it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import count
from typing import Literal, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from elastune.core.errors import UserError
from elastune.core.mesh import AXES, Axis, Mesh
from elastune.core.run import Place
from elastune.parallel.comm.backends import GlooFactory
from elastune.parallel.comm.exact import host_levels, level_ranks
from elastune.parallel.comm.group import Group, drop
from elastune.parallel.comm.process_exit import keep_for_ever
from elastune.parallel.comm.sockets import SocketRef, address_of, ends, open_sockets, sever

Backend = Literal["gloo", "nccl"]


class GroupFactory(Protocol):
    """Forms groups over one backend: ``parallel.comm.backends.GlooFactory``, ``parallel.comm.backends.NcclFactory``."""

    @property
    def backend(self) -> str:
        """The backend's name."""
        ...

    def form(
        self, store: Store, name: str, rank: int, size: int, *, superseded: Callable[[], bool] = lambda: False
    ) -> Group:
        """Form the group ``name`` of ``size`` workers, which all call this with their ``rank``; blocks.

        The workers find each other in ``store``. Raises ``GroupBroken`` if forming fails, and at once when
        ``superseded`` turns true.
        """
        ...


@dataclass(frozen=True)
class Comms:
    """All groups of one worker.

    Attributes:
        mesh: How the workers are arranged.
        everyone: All workers.
        groups: For each axis the workers that differ from this worker in this axis alone.
        batch: The workers with the same part of the model and other samples (the axes data and shard together).
        hosts: The host of each worker of the mesh, by rank; may be empty.
    """

    mesh: Mesh
    everyone: Group
    groups: Mapping[Axis, Group]
    batch: Group
    hosts: tuple[str, ...] = ()

    def group(self, axis: Axis) -> Group:
        """The group along ``axis``; it may be this worker alone."""
        return self.groups[axis]

    @property
    def rank(self) -> int:
        """This worker's rank in the mesh."""
        return self.everyone.rank

    @cached_property
    def speaks(self) -> bool:
        """Whether this worker has the loss of its samples; see ``Mesh.speaks``."""
        return self.mesh.speaks(self.rank)

    @cached_property
    def formed(self) -> tuple[Group, ...]:
        """The groups of several workers, each once."""
        by_id = {id(group): group for group in (self.everyone, self.batch, *self.groups.values()) if group.size > 1}
        return tuple(by_id.values())

    def abandon(self) -> None:
        """Give up all groups; see ``Group.abandon``."""
        for group in self.formed:
            group.abandon()


def replicated(everyone: Group) -> Comms:
    """The groups of workers that each carry a replica of their own."""
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
    """Form the groups of worker ``rank`` of ``mesh``; all its workers call this together.

    Axes with the same members share a group.

    Args:
        factory: Forms each group.
        store: The workers find each other in it.
        name: Differs between the views of a run.
        rank: This worker.
        mesh: How the workers are arranged.
        hosts: The host of each worker, by rank; empty if all run on one machine.
        climbs: Sums go by levels, if several workers run on each of several hosts and each worker carries a replica
            of its own. Forming takes twice as long then.
        superseded: See ``GroupFactory.form``.

    Raises:
        GroupBroken: See ``GroupFactory.form``.
    """
    formed: dict[tuple[int, ...], Group] = {}

    def group_of(kind: str, members: tuple[int, ...]) -> Group:
        """One group for each set of members."""
        if members not in formed:
            part = name if len(members) == mesh.workers else f"{name}/{kind}/{members[0]}"
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
    """Form the levels of worker ``rank`` (``Group.levels``); none if one level is enough.

    All workers call this, and each carries a replica of its own. The arguments are those of ``form_comms``.
    """
    if factory.backend != "gloo":  # levels are not tested with NCCL
        return ()
    formed: list[Group] = []
    try:
        for i, members in enumerate(level_ranks(host_levels(hosts), rank)):
            part, level_rank = f"{name}/level{i}/{members[0]}", members.index(rank)
            formed.append(factory.form(store, part, level_rank, len(members), superseded=superseded))
    except BaseException:
        drop_all(formed)
        raise
    return tuple(formed)


def drop_all(groups: Iterable[Group]) -> None:
    """Let go of each of ``groups``; see ``drop``."""
    for group in groups:
        drop(group)


def backend_for(device: str, *, own_device: bool) -> Backend:
    """NCCL if each worker has a GPU of its own (``own_device``), else gloo: NCCL refuses two workers on one GPU."""
    nccl = device.startswith("cuda") and own_device and dist.is_nccl_available()
    return "nccl" if nccl else "gloo"


def factory_for(device: str, *, own_device: bool, interface: str, timeout_s: float) -> GroupFactory:
    """The factory of groups for a run whose workers come and go."""
    if backend_for(device, own_device=own_device) == "gloo":
        return GlooFactory(interface, timeout_s)
    from elastune.parallel.comm.backends import NcclFactory

    return NcclFactory(torch.device(device), timeout_s)


# --- static runs -----------------------------------------------------------------------------------------------------

GOOD_END_S = 10.0  # for the last of the workers whose run has ended well
BAD_END_S = 2.0  # for the others after a failure: some of them may be gone
_runs = count()  # of this process: each meets under names of its own


@contextmanager
def static_groups(place: Place, mesh: Mesh, timeout_s: float = 1800.0) -> Iterator[Comms]:
    """Form the groups of a static run, whose workers all call this, and release them when the block ends.

    The workers meet at ``place.rendezvous``. After a good end their process groups are destroyed. After an exception
    the connections are ended, so that no worker waits for this one. A process group whose peers may be gone is kept
    for ever: its destructor would wait for operations that never end.

    Args:
        place: This worker's place.
        mesh: How the workers are arranged.
        timeout_s: No collective may last longer.

    Raises:
        UserError: If the mesh has more or fewer workers than the run, if the program has a process group of its own,
            or if the host of the rendezvous is unknown.
    """
    process, owner = os.getpid(), not dist.is_initialized()
    if place.world > 1 and not owner:
        rule = "elastune makes the process group of its workers"
        fix = "call torch.distributed.destroy_process_group() before elastune.run"
        raise UserError(rule, "one that the program has made", fix)
    formed: list[Group] = []
    store = _meeting_store(place, timeout_s) if place.world > 1 else None
    before, opened, well = open_sockets(), frozenset[SocketRef](), False
    try:
        everyone = Group() if store is None else _join(place, store, timeout_s)
        formed.append(everyone)
        comms = stand(everyone, place, mesh)
        formed.extend(comms.formed)
        opened = open_sockets() - before  # now: the program may open sockets of its own later
        yield comms
        well = True
    finally:
        if os.getpid() == process and owner and dist.is_initialized():  # else in a child that the program has forked
            _leave(place, formed, opened, store, well)


def _leave(
    place: Place, formed: Sequence[Group], opened: Collection[SocketRef], store: Store | None, well: bool
) -> None:
    """Release all process groups of this process. ``opened``: the sockets that were opened while they formed."""
    connected = _connections_of_groups(opened, place)
    if not well:
        sever(connected)  # so that no other worker waits for this one
    together = store is None or _all_leave(store, place, GOOD_END_S if well else BAD_END_S)
    pgs = list(dist.distributed_c10d._world.pg_map)
    for group in formed:
        group.abandon()
    sever(connected)  # so that this worker's threads that wait for a message end
    held = [each for group in formed for each in group._release()]
    if not (well and together):
        for pg in pgs:
            keep_for_ever(pg, "its workers had not all left the run")
    del pgs
    ended = threading.Thread(target=_destroy, args=(held,), name="destroy groups", daemon=True)
    ended.start()
    ended.join(GOOD_END_S)
    if ended.is_alive():
        keep_for_ever(ended, "the process groups of its run did not end")


def _destroy(held: list[object]) -> None:
    with suppress(RuntimeError, ValueError):
        dist.destroy_process_group()
    held.clear()


def _all_leave(store: Store, place: Place, limit_s: float) -> bool:
    """Wait until every worker is about to release its groups; return False after ``limit_s`` without that."""
    try:
        store.set(f"elastune/leaves/{place.rank}", "")
        store.wait([f"elastune/leaves/{rank}" for rank in range(place.world)], timedelta(seconds=limit_s))
    except (RuntimeError, TimeoutError):  # too late, or the store is gone with its worker
        return False
    return True


def _connections_of_groups(opened: Collection[SocketRef], place: Place) -> list[SocketRef]:
    """Those of ``opened`` that are connected, except the connections of the store: other workers still need them."""
    port = urlsplit(place.rendezvous).port if place.rendezvous.startswith("tcp://") else None
    at_store = {port, int(os.environ.get("MASTER_PORT", 0))}
    return [ref for ref, (own, other) in ends(opened).items() if not {own[1], other[1]} & at_store]


def _meeting_store(place: Place, timeout_s: float) -> Store:
    """The store in which the workers of ``place`` find each other, under names that no other run of theirs uses."""
    _refuse_unknown_host(place.rendezvous)
    limit = timedelta(seconds=timeout_s)
    store, _, _ = next(dist.rendezvous(place.rendezvous, place.rank, place.world, timeout=limit))  # type: ignore[attr-defined]
    store.set_timeout(limit)
    return PrefixStore(f"elastune/{next(_runs)}", store)


def join(place: Place, timeout_s: float = 1800.0) -> Group:
    """Meet the other workers of ``place`` in a process that ends by ``os._exit``; ``static_groups`` is for others.

    Nobody releases the group. No collective may last longer than ``timeout_s``. Raises ``UserError`` for an unknown
    host.
    """
    return Group() if place.world == 1 else _join(place, _meeting_store(place, timeout_s), timeout_s)


def _join(place: Place, store: Store, timeout_s: float) -> Group:
    """Meet the other workers in ``store``; no collective may last longer than ``timeout_s``."""
    device = torch.device(place.device)
    backend = backend_for(place.device, own_device=place.own_device)
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=limit)
    return Group(place.rank, place.world, dist.group.WORLD, backend, device)


def stand(group: Group, place: Place, mesh: Mesh) -> Comms:
    """Make the groups of a static run whose workers, all in ``group``, are arranged as ``mesh``; all call this.

    Raises:
        UserError: If the mesh has more or fewer workers than the run.
    """
    if mesh.workers != group.size:
        value = f"{mesh} ({mesh.workers}) of {group.size}"
        raise UserError("workers and mesh must agree", value, "leave --mesh out, or start as many workers")
    formed: dict[tuple[int, ...], Group] = {tuple(range(group.size)): group}

    def group_of(groups: Sequence[tuple[int, ...]]) -> Group:
        """This worker's group among ``groups``; torch needs every worker to take part in making each of them."""
        own_members = next(members for members in groups if group.rank in members)
        for members in groups:
            if len(members) > 1 and members not in formed:
                pg = dist.new_group(list(members))
                if members == own_members:
                    device, rank = torch.device(place.device), members.index(group.rank)
                    formed[members] = Group(rank, len(members), pg, group.backend, device)
                else:
                    formed[members] = Group()
        return formed[own_members] if len(own_members) > 1 else Group()

    along = {axis: group_of(mesh.groups(axis)) for axis in AXES}
    batch = group_of([mesh.batch_group(rank) for rank in range(mesh.replica // mesh.shard)])
    return Comms(mesh, group, along, batch)


def rendezvous_store() -> Store:
    """The store in which the workers of ``static_groups`` found each other."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def _refuse_unknown_host(rendezvous: str) -> None:
    """Raise ``UserError`` for an unknown host; torch would try for half an hour."""
    host = urlsplit(rendezvous).hostname if rendezvous.startswith("tcp://") else None
    if host is not None:
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            fix = "set MASTER_ADDR to an address of rank 0's machine"
            raise UserError("workers must be able to look up where they meet", f"{host}: {error}", fix) from None


# --- the default process group of torch ------------------------------------------------------------------------------


def open_default_group(everyone: Group) -> None:
    """Make the workers of ``everyone`` torch's default process group, with the same ranks and backend; all call this.

    A static run of several workers has one already. Where elastune has started the process, the group lasts as long
    as the process.
    Rank 0 serves the store in which they meet, and sends its address over ``everyone``.
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
        address = f"{server.host} {server.port}"
    else:
        server, address = None, ""
    rows = everyone.gather_tensors(torch.frombuffer(bytearray(address.encode() or b"-"), dtype=torch.uint8))
    host, port = rows[0].numpy().tobytes().decode().split()
    store = server or TCPStore(host, int(port), is_master=False)
    dist.init_process_group(everyone.backend, store=store, rank=everyone.rank, world_size=everyone.size)


def _serve_store(address: str) -> TCPStore:
    """A store that listens at ``address`` alone; torch's own listener would listen on every interface."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def own_address() -> str:
    """The address of the interface that the run's groups use."""
    return address_of(os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
