from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.soaked import soaked

from elastune.core.errors import UserError
from elastune.core.journal.records import Record, RunFailed, WorkerGone
from elastune.core.run import Elastic, ExecutionSettings
from elastune.elastic.worker.client import ORPHANED_CODE
from elastune.runtime.clusters.base import Cluster, Event, Message
from elastune.runtime.clusters.fork import Ended, Forked
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.elastic_run import ElasticRun
from elastune.testing.kits.cluster import (
    ClusterKit,
    events_until_end,
    events_until_messages,
    exits,
    reports,
    spec_of,
)


def records_of(events: list[Event], kind: type[Record]) -> list[Any]:
    return [event.record for event in events if isinstance(event, Message) and isinstance(event.record, kind)]


HERE = Path(__file__).parent
pytestmark = pytest.mark.usefixtures("processes")


class TestLocal(ClusterKit):
    def make(self, entry: str) -> Cluster:
        return LocalCluster(3, entry=entry, preload=())


@pytest.mark.parametrize(
    ("how", "code", "last_words"),
    [
        ("segfault", -signal.SIGSEGV, "Segmentation fault"),
        ("sigkill", -signal.SIGKILL, "about to die"),
        ("abort", -signal.SIGABRT, "Aborted"),
    ],
)
def test_a_death_is_reported_with_its_code_and_log(tmp_path: Path, how: str, code: int, last_words: str, serve) -> None:
    cluster = serve("odd_workers:die")
    spec = replace(spec_of(tmp_path, config={"how": how}), elastic=Elastic(most_losses=2))
    events = events_until_end(cluster, cluster.start(spec))
    (gone,) = records_of(events, WorkerGone)
    (failed,) = records_of(events, RunFailed)
    assert len(reports(events)) == 1
    assert (gone.code, failed.exit_code) == (code, code)
    assert last_words in gone.log
    assert last_words in failed.log


def test_an_exit_without_a_word_is_no_death(tmp_path: Path, serve) -> None:
    cluster = serve("odd_workers:die")
    events = events_until_end(cluster, cluster.start(spec_of(tmp_path, config={"how": "_exit"})))
    assert not records_of(events, WorkerGone)
    (failed,) = records_of(events, RunFailed)
    assert (failed.reason, failed.exit_code) == ("exception", 9)
    assert "exit code 9 (os._exit" in failed.detail
    assert "about to die" in failed.log


def test_news_that_nobody_asks_for_wake_who_waits_once(tmp_path: Path, serve) -> None:
    """Else a cluster that lives on would never wait again."""
    cluster = serve("odd_workers:die")
    handle = cluster.start(spec_of(tmp_path, config={"how": "_exit"}))
    until = time.monotonic() + 30
    while not handle.closed and time.monotonic() < until:
        cluster.wait(0.2)
    cluster.wait(0.0)
    began = time.monotonic()
    cluster.wait(0.2)
    assert time.monotonic() - began >= 0.2
    assert exits(handle.poll()), "who asks later is told"


def test_an_entry_that_is_not_there_is_told(tmp_path: Path, serve) -> None:
    cluster = serve("odd_workers:nothing")
    end = exits(events_until_end(cluster, cluster.start(spec_of(tmp_path))))[0]
    assert end.code == 1
    assert "nothing" in end.log.splitlines()[-1]


def test_logs_keep_attempts_apart(tmp_path: Path, serve) -> None:
    cluster = serve("elastune.testing.kits.cluster_workers:fail")
    logs = [exits(events_until_end(cluster, cluster.start(spec_of(tmp_path, seed=s))))[0].log for s in (1, 2)]
    assert "seed 2" in logs[1]
    assert "seed 1" not in logs[1]
    file = (tmp_path / "logs" / "worker-0.log").read_text()
    assert file.count("--- worker 0, ") == 2
    assert file.index("seed 1") < file.index("seed 2")


@pytest.mark.parametrize(
    ("garbage", "reason"),
    [("bytes", "no message"), ("endless", "1048576 bytes"), *soaked(("text", "no message"), ("json", "no message"))],
)
def test_a_worker_that_talks_garbage_is_ended_and_only_it(tmp_path: Path, garbage: str, reason: str, serve) -> None:
    cluster = serve("odd_workers:garble")
    events = events_until_end(cluster, cluster.start(spec_of(tmp_path, 2, config={"garbage": garbage})))
    assert [r.step for r in reports([e for e in events if e.rank == 1])] == [0]
    assert [r.step for r in reports([e for e in events if e.rank == 0])] == [0, 1]
    codes = {rank: end.code for rank, end in exits(events).items()}
    assert codes in ({0: 0}, {0: 0, 2: 0})  # the run goes on without it, perhaps with another in its place
    (gone,) = records_of(events, WorkerGone)
    assert (gone.worker, gone.how) == (1, "lost")
    assert gone.code in (-9, ORPHANED_CODE)  # it is killed, unless it ends first because it was cut off
    assert reason in gone.why
    last = gone.log.splitlines()[-1]
    ended_first = gone.code == ORPHANED_CODE and last.startswith("elastune: the coordinator is gone (")
    assert ended_first or (last.startswith("elastune: worker 1 was ended: ") and reason in last)


def test_a_record_that_is_too_long_fails_where_it_is_sent(tmp_path: Path, serve) -> None:
    cluster = serve("odd_workers:too_long")
    end = exits(events_until_end(cluster, cluster.start(spec_of(tmp_path))))[0]
    assert end.code == 5
    assert "at most 1048576 can be sent" in end.log


def test_a_worker_may_say_more_than_anybody_hears(tmp_path: Path, serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 MB of reports while the controller is busy: the coordinator reads no more, the worker waits, all arrives."""
    monkeypatch.setattr("elastune.elastic.coordinator.controller_interface.BACKLOG_LIMIT_BYTES", 1 << 20)
    cluster = serve("odd_workers:flood")
    spec = replace(spec_of(tmp_path, config={"count": 400}), elastic=Elastic(heartbeat_s=1.0))
    handle = cluster.start(spec)
    sizes, until = [], time.monotonic() + 2.5  # longer than its heartbeat: waiting is no silence
    while time.monotonic() < until:
        time.sleep(0.1)
        sizes.append(handle.coordinator._out._backlog_bytes)
    assert 1 << 20 < max(sizes) < 2 << 20
    events = events_until_end(cluster, handle)
    assert [report.step for report in reports(events)] == list(range(400))
    assert exits(events)[0].code == 0


def test_what_a_killed_worker_had_sent_is_heard(tmp_path: Path, serve) -> None:
    cluster = serve("odd_workers:speak_and_die")
    spec = replace(spec_of(tmp_path), elastic=Elastic(most_losses=1))
    events = events_until_end(cluster, cluster.start(spec))
    assert [report.step for report in reports(events)] == list(range(200))
    assert [failed.exit_code for failed in records_of(events, RunFailed)] == [-9]


def test_surroundings_are_those_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve) -> None:
    folder = tmp_path / "é"
    folder.mkdir()
    cluster = serve("odd_workers:surroundings")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ELASTUNE_TEST", "new")
    spec = spec_of(Path("out"))
    spec = type(spec)(spec.program, spec.out, execution=ExecutionSettings(threads=3))
    end = exits(events_until_end(cluster, cluster.start(spec)))[0]
    assert end.log.splitlines()[:3] == [
        f"{folder} new 3 lo",
        "stdin: '' session: True",
        "signals: True set()",
    ]
    assert (folder / "out" / "logs" / "worker-0.log").is_file()
    expected = [
        "/dev/null",
        str(folder / "out/logs/worker-0.log"),
        str(folder / "out/logs/worker-0.log"),
        *["socket"] * 3,
    ]
    assert end.log.splitlines()[3] == f"descriptors: {sorted(expected)}"


def test_two_runs_at_once_do_not_touch_each_other(tmp_path: Path, gone, running, serve) -> None:
    cluster = serve("elastune.testing.kits.cluster_workers:work_until_stopped")
    first = cluster.start(spec_of(tmp_path / "a", 2, seed=1))
    second = cluster.start(spec_of(tmp_path / "b", 1, seed=2))
    with pytest.raises(UserError, match="0 that are free of 3"):
        cluster.start(spec_of(tmp_path / "c", 1))
    events_until_messages(cluster, first, 2)
    events_until_messages(cluster, second, 1)
    others = list(second.pids.values())
    doomed = list(first.pids.values())
    assert len(doomed) == 2
    first.kill()
    assert {end.code for end in exits(events_until_end(cluster, first)).values()} == {-9}
    gone(doomed)
    assert running(others) == [True]
    third = cluster.start(spec_of(tmp_path / "c", 2, seed=3))
    second.stop()
    third.stop()
    for handle, workers, seed in ((second, 1, 2), (third, 2, 3)):
        events = events_until_end(cluster, handle)
        assert [end.code for end in exits(events).values()] == [3] * workers
        assert {r.metrics["seed"] for r in reports(events) if r.step == 1} == {seed}
    assert not list(tmp_path.glob("*/.coordinator*"))


def test_a_frozen_worker_can_be_killed(tmp_path: Path, serve) -> None:
    cluster = serve("elastune.testing.kits.cluster_workers:work_until_stopped")
    handle = cluster.start(spec_of(tmp_path))
    events_until_messages(cluster, handle, 1)
    os.kill(handle.pids[0], signal.SIGSTOP)
    handle.kill()
    assert exits(events_until_end(cluster, handle))[0].code == -9


def test_twenty_runs_leave_nothing_open(tmp_path: Path, bare, descriptors) -> None:
    with bare("elastune.testing.kits.cluster_workers:speak") as cluster:
        events_until_end(cluster, cluster.start(spec_of(tmp_path, 2)))
        server = cluster.launcher.server().pid
        before = descriptors(os.getpid()), descriptors(server)
        for _ in range(20):
            events_until_end(cluster, cluster.start(spec_of(tmp_path, 2)))
        assert (descriptors(os.getpid()), descriptors(server)) == before
        assert cluster.free == 3
        assert len(cluster._runs) <= 1
    assert {path.name for path in tmp_path.iterdir()} == {"logs"}


def test_an_output_folder_that_cannot_be_is_a_user_error(tmp_path: Path, serve) -> None:
    (tmp_path / "file").write_text("")
    cluster = serve("elastune.testing.kits.cluster_workers:speak")
    with pytest.raises(UserError, match="writable"):
        cluster.start(spec_of(tmp_path / "file", 2))
    assert cluster.free == 3
    (tmp_path / "half" / "logs" / "worker-1.log").mkdir(parents=True)
    with pytest.raises(UserError, match=r"worker-1\.log"):
        cluster.start(spec_of(tmp_path / "half", 3))
    deadline = time.monotonic() + 5
    while cluster.free < 3 and time.monotonic() < deadline:
        cluster.wait(0.01)
    assert cluster.free == 3
    assert exits(events_until_end(cluster, cluster.start(spec_of(tmp_path / "whole", 3))))[2].code == 0


def test_a_reply_of_a_worker_that_was_given_up_fails_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalCluster(1, entry="elastune.testing.kits.cluster_workers:work_until_stopped", preload=()) as cluster:
        spawner = cluster.launcher.server()
        replies, killed = iter([Forked(999, 1), Ended(999, 0), None]), list[int]()
        with monkeypatch.context() as patch:
            patch.setattr(spawner, "receive", lambda: next(replies))
            patch.setattr(spawner, "kill", killed.extend)
            assert cluster.launcher.poll() == []
        assert killed == [999], "nobody would end it"
        cluster.start(spec_of(tmp_path / "after"))


@pytest.mark.parametrize("capacity", [0, -3])
def test_no_room_is_no_cluster(capacity: int) -> None:
    with pytest.raises(UserError, match="capacity of 1 or more"):
        LocalCluster(capacity)


def devices(cluster: LocalCluster, run: ElasticRun) -> list[str]:
    return [cluster.launcher._processes[bootstrap].device for bootstrap in run._processes.known.values()]


def test_gpus_are_given_to_workers_in_turn_and_idle_ones_first(tmp_path: Path) -> None:
    two = ("cuda:0", "cuda:1")
    work = "elastune.testing.kits.cluster_workers:work_until_stopped"
    with LocalCluster(6, devices=two, entry=work, preload=()) as cluster:
        runs = [cluster.start(spec_of(tmp_path / str(i), n, device="cuda")) for i, n in enumerate((1, 2, 2))]
        given = [devices(cluster, run) for run in runs]
        with pytest.raises(UserError, match="cuda:2"):
            cluster.start(spec_of(tmp_path, device="cuda:2"))
    assert given == [["cuda:0"], ["cuda:1", "cuda:0"], ["cuda:1", "cuda:0"]]
    with LocalCluster(3, devices=two, entry=work, preload=()) as cluster:
        shared = cluster.start(spec_of(tmp_path / "s", 3, device="auto"))
        assert devices(cluster, shared) == ["cuda:0", "cuda:1", "cuda:0"]


def test_workers_are_ready_at_once_and_reduce_together(warm: LocalCluster, tmp_path: Path) -> None:
    events_until_end(warm, warm.start(spec_of(tmp_path / "first", 3)))
    ready_s = []
    for attempt in range(3):
        begin = time.perf_counter()
        handle = warm.start(spec_of(tmp_path / str(attempt), 3))
        events = events_until_messages(warm, handle, 1)
        ready_s.append(time.perf_counter() - begin)
        events += events_until_end(warm, handle)
        assert [end.code for end in exits(events).values()] == [0, 0, 0], exits(events)[0].log
        assert [r.metrics["total"] for r in reports(events) if r.step == 1] == [111.0] * 3
    print(f"first message of 3 workers that built an optimizer: {[round(s, 3) for s in ready_s]} s")
    assert min(ready_s) < 2.0, "each of them would import torch for as long"
    assert not list(tmp_path.glob("*/.coordinator*"))


def test_the_server_has_one_thread_and_workers_as_many_as_asked(warm: LocalCluster, tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    spec = type(spec)(spec.program, spec.out, execution=ExecutionSettings(threads=2))
    handle = warm.start(spec)
    events = events_until_messages(warm, handle, 1)
    assert reports(events)[0].metrics["threads"] == 2
    assert len(os.listdir(f"/proc/{warm.launcher.server().pid}/task")) == 1
    handle.kill()
    events_until_end(warm, handle)
