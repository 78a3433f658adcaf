"""The groups that one worker is in. Whoever knows the membership forms them; a mechanism never makes its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from torch._C._distributed_c10d import Store

from elastune.comm.group import Group, drop
from elastune.comm.levels import host_levels, level_ranks
from elastune.core.mesh import AXES, Axis, Mesh


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
