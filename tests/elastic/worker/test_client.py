from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from tests.support.members_kit import LIMIT_S, Raw, begun, coordinating, eventually, let_in, members

from elastune.core.errors import UserError
from elastune.core.sync_plan import SyncPlan
from elastune.elastic.coordinator import machine
from elastune.elastic.coordinator.coordinator import Coordinator
from elastune.elastic.wire import transport
from elastune.elastic.wire.messages import ResizeAsked
from elastune.elastic.wire.transport import ProtocolError
from elastune.elastic.wire.view import View
from elastune.elastic.worker.client import ORPHANED_CODE, CoordinatorClient, RunOver

# A worker process that takes part, then does what its argument says.
WORKER = """
import os, sys, time
from elastune.elastic.worker.client import CoordinatorClient
address, token, worker, then = sys.argv[1:]
member = CoordinatorClient(address, token, int(worker))
member.ready()
version = member.await_view(0, 30)
member.running(version.number, 0)
print("running", flush=True)
if then == "fork" and os.fork() == 0:
    time.sleep(60)
time.sleep(60)
"""


def process(coordinator: Coordinator, worker: int, then: str = "wait") -> subprocess.Popen:
    command = [sys.executable, "-c", WORKER, coordinator.address, coordinator.token, str(worker), then]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    with coordinating(2) as one:
        yield one


def test_a_run_from_its_first_version_to_its_end(coordinator: Coordinator) -> None:
    with members(coordinator, 0, 1) as (first, second):
        assert not first.joins
        number = begun([first, second])
        assert first.latest is not None
        assert (first.latest.members, first.latest.initial) == ((0, 1), True)
        assert not first.superseded(number)
        assert first.pending(number) is None
        for member in (first, second):
            member.done()
        assert first.await_bye(number) is None
        assert second.await_bye(number) is None
        assert first.superseded(number)
        with pytest.raises(RunOver, match="the run is over"):
            first.await_view(number, LIMIT_S)


def test_a_joiner_is_taken_in_and_confirmed(coordinator: Coordinator) -> None:
    with members(coordinator, 0, 1) as old:
        number = begun(old)
        coordinator.capacity(1)
        coordinator.ask(ResizeAsked(3))
        (start,) = eventually(coordinator.take)
        with members(coordinator, *start.workers) as (joiner,):
            assert joiner.joins
            joiner.ready()
            version = joiner.await_view(0, LIMIT_S)
            assert (version.members, version.joiners, version.scheduled) == ((0, 1, 2), (2,), True)
            assert eventually(lambda: old[0].pending(number)) == version
            assert not old[0].superseded(number)
            with pytest.raises(TimeoutError):
                old[0].await_view(number, 0.05)  # its members enter it at their boundary, not at once
            for member in (*old, joiner):
                member.running(version.number, 7)
            assert joiner.await_confirmed(version.number)
            assert coordinator.members == [0, 1, 2]


def test_a_joiner_whose_hand_over_breaks_is_told_so(coordinator: Coordinator) -> None:
    with members(coordinator, 0, 1) as old:
        number = begun(old)
        coordinator.capacity(1)
        coordinator.ask(ResizeAsked(3))
        (start,) = eventually(coordinator.take)
        with members(coordinator, *start.workers) as (joiner,):
            joiner.ready()
            version = joiner.await_view(number, LIMIT_S)
            old[1].close()  # dies in the hand-over
            assert not joiner.await_confirmed(version.number)
            assert joiner.superseded(version.number)
            after = old[0].await_view(number, LIMIT_S)
            assert (after.members, after.scheduled) == ((0,), False)


def test_a_death_breaks_the_version_for_the_others_at_once(coordinator: Coordinator) -> None:
    with members(coordinator, 0, 1) as (first, second):
        heard: list[tuple[View, str]] = []

        def hook(version: View) -> None:
            heard.append((version, threading.current_thread().name))
            raise RuntimeError("a hook that fails must not cost the connection")

        first.on_break = hook
        number = begun([first, second])
        second.close()
        version = first.await_view(number, LIMIT_S)
        assert (version.members, version.scheduled, version.initial) == ((0,), False, False)
        assert first.superseded(number)
        eventually(lambda: (version, "member") in heard)
        first.running(version.number, 5)
        first.done()
        assert first.await_bye(version.number) is None


def test_waiting_for_the_end_is_ended_by_a_version_to_enter() -> None:
    with coordinating(3) as coordinator, members(coordinator, 0, 1, 2) as result:
        number = begun(result)
        result[0].done()
        result[2].close()
        version = result[0].await_bye(number)
        assert version is not None
        assert version.members == (0, 1)


def test_a_killed_process_is_noticed_by_its_end_of_connection_even_if_it_had_forked(coordinator: Coordinator) -> None:
    other = process(coordinator, 1, "fork")
    try:
        with members(coordinator, 0) as (first,):
            number = begun([first])
            assert other.stdout is not None
            assert other.stdout.readline() == "running\n"
            time.sleep(0.2)  # let it fork
            os.kill(other.pid, signal.SIGKILL)  # the child lives on, without the connection
            version = first.await_view(number, 2.5)  # half a heartbeat
            assert version.members == (0,)
    finally:
        os.killpg(other.pid, signal.SIGKILL)
        other.wait()


@pytest.mark.soak
def test_a_frozen_worker_is_lost_and_ends_when_it_wakes() -> None:
    with coordinating(2, heartbeat_s=0.5) as coordinator, members(coordinator, 0) as (first,):
        other = process(coordinator, 1)
        try:
            number = begun([first])
            assert other.stdout is not None
            assert other.stdout.readline() == "running\n"
            os.kill(other.pid, signal.SIGSTOP)
            assert first.await_view(number, LIMIT_S).members == (0,)
            os.kill(other.pid, signal.SIGCONT)
            assert other.wait(LIMIT_S) == ORPHANED_CODE
            assert other.stderr is not None
            assert "the coordinator is gone" in other.stderr.read()
        finally:
            other.kill()
            other.wait()


def test_a_worker_ends_with_its_coordinator() -> None:
    with coordinating(1) as coordinator:
        other = process(coordinator, 0)
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "running\n"
            coordinator.close()
            assert other.wait(LIMIT_S) == ORPHANED_CODE
        finally:
            other.kill()
            other.wait()


def test_who_waits_is_told_that_the_coordinator_is_gone() -> None:
    with coordinating(1) as coordinator, members(coordinator, 0) as (first,):
        orphaned: list[str] = []
        first.on_orphaned = orphaned.append
        threading.Timer(0.1, coordinator.close).start()
        with pytest.raises(RunOver, match="gone"):
            first.await_view(0, LIMIT_S)
        eventually(lambda: orphaned)


def test_a_silent_coordinator_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def welcome() -> None:
            connection, _ = listener.accept()
            let_in(connection, "token")
            connection.sendall(b'{"kind":"welcome","joins":false,"beat_s":0.02,"silence_s":0.1}\n')
            kept.append(connection)

        kept: list[socket.socket] = []
        threading.Thread(target=welcome).start()
        member = CoordinatorClient(f"127.0.0.1:{listener.getsockname()[1]}", "token", 0)
        orphaned: list[str] = []
        member.on_orphaned = orphaned.append
        assert "silent" in eventually(lambda: orphaned)[0]
        member.close()
        kept[0].close()


def test_a_signal_handler_may_send_while_its_thread_is_sending(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(machine, "changes", lambda state, request: bool(asked.append(request)))
    with members(coordinator, 0, 1) as (first, _second):
        sent = {1: 0, 2: 0}

        def send(workers: int) -> None:
            sent[workers] += 1
            first.resize(workers)

        before = signal.signal(signal.SIGALRM, lambda *_: send(1))
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
            until = time.monotonic() + 0.5
            while time.monotonic() < until:
                send(2)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert sent[1] > 10
        eventually(lambda: len(asked) == sent[1] + sent[2])


def test_doing_is_cheap_and_told(coordinator: Coordinator) -> None:
    with members(coordinator, 0, 1) as (first, _):
        started = time.process_time()
        for step in range(20_000):
            first.doing("reducing", step, 99)
        assert (time.process_time() - started) / 20_000 < 20e-6
        peer = coordinator._peers.get(0)
        assert peer is not None
        eventually(lambda: (peer.beat.step, peer.beat.doing, peer.beat.size_bytes) == (19_999, "reducing", 99))


@pytest.mark.parametrize(("grace", "every_s"), [(0.07, 0.07), (0.0, 0.05), (9.0, 0.5)])
def test_from_the_first_round_with_a_quorum_on_beats_come_as_often_as_its_grace(grace: float, every_s: float) -> None:
    """But no more often than 20 times a second, and no more seldom than without one."""
    with coordinating(1, heartbeat_s=60.0) as coordinator, members(coordinator, 0) as (first,):
        peer = coordinator._peers.get(0)
        assert peer is not None
        eventually(lambda: peer.beat.every_s == 0.5)
        first.report_round(1, 0, 1, SyncPlan("local", 4, 3, quorum=3, grace=grace), 1, 0.1)
        eventually(lambda: peer.beat.every_s == every_s)
        came = set[float]()
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            came.add(peer.beat_at)
            time.sleep(0.005)
        assert (len(came) > 6) == (every_s < 0.1)


@pytest.mark.parametrize("address", ["", "nowhere", "host:", ":5", "host:99999", "host:5x", "host:-1"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(UserError, match="HOST:PORT"):
        CoordinatorClient(address, "token", 0)


@pytest.mark.soak
def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport.dial, "__defaults__", (0.2,))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(UserError, match="must reach its coordinator"):
        CoordinatorClient(f"127.0.0.1:{port}", "token", 0)


def test_a_coordinator_that_starts_later_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    servers: list[socket.socket] = []

    def serve() -> None:
        servers.append(socket.create_server(("127.0.0.1", port)))
        connection, _ = servers[0].accept()
        let_in(connection, "token")
        connection.sendall(b'{"kind":"welcome","joins":true,"beat_s":0.5}\n')
        servers.append(connection)

    threading.Timer(0.3, serve).start()
    member = CoordinatorClient(f"127.0.0.1:{port}", "token", 0)
    assert member.joins
    member.close()
    for server in servers:
        server.close()


@pytest.mark.parametrize("token", ["token", "another", None])
@pytest.mark.parametrize("answer", [b"", b"rubbish\n", b'{"kind":"bye"}\n', b"x" * (2 << 20)])
def test_what_is_no_coordinator_is_refused(token: str | None, answer: bytes) -> None:
    """A server without the token, one that does not ask for it, one that has it and lost its mind."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(LIMIT_S)
                with contextlib.suppress(ProtocolError, ConnectionError):
                    if token:
                        let_in(connection, token)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(UserError, match="must let its workers in"):
            CoordinatorClient(f"127.0.0.1:{listener.getsockname()[1]}", "token", 0)
        thread.join()


def test_a_wrong_token_and_a_taken_number_are_refused(coordinator: Coordinator) -> None:
    with members(coordinator, 0), pytest.raises(UserError, match="number of its own"):
        CoordinatorClient(coordinator.address, coordinator.token, 0)
    with pytest.raises(UserError, match="the token of this run"):
        CoordinatorClient(coordinator.address, "0" * 32, 1)
    with Raw(coordinator) as raw:
        raw.hello(coordinator, 1)
        assert raw.receive() is not None


def test_what_is_not_finite_is_refused_where_it_is_said(coordinator: Coordinator) -> None:
    with members(coordinator, 0) as (first,), pytest.raises(ValueError, match="finite"):
        first.noticed(float("inf"), "spot")
