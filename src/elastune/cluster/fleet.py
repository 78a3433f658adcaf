"""A cluster that has its agents started as its runs need them, and lets idle ones go."""

from __future__ import annotations

import math
import os
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastune.cluster.agents.fleet import AgentSeen, Fleet, NotStarted, Starter
from elastune.cluster.base import Handle, LeftRun
from elastune.cluster.elastic_run import ElasticRun
from elastune.cluster.hosts import LOOK_S, HostsCluster
from elastune.cluster.spot_watch import SpotWatch
from elastune.core.errors import UserError
from elastune.core.run import RunSpec

STEER_S = 0.5


@dataclass(frozen=True)
class FleetSize:
    """How many agents there may be. ``workers_each``: room at each, None: as many as a host has, all hosts are used;
    ``least`` are kept whatever is needed; ``idle_s``: how long the others stay without workers."""

    most: int
    workers_each: int | None = None
    least: int = 0
    idle_s: float = 60.0

    def agents(self, workers: int) -> int:
        """How many it takes for ``workers``."""
        if self.workers_each is None:
            return self.most
        return max(self.least, min(self.most, math.ceil(workers / self.workers_each)))


class FleetCluster(HostsCluster):
    """As ``HostsCluster``, with agents that ``starter`` starts; it is told this cluster's address ("host:port").

    ``expected``: how many workers there is to be room for until a run begins, or always, where somebody else gives
    the workers out (not ``grows``); a run's own target counts from then on. ``grace_s``, ``gather_s``, ``out``,
    ``spot``, ``own_folders``: as there. Raises ``UserError`` where nothing can be started.
    """

    def __init__(
        self,
        address: str,
        port: int,
        token: str,
        *,
        starter: Callable[[str], Starter],
        size: FleetSize,
        expected: int,
        tls: ssl.SSLContext | None = None,
        grows: bool = True,
        grace_s: float = 0.0,
        gather_s: float = 0.0,
        tell: Callable[[str], None] = lambda line: None,
        spot: SpotWatch | None = None,
        out: Path | None = None,
        own_folders: bool | None = False,
    ) -> None:
        super().__init__(
            address, port, token, tls=tls, grows=grows, grace_s=grace_s, gather_s=gather_s, tell=tell,
            spot=spot, out=out, own_folders=own_folders,
        )  # fmt: skip
        self._size, self._expected = size, expected
        self._idle_since: dict[str, float] = {}
        self._next_steer = 0.0
        where = f"[{address}]" if ":" in address else address
        try:
            starts = starter(f"{where}:{self.launcher.port}")
        except BaseException:
            super().close()
            raise
        self._fleet = Fleet(starts, size.idle_s)
        try:
            self._fleet.begin(size.agents(expected))
        except BaseException as error:
            self.close()
            if isinstance(error, NotStarted):
                raise UserError("agents must be started", error, "see elastune doctor") from None
            raise

    def start(self, spec: RunSpec) -> ElasticRun:
        run = super().start(spec)
        if self._grows:
            self._expected = 0
        return run

    def adopt(self, left: Sequence[LeftRun]) -> list[Handle | None]:
        found = super().adopt(left)
        if self._grows and any(run is not None for run in found):
            self._expected = 0
        return found

    @property
    def wanted(self) -> int:
        """How many workers there is use for."""
        return max(
            self._expected, sum(run.coordinator.membership.target for run in self._runs.values() if not run.over)
        )

    def pump(self, timeout_s: float) -> None:
        super().pump(timeout_s)
        now = time.monotonic()
        if self._closed or now < self._next_steer:
            return
        self._next_steer = now + STEER_S
        agents = {agent.label or f"#{number}": (number, agent) for number, agent in self.launcher.agents.items()}
        if self._spot is not None:  # those that came by themselves may be on-demand ones, which replace none
            agents = {label: (number, agent) for label, (number, agent) in agents.items() if agent.label}
        idle = {label for label, (_, agent) in agents.items() if not (agent.workers or agent.unnamed)}
        self._idle_since = {label: self._idle_since.get(label, now) for label in idle}
        seen = {
            label: AgentSeen(now - self._idle_since.get(label, now), agent.notice is not None)
            for label, (_, agent) in agents.items()
        }
        for label in self._fleet.steer(self._size.agents(self.wanted), seen):
            self.launcher.dismiss(agents[label][0])
        for line in self._fleet.news():
            self._tell(line)

    def gather(self, workers: int, limit_s: float, ends: Callable[[], bool] = lambda: False) -> int:
        until = time.monotonic() + limit_s
        while self.free < workers and not ends():
            waits = self._fleet.waits()
            if time.monotonic() >= until:
                rule = f"agents with room for {workers} workers must come within {limit_s:g} s"
                fix = "wait longer with --gather, or ask for less"
                raise UserError(rule, f"room for {self.free}" + (f", {waits}" if waits else ""), fix)
            if (never := self._fleet.never()) is not None:
                raise UserError("what starts agents must be able to begin", never.value, never.fix)
            if self._fleet.given_up:
                raise UserError("agents must come from what was started", f"room for {self.free}", "see what it said")
            self.pump(LOOK_S)
        return self.free

    def close(self) -> None:
        if self._closed or os.getpid() != self._owner:
            return
        self._fleet.stop()
        super().close()
        try:
            self._fleet.close()
        except NotStarted as error:
            self._tell(f"something may be left of what was started: {error}")
