"""Workers on several hosts: links that are cut, come back and are slow. Weights and the ledger must not show it."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.soaked import soaked
from tests.support.elastic_runs import Ran, Runs
from tests.support.host_runs import HostRun, HostRuns, NamespaceLauncher
from tests.support.hosts import Network

from elastune.core.journal.records import WorkerGone
from elastune.core.run import Program
from elastune.elastic.wire.messages import ResizeAsked
from elastune.elastic.worker.client import ORPHANED_CODE
from elastune.runtime.clusters.local import LocalCluster

PROGRAM = Program(Path(__file__).parent / "programs" / "elastic.py")
SAMPLES = 1000
WIDE = 4096  # 3.8 MB of state


@pytest.fixture(scope="module")
def wide_undisturbed(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The same of a large network."""
    return Runs(cluster, tmp_path_factory.mktemp("wide"), PROGRAM)(1, wide=WIDE)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(4) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def launcher(network: Network) -> Iterator[NamespaceLauncher]:
    warm = NamespaceLauncher(network)
    yield warm
    warm.close()


@pytest.fixture
def runs(launcher: NamespaceLauncher, tmp_path: Path) -> HostRuns:
    return HostRuns(launcher, tmp_path, PROGRAM)


def same(ran: Ran, undisturbed: Ran) -> None:
    """The verdict."""
    assert ran.sha256 == undisturbed.sha256
    assert ran.ledger.exact, ran.ledger
    assert [seen.once for seen in ran.ledger.epochs] == [SAMPLES] * 3


class CutOff:
    """Cuts a worker's host off once the worker has stopped itself, and lets it go on there.

    The link comes back after ``steps`` steps of the others.
    """

    def __init__(self, worker: int, *, steps: float = math.inf) -> None:
        self.worker = worker
        self.cut_at: int | None = None
        self._steps = steps

    def __call__(self, run: HostRun) -> None:
        process = run.processes[self.worker]
        if self.cut_at is None:
            if process.stopped:
                process.host.cut()
                self.cut_at = run.coordinator.step
                process.signal(signal.SIGCONT)
        elif process.host.is_cut and run.coordinator.step >= self.cut_at + self._steps:
            assert process.code is None, "it ended before its link came back"
            process.host.heal()


def test_nothing_happens(runs: HostRuns, undisturbed: Ran) -> None:
    ran = runs(3, heartbeat_s=20.0)
    same(ran, undisturbed)
    assert not ran.lost
    assert set(ran.codes.values()) == {0}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("worker", "place"), [(0, "scatter"), *soaked((1, "gather"), (2, "reduced"))])
def test_a_host_is_cut_off_in_a_step(runs: HostRuns, undisturbed: Ran, worker: int, place: str) -> None:
    """No end of connection, only silence: the others go on after the heartbeat, the one that is alone ends itself."""
    ran = runs(3, act=CutOff(worker), heartbeat_s=3.0, silence_s=6.0, faults=[f"stop {worker} 9 {place}"])
    same(ran, undisturbed)
    assert worker in ran.lost
    assert ran.codes[worker] == ORPHANED_CODE
    assert "silent" in ran.logs[worker].splitlines()[-1]


@pytest.mark.soak
def test_a_link_that_comes_back_too_late_changes_nothing(runs: HostRuns, undisturbed: Ran) -> None:
    """The others have gone on without it by several steps; it finds its connections closed."""
    act = CutOff(0, steps=4)
    ran = runs(3, act=act, heartbeat_s=3.0, silence_s=100.0, faults=["stop 0 9 scatter"], pause_s=0.1)
    same(ran, undisturbed)
    assert act.cut_at is not None
    assert 0 in ran.lost
    assert ran.codes[0] == ORPHANED_CODE
    assert "the coordinator is gone" in ran.logs[0]
    assert "silent" not in ran.logs[0], "its connection was closed or reset"


def test_a_link_that_comes_back_in_time_is_a_pause(runs: HostRuns, undisturbed: Ran) -> None:
    held: list[float] = []

    def act(run: HostRun) -> None:
        process = run.processes[1]
        if not held and process.stopped:
            process.host.cut()
            held.append(time.monotonic())
            process.signal(signal.SIGCONT)
        elif held and process.host.is_cut and time.monotonic() > held[0] + 1.0:
            process.host.heal()

    ran = runs(3, act=act, heartbeat_s=20.0, faults=["stop 1 9 scatter"])
    same(ran, undisturbed)
    assert held
    assert not ran.lost
    assert not ran.regrouped
    assert set(ran.codes.values()) == {0}


@pytest.mark.soak
@pytest.mark.parametrize("dies", ["giver", "joiner's link", *soaked("joiner")])
def test_a_death_in_a_slow_hand_over(runs: HostRuns, wide_undisturbed: Ran, dies: str, tmp_path: Path) -> None:
    """The state is large and the joiner's link slow; when part of it has arrived, one of the two is lost."""
    size_bytes = 3 * 77 * WIDE * 4
    before: list[int] = []
    struck: list[int] = []
    noticed = tmp_path / "noticed"  # from then on there is no need to go slowly

    def act(run: HostRun) -> None:
        host = run.network.hosts[2]
        if not before and run.coordinator.step >= 3:
            host.slow("20mbit")
            before.append(host.received_bytes)
            run.coordinator.ask(ResizeAsked(3, "the test"))
        elif before and not struck and host.received_bytes > before[0] + size_bytes // 3:
            struck.append(run.coordinator.step)
            if dies == "joiner's link":
                host.cut()
            else:
                run.kill(0 if dies == "giver" else 2)
            host.unslow()
        elif struck and any(isinstance(record, WorkerGone) for record in run.records):
            noticed.touch()

    ran = runs(2, act=act, hosts=3, heartbeat_s=3.0, silence_s=8.0, wide=WIDE, pause_s=0.3, until=str(noticed))
    assert struck
    same(ran, wide_undisturbed)
    assert (0 if dies == "giver" else 2) in ran.lost
