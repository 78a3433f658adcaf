"""What NCCL does on ONE GPU, as JSON: for ``test_nccl.py``, in a process of its own, which a failing NCCL may end."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from elastune.parallel.comm.backends import NcclFactory, _NcclForming
from elastune.parallel.comm.group import Group, GroupBroken

DEVICE = torch.device("cuda:0")
LIMIT_S = 60.0


def form(store: dist.Store, name: str, rank: int = 0, size: int = 1) -> Group:
    """A communicator even for one worker; the factory needs none there."""
    return _NcclForming(store, name, rank, size, NcclFactory(DEVICE, LIMIT_S)).result(lambda: False)


def reduce(group: Group, data: torch.Tensor) -> Any:
    return group._start(lambda pg: pg.allreduce([data]))


def collectives(group: Group) -> dict[str, bool]:
    """Whether each gives what it must for a world of one."""
    data = torch.arange(1000.0, device=DEVICE)
    moved, gathered, summed = torch.zeros_like(data), torch.zeros_like(data), data.clone()
    group.all_to_all(moved, data, [1000], [1000]).wait()
    group.all_gather(gathered, data).wait()
    reduce(group, summed).wait()
    outcome, options = data.clone(), dist.BroadcastOptions()
    group._start(lambda pg: pg.broadcast([outcome], options)).wait()
    results = {"all_to_all": moved, "all_gather": gathered, "all_reduce": summed, "broadcast": outcome}
    return {name: torch.equal(result, data) for name, result in results.items()}


def alone() -> dict[str, Any]:
    store = dist.HashStore()
    group = form(store, "first")
    results: dict[str, Any] = {"collectives": collectives(group)}

    busy_s = 1.0
    torch.cuda._sleep(int(busy_s * 1.5e9))  # cycles: the sum cannot begin before
    data = torch.ones(1000, device=DEVICE)
    work = reduce(group, data)
    started = time.monotonic()
    threading.Timer(0.2, group.abandon).start()
    try:
        work.wait()
        results["abandoned"] = "counted as done"
    except GroupBroken as broken:
        results["abandoned"] = str(broken)
    results["waited_s"] = time.monotonic() - started
    results["drained"] = group.drain()

    times = []
    for number in range(5):
        started = time.monotonic()
        group = form(store, f"again {number}")
        reduce(group, data).wait()
        times.append(time.monotonic() - started)
        group.abandon()
        results["drained"] = results["drained"] and group.drain()
    results["formed_s"] = times
    results["sum"] = float(data[0])
    return results


def shared() -> dict[str, Any]:
    """Two ranks on one GPU."""
    store = dist.HashStore()
    result = ["neither formed nor refused"] * 2

    def one(rank: int) -> None:
        try:
            form(store, "shared", rank, 2)
            result[rank] = "formed"
        except GroupBroken as broken:
            result[rank] = str(broken)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return {"told": list(result)}


if __name__ == "__main__":
    torch.cuda.set_device(DEVICE)
    print(json.dumps({"alone": alone, "shared": shared}[sys.argv[1]]()), flush=True)
    os._exit(0)  # as workers end
