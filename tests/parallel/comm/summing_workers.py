"""Workers that check their routes, and try some: what test_route_check.py and test_route_trial.py run."""

from __future__ import annotations

import time
from typing import Any

import torch

from elastune.core.communication import Topology, routes_of
from elastune.parallel.comm import relay as route_check
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.network_probe import time_routes
from elastune.parallel.comm.reducer import FlatReducer
from elastune.parallel.comm.relay import RouteNodes
from elastune.testing.worker_processes import Worker


def checked(worker: Worker, topology: str) -> None:
    """Says whether sums are found right, whether they are where one worker loses what it is given, and what comes of a
    sum by routes that were laid before others."""
    group = worker.form("first")
    group.routes = routes_of(Topology.parse(topology), worker.size)
    right = route_check.adds_up(group)
    if worker.rank == 2:
        RouteNodes.add = lambda self, rows: [rows[0][1] * 0]  # type: ignore[method-assign]
    wrong = route_check.adds_up(group)
    reducer = FlatReducer([torch.zeros(4)], group)
    group.routes = routes_of(Topology.parse("ring" if topology != "ring" else "tree"), worker.size)
    reducer.begin()
    reducer.begin_slot(worker.rank, last=True)
    try:
        reducer.put(0, torch.ones(4))
        result = ""
    except RuntimeError as error:
        result = str(error)
    worker.send("ended", right, wrong, result)
    worker.receive()


def tried(worker: Worker, num_slots: int) -> None:
    """Says how long sums took on no routes, a ring, which is slow, and a tree."""
    group, begin_send = worker.form("first"), Group.begin_send
    laid = [routes_of(Topology(shape), worker.size) for shape in ("native", "ring", "tree")]

    def slow(self: Group, *args: Any, **how: Any) -> Any:
        if self.routes == laid[1]:
            time.sleep(0.1)
        return begin_send(self, *args, **how)

    Group.begin_send = slow  # type: ignore[method-assign]
    result = time_routes(group, [(routes, 512) for routes in laid], 1_000, num_slots)
    worker.send("ended", result, (group.routes, group.chunk_kib))
    worker.receive()
