"""``local``: workers are processes of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastune.cluster.kinds.kind import Access, ClusterKind, RoomWanted
from elastune.core.errors import UserError

if TYPE_CHECKING:
    from elastune.cluster.detached import DetachedCluster


@dataclass(frozen=True)
class LocalKind(ClusterKind):
    """No settings: each job has as many processes as it needs; they end with their controller, or after a grace."""

    name = "local"
    form = "local"
    here = True

    def check(self, access: Access) -> None:
        asked = {"--token-file": access.token_file, "--interface": access.interface, "--tls": access.tls}
        for option in (name for name, value in asked.items() if value):
            raise UserError(f"{option} belongs to a cluster of agents", "--cluster local", "leave it out")

    def open(self, access: Access, room: RoomWanted) -> DetachedCluster | None:
        if not (room.grace_s or room.adopts):
            return None
        from elastune.cluster.detached import DetachedCluster

        cluster = DetachedCluster(room.most, room.out, room.grace_s, lambda line: None, fills=not room.grows)
        if not (room.grows or room.adopts):
            try:
                cluster.fill()
            except BaseException:
                cluster.close()
                raise
        return cluster
