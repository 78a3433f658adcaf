"""Which backend is chosen, and the NCCL groups as far as they can be had without two GPUs."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastune.parallel.comm import process_groups as backend
from elastune.parallel.comm.backends import Communicator, GlooFactory, HostWaits, NcclFactory
from elastune.parallel.comm.group import Group, GroupBroken
from elastune.parallel.comm.process_groups import backend_for, factory_for


@pytest.mark.parametrize(
    ("device", "own_device", "available", "chosen"),
    [
        ("cuda:0", True, True, "nccl"),
        ("cuda", True, True, "nccl"),
        ("cuda:0", False, True, "gloo"),
        ("cuda:0", True, False, "gloo"),
        ("cpu", True, True, "gloo"),
    ],
)
def test_nccl_is_for_one_gpu_a_worker(
    monkeypatch: pytest.MonkeyPatch, device: str, own_device: bool, available: bool, chosen: str
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: available)
    assert backend_for(device, own_device=own_device) == chosen
    factory = factory_for(device, own_device=own_device, interface="lo", timeout_s=1.0)
    assert factory.backend == chosen
    assert isinstance(factory, NcclFactory if chosen == "nccl" else GlooFactory)


def test_a_lone_worker_keeps_its_results_where_others_will_want_them() -> None:
    device = torch.device("cuda:3")
    assert NcclFactory(device, 1.0).form(dist.HashStore(), "any", 0, 1).wire == device  # type: ignore[attr-defined]
    assert GlooFactory("lo", 1.0).form(dist.HashStore(), "any", 0, 1).wire.type == "cpu"  # type: ignore[attr-defined]


class FakeWork:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: str | None = None

    def is_completed(self) -> bool:
        return self.done.is_set()

    def wait(self) -> None:
        assert self.done.is_set(), "on the host, only once the result is here"
        if self.error is not None:
            raise RuntimeError(self.error)


class FakeNccl:
    """What of ``ProcessGroupNCCL`` is used, with works that end when the test says so, or by ``abort``."""

    def __init__(self) -> None:
        self.works: list[FakeWork] = []
        self.aborted = 0

    def allreduce(self, tensors: list[torch.Tensor]) -> FakeWork:
        self.works.append(FakeWork())
        return self.works[-1]

    def abort(self) -> None:
        """As in torch: what was under way ends with its event recorded, and no error."""
        self.aborted += 1
        time.sleep(0.05)
        for work in self.works:
            work.done.set()


def group_of(fake: FakeNccl) -> Group:
    communicator = Communicator(fake)
    return Group(0, 2, HostWaits(fake, communicator), "nccl", torch.device("cpu"), connections=communicator)


def test_a_result_is_awaited_on_the_host() -> None:
    fake = FakeNccl()
    work = group_of(fake).all_reduce(torch.ones(1))
    threading.Timer(0.1, fake.works[0].done.set).start()
    started = time.monotonic()
    work.wait()
    assert time.monotonic() - started >= 0.09
    assert not fake.aborted


def test_whoever_waits_hears_of_the_end_of_a_group() -> None:
    fake = FakeNccl()
    group = group_of(fake)
    work = group.all_reduce(torch.ones(1))
    threading.Timer(0.1, group.abandon).start()
    with pytest.raises(GroupBroken):
        work.wait()
    with pytest.raises(GroupBroken):
        group.all_reduce(torch.ones(1))
    with pytest.raises(GroupBroken):  # not the sum, though the work has ended and says nothing of an error
        work.wait()
    assert group.drain(), "its buffers may be used again once the communicator has ended"
    group.abandon()
    assert fake.aborted == 1


def test_a_collective_that_fails_breaks_its_group() -> None:
    fake = FakeNccl()
    group = group_of(fake)
    work = group.all_reduce(torch.ones(1))
    fake.works[0].error = "unhandled system error"
    fake.works[0].done.set()
    with pytest.raises(GroupBroken, match="unhandled system error"):
        work.wait()
    assert group.broken


def test_a_wait_that_times_out_harms_nothing() -> None:
    fake = FakeNccl()
    work = HostWaits(fake, Communicator(fake)).allreduce([torch.ones(1)])
    with pytest.raises(RuntimeError, match="not yet"):
        work.wait(timedelta(milliseconds=5))
    fake.works[0].done.set()
    work.wait(timedelta(milliseconds=5))


def test_what_is_called_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The methods that ``Group`` calls belong to every backend of this torch."""
    for name in ("alltoall_base", "_allgather_base", "allreduce", "broadcast", "send", "recv"):
        assert callable(getattr(dist.ProcessGroupGloo, name))
    assert callable(getattr(torch._C._distributed_c10d.Backend, "eager_connect_single_device", None))
    assert backend.factory_for("cpu", own_device=True, interface="lo", timeout_s=1.0).backend == "gloo"


@pytest.mark.gpu
def test_nccl_groups_form_reduce_and_are_given_up() -> None:
    """Needs two GPUs."""
    if not torch.cuda.is_available() or torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: NCCL takes one worker a GPU")
    results: dict[int, Any] = {}
    store = dist.HashStore()  # type: ignore[attr-defined]

    def one(rank: int) -> None:
        device = torch.device(f"cuda:{rank}")
        torch.cuda.set_device(device)
        group = NcclFactory(device, 60.0).form(store, "first", rank, 2)
        data = torch.full((1000,), float(rank + 1), device=device)
        group.all_reduce(data).wait()
        results[rank] = float(data[0])
        if rank == 0:
            work = group.all_reduce(data)  # the other never comes
            threading.Timer(0.5, group.abandon).start()
            with pytest.raises(GroupBroken):
                work.wait()
            group.drain()
        second = NcclFactory(device, 60.0).form(store, "second", rank, 2)
        second.all_reduce(data).wait()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert results == {0: 3.0, 1: 3.0}
