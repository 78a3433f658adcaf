"""Workers as processes of this machine, forked from a warm server and watched until their end."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import Literal

from elastune.cluster.elastic_cluster import ElasticCluster
from elastune.cluster.fork.launcher import ForkLauncher
from elastune.cluster.fork.spawner import PRELOAD
from elastune.cluster.worker import WORK


class LocalCluster(ElasticCluster):
    """Room for ``capacity`` worker processes on this machine.

    The death of the process that made it, however sudden, ends everything that it started. ``devices``: the names that
    workers may be given, or "auto" for what the machine has. ``preload``: modules that the fork server imports once for
    all workers; it begins here, in the background, so a cluster made early is warm when its first run starts.
    """

    def __init__(
        self,
        capacity: int,
        *,
        devices: Sequence[str] | Literal["auto"] = "auto",
        entry: str = WORK,
        preload: Sequence[str] = (*PRELOAD, WORK.partition(":")[0]),
    ) -> None:
        super().__init__(ForkLauncher(capacity, devices=devices, preload=preload), entry=entry)
        atexit.register(self.close)

    def close(self) -> None:
        super().close()
        atexit.unregister(self.close)
