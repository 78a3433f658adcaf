"""Topologies on links that differ: 4 hosts of one worker each, 8 MiB of sums, in fast and in exact mode.

Hosts are network namespaces of this machine whose links are shaped to a declared rate, so times are emulated. Every
topology sums the same numbers on the same processes, in turns; ``auto`` is what the measured links and the model come
to, and its modelled time stands beside the measured one. ``native`` is gloo's all-reduce in fast mode.

In the second part the link of one host turns slow in mid-run: after how many steps does ``auto`` use other routes?

    python -m benchmarks.parallel.topologies [--smoke] [--out benchmarks/results/topologies.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from benchmarks.common.forked import on_workers
from benchmarks.common.result_file import write_result
from tests.support.hosts import INTERFACE, Network, enter
from torch.distributed import TCPStore

from elastune.core.communication import Topology, routes_of
from elastune.core.plan.links import HostLinks, Sums
from elastune.core.plan.links import best_topology as best
from elastune.core.slots import cut
from elastune.parallel.comm.backends import GlooFactory
from elastune.parallel.comm.exact import ExactReducer
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.network_probe import probe_links
from elastune.parallel.comm.reducer import FlatReducer
from elastune.train.adaptation.routing import LinkWatch

HOSTS, SLOTS, LIMIT_S, BURST = 4, 4, 120.0, "64k"
NATIVE = Topology("native")
NAMED = {
    "one slow": ("native", "ring", "tree", "star", "parents=[0,0,0,2]", "parents=[3,3,1,3]"),
    "equal": ("native", "tree"),
}
CASES = {"one slow": ("", "", "", "200mbit"), "equal": ("200mbit",) * HOSTS}


class Bench:
    """One worker's group and reducers, whose routes are changed."""

    def __init__(self, rank: int, names: list[str], store: tuple[str, int], size: int) -> None:
        there = TCPStore(*store, is_master=False)
        self.group: Group = GlooFactory(INTERFACE, LIMIT_S).form(there, "all", rank, HOSTS)
        self.names, self.size = names, size
        like = [torch.empty(size)]
        self.reducers: dict[str, Any] = {
            "fast": FlatReducer(like, self.group),
            "exact": ExactReducer(like, SLOTS, self.group),
        }
        self.value = torch.randn(size, generator=torch.Generator().manual_seed(rank))

    def route(self, topology: Topology) -> None:
        self.group.routes = routes_of(topology, HOSTS, self.names)
        self.group.chunk_kib = topology.chunk_kib
        for reducer in self.reducers.values():
            reducer.regroup(self.group)

    def choose(self, mode: str, used: Topology) -> tuple[Topology, dict[str, float]]:
        """What auto would use, and the modelled seconds; alike on all workers."""
        rows = self.group.gather_floats(probe_links(self.group, self.names))
        latency_s, rates = (tuple(tuple(row[way::2]) for row in rows) for way in (0, 1))
        sums = Sums(self.size, 4, tuple(self.names), SLOTS if mode == "exact" else 0)
        chosen, seconds = best(sums, HostLinks.steadied(tuple(self.names), latency_s, rates), used)
        return chosen, dict(seconds)

    def reduce(self, mode: str) -> tuple[float, float, torch.Tensor]:
        """Seconds of one reduction, how long this worker has waited in it, and its sums."""
        reducer = self.reducers[mode]
        reducer.begin()
        for slot in cut(SLOTS, HOSTS)[self.group.rank]:
            reducer.begin_slot(slot, last=True)
        self.group.all_reduce(torch.zeros(1)).wait()  # start together
        started = time.perf_counter()
        reducer.put(0, self.value)
        (total,) = reducer.finish()
        seconds = time.perf_counter() - started
        return seconds, reducer.wait_s, total


def compare(
    rank: int, spaces: list[str], names: list[str], store: tuple[str, int], case: str, size: int, rounds: int, out: str
) -> None:
    """Time all topologies in turns; the first worker writes what it has seen."""
    torch.set_num_threads(1)
    enter(spaces[rank])
    bench, result, digests = Bench(rank, names, store, size), {}, set()
    for mode in ("fast", "exact"):
        auto, modelled = bench.choose(mode, NATIVE)
        ways = {text: Topology.parse(text) for text in NAMED[case]} | {"auto": auto}
        times: dict[str, list[float]] = {text: [] for text in ways}
        for turn in range(rounds + 1):
            for text, topology in ways.items():
                bench.route(topology)
                seconds, _, total = bench.reduce(mode)
                bench.group.all_reduce(torch.zeros(1)).wait()
                if turn:
                    times[text].append(seconds)
                elif mode == "exact":
                    digests.add(sha256(total.numpy().tobytes()).hexdigest())
        modelled_ms = {text: round(1e3 * s, 1) for text, s in modelled.items()}
        result[mode] = {"times": times, "auto": str(auto), "modelled_ms": modelled_ms}
    if rank == 0:
        Path(out).write_text(json.dumps({"modes": result, "bits": len(digests)}))


def turn_slow(
    rank: int, spaces: list[str], names: list[str], store: tuple[str, int], size: int, steps: int, out: str
) -> None:
    """Steps under auto; the first worker says when a third of them is done, and when routes have changed."""
    torch.set_num_threads(1)
    enter(spaces[rank])
    bench, watch, used, result = Bench(rank, names, store, size), LinkWatch(), NATIVE, []
    bench.choose("fast", used)
    for step in range(steps):
        if step == steps // 3:
            if rank == 0:
                Path(f"{out}.slow").touch()
            while not Path(f"{out}.slowed").exists():
                time.sleep(0.01)
        seconds, wait_s, _ = bench.reduce("fast")
        watch.observe([wait for (wait,) in bench.group.gather_floats([wait_s])])
        result.append((seconds, str(used)))
        if watch.due:
            watch.begin()
            used, _ = bench.choose("fast", used)
            bench.route(used)
    if rank == 0:
        Path(out).write_text(json.dumps(result))


@contextmanager
def network(rates: tuple[str, ...]) -> Iterator[tuple[Network, list[Any], TCPStore, Path]]:
    """Hosts with these links; what workers are given; the store that they meet at; where they write."""
    store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    with Network(HOSTS) as net, tempfile.TemporaryDirectory() as folder:
        for host, rate in zip(net.hosts, rates, strict=True):
            if rate:
                host.slow(rate, BURST)
        names = [host.address for host in net.hosts]
        yield net, [[host.space.path for host in net.hosts], names, (net.address, store.port)], store, Path(folder)


def compared(case: str, size: int, rounds: int) -> list[dict[str, Any]]:
    """Rows of one case: medians, and the median of paired ratios to native."""
    with network(CASES[case]) as (_, given, _, folder):
        on_workers(compare, HOSTS, *given, case, size, rounds, str(folder / "found"))
        data = json.loads((folder / "found").read_text())
    assert data["bits"] == 1, "in exact mode all topologies have the same bits"
    rows = []
    for mode, result in data["modes"].items():
        for text, times in result["times"].items():
            ratios = sorted(own / native for own, native in zip(times, result["times"]["native"], strict=True))
            row = {
                "links": case, "mode": mode, "topology": text, "ms": round(1e3 * statistics.median(times), 1),
                "ratio": round(statistics.median(ratios), 3), "lowest": round(ratios[0], 2),
                "highest": round(ratios[-1], 2),
            }  # fmt: skip
            if text == "auto":
                row |= {"is": result["auto"], "modelled_ms": result["modelled_ms"]}
            rows.append(row)
    return rows


def answered(size: int, steps: int) -> dict[str, Any]:
    """After how many steps with a slow link auto uses other routes."""
    with network(("",) * HOSTS) as (net, given, _, folder):
        out = folder / "told"

        def slow() -> None:
            while not Path(f"{out}.slow").exists():
                time.sleep(0.01)
            net.hosts[3].slow("200mbit", BURST)
            Path(f"{out}.slowed").touch()

        threading.Thread(target=slow, daemon=True).start()
        on_workers(turn_slow, HOSTS, *given, size, steps, str(out))
        data = json.loads(out.read_text())
    from_step = steps // 3
    changed = next((at for at, (_, used) in enumerate(data) if at > from_step and used != "native"), None)
    before, after = data[:from_step], data[from_step:]
    return {
        "steps_until_answered": None if changed is None else changed - from_step,
        "changed_before": sum(used != "native" for _, used in before),
        "ms_before": round(1e3 * statistics.median(s for s, _ in before), 1),
        "ms_slow_native": round(1e3 * statistics.median([s for s, used in after if used == "native"]), 1),
        "ms_slow_auto": round(1e3 * statistics.median([s for s, used in after if used != "native"] or [0.0]), 1),
        "is": data[-1][1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one case, few rounds")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", type=int, default=2 << 20, help="float32 numbers that are summed")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    size, rounds = (1 << 16, 1) if args.smoke else (args.size, args.rounds)
    rows = [row for case in list(CASES)[: 1 if args.smoke else None] for row in compared(case, size, rounds)]
    for row in rows:
        what = f" = {row['is']}, modelled {row['modelled_ms']}" if "is" in row else ""
        print(
            f"{row['links']:8} {row['mode']:5} {row['topology']:18} {row['ms']:7.1f} ms  {row['ratio']:.2f} x native "
            f"[{row['lowest']:.2f}-{row['highest']:.2f}]{what}",
            flush=True,
        )
    live = {} if args.smoke else answered(size, 45)
    print(live, flush=True)
    if args.out:
        result = {
            "rounds": rounds,
            "summed_bytes": 4 * size, "slots": SLOTS, "emulated": "links shaped (tbf) between namespaces",
            "rows": rows, "turns_slow": live,
        }  # fmt: skip
        write_result(args.out, result)


if __name__ == "__main__":
    main()
