"""``hosts:PORT``: workers run wherever somebody starts agents that come to this port."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from elastune.cluster.agents.facts import HostReport
from elastune.cluster.agents.run_folder import place
from elastune.cluster.kinds.kind import Access, ClusterKind, Folder, RoomWanted, own_folders_of
from elastune.core.errors import UserError

if TYPE_CHECKING:
    from elastune.cluster.hosts import HostsCluster
    from elastune.cluster.spot_watch import SpotWatch

LOOK_S = 0.2
NOBODYS = "-"  # the text of no file


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class HostsKind(ClusterKind):
    """``port``: where agents come to. ``token_file``, ``interface``, ``tls``: see ``Access``, which has precedence.

    ``folder``: "local" where hosts do not see the run's folder: their agents then push checkpoints to the controller;
    "shared": they have to see it. By default the first that come are asked.
    """

    port: Annotated[int, Field(ge=1, le=65535)]
    token_file: Path | None = None
    interface: str | None = None
    tls: bool = False
    folder: Folder = "auto"

    name = "hosts"
    form = "hosts:PORT[,token_file=FILE,interface=NAME,tls=true,folder=local], such as hosts:7070"
    first = "port"

    @property
    def tells_kinds(self) -> bool:
        return True

    def check(self, access: Access) -> None:
        if access.token_file is None and self.token_file is None:
            raise UserError("a cluster of agents needs a secret", "no --token-file", "--token-file FILE, made if new")

    def open(self, access: Access, room: RoomWanted) -> HostsCluster:
        later_s = access.gather_s if room.adopts and room.grows else 0.0  # who gives workers out waits by himself
        own = own_folders_of(self.folder, room)
        cluster = self.listen(
            access,
            grows=room.grows,
            grace_s=room.grace_s,
            spot=room.spot,
            gather_s=later_s,
            out=room.out,
            own_folders=own,
        )
        if room.adopts:
            return cluster
        access.tell(f"waiting for agents with room for {room.workers} workers: {self.join_command(access)}")
        return cluster.gathered(room.workers, access.gather_s)

    def listen(
        self,
        access: Access,
        *,
        grows: bool = True,
        grace_s: float = 0.0,
        gather_s: float = 0.0,
        spot: SpotWatch | None = None,
        out: Path | None = None,
        own_folders: bool | None = False,
    ) -> HostsCluster:
        """The cluster before any agent has come. ``out``, ``own_folders``: as of ``HostsCluster``. Raises
        ``UserError``."""
        from elastune.cluster.agents.token import credentials
        from elastune.cluster.hosts import HostsCluster

        self.check(access)
        access = self._completed(access)
        assert access.token_file is not None
        address, own = self._address(access), credentials(access.token_file, tls=access.tls)
        return HostsCluster(
            address,
            self.port,
            own.token,
            tls=own.tls,
            grows=grows,
            grace_s=grace_s,
            gather_s=gather_s,
            tell=access.tell,
            spot=spot,
            out=out,
            own_folders=own_folders,
        )

    def inspect(self, access: Access, out: Path | None) -> list[HostReport]:
        cluster = self.listen(access)
        with cluster, _marked(None if self.folder == "local" else out) as (path, text):
            access.tell(f"listening for agents for {access.gather_s:g} s: {self.join_command(access)}")
            until = time.monotonic() + access.gather_s
            while (left_s := until - time.monotonic()) > 0:
                cluster.pump(min(left_s, LOOK_S))
                cluster.launcher.probe(path, text)
            return cluster.launcher.reports

    def join_command(self, access: Access) -> str:
        """What is to be run on each host."""
        access = self._completed(access)
        address = self._address(access)
        where = f"[{address}]" if ":" in address else address
        return f"elastune agent --join {where}:{self.port} --token-file {access.token_file}"

    def _completed(self, access: Access) -> Access:
        token_file, interface = access.token_file or self.token_file, access.interface or self.interface
        return replace(access, token_file=token_file, interface=interface, tls=access.tls or self.tls)

    def _address(self, access: Access) -> str:
        from elastune.comm.interfaces import address_of

        return "127.0.0.1" if access.interface is None else address_of(access.interface)


@contextmanager
def _marked(folder: Path | None) -> Iterator[tuple[str, str]]:
    """A file in ``folder``, while the block lasts, and the text that nobody else would write into it; "" without."""
    if folder is None:
        yield "", NOBODYS
        return
    mark = place(folder)
    try:
        yield str(mark.path), mark.text
    finally:
        mark.remove()
