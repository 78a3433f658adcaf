"""The local launcher and the smallest one that can be written keep the same contract."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from elastune.core.errors import UserError
from elastune.core.journal.records import Reported
from elastune.core.run import Elastic, Place, Program, RunSpec
from elastune.elastic.coordinator.controller_interface import RecordSent
from elastune.elastic.coordinator.machine import Start
from elastune.elastic.wire.messages import WorkerSpec
from elastune.runtime.clusters.base import Message
from elastune.runtime.clusters.elastic_cluster import ElasticCluster
from elastune.runtime.clusters.fork import ForkLauncher
from elastune.runtime.elastic_run import ElasticRun
from elastune.runtime.launcher import (
    VARIABLE,
    Bootstrap,
    Launcher,
    Needs,
    ProcessEnded,
    ProcessEvent,
    ProcessStarted,
    bootstrap_of,
)
from elastune.testing.kits.cluster import ClusterKit
from elastune.testing.kits.launcher import LauncherKit

pytestmark = pytest.mark.usefixtures("processes")


class ToyLauncher(Launcher):
    """Starts each worker as a program of its own. A launcher for Slurm or Ray needs no more than this."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._running: dict[Bootstrap, tuple[subprocess.Popen[bytes], Path]] = {}
        self._events: list[ProcessEvent] = []

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def free(self) -> int:
        return self._capacity - len(self._running)

    def start(self, workers: Sequence[Bootstrap], needs: Needs) -> None:
        if len(workers) > self.free:
            raise UserError("workers must find room", len(workers), "ask for fewer")
        needs.logs.mkdir(parents=True, exist_ok=True)
        for worker in workers:
            log = needs.logs / f"worker-{worker.worker}.log"
            command = [sys.executable, "-m", "elastune.runtime.worker"]
            environment = {**os.environ, VARIABLE: worker.to_json(), "PYTHONPATH": os.pathsep.join(sys.path)}
            with log.open("wb") as file:
                process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
                )
            self._running[worker] = process, log
            self._events.append(ProcessStarted(worker, process.pid))

    def end(self, workers: Sequence[Bootstrap], why: str = "") -> None:
        for worker in workers:
            if worker in self._running:
                self._running[worker][0].kill()

    def poll(self) -> list[ProcessEvent]:
        for worker, (process, log) in list(self._running.items()):
            if process.poll() is not None:
                del self._running[worker]
                self._events.append(ProcessEnded(worker, process.returncode, log.read_text().strip()))
        events, self._events = self._events, []
        return events

    def fileno(self) -> int | None:
        return None

    def close(self) -> None:
        self.end(list(self._running))
        for process, _ in self._running.values():
            process.wait()


class TestForks(LauncherKit):
    def make(self, capacity: int) -> Launcher:
        return ForkLauncher(capacity, preload=())


class TestToy(LauncherKit):
    def make(self, capacity: int) -> Launcher:
        return ToyLauncher(capacity)


class TestClusterOfToys(ClusterKit):
    def make(self, entry: str) -> ElasticCluster:
        return ElasticCluster(ToyLauncher(3), entry=entry)


def test_room_is_told_again_after_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator counts what it starts off what it was told: as much again is news to it."""
    spec = RunSpec(Program(tmp_path / "none.py"), tmp_path, elastic=Elastic(high=3))
    run = ElasticRun(WorkerSpec("none:none", spec, Place(), {}, str(tmp_path), []), launcher := ToyLauncher(3))
    results: list[int] = []
    monkeypatch.setattr(run.coordinator, "capacity", results.append)
    monkeypatch.setattr(launcher, "start", lambda workers, needs: None)
    run.room(2)
    run.room(2)
    assert results == [2]
    monkeypatch.setattr(run.coordinator, "take", lambda: [Start((0,))])
    run.process_events()
    run.room(2)
    assert results == [2, 2]
    run.close()


def test_what_every_member_tells_is_handed_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, said = RunSpec(Program(tmp_path / "none.py"), tmp_path), Reported(1, 1, 1, 1.0, {"loss": 1.0})
    run = ElasticRun(WorkerSpec("none:none", spec, Place(), {}, str(tmp_path), []), ToyLauncher(3))
    monkeypatch.setattr(run.coordinator, "take", lambda: [RecordSent(0, said, 1), RecordSent(1, said, 1)])
    assert run.poll() == [Message(0, said)]
    assert run.poll() == []
    run.close()


def test_a_bootstrap_survives_the_environment_and_hides_its_token() -> None:
    own = Bootstrap(3, "10.0.0.1:4000", "secret", "cuda:1")
    assert bootstrap_of({VARIABLE: own.to_json()}) == own
    assert "secret" not in repr(own)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"worker": "3", "coordinator": "a:1", "token": "x"}'])
def test_a_bootstrap_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="bootstrap"):
        bootstrap_of({VARIABLE: text})
