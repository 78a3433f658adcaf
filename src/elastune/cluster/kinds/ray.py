"""``ray[:address=...,...]``: workers run on the nodes of a Ray cluster."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from elastune.cluster.kinds.kind import (
    Access,
    ClusterFact,
    ClusterKind,
    Folder,
    HostKind,
    RoomWanted,
    own_folders_of,
)
from elastune.core.cost import SPOT
from elastune.core.errors import UserError

if TYPE_CHECKING:
    from elastune.cluster.agents.remembered import Remembered
    from elastune.cluster.fleet import FleetCluster
    from elastune.cluster.ray.connection import WorkerShape
    from elastune.cluster.ray.starter import Keeping

FOLDER = "cluster"  # in that of the results, of what is to outlive this controller
NO_ROOM = "say workers_per_node=, of the nodes that the autoscaler adds"
Amount = Annotated[float, Field(ge=0, le=1 << 16, allow_inf_nan=False)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class RayKind(ClusterKind):
    """``address``: of Ray's head; by default that of the job or machine that this is. ``workers_per_node``: how many an
    agent has, by default what most nodes have room for; ``cpus_per_worker``, ``gpus_per_worker``: what Ray gives each.
    ``idle_s``: how long an agent is kept without workers. ``port``: where agents come to, 0 for any that is free.
    ``kind``, ``folder``: as of ``SlurmKind`` and ``HostsKind``.
    """

    address: Annotated[str, Field(pattern=r"^[^/\s]+:[0-9]{1,5}$")] | None = None
    workers_per_node: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    cpus_per_worker: Annotated[Amount, Field(gt=0)] = 1.0
    gpus_per_worker: Amount = 0.0
    idle_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60.0
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    kind: HostKind = "on-demand"
    folder: Folder = "auto"

    name = "ray"
    form = "ray[:HOST:PORT,workers_per_node=4,cpus_per_worker=1,gpus_per_worker=1]"
    first = "address"

    @property
    def tells_kinds(self) -> bool:
        return self.kind == SPOT

    def check(self, access: Access) -> None:
        from elastune.cluster.ray.connection import need_ray

        need_ray()

    def open(self, access: Access, room: RoomWanted) -> FleetCluster:
        from elastune.cluster.agents.token import credentials
        from elastune.cluster.fleet import FleetCluster, FleetSize
        from elastune.cluster.ray.connection import join_ray, own_address
        from elastune.cluster.ray.starter import Actors
        from elastune.comm.interfaces import address_of

        leave = join_ray(self.address)
        try:
            each = self._workers_each(room.most)
            address = address_of(access.interface) if access.interface else own_address()
            folder = (room.out / FOLDER).resolve()
            left = self._left(folder, address, access) if room.adopts else None
            with tempfile.TemporaryDirectory() as passing:
                beside = folder if room.grace_s or left is not None else Path(passing)
                own = credentials(access.token_file or beside / "token", tls=access.tls)

            def starter(where: str) -> Actors:
                kept = self._keeping(folder, room, left, where)  # before there is an actor
                return Actors(where, own.token, each, self._shape, leave, kept, self.kind)

            cluster = FleetCluster(
                address, self.port if left is None else left.port, own.token, tls=own.tls,
                starter=starter,
                size=FleetSize(-(-room.most // each), each, idle_s=self.idle_s),
                expected=room.most, grows=room.grows, grace_s=room.grace_s,
                gather_s=access.gather_s if left is not None and room.grows else 0.0, tell=access.tell,
                spot=room.spot, out=room.out, own_folders=own_folders_of(self.folder, room),
            )  # fmt: skip
        except BaseException:
            leave()
            raise
        if left is not None:  # its agents may have no room: their workers are to be taken over first
            return cluster
        access.tell(f"waiting for actors with room for {room.workers} workers, {each} at each")
        return cluster.gathered(room.workers, access.gather_s)

    def _left(self, folder: Path, address: str, access: Access) -> Remembered | None:
        """The controller before this one, whose agents come to this one; those that would not find it are ended."""
        from elastune.cluster.agents.remembered import can_follow, check_gone, remembered
        from elastune.cluster.ray.starter import end_left

        left = remembered(folder)
        if left is None or (left.address == address and self.port in (0, left.port)):
            return left
        check_gone(left)
        if can_follow(left, address, self.port):
            access.tell(f"actors {left.name} are told to come here, to {address} instead of {left.address}")
            return left
        access.tell(f"actors {left.name} look for their controller at {left.address}:{left.port}: they are ended")
        end_left(left.name)
        return None

    def _keeping(self, folder: Path, room: RoomWanted, left: Remembered | None, where: str) -> Keeping | None:
        """By what the next controller finds the actors of this one, which listens at ``where``; None: it is not to."""
        from elastune.cluster.agents.remembered import new_name, remember
        from elastune.cluster.ray.starter import Keeping

        if not room.grace_s and left is None:
            return None
        name = new_name() if left is None else left.name
        if room.grace_s:
            remember(folder, name, where)
        return Keeping(name, folder)

    def examine(self) -> list[ClusterFact]:
        from elastune.cluster.ray.connection import join_ray, need_ray, nodes, own_address, usual_room

        leave = join_ray(self.address)
        try:
            there, address = nodes(), own_address()
        finally:
            leave()
        cpus, gpus = (sum(node.get(name, 0.0) for node in there) for name in ("CPU", "GPU"))
        room = self.workers_per_node or usual_room(there, self._shape)
        return [
            ClusterFact("Ray", str(need_ray().__version__)),
            ClusterFact("nodes", f"{len(there)}, with {cpus:g} CPUs and {gpus:g} GPUs"),
            ClusterFact("workers on a node", str(room) if room else None, NO_ROOM),
            ClusterFact("address for agents", address, "choose it by --interface"),
        ]

    @property
    def _shape(self) -> WorkerShape:
        from elastune.cluster.ray.connection import WorkerShape

        return WorkerShape(self.cpus_per_worker, self.gpus_per_worker)

    def _workers_each(self, most: int) -> int:
        from elastune.cluster.ray.connection import nodes, usual_room

        usual = self.workers_per_node or usual_room(nodes(), self._shape)
        if not usual:
            value = f"no node with {self.cpus_per_worker:g} CPUs and {self.gpus_per_worker:g} GPUs"
            raise UserError("how many workers a Ray node has room for must be known", value, NO_ROOM)
        return min(usual, most)
