"""The rendezvous of process groups, with the real ones, among real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from tests.support.members_kit import LIMIT_S, begun, coordinating, eventually, members
from torch.distributed import PrefixStore, ProcessGroupGloo

from elastune.elastic.coordinator.coordinator import Coordinator
from elastune.elastic.wire.messages import Broken
from elastune.elastic.worker.elastic_group import MemberStore

VERSIONS = 50
# One process imports torch and forks the workers: imports would take most of the time.
WORKERS = f"""
import os, sys, time
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo
from elastune.elastic.worker.client import CoordinatorClient
from elastune.elastic.worker.elastic_group import MemberStore

def work(worker):
    member = CoordinatorClient(*sys.argv[1:], worker)
    store = MemberStore(member)
    options = ProcessGroupGloo._Options()
    options._devices = [ProcessGroupGloo.create_device(interface="lo")]
    options._threads = 1
    member.ready()
    version = member.await_view(0, 60)
    for turn in range({VERSIONS}):
        number, size = version.number, len(version.members)
        group = ProcessGroupGloo(PrefixStore(str(number), store), version.ranks[worker], size, options)
        total = torch.full((4,), float(worker + 1))
        group.allreduce([total]).wait()
        assert total.tolist() == [6.0] * 4, total
        kept = len(member._board.items())
        assert kept <= 2 * size, kept
        group.shutdown()
        del group
        member.running(number, turn)
        if turn < {VERSIONS - 1}:
            version = member.await_view(number, 60)
    member.done()
    assert member.await_bye(number) is None

children = []
for worker in range(3):
    if (child := os.fork()) == 0:
        try:
            work(worker)
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children], flush=True)
"""


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    with coordinating(3, low=3) as one:
        yield one


@pytest.mark.soak
def test_process_groups_form_through_it_again_and_again(coordinator: Coordinator) -> None:
    command = [sys.executable, "-c", WORKERS, coordinator.address, coordinator.token]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        for number in range(1, VERSIONS):

            def settled(number: int = number) -> bool:
                current = coordinator._state.current
                return (current is not None and current.number == number) or process.poll() is not None

            eventually(settled)
            coordinator._call(lambda number=number: coordinator._feed(0, Broken(number, "again")))
        lines = process.communicate(timeout=60)[0].splitlines()
        assert lines[-1:] == ["[0, 0, 0]"]  # torch 2.9's gloo says before that who is connected
        assert len(coordinator._board.items()) <= 2 * 3
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_wait_ends_once_the_version_is_superseded(coordinator: Coordinator) -> None:
    with members(coordinator, 0, 1, 2) as result:
        number = begun(result)
        rendezvous = MemberStore(result[0])
        store = PrefixStore(str(number), rendezvous)
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(interface="lo")]
        threading.Timer(0.2, result[2].close).start()
        with pytest.raises(RuntimeError, match=f"view {number} is superseded"):
            ProcessGroupGloo(store, 0, 3, options)


def test_a_wait_has_its_limit(coordinator: Coordinator) -> None:
    with members(coordinator, 0) as (member,), pytest.raises(RuntimeError, match=r"nobody published 0/a within 0.1 s"):
        MemberStore(member).wait(["0/a"], timedelta(seconds=0.1))


def test_bytes_come_through_as_they_are(coordinator: Coordinator) -> None:
    with members(coordinator, 0, 1, 2) as result:
        number = begun(result)
        stores = [MemberStore(member) for member in result[:2]]
        mine, other = (PrefixStore(str(number), store) for store in stores)
        data = bytes(range(256))
        assert not other.check(["a"])
        mine.set("a", data)
        other.wait(["a"], timedelta(seconds=LIMIT_S))
        assert other.get("a") == data
        assert other.check(["a"])
        assert mine.multi_get(["a", "a"]) == [data, data]
        mine.set("a", "again")
        until = time.monotonic() + LIMIT_S
        while other.get("a") != b"again" and time.monotonic() < until:
            time.sleep(0.01)
        assert other.get("a") == b"again"


def test_a_value_of_an_old_version_is_forgotten(coordinator: Coordinator) -> None:
    with members(coordinator, 0, 1, 2) as result:
        number = begun(result)
        store = MemberStore(result[0])
        store.set(f"{number}/a", b"1")
        for turn in range(2):
            result[0].broken(number + turn, "again")
            for member in result:
                assert member.await_view(number + turn, LIMIT_S).number == number + turn + 1
                member.running(number + turn + 1, turn + 1)
        assert not store.check([f"{number}/a"])
