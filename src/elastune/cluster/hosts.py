"""A cluster of any hosts: it has the workers of the agents that have come to it."""

from __future__ import annotations

import time
from collections.abc import Callable

from elastune.cluster.agents.launcher import AgentLauncher
from elastune.cluster.elastic_cluster import ElasticCluster
from elastune.cluster.elastic_run import ElasticRun
from elastune.cluster.worker import WORK
from elastune.core.errors import UserError
from elastune.core.run import RunSpec
from elastune.train.machine import software

LOOK_S = 0.2


class HostsCluster(ElasticCluster):
    """Agents come to ``address``:``port`` with ``token``, at any time; coordinators of runs listen on ``address`` too.

    A run that may have more workers than it begins with takes those of agents that come later, and of agents that come
    in place of lost ones. ``grows``: false where somebody else gives the workers out.
    ``tell``: is called with one line whenever an agent comes or goes. Raises ``UserError`` where it cannot listen.
    """

    launcher: AgentLauncher

    def __init__(
        self,
        address: str,
        port: int,
        token: str,
        *,
        entry: str = WORK,
        silence_s: float = 30.0,
        grows: bool = True,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        launcher = AgentLauncher(address, port, token, versions=software(), tell=tell)
        super().__init__(launcher, host=address, entry=entry, silence_s=silence_s)
        self._grows = grows

    def start(self, spec: RunSpec) -> ElasticRun:
        run = super().start(spec)
        if self._grows and run.high > spec.means.workers:
            run.resize(run.high, "as many as there is room for")
        return run

    def gather(self, workers: int, limit_s: float) -> int:
        """Wait until there is room for ``workers``; how much there is. Raises ``UserError`` after ``limit_s``."""
        until = time.monotonic() + limit_s
        while self.free < workers:
            if time.monotonic() >= until:
                rule = f"agents with room for {workers} workers must come within {limit_s:g} s"
                raise UserError(rule, f"room for {self.free}", "start them: elastune agent --join ... --token-file ...")
            self.pump(LOOK_S)
        return self.free
