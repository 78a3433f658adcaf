"""By which of this machine's addresses a cluster's nodes reach it."""

from __future__ import annotations

import socket

from elastune.cluster.agents.fleet import NotStarted
from elastune.cluster.slurm.commands import ask
from elastune.core.errors import UserError

ANY_PORT = 9  # nothing is sent there


def address_towards(host: str) -> str:
    """This machine's own address on its way to ``host``. Raises ``OSError``."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as way:
        way.connect(address)
        return str(way.getsockname()[0])


def address_towards_nodes(partition: str | None) -> str:
    """This machine's address by which nodes reach it, as the way to the first of them shows. Raises ``UserError``."""
    chosen = [] if partition is None else [f"--partition={partition}"]
    try:
        nodes = ask("sinfo", "--noheader", "--Node", "--format=%o", *chosen).split()
        if not nodes:
            rule = "--cluster slurm needs a partition with nodes"
            raise UserError(rule, partition or "none is the default", "choose one that sinfo lists")
        return address_towards(nodes[0])
    except NotStarted as error:
        raise UserError("Slurm must answer", error, "see sinfo, and SLURM_CONF") from None
    except OSError as error:
        raise UserError("a way to the nodes must be known", error.strerror, "choose it by --interface") from None
