"""Where workers run, as the command line says it: this machine, or agents on any hosts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastune.cli import parse
from elastune.cli.output import print_error
from elastune.core.errors import UserError

if TYPE_CHECKING:
    from elastune.cluster.hosts import HostsCluster

LOCAL = "local"
TokenFile = Annotated[
    Path | None,
    typer.Option(help="File with the secret that agents show; a new one is made where there is none.", metavar="FILE"),
]
Interface = Annotated[
    str | None, typer.Option(help="Network interface that workers and agents use. [default: the loopback interface]")
]


@dataclass(frozen=True)
class ClusterName:
    """What ``--cluster`` names. ``port``: where agents come to; None: workers run on this machine."""

    port: int | None = None


def parse_cluster(text: str) -> ClusterName:
    """``local`` or ``hosts:PORT``. Raises ``UserError``."""
    kind, _, port = text.partition(":")
    if text == LOCAL:
        return ClusterName()
    if kind == "hosts" and port.isascii() and port.isdigit() and 0 < int(port) <= 65535:
        return ClusterName(int(port))
    raise UserError("--cluster must be local or hosts:PORT", text, "such as hosts:7070")


@dataclass(frozen=True)
class ClusterOptions:
    """Where workers run."""

    cluster: Annotated[
        str, typer.Option(metavar="local|hosts:PORT", help="Where workers run; hosts: wherever agents are started.")
    ] = LOCAL
    token_file: TokenFile = None
    interface: Interface = None
    gather: Annotated[
        str, typer.Option(metavar="TIME", help="How long to wait for agents with room for the first workers.")
    ] = "10m"

    def place(self) -> ClusterName:
        """What is asked for. Raises ``UserError`` for what contradicts itself."""
        place = parse_cluster(self.cluster)
        if place.port is None and (self.token_file or self.interface):
            option = "--token-file" if self.token_file else "--interface"
            raise UserError(f"{option} belongs to a cluster of agents", f"--cluster {self.cluster}", "leave it out")
        if place.port is not None and self.token_file is None:
            raise UserError("a cluster of agents needs a secret", "no --token-file", "--token-file FILE, made if new")
        return place

    def hosts(self, low: int) -> HostsCluster | None:
        """The cluster once it has room for ``low`` workers; None where workers run on this machine."""
        place = self.place()
        if place.port is None or self.token_file is None:
            return None
        from elastune.cluster.agents.interface import address_of
        from elastune.cluster.agents.token import make_token, read_token
        from elastune.cluster.hosts import HostsCluster

        limit_s = parse.duration(self.gather, "--gather")
        address = "127.0.0.1" if self.interface is None else address_of(self.interface)
        exists = self.token_file.exists()
        token = read_token(self.token_file) if exists else make_token(self.token_file)
        cluster = HostsCluster(address, place.port, token, tell=print_error)
        try:
            where = f"[{address}]" if ":" in address else address
            join = f"elastune agent --join {where}:{place.port} --token-file {self.token_file}"
            print_error(f"waiting for agents with room for {low} workers: {join}")
            cluster.gather(low, limit_s)
        except BaseException:
            cluster.close()
            raise
        return cluster
