"""Elastic runs over several hosts: a launcher that starts workers on them, and what is done to them there."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.elastic_runs import Ran, Runs
from tests.support.hosts import INTERFACE, Host, Network

from elastune.core.journal.records import Record
from elastune.core.run import Elastic, Program
from elastune.elastic.coordinator.coordinator import Coordinator
from elastune.runtime.clusters.elastic_cluster import ElasticCluster
from elastune.runtime.clusters.fork import PRELOAD, ForkLauncher
from elastune.runtime.elastic_run import ElasticRun
from elastune.runtime.launcher import Bootstrap, Launcher, Needs, ProcessEnded, ProcessEvent, ProcessStarted


@dataclass
class Process:
    """One worker's process on its host. ``code``: its exit code (negative: the signal), once it has ended."""

    host: Host
    pid: int = 0
    code: int | None = None
    log: str = ""

    @property
    def stopped(self) -> bool:
        """Whether SIGSTOP holds it."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        except (FileNotFoundError, ProcessLookupError):  # not started yet, or ended
            return False

    def signal(self, number: int) -> None:
        """Send it a signal, be its host connected or not."""
        os.kill(self.pid, number)


class NamespaceLauncher(Launcher):
    """``each`` workers on every host of ``network``, one host after the other, forked by a server there.

    What is cut off cannot be ended. ``limit``: room for so many workers.
    """

    interface = INTERFACE

    def __init__(
        self, network: Network, each: int = 1, preload: Sequence[str] = (*PRELOAD, "elastune.train.worker")
    ) -> None:
        self.network = network
        self.limit = each * len(network.hosts)
        self.processes: dict[int, Process] = {}
        self._servers = [ForkLauncher(each, preload=preload, prefix=host.command()) for host in network.hosts]
        self._at: dict[Bootstrap, int] = {}

    @property
    def capacity(self) -> int:
        return self.limit

    @property
    def free(self) -> int:
        taken = sum(server.capacity - server.free for server in self._servers)
        return max(0, min(self.limit - taken, len(self._idle())))

    def _idle(self) -> list[int]:
        hosts = enumerate(zip(self.network.hosts, self._servers, strict=True))
        return [at for at, (host, server) in hosts if not host.is_cut for _ in range(server.free)]

    def start(self, workers: Sequence[Bootstrap], needs: Needs) -> None:
        for worker, at in zip(workers, self._idle(), strict=False):
            self._at[worker], self.processes[worker.worker] = at, Process(self.network.hosts[at])
            self._servers[at].start([worker], needs)

    def end(self, workers: Sequence[Bootstrap], why: str = "") -> None:
        for worker in workers:
            if not self.network.hosts[self._at[worker]].is_cut:
                self._servers[self._at[worker]].end([worker], why)

    def poll(self) -> list[ProcessEvent]:
        events = [event for server in self._servers for event in server.poll()]
        for event in events:
            process = self.processes[event.bootstrap.worker]
            match event:
                case ProcessStarted(pid=pid):
                    process.pid = pid
                case ProcessEnded(code=code, log=log):
                    process.code, process.log = code, log
        return events

    def fileno(self) -> int | None:
        return None

    def close(self) -> None:
        for server in self._servers:
            server.close()


@dataclass(frozen=True)
class HostRun:
    """A run that is going on."""

    handle: ElasticRun
    launcher: NamespaceLauncher
    records: list[Record]

    @property
    def network(self) -> Network:
        """Its hosts."""
        return self.launcher.network

    @property
    def processes(self) -> dict[int, Process]:
        """By the number of the worker, those that ended too."""
        return self.launcher.processes

    @property
    def coordinator(self) -> Coordinator:
        """Its coordinator."""
        return self.handle.coordinator

    def kill(self, worker: int) -> None:
        """SIGKILL to a worker."""
        self.handle.kill_worker(worker)


Act = Callable[[HostRun], None]


@dataclass
class HostsRan(Ran):
    """What a run over several hosts came to. ``codes``: how each worker's process ended; ``logs``: what it printed."""

    codes: dict[int, int | None] = field(default_factory=dict)
    logs: dict[int, str] = field(default_factory=dict)


class HostRuns:
    """Starts runs of ``program`` on the hosts of ``launcher``, in folders of their own below ``folder``."""

    def __init__(self, launcher: NamespaceLauncher, folder: Path, program: Program) -> None:
        self._launcher = launcher
        self._folder = folder
        self._program = program

    def __call__(
        self,
        workers: int,
        *,
        act: Act = lambda run: None,
        heartbeat_s: float = 5.0,
        silence_s: float = 30.0,
        hosts: int | None = None,
        high: int = 4,
        **config: Any,
    ) -> HostsRan:
        """Run the program to its end; ``act`` is called again and again.

        ``hosts``: how many may be used at a time (``workers``). ``silence_s``: how long a worker bears to hear nothing.
        """
        launcher = self._launcher
        launcher.limit, launcher.processes = hosts or workers, {}
        cluster = ElasticCluster(launcher, host=launcher.network.address, silence_s=silence_s)
        elastic = Elastic(low=1, high=high, heartbeat_s=heartbeat_s)
        runs = Runs(cluster, self._folder, self._program)
        try:
            ran = runs(
                workers, act=lambda handle, records: act(HostRun(handle, launcher, records)), elastic=elastic, **config
            )
        finally:
            for host in launcher.network.hosts:
                if host.is_cut:
                    host.heal()
            for process in launcher.processes.values():
                if process.stopped:
                    process.signal(signal.SIGCONT)
        codes = {worker: process.code for worker, process in launcher.processes.items()}
        logs = {worker: process.log for worker, process in launcher.processes.items()}
        return HostsRan(ran.outcome, ran.records, codes, logs)
