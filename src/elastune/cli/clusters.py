"""Where workers run, as the command line says it."""

from __future__ import annotations

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

    def request(self) -> ClusterRequest:
        """What is asked for; nothing is opened yet. Raises ``UserError`` for what contradicts itself."""
        from elastune.cluster.kinds.kind import Access, ClusterRequest
        from elastune.cluster.kinds.registry import parse_cluster

        kind = parse_cluster(self.cluster)
        gather_s = parse.duration(self.gather, "--gather")
        access = Access(self.token_file, self.interface, gather_s, tell=print_error, tls=self.tls)
        kind.check(access)
        return ClusterRequest(kind, access)
