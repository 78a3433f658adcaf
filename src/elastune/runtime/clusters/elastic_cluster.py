"""A cluster of any launcher, with a coordinator for each run."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from elastune.core.errors import UserError
from elastune.core.run import Place, RunSpec
from elastune.elastic.wire.contact import left_behind
from elastune.elastic.wire.messages import WorkerSpec
from elastune.elastic.wire.transport import HOST
from elastune.parallel.mechanisms.capabilities import settled
from elastune.runtime.clusters.base import Cluster, Handle, NoRoomError, RunFiles, SurvivingRun
from elastune.runtime.elastic_run import AdoptedRun, ElasticRun
from elastune.runtime.launcher import Launcher, ProcessStarted
from elastune.runtime.worker import WORK

OWN_PREFIX = "ELASTUNE_"  # of the variables that a run passes to other machines
LOOK_S = 0.05  # between two polls of a launcher without a descriptor
LAUNCHER_LOOK_S = 1.0  # between two polls of a launcher with a descriptor: it may have work without an event
CLOSE_LIMIT_S = 5.0
NOBODY_S = 10.0  # how long to wait for the first of the workers that may have outlived their controller


class ElasticCluster(Cluster):
    """A cluster whose workers a launcher starts. One thread uses it.

    Args:
        launcher: Starts and ends the workers.
        host: The address on which coordinators listen; loopback if all workers are on this machine.
        files: How a controller reaches the files of workers, if it shares no folder with them.
        entry: The ``module:function`` that a worker runs.
        silence_s: After a silence of its coordinator of this length, a worker ends itself.
    """

    def __init__(
        self,
        launcher: Launcher,
        *,
        host: str = "127.0.0.1",
        files: RunFiles | None = None,
        entry: str = WORK,
        silence_s: float = 30.0,
    ) -> None:
        self.files = files or self.files
        self.launcher = launcher
        self._host = host
        self._entry = entry
        self._silence_s = silence_s
        self._runs: dict[str, ElasticRun] = {}  # by their tokens
        self._next_look = self._looked_at = 0.0
        self._owner = os.getpid()
        self._closed = False

    @property
    def capacity(self) -> int:
        return self.launcher.capacity

    @property
    def free(self) -> int:
        return self.launcher.free

    def start(self, spec: RunSpec) -> ElasticRun:
        if self._closed:
            raise RuntimeError("this cluster was closed")
        self.pump(0.0)
        count = spec.execution.workers
        if not 1 <= count <= self.free:
            rule = f"workers must be from 1 to the {self.free} that are free of {self.capacity} in the cluster"
            raise NoRoomError(rule, count, "ask for fewer, or give the cluster a larger capacity")
        spec = settled(replace(spec, out=spec.out.resolve()))
        run = ElasticRun(self._task(spec), self.launcher, host=self._host, silence_s=self._silence_s, pump=self.pump)
        self._add(run)
        try:
            run.begin()
        except OSError as error:
            run.abandon()
            rule = f"the system must have room for {count} workers"
            raise UserError(rule, error.strerror, "ask for fewer, or raise its limits (ulimit -a)") from error
        except BaseException:
            run.abandon()
            raise
        self._offer_room()
        return run

    def adopt(self, left: Sequence[SurvivingRun]) -> list[Handle | None]:
        awaited = {at: run for at, survivor in enumerate(left) if (run := self._await(survivor)) is not None}
        adopted: list[Handle | None] = [None for _ in left]
        began, met = time.monotonic(), dict[int, float]()
        while awaited:  # all runs are known before an agent names a process: a process of no run would be ended
            now = time.monotonic()
            for at, run in list(awaited.items()):
                if run.some_back:
                    met.setdefault(at, now)
                # If the controller's machine has failed, its workers notice only the silence.
                nobody_s = NOBODY_S + (self._silence_s if run.moved else 0.0)
                until = met[at] + run.spec.elastic.heartbeat_s if at in met else began + nobody_s
                if run.all_back or run.all_ended or now > until:
                    adopted[at] = run if run.take_over(now - began) else None
                    del awaited[at]
            if awaited:
                self.pump(LOOK_S)
        return adopted

    def _await(self, left: SurvivingRun) -> AdoptedRun | None:
        """Listen for the workers of ``left``; None if that is not possible."""
        spec = settled(replace(left.spec, out=left.spec.out.resolve()))
        contact = left_behind(spec.out)
        if contact is None:
            return None
        if not spec.elastic.grace_s:  # its workers keep their records until the controller confirms them
            spec = replace(spec, elastic=replace(spec.elastic, grace_s=contact.grace_s))
        options = {"host": self._host, "silence_s": self._silence_s, "pump": self.pump}
        try:
            run = AdoptedRun(self._task(spec), self.launcher, contact, left.kept, **options)
        except OSError:  # their address is not one of this machine, or another process has it
            return None
        self._add(run, goes_on=True)
        return run

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not any(run.pending for run in self._runs.values()) and (left_s := deadline - time.monotonic()) > 0:
            if self._closed:
                return
            self.pump(left_s)
        for run in self._runs.values():
            run.woken()

    def pump(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for events of processes and coordinators, and pass them to the runs."""
        if self._closed:
            return
        self._process_pending(timeout_s)
        self._runs = {token: run for token, run in self._runs.items() if run.pending or not run.closed}
        self._offer_room()

    def close(self) -> None:
        if self._closed or os.getpid() != self._owner:  # a fork of the controller does not own what it inherited
            return
        self.pump(0.0)
        self._closed = True
        for run in self._runs.values():
            run.kill()
        self.launcher.close()
        deadline = time.monotonic() + CLOSE_LIMIT_S
        while any(not run.closed for run in self._runs.values()) and time.monotonic() < deadline:
            self._process_pending(LOOK_S)
        for run in self._runs.values():
            run.close()

    def _process_pending(self, timeout_s: float) -> None:
        poll, descriptor = select.poll(), self.launcher.fileno()
        pause_s = max(0.0, self._looked_at + self.launcher.pause_s - time.monotonic()) if not self._closed else 0.0
        if pause_s:
            timeout_s = min(timeout_s, pause_s)
        elif descriptor is not None:
            poll.register(descriptor, select.POLLIN)
        open_runs = {run.coordinator.fileno(): run for run in self._runs.values() if not run.closed}
        for number in open_runs:
            poll.register(number, select.POLLIN)
        limit_s = timeout_s if descriptor is not None else min(timeout_s, LOOK_S)
        ready = [number for number, _ in poll.poll(limit_s * 1000)]
        if due := descriptor in ready or descriptor is None or self._closed or time.monotonic() >= self._next_look:
            self._looked_at = time.monotonic()
            self._next_look = self._looked_at + LAUNCHER_LOOK_S
        for event in self.launcher.poll() if due else []:
            if (run := self._runs.get(event.bootstrap.token)) is not None:
                run.process_event(event)
            elif isinstance(event, ProcessStarted):  # it was started for a controller before this one
                self.launcher.end([event.bootstrap], "its run is not known here")
        for number in ready:
            if number in open_runs:
                open_runs[number].process_events()

    def _add(self, run: ElasticRun, *, goes_on: bool = False) -> None:
        """``run`` is one of this cluster's. ``goes_on``: its workers are those of a controller before this one."""
        self._runs[run.coordinator.token] = run

    def _task(self, spec: RunSpec) -> WorkerSpec:
        """What all workers of a run have in common, those too that it will start later."""
        folder = str(Path.cwd())
        paths = [path or folder for path in sys.path]
        if self.launcher.own_environment:
            ours = {name: value for name, value in os.environ.items() if name.startswith(OWN_PREFIX) and name != HOST}
            environment = {**ours, **_threads(spec.execution.threads)}
            paths = [path for path in paths if not path.startswith((sys.prefix, sys.base_prefix))]
            return WorkerSpec(self._entry, spec, Place(), environment, folder, paths, adds=True)
        environment = {**os.environ, **_threads(spec.execution.threads), "GLOO_SOCKET_IFNAME": self.launcher.interface}
        return WorkerSpec(self._entry, spec, Place(), environment, folder, paths)

    def _offer_room(self) -> None:
        """Report to each run the room that the runs before it do not need."""
        free = self.free
        for run in self._runs.values():
            free = run.room(free)


def _threads(count: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count)}
