"""Sums in canonical order over several hosts: everybody to everybody, or first within each host and then across.

Hosts are network namespaces of this machine whose links are shaped to a declared rate, so times are emulated; bytes are
counted on the hosts' interfaces. Both ways sum the same numbers on the same processes, in turns. Time is that of a
reduction whose slots are all in: nothing of it is hidden behind a backward pass. Groups are formed before.

    python -m benchmarks.parallel.levels [--smoke] [--out benchmarks/results/levels.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from benchmarks.common.forked import on_workers
from benchmarks.common.result_file import write_result
from tests.support.hosts import INTERFACE, Network, enter
from torch.distributed import TCPStore

from elastune.core.mesh import Mesh
from elastune.core.slots import cut
from elastune.parallel.comm.backends import GlooFactory
from elastune.parallel.comm.exact import ExactReducer
from elastune.parallel.comm.process_groups import Comms, form_comms

LINKS = ("200mbit", "1gbit", "none")
SHAPES = ((2, 2), (4, 2), (2, 4))
SLOTS = 8
BURST = "512k"
TENSORS = 8
LIMIT_S = 120.0


def received_bytes() -> int:
    """What has come in by this host's link. (/sys tells of the namespace in which it was mounted.)"""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[0]) for line in lines if line.strip().startswith(f"{INTERFACE}:"))


def reduce(reducer: ExactReducer, comms: Comms, values: dict[int, list[torch.Tensor]]) -> list[torch.Tensor]:
    """One reduction of what each slot of this worker has."""
    reducer.begin()
    for slot, tensors in values.items():
        reducer.begin_slot(slot, last=slot == max(values))
        for index, tensor in enumerate(tensors):
            reducer.put(index, tensor)
    comms.everyone.all_reduce(torch.zeros(1)).wait()  # start together
    return reducer.finish()


def worker(
    rank: int, spaces: list[str], names: list[str], store: tuple[str, int], size: int, rounds: int, out: str
) -> None:
    """Time both ways in turns; the first worker writes seconds, the first of each host what it has received."""
    torch.set_num_threads(1)
    enter(spaces[rank])
    factory, mesh, there = GlooFactory(INTERFACE, LIMIT_S), Mesh(data=len(names)), TCPStore(*store, is_master=False)
    formed_s = {}
    for turn in range(3):
        for way, hosts in (("flat", ()), ("levels", names)):
            began = time.perf_counter()
            comms = form_comms(factory, there, f"{way} {turn}", rank, mesh, hosts, climbs=True)
            formed_s.setdefault(way, []).append(time.perf_counter() - began)
    like = [torch.empty(size // TENSORS) for _ in range(TENSORS)]
    generator = torch.Generator().manual_seed(rank)
    run = cut(SLOTS, len(names))[rank]
    values = {slot: [torch.randn(t.shape, generator=generator) for t in like] for slot in run}
    levels, result = comms.everyone.levels, {}
    ways: dict[str, list[Any]] = {"flat": [], "levels": []}
    for way in ways:
        comms.everyone.levels = levels if way == "levels" else ()
        result[way] = ExactReducer(like, SLOTS, comms.everyone)
    digests = set()
    for turn in range(rounds + 2):
        for way, reducer in result.items():
            before, started = received_bytes(), time.perf_counter()
            sums = reduce(reducer, comms, values)
            seconds = time.perf_counter() - started
            comms.everyone.all_reduce(torch.zeros(1)).wait()
            if turn > 1:
                ways[way].append((seconds, received_bytes() - before))
            if turn == 0:
                digests.add(sha256(torch.cat(sums).numpy().tobytes()).hexdigest())
    if rank == 0:
        Path(out).write_text(json.dumps({"ways": ways, "bits": len(digests), "formed_s": formed_s}))


def measured(hosts: int, each: int, link: str, size: int, rounds: int) -> dict[str, Any]:
    """Medians of one shape on one link."""
    store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    with Network(hosts) as network, tempfile.TemporaryDirectory() as folder:
        for host in network.hosts if link != "none" else []:
            host.slow(link, BURST)
        spaces = [host.space.path for host in network.hosts for _ in range(each)]
        names = [host.address for host in network.hosts for _ in range(each)]
        out = Path(folder) / "found.json"
        on_workers(worker, len(names), spaces, names, (network.address, store.port), size, rounds, str(out))
        data = json.loads(out.read_text())
    assert data["bits"] == 1, "both ways have the same bits"
    flat, levels = data["ways"]["flat"], data["ways"]["levels"]
    ratios = sorted(b[0] / a[0] for a, b in zip(flat, levels, strict=True))
    return {
        "hosts": hosts,
        "workers_each": each,
        "link": link,
        "flat_ms": round(1e3 * statistics.median(s for s, _ in flat), 1),
        "levels_ms": round(1e3 * statistics.median(s for s, _ in levels), 1),
        "ratio": round(statistics.median(ratios), 2),
        "lowest": round(ratios[0], 2),
        "highest": round(ratios[-1], 2),
        "flat_bytes": round(statistics.median(b for _, b in flat) / (4 * size), 2),
        "levels_bytes": round(statistics.median(b for _, b in levels) / (4 * size), 2),
        "groups_formed_ms": {way: round(1e3 * statistics.median(s), 1) for way, s in data["formed_s"].items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one shape and link, a few seconds")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--size", type=int, default=2_000_000, help="float32 numbers that are summed")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    size, rounds = (100_000, 2) if args.smoke else (args.size, args.rounds)
    rows = []
    for hosts, each in SHAPES[:1] if args.smoke else SHAPES:
        for link in LINKS[:1] if args.smoke else LINKS:
            row = measured(hosts, each, link, size, rounds)
            rows.append(row)
            print(
                f"{hosts} hosts x {each}, {link:8} {row['flat_ms']:7.1f} -> {row['levels_ms']:7.1f} ms  "
                f"{row['ratio']:.2f} x [{row['lowest']:.2f}-{row['highest']:.2f}]  bytes received by a host, over the "
                f"sums': {row['flat_bytes']} -> {row['levels_bytes']}",
                flush=True,
            )
    if args.out:
        result = {
            "rounds": rounds,
            "summed_bytes": 4 * size, "slots": SLOTS, "emulated": "links shaped (tbf) between namespaces",
            "rows": rows,
        }  # fmt: skip
        write_result(args.out, result)


if __name__ == "__main__":
    main()
