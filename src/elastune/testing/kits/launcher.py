"""Tests that every launcher must pass, for inheritance.

class TestMine(LauncherKit):
    def make(self, capacity: int) -> Launcher: ...

Workers are started for a coordinator that this process runs, so the kit sees them connect, report and end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastune.core.errors import UserError
from elastune.core.journal.records import Reported
from elastune.core.run import Config, Place, Program, RunSpec
from elastune.elastic.coordinator.controller_interface import (
    ListenOptions,
    RecordSent,
    Timeouts,
    WorkerBounds,
    WorkerDisconnected,
    WorkerLookups,
)
from elastune.elastic.coordinator.coordinator import Coordinator
from elastune.elastic.wire.messages import WorkerSpec
from elastune.runtime.launcher import Bootstrap, Launcher, Needs, ProcessEnded, ProcessEvent, ProcessStarted
from elastune.testing.kits.cluster import WORKERS

LIMIT_S = 60.0


class Scene:
    """A launcher, a coordinator of workers 0, 1, 2, and the events of both."""

    def __init__(self, launcher: Launcher, coordinator: Coordinator, logs: Path) -> None:
        self.launcher = launcher
        self.coordinator = coordinator
        self.needs = Needs("cpu", logs)
        self.workers = [Bootstrap(n, coordinator.address, coordinator.token) for n in range(3)]
        self.news: list[ProcessEvent] = []
        self.received: list[object] = []

    def until(self, true: Callable[[], bool]) -> None:
        """Poll both until ``true()``."""
        deadline = time.monotonic() + LIMIT_S
        while not true():
            assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s; so far {self.news}, {self.received}"
            self.news += self.launcher.poll()
            self.received += self.coordinator.take()
            time.sleep(0.005)

    def ends(self) -> dict[int, ProcessEnded]:
        """By worker."""
        return {event.bootstrap.worker: event for event in self.news if isinstance(event, ProcessEnded)}

    def pids(self) -> dict[int, int]:
        """By worker."""
        return {event.bootstrap.worker: event.pid for event in self.news if isinstance(event, ProcessStarted)}

    def reports(self) -> list[tuple[int, int]]:
        """Worker and step of each report, in order."""
        records = [sent for sent in self.received if isinstance(sent, RecordSent)]
        return [(sent.worker, sent.record.step) for sent in records if isinstance(sent.record, Reported)]


class LauncherKit(ABC):
    """The contract of ``elastune.runtime.launcher``."""

    @abstractmethod
    def make(self, capacity: int) -> Launcher:
        """A launcher with room for ``capacity`` workers."""

    @contextmanager
    def scene(self, logs: Path, entry: str, capacity: int = 2, **config: object) -> Iterator[Scene]:
        """Workers that will call ``entry`` of ``cluster_workers``."""
        settings: Config = dict(config)  # type: ignore[arg-type]
        spec = RunSpec(Program(Path("none.py")), logs, config=settings)
        place, environment = Place(0, 2), dict(os.environ)
        task = WorkerSpec(f"{WORKERS}:{entry}", spec, place, environment, str(Path.cwd()), sys.path)
        launcher = self.make(capacity)
        entrance = ListenOptions(token=launcher.new_token(), tls=launcher.tls)
        lookups = WorkerLookups(spec_of=lambda worker: task)
        coordinator = Coordinator(range(3), WorkerBounds(1, 3), Timeouts(20.0), entrance, lookups)
        try:
            yield Scene(launcher, coordinator, logs)
        finally:
            launcher.close()
            coordinator.close()

    def test_workers_connect_speak_and_end_with_their_codes(self, tmp_path: Path) -> None:
        with self.scene(tmp_path, "speak", count=3, code=17) as scene:
            assert (scene.launcher.capacity, scene.launcher.free) == (2, 2)
            scene.launcher.start(scene.workers[:2], scene.needs)
            assert scene.launcher.free == 0
            scene.until(lambda: len(scene.ends()) == 2)
            assert scene.launcher.free == 2
            assert {worker: end.code for worker, end in scene.ends().items()} == {0: 17, 1: 17}
            assert "worker 0 has spoken" in scene.ends()[0].log
            scene.until(lambda: sum(isinstance(event, WorkerDisconnected) for event in scene.received) == 2)
            assert sorted(scene.reports()) == [(worker, step) for worker in (0, 1) for step in range(3)]
            assert WorkerDisconnected(1, 17) in scene.received

    def test_there_is_room_for_so_many(self, tmp_path: Path) -> None:
        with self.scene(tmp_path, "speak") as scene:
            with pytest.raises((UserError, OSError)):
                scene.launcher.start(scene.workers, scene.needs)
            scene.until(lambda: scene.launcher.free == 2)
            scene.launcher.start(scene.workers[:1], scene.needs)
            assert scene.launcher.free == 1
            scene.until(lambda: len(scene.ends()) >= 1)

    def test_one_is_ended_and_the_other_goes_on(self, tmp_path: Path) -> None:
        with self.scene(tmp_path, "work_until_stopped") as scene:
            scene.launcher.start(scene.workers[:2], scene.needs)
            scene.until(lambda: len(scene.reports()) == 2 and len(scene.pids()) == 2)
            scene.launcher.end(scene.workers[:1], "it is not needed")
            scene.launcher.end(scene.workers[:1])
            scene.until(lambda: 0 in scene.ends())
            assert scene.ends()[0].code in (-signal.SIGKILL, None)
            scene.coordinator.stop()
            scene.until(lambda: 1 in scene.ends())
            assert scene.ends()[1].code == 3
            scene.launcher.end(scene.workers)

    def test_a_death_is_told(self, tmp_path: Path) -> None:
        with self.scene(tmp_path, "work_until_stopped") as scene:
            scene.launcher.start(scene.workers[:1], scene.needs)
            scene.until(lambda: bool(scene.reports()) and bool(scene.pids()))
            os.kill(scene.pids()[0], signal.SIGKILL)
            scene.until(lambda: bool(scene.ends()))
            assert scene.ends()[0].code in (-signal.SIGKILL, None)
            scene.until(lambda: WorkerDisconnected(0, None) in scene.received)

    def test_closing_leaves_nothing_and_may_be_repeated(self, tmp_path: Path) -> None:
        with self.scene(tmp_path, "work_until_stopped") as scene:
            scene.launcher.start(scene.workers[:2], scene.needs)
            scene.until(lambda: len(scene.reports()) == 2 and len(scene.pids()) == 2)
            scene.launcher.close()
            scene.launcher.close()
            scene.news += scene.launcher.poll()
            assert sorted(scene.ends()) == [0, 1]
            assert not [pid for pid in scene.pids().values() if Path(f"/proc/{pid}").exists()]

    def test_the_token_is_in_no_command_line(self, tmp_path: Path) -> None:
        with self.scene(tmp_path, "work_until_stopped") as scene:
            scene.launcher.start(scene.workers[:1], scene.needs)
            scene.until(lambda: bool(scene.reports()) and bool(scene.pids()))
            lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
            assert not [line for line in lines if scene.coordinator.token.encode() in line]
            assert scene.coordinator.token not in "".join(file.read_text() for file in tmp_path.rglob("*.log"))
