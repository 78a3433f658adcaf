"""Workers as processes of this machine, forked from a warm server and watched until their end."""

from __future__ import annotations

import atexit
import socket
from collections.abc import Sequence
from typing import Literal

from elastune.cluster.elastic_cluster import ElasticCluster
from elastune.cluster.fork.launcher import ForkLauncher
from elastune.cluster.fork.spawner import PRELOAD
from elastune.cluster.worker import WORK
from elastune.core.errors import UserError

WARM = (*PRELOAD, WORK.partition(":")[0])  # what every worker would import
LOOPBACK = "127.0.0.1"
REACH_LIMIT_S = 2.0
SILENCE_S = 120.0


def check_loopback() -> None:
    """Raise ``UserError`` where processes of this machine cannot reach each other: workers would fail one by one."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        try:
            socket.create_connection(listener.getsockname(), REACH_LIMIT_S).close()
        except OSError as error:
            rule = "workers on one machine need its loopback interface"
            raise UserError(rule, f"{LOOPBACK}: {error.strerror or error}", "bring it up: ip link set lo up") from None


class LocalCluster(ElasticCluster):
    """Room for ``capacity`` worker processes on this machine.

    The death of the process that made it, however sudden, ends everything that it started. ``devices``: the names that
    workers may be given, or "auto" for what the machine has. ``preload``: modules that the fork server imports once for
    all workers; it begins here, in the background, so a cluster made early is warm when its first run starts. Raises
    ``UserError`` where this machine cannot reach itself.
    """

    def __init__(
        self,
        capacity: int,
        *,
        devices: Sequence[str] | Literal["auto"] = "auto",
        entry: str = WORK,
        preload: Sequence[str] = WARM,
    ) -> None:
        check_loopback()
        launcher = ForkLauncher(capacity, devices=devices, preload=preload)
        # A worker here ends with its controller in any case; one that hears nothing may wait for the network.
        super().__init__(launcher, entry=entry, silence_s=SILENCE_S)
        atexit.register(self.close)

    def close(self) -> None:
        super().close()
        atexit.unregister(self.close)
