"""Tests that every cluster must pass, for inheritance.

class TestMine(ClusterKit):
    def make(self, entry: str) -> Cluster: ...
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from pathlib import Path

import pytest

from elastune.core.errors import UserError
from elastune.core.journal.records import Reported
from elastune.core.run import Config, ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.base import NOBODY, Cluster, Event, Exited, Handle, Message

WORKERS = "elastune.testing.kits.cluster_workers"
LIMIT_S = 30.0


def spec_of(
    out: Path, workers: int = 1, *, config: Config | None = None, seed: int = 0, device: str = "cpu"
) -> RunSpec:
    """Return a run whose program does not matter."""
    execution = ExecutionSettings(workers=workers, device=device)
    return RunSpec(Program(Path("none.py")), out, config=config or {}, seed=seed, execution=execution)


def events_until_end(cluster: Cluster, handle: Handle, limit_s: float = LIMIT_S) -> list[Event]:
    """Return all events of a run's workers, to their end."""
    deadline = time.monotonic() + limit_s
    events: list[Event] = []
    while handle.alive:
        assert time.monotonic() < deadline, f"still alive: {handle.alive} workers; so far {events}"
        cluster.wait(0.5)
        events += handle.poll()
    return events


def events_until_messages(cluster: Cluster, handle: Handle, count: int, limit_s: float = LIMIT_S) -> list[Event]:
    """Return all events up to the ``count``-th message of a worker."""
    deadline = time.monotonic() + limit_s
    events: list[Event] = []
    while sum(isinstance(event, Message) and event.rank != NOBODY for event in events) < count:
        assert handle.alive, f"all workers ended before {count} messages: {events}"
        assert time.monotonic() < deadline, f"no {count} messages, but {events}"
        cluster.wait(0.5)
        events += handle.poll()
    return events


def exits(events: list[Event]) -> dict[int, Exited]:
    """Return how each rank ended."""
    return {event.rank: event for event in events if isinstance(event, Exited)}


def reports(events: list[Event]) -> list[Reported]:
    """Return the reports among ``events``, in order."""
    return [e.record for e in events if isinstance(e, Message) and isinstance(e.record, Reported)]


class ClusterKit(ABC):
    """The tests of the contract ``elastune.runtime.clusters.base``."""

    @abstractmethod
    def make(self, entry: str) -> Cluster:
        """Return a cluster that runs ``entry``, with room for as many workers as the kind allows, at most 3."""

    def test_messages_come_in_order_and_before_the_exit(self, tmp_path: Path) -> None:
        with self.make(f"{WORKERS}:speak") as cluster:
            handle = cluster.start(spec_of(tmp_path, cluster.capacity, config={"count": 20}))
            assert handle.alive == cluster.capacity
            events = events_until_end(cluster, handle)
            assert handle.poll() == []
        for rank in range(cluster.capacity):
            of_rank = [event for event in events if event.rank == rank]
            assert [r.step for r in reports(of_rank)] == list(range(20))
            assert [r.metrics["world"] for r in reports(of_rank)] == [cluster.capacity] * 20
            assert isinstance(of_rank[-1], Exited)
            assert of_rank[-1].code == 0

    def test_an_exit_code_is_handed_on(self, tmp_path: Path) -> None:
        with self.make(f"{WORKERS}:speak") as cluster:
            events = events_until_end(cluster, cluster.start(spec_of(tmp_path, config={"code": 17})))
        assert exits(events)[0].code == 17

    def test_an_exception_ends_with_its_story(self, tmp_path: Path) -> None:
        with self.make(f"{WORKERS}:fail") as cluster:
            events = events_until_end(cluster, cluster.start(spec_of(tmp_path, seed=13)))
        assert len(reports(events)) == 1
        assert exits(events)[0].code == 1
        assert exits(events)[0].log.splitlines()[-1] == "ArithmeticError: seed 13 was unlucky"

    def test_sys_exit_ends_as_in_any_program(self, tmp_path: Path) -> None:
        with self.make(f"{WORKERS}:leave") as cluster:
            events = events_until_end(cluster, cluster.start(spec_of(tmp_path)))
        assert exits(events)[0].code == 1
        assert exits(events)[0].log.splitlines()[-1].endswith("no more")

    def test_a_run_can_be_asked_to_stop(self, tmp_path: Path) -> None:
        with self.make(f"{WORKERS}:work_until_stopped") as cluster:
            handle = cluster.start(spec_of(tmp_path, cluster.capacity))
            handle.stop()
            handle.stop()
            events = events_until_end(cluster, handle)
            handle.stop()
            handle.kill()
        assert {rank: end.code for rank, end in exits(events).items()} == dict.fromkeys(range(cluster.capacity), 3)

    def test_a_run_can_be_killed(self, tmp_path: Path) -> None:
        with self.make(f"{WORKERS}:work_until_stopped") as cluster:
            handle = cluster.start(spec_of(tmp_path, cluster.capacity))
            handle.kill()
            events = events_until_end(cluster, handle)
        assert {rank: end.code for rank, end in exits(events).items()} == dict.fromkeys(range(cluster.capacity), -9)

    def test_closing_ends_a_run_and_may_be_repeated(self, tmp_path: Path) -> None:
        cluster = self.make(f"{WORKERS}:work_until_stopped")
        handle = cluster.start(spec_of(tmp_path))
        cluster.close()
        cluster.close()
        assert exits(handle.poll())[0].code == -9
        assert handle.alive == 0

    def test_capacity_is_a_rule(self, tmp_path: Path) -> None:
        with self.make(f"{WORKERS}:speak") as cluster:
            for workers in (-1, cluster.capacity + 1):
                with pytest.raises(UserError):
                    cluster.start(spec_of(tmp_path / "bad", workers))
            assert not (tmp_path / "bad").exists()
            first = cluster.start(spec_of(tmp_path, cluster.capacity))
            with pytest.raises(UserError):
                cluster.start(spec_of(tmp_path / "second"))
            events_until_end(cluster, first)
            events_until_end(cluster, cluster.start(spec_of(tmp_path, cluster.capacity)))

    def test_waiting_without_events_ends_in_time(self) -> None:
        with self.make(f"{WORKERS}:speak") as cluster:
            start = time.monotonic()
            cluster.wait(0.05)
            assert time.monotonic() - start < 5.0
