"""Whoever dies, and however: nothing is left of what a cluster has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from elastune.core.journal.records import RunFailed, WorkerGone
from elastune.core.run import Elastic
from elastune.runtime.clusters.base import Message
from elastune.runtime.clusters.fork import END_LIMIT_S
from elastune.runtime.clusters.local import LocalCluster
from elastune.testing.kits.cluster import events_until_end, events_until_messages, exits, reports, spec_of

HERE = Path(__file__).parent
pytestmark = pytest.mark.usefixtures("processes")


@contextmanager
def controller_that_ends_by(how: str, out: Path) -> Iterator[subprocess.Popen[str]]:
    """A process of its own, in a session of its own, with a cluster of two workers; see ``controller.py``."""
    command = [sys.executable, str(HERE / "controller.py"), str(out), how]
    quiet = subprocess.DEVNULL if how == "exception" else None
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=quiet, text=True, start_new_session=True
    ) as controller:
        try:
            yield controller
        finally:
            controller.kill()


def test_what_a_worker_started_ends_with_it(tmp_path: Path, gone, running, serve) -> None:
    cluster = serve("odd_workers:with_family")
    for end in ("stop", "kill"):
        handle = cluster.start(spec_of(tmp_path, 2))
        family = [p for r in reports(events_until_messages(cluster, handle, 2)) for p in r.metrics.values()]
        assert running(family) == [True] * 6
        getattr(handle, end)()
        events_until_end(cluster, handle)
        gone(family)


def test_what_left_the_process_group_ends_with_the_cluster(tmp_path: Path, gone, bare) -> None:
    with bare("odd_workers:with_daemon") as cluster:
        events = events_until_end(cluster, cluster.start(spec_of(tmp_path)))
    gone([reports(events)[0].metrics["daemon"]], limit_s=0.1)


@pytest.mark.parametrize("how", ["return", "raise", "sigkill"])
def test_data_loaders_end_with_their_worker(
    warm: LocalCluster, tmp_path: Path, how: str, gone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "_entry", "odd_workers:with_loaders")
    handle = warm.start(replace(spec_of(tmp_path, config={"how": how}), elastic=Elastic(most_losses=1)))
    events = events_until_messages(warm, handle, 1)
    if how == "sigkill":
        os.kill(handle.pids[0], signal.SIGKILL)
    events += events_until_end(warm, handle)
    if how == "sigkill":
        (failed,) = (e.record for e in events if isinstance(e, Message) and isinstance(e.record, RunFailed))
        assert failed.exit_code == -9
    else:
        assert exits(events)[0].code == {"return": 0, "raise": 1}[how]
    assert len(reports(events)) == 1
    gone(reports(events)[0].metrics.values())


def test_close_gives_everything_back(tmp_path: Path, gone, bare, descriptors) -> None:
    before, threads = descriptors(os.getpid()), threading.active_count()
    cluster = bare("elastune.testing.kits.cluster_workers:work_until_stopped")
    handle = cluster.start(spec_of(tmp_path, 3))
    events_until_messages(cluster, handle, 3)
    processes = [cluster.launcher.server().pid, *handle.pids.values()]
    cluster.close()
    gone(processes, limit_s=0.1)
    assert descriptors(os.getpid()) == before
    assert threading.active_count() == threads
    assert {path.name for path in tmp_path.iterdir()} == {"logs"}


def test_the_server_may_be_killed(tmp_path: Path, gone, bare) -> None:
    with bare("odd_workers:with_family") as cluster:
        handle = cluster.start(spec_of(tmp_path, 2))
        family = [p for r in reports(events_until_messages(cluster, handle, 2)) for p in r.metrics.values()]
        os.kill(cluster.launcher.server().pid, signal.SIGKILL)
        events = events_until_messages(cluster, handle, 4)  # two are told of as lost, two come in their place
        lost = [e.record for e in events if isinstance(e, Message) and isinstance(e.record, WorkerGone)]
        assert sorted((record.worker, record.code) for record in lost) == [(0, -9), (1, -9)]
        assert lost[0].log.splitlines()[-1] == "elastune: the fork server ended (SIGKILL)"
        assert sorted(handle.pids) == [2, 3]
        handle.kill()
        events_until_end(cluster, handle)
        gone(family)
        assert cluster.free == 3
        again = cluster.start(spec_of(tmp_path, 3))
        events_until_messages(cluster, again, 3)
        again.stop()
        assert [end.code for end in exits(events_until_end(cluster, again)).values()] == [3, 3, 3]


def test_the_server_may_be_killed_unnoticed(tmp_path: Path, bare) -> None:
    with bare("elastune.testing.kits.cluster_workers:speak") as cluster:
        events_until_end(cluster, cluster.start(spec_of(tmp_path)))
        os.kill(cluster.launcher.server().pid, signal.SIGKILL)
        time.sleep(0.05)
        assert exits(events_until_end(cluster, cluster.start(spec_of(tmp_path))))[0].code == 0


def test_the_thread_that_made_a_cluster_may_end(tmp_path: Path, bare) -> None:
    made: list[LocalCluster] = []
    thread = threading.Thread(target=lambda: made.append(bare("elastune.testing.kits.cluster_workers:speak")))
    thread.start()
    thread.join()
    with made[0] as cluster:
        server = cluster.launcher.server().pid
        events_until_end(cluster, cluster.start(spec_of(tmp_path)))
        warm = threading.Thread(target=lambda: events_until_end(cluster, cluster.start(spec_of(tmp_path))))
        warm.start()
        warm.join()
        assert exits(events_until_end(cluster, cluster.start(spec_of(tmp_path))))[0].code == 0
        assert cluster.launcher.server().pid == server


def test_a_fork_of_the_controller_does_not_end_its_workers(tmp_path: Path, serve) -> None:
    cluster = serve("elastune.testing.kits.cluster_workers:work_until_stopped")
    handle = cluster.start(spec_of(tmp_path))
    events_until_messages(cluster, handle, 1)
    if (child := os.fork()) == 0:
        cluster.close()
        os._exit(0)
    os.waitpid(child, 0)
    handle.stop()
    assert exits(events_until_end(cluster, handle))[0].code == 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "exception", "_exit", "return"])
def test_nothing_survives_its_controller(tmp_path: Path, how: str, gone, running) -> None:
    with controller_that_ends_by(how, tmp_path) as controller:
        processes = [int(p) for p in controller.stdout.readline().split()]
        assert len(processes) == 7
        if how.startswith("SIG"):
            assert running(processes) == [True] * 7
            controller.send_signal(getattr(signal, how))
        controller.wait(20)
        took_s = gone(processes)
    print(f"{how}: all gone {took_s * 1e3:.0f} ms after the controller")


def test_a_server_that_still_imports_does_not_survive_its_controller(tmp_path: Path, gone) -> None:
    with controller_that_ends_by("early", tmp_path) as controller:
        server = int(controller.stdout.readline())
        controller.kill()
        gone([server])


def test_ctrl_c_is_for_the_controller_to_decide(tmp_path: Path, gone) -> None:
    with controller_that_ends_by("SIGINT", tmp_path) as controller:
        processes = [int(p) for p in controller.stdout.readline().split()]
        os.killpg(controller.pid, signal.SIGINT)
        assert controller.stdout.readline() == "3 3\n"
        controller.wait(20)
        gone(processes)


def test_workers_end_with_their_controller_while_the_server_is_frozen(tmp_path: Path, gone, running) -> None:
    with controller_that_ends_by("SIGKILL", tmp_path) as controller:
        server, *family = [int(p) for p in controller.stdout.readline().split()]
        os.kill(server, signal.SIGSTOP)
        controller.kill()
        gone(family)
        assert running([server]) == [True]
        os.kill(server, signal.SIGCONT)
        gone([server])


def test_workers_end_with_their_server_while_the_controller_is_frozen(tmp_path: Path, gone) -> None:
    with controller_that_ends_by("SIGKILL", tmp_path) as controller:
        server, *family = [int(p) for p in controller.stdout.readline().split()]
        controller.send_signal(signal.SIGSTOP)
        os.kill(server, signal.SIGKILL)
        gone([family[0], family[3]])  # the kernel's doing; what they had started is the controller's
        controller.send_signal(signal.SIGCONT)
        gone(family)


def test_nothing_survives_a_server_killed_with_its_controller(tmp_path: Path, gone) -> None:
    with controller_that_ends_by("SIGKILL", tmp_path) as controller:
        server, *family = [int(p) for p in controller.stdout.readline().split()]
        os.kill(controller.pid, signal.SIGSTOP)  # it must not see the server's end before its own
        os.kill(server, signal.SIGKILL)
        controller.kill()
        gone(family)


def test_a_frozen_server_ends_no_run_and_no_cluster(tmp_path: Path, bare) -> None:
    with bare("elastune.testing.kits.cluster_workers:work_until_stopped") as cluster:
        handle = cluster.start(spec_of(tmp_path))
        events_until_messages(cluster, handle, 1)
        os.kill(cluster.launcher.server().pid, signal.SIGSTOP)
        handle.stop()
        assert exits(events_until_end(cluster, handle))[0].code == 3
        os.kill(cluster.launcher.server().pid, signal.SIGSTOP)
        began = time.monotonic()
    assert time.monotonic() - began < END_LIMIT_S, "it was woken, not waited for"
