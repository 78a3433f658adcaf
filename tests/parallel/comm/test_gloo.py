"""Groups that break: no survivor blocks, no byte lands late, nothing is left over."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.soaked import soaked
from tests.support.strangers import Strangers, garbage

from elastune.parallel.comm import sockets
from elastune.parallel.comm.backends import GlooFactory
from elastune.parallel.comm.group import Group, GroupBroken
from elastune.parallel.comm.sockets import SocketRef, connections, listeners, sever


@pytest.fixture(autouse=True)
def _workers_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.parametrize("kind", ["all_reduce", "all_to_all", "exchange"])
def test_survivors_of_a_death_go_on(kind: str) -> None:
    import breaking_workers

    from elastune.testing.worker_processes import processes

    with processes(4, breaking_workers.interrupted, kind, [0, 2, 3]) as them:
        for rank in range(4):
            assert them.receive(rank) == ("busy",)
        them.signal(1, signal.SIGKILL)
        for rank in (0, 2, 3):
            them.send(rank, "abandon")
        for rank in (0, 2, 3):
            said, late_s, why = them.receive(rank)
            assert said == "raised"
            assert why
            assert late_s < 5
            them.send(rank, "go on")
        for rank in (0, 2, 3):
            assert them.receive(rank) == ("sum", 5.0)
            them.send(rank, "end")
        them.all_end_well(0, 2, 3)


@pytest.mark.parametrize("kind", ["all_reduce", "all_to_all", "exchange"])
def test_a_frozen_worker_holds_nobody_and_changes_nothing_when_it_wakes(kind: str) -> None:
    import breaking_workers

    from elastune.testing.worker_processes import processes

    with processes(3, breaking_workers.interrupted, kind, [0, 2]) as them:
        for rank in range(3):
            assert them.receive(rank) == ("busy",)
        them.signal(1, signal.SIGSTOP)
        for rank in (0, 2):
            them.send(rank, "abandon")
        for rank in (0, 2):
            said, late_s, _ = them.receive(rank)
            assert said == "raised"
            assert late_s < 5
        them.signal(1, signal.SIGCONT)
        them.send(1, "abandon")
        said, why = them.receive(1)
        assert said == "woken"
        assert why
        for rank in (0, 2):
            them.send(rank, "go on")
        for rank in (0, 2):
            assert them.receive(rank) == ("sum", 2.0)
            them.send(rank, "end")


def test_groups_leave_nothing_behind() -> None:
    import breaking_workers

    from elastune.testing.worker_processes import processes

    with processes(2, breaking_workers.cycles, 100) as them:
        for rank in range(2):
            _, early, late = them.receive(rank)
            assert late[0] <= early[0] + 1, "file descriptors"
            assert late[1] <= early[1] + 1, "threads"
        them.all_end_well()


@pytest.mark.parametrize("partly", [False, True])
def test_a_group_that_cannot_form_is_given_up_when_superseded(partly: bool) -> None:
    import breaking_workers

    from elastune.testing.worker_processes import processes

    with processes(3, breaking_workers.superseded, partly) as them:
        assert them.receive(2) == ("ready",)
        if partly:
            them.signal(2, signal.SIGSTOP)
        them.send(0, "form")
        them.send(1, "form")
        for rank in (0, 1):
            said, after_all, cleared, *things = them.receive(rank)
            assert said == "superseded", said
            assert after_all
            assert cleared, things
            them.send(rank, "end")


@pytest.mark.parametrize("strangers", [3, *soaked(0)])
def test_strangers_reach_no_group_that_forms(strangers: int) -> None:
    """They connect to every port of every worker, all the time, are silent, talk noise, or greet as a peer would."""
    import breaking_workers

    from elastune.testing.worker_processes import processes

    count, size = 12, 4
    with contextlib.ExitStack() as stack:
        them = stack.enter_context(processes(size, breaking_workers.forming_again, count, bool(strangers)))
        pids = [process.pid for process in them.processes if process.pid is not None]
        attackers = [stack.enter_context(Strangers(lambda: pids, garbage(seed))) for seed in range(strangers)]
        longest_s = 0.0
        for _ in range(count):
            for rank in range(size):
                said, formed_s, got = them.receive(rank)
                assert said == "used"
                assert got == [float(other) for other in range(size)]
                longest_s = max(longest_s, formed_s)
        them.all_end_well()
        assert longest_s < 15.0
        assert all(len(attacker.met) >= count for attacker in attackers), "they were there"


def test_strangers_who_come_before_a_door_is_shut_are_left_behind() -> None:
    """Gloo listens before its listener can be known; who greets as a peer in between must not be taken for one."""
    import breaking_workers

    from elastune.testing.worker_processes import processes

    with processes(3, breaking_workers.forming_at_late_doors, 2) as them:
        pids = [process.pid for process in them.processes if process.pid is not None]
        with Strangers(lambda: pids, garbage()):
            for _ in range(2):
                assert [them.receive(rank) for rank in range(3)] == [("sum", [0.0, 1.0, 2.0])] * 3
            them.all_end_well()


def test_who_waits_to_be_accepted_has_entered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        it, own = next(item for item in listeners().items() if item[0].fd == server.fileno())
        assert not sockets.entered(it, own)
        with socket.create_connection(own):
            assert sockets.entered(it, own) is (sys.platform == "linux")
            with server.accept()[0]:
                assert sockets.entered(it, own)
        assert not sockets.entered(it, own)


def test_what_several_send_each_other_at_once_comes_in_order() -> None:
    import breaking_workers

    from elastune.testing.worker_processes import processes

    with processes(3, breaking_workers.exchange) as them:
        for rank in range(3):
            assert them.receive(rank) == ("right", True)
        them.all_end_well()


def test_tensors_from_one_to_another_come_in_order_and_not_at_all_when_abandoned() -> None:
    import breaking_workers

    from elastune.testing.worker_processes import processes

    with processes(2, breaking_workers.talk) as them:
        assert [them.receive(rank) for rank in range(2)] == [("right", True)] * 2
        them.send(1, "abandon")
        assert them.receive(1) == ("broken",)


def test_letting_go_beside_a_frozen_worker_stops_nobody() -> None:
    import breaking_workers

    from elastune.testing.worker_processes import processes

    with processes(2, breaking_workers.drop_beside_a_frozen_one) as them:
        for rank in range(2):
            assert them.receive(rank) == ("ready",)
        them.signal(1, signal.SIGSTOP)
        them.send(0, "drop")
        said, called_s, gone_s, pause_s = them.receive(0)
        assert said == "dropped"
        assert called_s < 2
        assert pause_s < 2, f"let go after {gone_s} s"


def test_a_store_that_fails_breaks_the_group() -> None:
    class Failing(dist.Store):
        def set(self, key: str, value: bytes) -> None:
            raise RuntimeError("no coordinator\nand more lines")

    with pytest.raises(GroupBroken, match="no coordinator"):
        GlooFactory("lo", 30).form(Failing(), "any", 0, 2)


def test_the_others_must_come_in_time() -> None:
    with pytest.raises(GroupBroken):
        GlooFactory("lo", 0.3).form(dist.HashStore(), "any", 0, 2)


def test_an_unknown_interface_breaks_the_group() -> None:
    with pytest.raises(GroupBroken):
        GlooFactory("no-such", 30).form(dist.HashStore(), "any", 0, 2)


def test_a_wait_that_nobody_waits_for_ends() -> None:
    """The creation's thread leaves the store although the others never come."""
    given_up = threading.Event()
    threading.Timer(0.2, given_up.set).start()
    with pytest.raises(GroupBroken, match="superseded"):
        GlooFactory("lo", 3600).form(dist.HashStore(), "any", 0, 2, superseded=given_up.is_set)
    for thread in [t for t in threading.enumerate() if t.name in ("form any", "give up forming")]:
        thread.join(20)
        assert not thread.is_alive()


def test_a_lone_worker_needs_nobody() -> None:
    group = GlooFactory("lo", 1).form(dist.HashStore(), "any", 0, 1)
    data = torch.ones(3)
    group.all_reduce(data).wait()
    group.broadcast(data)
    group.drain()
    assert data.tolist() == [1.0] * 3
    assert not group.broken
    group.abandon()
    group.abandon()
    assert group.broken


def test_a_group_without_connections_of_its_own_is_only_marked() -> None:
    group = Group(0, 2, object(), "gloo")
    group.abandon("enough")
    with pytest.raises(GroupBroken, match="enough"):
        group.all_reduce(torch.ones(1))


def test_a_number_that_another_socket_has_by_now_is_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        own = server.getsockname()
        assert own in listeners().values()
        with socket.create_connection(own) as out, server.accept()[0] as into:
            result = connections(own, [])
            assert [f.fd for f in result] == [into.fileno()]
            assert {f.fd for f in connections(own, [own])} == {into.fileno(), out.fileno()}
            sever([SocketRef(out.fileno(), result[0].inode), SocketRef(into.fileno(), -1), SocketRef(9999, 1)])
            out.sendall(b"still here")
            assert into.recv(10) == b"still here"
            sever(result)
            out.settimeout(10)
            assert out.recv(10) == b""
            assert into.fileno() >= 0


def test_waiting_in_the_store_keeps_its_own_time() -> None:
    from elastune.parallel.comm.backends import _Patient

    store = _Patient(dist.HashStore(), threading.Event())
    with pytest.raises(RuntimeError):
        store.wait(["never"], timedelta(seconds=0.5))
    store.set("now", b"there")
    store.wait(["now"], timedelta(seconds=0.5))
    assert store.get("now") == b"there"
    assert store.check(["now"])
