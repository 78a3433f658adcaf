"""An agent whose host has not what it says: processes that never run, devices that are not there."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from elastune.core.journal.records import Record, Reported, RunFailed, WorkerGone
from elastune.core.run import Elastic, ExecutionSettings, Program, RunSpec
from elastune.elastic.wire.transport import host_name
from elastune.runtime import elastic_run as starting
from elastune.runtime.agents.agent import Agent, hello_of, join
from elastune.runtime.clusters.fork import ForkLauncher
from elastune.runtime.clusters.hosts import HostsCluster
from elastune.runtime.job.run import JobFailed, run_job
from elastune.runtime.launcher import Bootstrap, Launcher, Needs, ProcessEnded, ProcessEvent, ProcessStarted
from elastune.train.machine import software

TOKEN = "a token of this test"
LIMIT_S = 60.0


class Liar(Launcher):
    """Says of every worker that it runs, and runs none."""

    capacity = free = 2

    def __init__(self) -> None:
        self.ended: list[Bootstrap] = []
        self._events: list[ProcessEvent] = []

    def start(self, workers: Sequence[Bootstrap], needs: Needs) -> None:
        self._events += [ProcessStarted(worker, 1 << 22) for worker in workers]

    def end(self, workers: Sequence[Bootstrap], why: str = "") -> None:
        self.ended += workers
        self._events += [ProcessEnded(worker, -9) for worker in workers]

    def poll(self) -> list[ProcessEvent]:
        events, self._events = self._events, []
        return events

    def fileno(self) -> int | None:
        return None

    def close(self) -> None:
        pass


def agent(cluster: HostsCluster, host: str, launcher: Launcher, logs: Path) -> threading.Thread:
    """Have one come, with room for one worker."""

    def serve() -> None:
        link = join(f"127.0.0.1:{cluster.launcher.port}", TOKEN, hello_of(software(), host, 1), LIMIT_S)
        try:
            Agent(link, launcher, logs).serve()
        finally:
            launcher.close()

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


@pytest.mark.soak
def test_workers_that_never_come_are_lost_and_the_others_train(
    tmp_path: Path, tiny: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    liar, result, lying = Liar(), list[Record](), list[threading.Thread]()

    def observe(record: Record) -> None:
        result.append(record)
        if isinstance(record, Reported) and not lying:  # the first one needs its time
            monkeypatch.setattr(starting, "START_LIMIT_S", 2.0)
            lying.append(agent(cluster, "liar", liar, tmp_path / "liar"))
        if isinstance(record, WorkerGone):
            (tmp_path / "go").touch()

    with HostsCluster("127.0.0.1", 0, TOKEN) as cluster:
        honest = agent(cluster, "honest", ForkLauncher(1), tmp_path / "honest")
        cluster.gather(1, LIMIT_S)
        spec = RunSpec(
            tiny,
            tmp_path / "run",
            config={"epochs": 400, "pause_s": 0.1, "until": str(tmp_path / "go")},
            execution=ExecutionSettings(workers=1, num_slots=4),
            elastic=Elastic(low=1, high=2),
            max_steps=400,
        )
        finished = run_job(spec, cluster=cluster, observe=observe)
    for thread in (honest, *lying):
        thread.join(LIMIT_S)
    assert finished.workers == 1
    why = next(record.why for record in result if isinstance(record, WorkerGone))
    assert "host liar says that worker 1 runs, but it has not come within 2 s" in why
    assert liar.ended


@pytest.mark.soak
def test_a_device_that_a_host_does_not_have_is_told_with_the_host(tmp_path: Path, tiny: Program) -> None:
    with HostsCluster("127.0.0.1", 0, TOKEN) as cluster:
        thread = agent(cluster, "n7", ForkLauncher(1, devices=("cuda:0",)), tmp_path / "n7")
        cluster.gather(1, LIMIT_S)
        with pytest.raises(JobFailed) as failed:
            run_job(
                RunSpec(tiny, tmp_path / "run", execution=ExecutionSettings(workers=1, device="cuda")), cluster=cluster
            )
    thread.join(LIMIT_S)
    assert isinstance(failed.value.failure, RunFailed)
    assert f"cuda:0 of host {host_name()}: " in str(failed.value)
