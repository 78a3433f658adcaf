"""Where workers run, as the command line says it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastune.cli import parse
from elastune.cli.output import print_error

if TYPE_CHECKING:
    from elastune.cluster.kinds.kind import ClusterRequest

LOCAL = "local"
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the secret that the controller and its agents share. It is made where there is none.",
        metavar="FILE",
    ),
]
Interface = Annotated[
    str | None,
    typer.Option(
        help="Network interface for agents and workers, such as eth0. [default: loopback for a controller of "
        "--cluster hosts, else the one that leads to the other machines]"
    ),
]


@dataclass(frozen=True)
class ClusterOptions:
    """Where workers run."""

    cluster: Annotated[
        str,
        typer.Option(
            metavar="KIND[:SETTING,...]",
            help="Where workers run: local (this machine), hosts:PORT (agents that you start on other machines), "
            "slurm or ray. See docs/clusters.md.",
        ),
    ] = LOCAL
    token_file: TokenFile = None
    interface: Interface = None
    tls: Annotated[
        bool,
        typer.Option("--tls", help="Encrypt connections with TLS. The token file names the certificate."),
    ] = False
    gather: Annotated[
        str, typer.Option(metavar="TIME", help="How long to wait until agents have room for the first workers.")
    ] = "10m"

    @property
    def local(self) -> bool:
        """Whether workers run on this machine."""
        return self.cluster == LOCAL

    @property
    def words(self) -> str:
        """The options again, for a command that runs on the same cluster; "" for this machine.

        Raises ``UserError`` for what names no cluster.
        """
        if self.local:
            return ""
        from elastune.cluster.kinds.hosts import HostsKind
        from elastune.cluster.kinds.kind import Access
        from elastune.cluster.kinds.registry import parse_cluster

        kind = parse_cluster(self.cluster)
        if isinstance(kind, HostsKind):  # the others look for what may be on the login node alone
            kind.check(Access(self.token_file))
        found = ["--cluster", self.cluster]
        found += [] if self.token_file is None else ["--token-file", str(self.token_file)]
        found += [] if self.interface is None else ["--interface", self.interface]
        found += ["--tls"] if self.tls else []
        found += [] if self.gather == type(self).gather else ["--gather", self.gather]
        return shlex.join(found)

    def request(self) -> ClusterRequest:
        """What is asked for; nothing is opened yet. Raises ``UserError`` for what contradicts itself."""
        from elastune.cluster.kinds.kind import Access, ClusterRequest
        from elastune.cluster.kinds.registry import parse_cluster

        kind = parse_cluster(self.cluster)
        gather_s = parse.duration(self.gather, "--gather")
        access = Access(self.token_file, self.interface, gather_s, tell=print_error, tls=self.tls)
        kind.check(access)
        return ClusterRequest(kind, access)
