"""Workers that check their routes: what test_route_check.py runs."""

from __future__ import annotations

import torch

from elastune.comm import route_check
from elastune.comm.flat import FlatReducer
from elastune.comm.relay import Passing
from elastune.core.routes import routes_of
from elastune.core.topology import Topology
from elastune.testing.worker_processes import Worker


def checked(worker: Worker, topology: str) -> None:
    """Says whether sums are found right, whether they are where one worker loses what it is given, and what comes of a
    sum by routes that were laid before others."""
    group = worker.form("first")
    group.routes = routes_of(Topology.parse(topology), worker.size)
    right = route_check.adds_up(group)
    if worker.rank == 2:
        Passing.add = lambda self, rows: [rows[0][1] * 0]  # type: ignore[method-assign]
    wrong = route_check.adds_up(group)
    reducer = FlatReducer([torch.zeros(4)], group)
    group.routes = routes_of(Topology.parse("ring" if topology != "ring" else "tree"), worker.size)
    reducer.begin()
    reducer.begin_slot(worker.rank, last=True)
    try:
        reducer.put(0, torch.ones(4))
        told = ""
    except RuntimeError as error:
        told = str(error)
    worker.say("ended", right, wrong, told)
    worker.hear()
