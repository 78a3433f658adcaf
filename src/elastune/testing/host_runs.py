"""Elastic runs over several hosts, by a launcher that knows no more than any other must.

It gives each worker an order (what to run, its number, the coordinator's address, the run's token), starts those that
the coordinator asks for, ends those that it can still reach, and tells how processes end.
"""

from __future__ import annotations

import itertools
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastune.cluster.spawner import Forked, Spawner
from elastune.cluster.wire import WorkerSpec, encode_order
from elastune.core.run import Elastic, Means, Place, Program, RunSpec
from elastune.elastic.coordinator.coordinator import Coordinator
from elastune.elastic.protocol.instructions import End, GiveUp, Start
from elastune.journal.reader import read
from elastune.journal.records import Record, RunFailed, RunFinished, WorkerGone
from elastune.journal.writer import JournalWriter
from elastune.testing.elastic_runs import Ran
from elastune.testing.hosts import INTERFACE, Host, Network, enter
from elastune.train.work import work

LIMIT_S = 150.0
LOOK_S = 0.02
SPACE, JOURNAL = "ELASTUNE_TEST_SPACE", "ELASTUNE_TEST_JOURNAL"  # in a worker's environment
_KEYS = itertools.count(1)  # at the fork server


@dataclass
class Process:
    """One worker's process on its host. ``code``: its exit code (negative: the signal), once it has ended."""

    host: Host
    connection: socket.socket
    pid: int = 0
    code: int | None = None

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


@dataclass
class HostRun:
    """A run that is going on. ``processes``: by the number of the worker, those that ended too."""

    spec: RunSpec
    network: Network
    spawner: Spawner
    coordinator: Coordinator
    hosts: int
    processes: dict[int, Process] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    failure: RunFailed | None = None
    _by_key: dict[int, int] = field(default_factory=dict)
    _told_free: int = 0

    def launch(self, worker: int) -> None:
        """Start ``worker`` on a host that has none."""
        host = self._free_hosts()[0]
        place = Place(worker, coordinator=self.coordinator.address, token=self.coordinator.token)
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
        environment |= {SPACE: host.space.path, JOURNAL: str(self.journal(worker))}
        entry = f"{__name__}:on_host"
        order = encode_order(WorkerSpec(entry, self.spec, place, environment, str(Path.cwd()), sys.path))
        ours, theirs = socket.socketpair()
        key = next(_KEYS)
        self.processes[worker], self._by_key[key] = Process(host, ours), worker
        with theirs, self.log(worker).open("wb") as log:
            self.spawner.fork(key, theirs.fileno(), log.fileno())
        ours.sendall(order)

    def journal(self, worker: int) -> Path:
        """Where ``worker`` writes its records."""
        return self.spec.out / f"worker-{worker}.jsonl"

    def log(self, worker: int) -> Path:
        """Where ``worker`` prints."""
        return self.spec.out / f"worker-{worker}.log"

    def look(self, timeout_s: float = LOOK_S) -> None:
        """Wait for news, and do what it asks for."""
        sources: list[Any] = [self.coordinator, self.spawner]
        select.select(sources, [], [], timeout_s)
        while (news := self.spawner.receive()) is not None:
            worker = self._by_key.get(news.key)
            if worker is None:  # of a run before this one
                continue
            process = self.processes[worker]
            if isinstance(news, Forked):
                process.pid = news.pid
            else:
                process.code = news.code
                process.connection.close()
                self.coordinator.lost(worker, f"it ended with {news.code} {news.why}")
        self._heed()
        running = sum(process.code is None for process in self.processes.values())
        free = max(0, min(self.hosts - running, len(self._free_hosts())))
        if free != self._told_free:
            self._told_free = free
            self.coordinator.capacity(free)

    def _free_hosts(self) -> list[Host]:
        busy = [process.host for process in self.processes.values() if process.code is None]
        return [host for host in self.network.hosts if host not in busy and not host.is_cut]

    def _heed(self) -> None:
        self.records += self.coordinator.take_records()
        for instruction in self.coordinator.take():
            if isinstance(instruction, End) and instruction.lost:
                self.records.append(WorkerGone(instruction.worker, "lost", instruction.why))
            match instruction:
                case Start(workers=workers):
                    for worker in workers:
                        self.launch(worker)
                case End(worker=worker) if not self.processes[worker].host.is_cut:
                    self.kill(worker)
                case GiveUp(why=why):
                    self.failure = RunFailed("worker_lost", why, 0)
                    self.kill_all()

    def kill(self, worker: int) -> None:
        """SIGKILL to a worker."""
        self.spawner.kill([key for key, number in self._by_key.items() if number == worker])

    def kill_all(self) -> None:
        """SIGKILL to all workers."""
        self.spawner.kill(list(self._by_key))

    @property
    def ended(self) -> bool:
        """Whether no process is left."""
        return all(process.code is not None for process in self.processes.values())


Act = Callable[[HostRun], None]


@dataclass
class HostsRan(Ran):
    """What a run over several hosts came to. ``codes``: how each worker's process ended; ``logs``: what it printed."""

    codes: dict[int, int | None] = field(default_factory=dict)
    logs: dict[int, str] = field(default_factory=dict)


class HostRuns:
    """Starts runs of ``program`` on the hosts of ``network``, one worker a host, in folders of their own."""

    def __init__(self, network: Network, spawner: Spawner, folder: Path, program: Program) -> None:
        self._network = network
        self._spawner = spawner
        self._folder = folder
        self._program = program
        self._count = itertools.count()

    def __call__(
        self,
        workers: int,
        *,
        act: Act = lambda run: None,
        heartbeat_s: float = 5.0,
        silence_s: float = 30.0,
        hosts: int | None = None,
        **config: Any,
    ) -> HostsRan:
        """Run the program to its end; ``act`` is called again and again.

        ``hosts``: how many may be used at a time (``workers``). ``silence_s``: how long a worker bears to hear nothing.
        """
        out = self._folder / str(next(self._count))
        out.mkdir(parents=True)
        elastic = Elastic(low=1, high=4, heartbeat_s=heartbeat_s)
        spec = RunSpec(self._program, out, config, seed=3, means=Means(workers=workers), elastic=elastic)
        coordinator = Coordinator(
            range(workers), low=1, high=4, heartbeat_s=heartbeat_s, silence_s=silence_s, host=self._network.address
        )
        run = HostRun(spec, self._network, self._spawner, coordinator, hosts or workers)
        deadline = time.monotonic() + LIMIT_S
        try:
            for worker in range(workers):
                run.launch(worker)
            while not run.ended:
                assert time.monotonic() < deadline, f"no end within {LIMIT_S:g} s: {_told(run)}"
                run.look()
                act(run)
        finally:
            _clear_away(run)
        return _ran(run)


def on_host(spec: RunSpec, place: Place, send: Callable[[Record], None], stop_requested: Callable[[], bool]) -> int:
    """A worker's entry point: go to its host, and work there."""
    enter(os.environ[SPACE])
    with JournalWriter(Path(os.environ[JOURNAL])) as journal:

        def keep(record: Record) -> None:
            journal.write(record)

        return work(spec, place, keep, stop_requested)


def _ran(run: HostRun) -> HostsRan:
    records = list(run.records)
    for worker in sorted(run.processes):
        if run.journal(worker).exists():
            records += [entry.record for entry in read(run.journal(worker))]
    ends = [record for record in records if isinstance(record, (RunFailed, RunFinished))]
    assert run.failure is not None or ends, _told(run)
    outcome = run.failure or next((end for end in ends if isinstance(end, RunFailed)), ends[0])
    assert len({end.sha256 for end in ends if isinstance(end, RunFinished)}) <= 1, "members came to different ends"
    codes = {worker: process.code for worker, process in run.processes.items()}
    return HostsRan(outcome, records, codes, {worker: run.log(worker).read_text() for worker in codes})


def _told(run: HostRun) -> str:
    logs = [f"worker {worker}: {run.log(worker).read_text()[-500:]}" for worker in run.processes]
    return "\n".join([*map(str, run.records[-12:]), *logs])


def _clear_away(run: HostRun) -> None:
    run.kill_all()
    deadline = time.monotonic() + 20
    while not run.ended and time.monotonic() < deadline:
        run.look()
    run.coordinator.close()
    for host in run.network.hosts:
        if host.is_cut:
            host.heal()
    for process in run.processes.values():
        process.connection.close()
        if process.stopped:
            process.signal(signal.SIGCONT)
