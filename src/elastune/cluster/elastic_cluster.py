"""A cluster made of any launcher and a coordinator for each run."""

from __future__ import annotations

import os
import select
import sys
import time
from dataclasses import replace
from pathlib import Path

from elastune.cluster.base import Cluster
from elastune.cluster.elastic_run import ElasticRun
from elastune.cluster.launcher import Launcher
from elastune.cluster.run_files import RunFiles
from elastune.cluster.worker import HOST, WORK
from elastune.core.errors import UserError
from elastune.core.run import Place, RunSpec
from elastune.elastic.protocol.worker_spec import WorkerSpec
from elastune.mechanisms.registry import settled

OWN_PREFIX = "ELASTUNE_"  # of the variables that a run takes along to other machines
LOOK_S = 0.05  # between looks at a launcher that has no descriptor
LAUNCHER_LOOK_S = 1.0  # between looks at one that has: it may have more to do than to tell
CLOSE_LIMIT_S = 5.0


class ElasticCluster(Cluster):
    """Runs whose workers ``launcher`` starts. One thread uses it.

    ``host``: the address on which coordinators listen, and by which workers reach them; loopback where they are on this
    machine. ``files``: how a controller reaches what workers have written, where it shares no folder with them.
    ``entry``: the ``module:function`` that a worker runs. ``silence_s``: how long a worker bears to hear nothing from
    its coordinator before it ends itself.
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
        self._next_look = 0.0
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
        count = spec.means.workers
        if not 1 <= count <= self.free:
            rule = f"workers must be from 1 to the {self.free} that are free of {self.capacity} in the cluster"
            raise UserError(rule, count, "ask for fewer, or give the cluster a larger capacity")
        spec = settled(replace(spec, out=spec.out.resolve()))
        run = ElasticRun(self._task(spec), self.launcher, host=self._host, silence_s=self._silence_s, pump=self.pump)
        self._runs[run.coordinator.token] = run
        try:
            run.begin()
        except OSError as error:
            run.abandon()
            rule = f"the system must have room for {count} workers"
            raise UserError(rule, error.strerror, "ask for fewer, or raise its limits (ulimit -a)") from error
        except BaseException:
            run.abandon()
            raise
        self._tell_room()
        return run

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not any(run.pending for run in self._runs.values()) and (left_s := deadline - time.monotonic()) > 0:
            if self._closed:
                return
            self.pump(left_s)

    def pump(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for news of processes and from coordinators; what they are goes to the runs."""
        if self._closed:
            return
        self._hear(timeout_s)
        self._runs = {token: run for token, run in self._runs.items() if run.pending or not run.closed}
        self._tell_room()

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
            self._hear(LOOK_S)
        for run in self._runs.values():
            run.close()

    def _hear(self, timeout_s: float) -> None:
        poll, descriptor = select.poll(), self.launcher.fileno()
        if descriptor is not None:
            poll.register(descriptor, select.POLLIN)
        open_runs = {run.coordinator.fileno(): run for run in self._runs.values() if not run.closed}
        for number in open_runs:
            poll.register(number, select.POLLIN)
        limit_s = timeout_s if descriptor is not None else min(timeout_s, LOOK_S)
        ready = [number for number, _ in poll.poll(limit_s * 1000)]
        if due := descriptor in ready or descriptor is None or self._closed or time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LAUNCHER_LOOK_S
        for event in self.launcher.poll() if due else []:
            if (run := self._runs.get(event.bootstrap.token)) is not None:
                run.hear(event)
        for number in ready:
            if number in open_runs:
                open_runs[number].heed()

    def _task(self, spec: RunSpec) -> WorkerSpec:
        """What all workers of a run have in common, those too that it will start later."""
        here = str(Path.cwd())
        paths = [path or here for path in sys.path]
        if self.launcher.own_environment:
            ours = {name: value for name, value in os.environ.items() if name.startswith(OWN_PREFIX) and name != HOST}
            environment = {**ours, **_threads(spec.means.threads)}
            paths = [path for path in paths if not path.startswith((sys.prefix, sys.base_prefix))]
            return WorkerSpec(self._entry, spec, Place(), environment, here, paths, adds=True)
        environment = {**os.environ, **_threads(spec.means.threads), "GLOO_SOCKET_IFNAME": self.launcher.interface}
        return WorkerSpec(self._entry, spec, Place(), environment, here, paths)

    def _tell_room(self) -> None:
        for run in self._runs.values():
            run.room(self.free)


def _threads(count: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count)}
