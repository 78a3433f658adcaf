"""Steps of ``strategies.py`` on four hosts: network namespaces of this machine, links shaped to a declared rate.

Each host has one worker, which carries a quarter of the learners. Compute is real, and the four share this machine's
cores; so on hosts of their own the network would be a larger part of a step than it is here.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.adaptive.strategies_task import SMOKE, TASKS, accuracy, train
from benchmarks.common.forked import on_workers
from tests.support.hosts import INTERFACE, Network, enter
from tests.support.sessions import lone_session
from torch import nn
from torch.distributed import TCPStore

from elastune.core.run import ExecutionSettings
from elastune.core.sync_plan import SyncPlan
from elastune.parallel.comm.backends import GlooFactory
from elastune.parallel.comm.group import Group

HOSTS = 4
BURST = "64k"
LIMIT_S = 120.0
Row = dict[str, Any]


def received_bytes() -> int:
    """What has come in by this host's link. (/sys tells of the namespace in which it was mounted.)"""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith(f"{INTERFACE}:"))


def trained(group: Group, name: str, order: Row) -> Row:
    """Train as ``order`` says: "sync", "lr", "seed", "steps"; "looks": whether the first worker evaluates.

    Times are when this worker had met the others, in seconds, after as many steps, and what had come and gone by then.
    Data are loaded and groups are formed before.
    """
    task = SMOKE if name == SMOKE.name else TASKS[name]
    sets, plan = task.data(), SyncPlan.parse(order["sync"])
    each = plan.every if plan.in_rounds else 1
    times: list[tuple[int, float, int, int]] = []
    looks: list[tuple[int, float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        execution = ExecutionSettings(mode="fast", workers=group.size, num_slots=max(8, plan.learners))
        spec = {"seed": order["seed"], "sync": plan, "execution": execution, "max_steps": order["steps"]}
        session = lone_session(Path(folder), group=group, **spec)

        def after(model: nn.Module) -> None:
            assert session.trained is not None
            sent = session.trained.sync.sent_bytes
            times.append(((len(times) + 1) * each, time.perf_counter() - began, sent, received_bytes()))
            if order.get("looks") and times[-1][0] % task.every == 0 and group.rank == 0:
                looks.append((times[-1][0], time.perf_counter() - began, accuracy(model, sets.validation)))

        group.all_reduce(torch.zeros(1)).wait()  # start together
        began = time.perf_counter()
        train(session, task, order["lr"], after, sets.train)
    return {**order, "times": times, "looks": looks}


def worker(rank: int, spaces: list[str], store: tuple[str, int], name: str, orders: list[Row], out: str) -> None:
    """One host's: all ``orders`` in turn; the first writes what it found."""
    torch.set_num_threads(1)
    enter(spaces[rank])
    factory, there = GlooFactory(INTERFACE, LIMIT_S), TCPStore(*store, is_master=False)
    results = [trained(factory.form(there, f"{at}", rank, HOSTS), name, order) for at, order in enumerate(orders)]
    if rank == 0:
        Path(out).write_text(json.dumps(results))


def on_hosts(name: str, link: str, orders: Sequence[Row]) -> list[Row]:
    """Each of ``orders`` by four hosts whose links let ``link`` through, in turn."""
    store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    with Network(HOSTS) as network, tempfile.TemporaryDirectory() as folder:
        for host in network.hosts:
            host.slow(link, BURST)
        spaces, out = [host.space.path for host in network.hosts], Path(folder) / "found.json"
        on_workers(worker, HOSTS, spaces, (network.address, store.port), name, list(orders), str(out))
        data: list[Row] = json.loads(out.read_text())
    return data


def paces(row: Row) -> Row:
    """Seconds and bytes of a global batch, of one ``trained``; the first fifth of what it did is left out.

    Bytes are those of the first worker: what its collectives count as sent, and what came in by its host's link.
    Quartiles are of a strategy's meetings: steps of ``allreduce``, rounds of the others.
    """
    times = row["times"]
    settled = times[max(0, len(times) // 5 - 1) :]
    gaps = sorted((b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(settled))
    steps = settled[-1][0] - settled[0][0]
    low, _, high = statistics.quantiles(gaps, n=4, method="inclusive") if len(gaps) > 1 else gaps * 3
    return {
        "sync": row["sync"],
        "steps": steps,
        "step_ms": round(1e3 * (settled[-1][1] - settled[0][1]) / steps, 2),
        "quartiles_ms": [round(1e3 * low, 2), round(1e3 * high, 2)],
        "sent_bytes_a_step": round((settled[-1][2] - settled[0][2]) / steps),
        "received_bytes_a_step": round((settled[-1][3] - settled[0][3]) / steps),
    }
