"""Sharded state from any mesh to any other: bytes against the least there are, milliseconds, bits.

Parameters of a GPT-like model and both moments of Adam, in workers of this machine over loopback, go through meshes of
4 and 8 workers. Every element is checked after every change. Told: bytes sent against the minimum (what each worker
lacks, once), wall time of the slowest worker, and per 100 MB moved. Beside it, in the same processes: every tensor
whole on every worker (a full gather), and torch's DCP (save and load, 4 and 8 shards to half as many rows).

    python -m benchmarks.elastic.reshape [--smoke] [--large] [--out benchmarks/results/reshape.json]

It fails (exit code 1) where a bit differs or a byte more than needed is sent.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from benchmarks.common.result_file import write_result

from elastune.core.layout import ParamBlock, Segment, Split, held
from elastune.core.mesh import Mesh
from elastune.parallel.comm.group import Group
from elastune.parallel.mechanisms.owned.placement import VALUES, Shard, meet
from elastune.parallel.mechanisms.owned.state import Kept
from elastune.runtime.job.run import machine_context
from elastune.testing.worker_processes import Worker, processes

BLOCKS = 4
SIZES = {"1M": (128, 5), "10M": (368, 6), "100M": (832, 12)}  # width and layers
CHAINS = {
    4: ["shard=4", "data=2,shard=2", "shard=2,tensor=2", "tensor=2,pipeline=2", "shard=4", "shard=3", "tensor=4",
        "data=2,pipeline=2", "data=4", "data=2,tensor=2", "data=1", "shard=4"],
    8: ["shard=8", "data=2,shard=4", "shard=4,tensor=2", "shard=2,tensor=2,pipeline=2", "shard=8", "shard=7",
        "data=2,tensor=4", "data=8", "data=4,shard=2", "shard=8"],
}  # fmt: skip
NAMES = (VALUES, "exp_avg", "exp_avg_sq")


def gpt(width: int, layers: int) -> Split:
    """Leaves of a GPT: of each layer qkv, projection, up, down (in blocks), and what is whole."""
    results: list[ParamBlock] = []

    def add(name: str, size: int, layer: int, *, divided: bool) -> None:
        for block in range(BLOCKS) if divided else [None]:
            part = size // BLOCKS if divided else size
            results.append(ParamBlock(f"{name}#{block}", name, ((0, part),), layer=layer, block=block))

    add("embedding", 512 * width, 0, divided=True)
    for layer in range(layers):
        for name, size in (("qkv", 3), ("out", 1), ("up", 4), ("down", 4)):
            add(f"{layer}.{name}", size * width * width, layer, divided=True)
        add(f"{layer}.rest", 9 * width, layer, divided=False)
    add("head", 512 * width, layers - 1, divided=True)
    return Split(tuple(results), BLOCKS, (1.0,) * layers)


def truth(segment: Segment, name: str) -> torch.Tensor:
    """What must be there: numbers that tell leaf, place and kind."""
    start = 1_000_003 * segment.param_block + 7_919 * NAMES.index(name)
    return torch.arange(start + segment.start, start + segment.stop).remainder_(2**24).float()


def state(split: Split, mesh: Mesh, rank: int, copies: int) -> Kept:
    """What worker ``rank`` has in ``mesh``; nothing where it has no place."""
    shards: list[Shard] = []
    if rank < mesh.workers:
        holds = held(split, mesh, copies)[rank]
        shards = [Shard(s, {name: truth(s, name) for name in NAMES[1:]}, held=True) for s in holds]
        computed = split.computed(mesh, rank)
        values = [Segment(i, 0, split.param_blocks[i].size) for i in computed] + [
            s for s in holds if s.param_block not in computed
        ]
        shards += [Shard(s, {VALUES: truth(s, VALUES)}, held=False) for s in values]
    facts = {shard.segment.param_block: {"step": 1.0} for shard in shards if shard.held}
    return Kept(split, copies, False, 1 if shards else -1, tuple(shards), facts)


def least(split: Split, before: Mesh, after: Mesh, copies: int) -> int:
    """Bytes that are wanted where they are not, counted element by element."""
    total = 0
    had = held(split, before, copies)
    for rank, holds in enumerate(held(split, after, copies)):
        here = [torch.zeros(param_block.size, dtype=torch.bool) for param_block in split.param_blocks]
        for s in had[rank] if rank < before.workers else ():
            here[s.param_block][s.start : s.stop] = True
        total += sum(8 * int((~here[s.param_block][s.start : s.stop]).sum()) for s in holds)
        for param_block in split.computed(before, rank) if rank < before.workers else ():
            here[param_block][:] = True
        computed = split.computed(after, rank)
        values = [Segment(i, 0, split.param_blocks[i].size) for i in computed] + [
            s for s in holds if s.param_block not in computed
        ]
        total += sum(4 * int((~here[s.param_block][s.start : s.stop]).sum()) for s in values)
    return total


def full_gather(group: Group, split: Split, had: Kept, mesh: Mesh, copies: int) -> None:
    """The usual way: each tensor whole on every worker, its own part cut out."""
    holds, computed = held(split, mesh, copies), [split.computed(mesh, rank) for rank in range(mesh.workers)]

    def has(rank: int, shard: Shard) -> bool:
        return shard.segment in holds[rank] if shard.held else shard.segment.param_block in computed[rank]

    for param_block in range(len(split.param_blocks)):
        whole = {name: torch.zeros(split.param_blocks[param_block].size) for name in NAMES}
        for shard in had.shards:
            if shard.segment.param_block == param_block:
                first = next((rank for rank in range(mesh.workers) if has(rank, shard)), None)
                if first == group.rank:
                    for name, tensor in shard.tensors.items():
                        whole[name][shard.segment.start : shard.segment.stop] = tensor
        for tensor in whole.values():
            group.all_reduce(tensor).wait()


def together(group: Group) -> None:
    """Return once everybody is here."""
    group.gather_floats([1.0])


def through_meshes(worker: Worker, size: str, chain: list[str], times: int, copies: int, beside: bool) -> None:
    """From mesh to mesh of ``chain``, each change ``times`` times; says one row of each."""
    split, group = gpt(*SIZES[size]), worker.form("all", 3600.0)
    for step, (before, after) in enumerate(pairwise(map(Mesh.parse, chain))):
        had = state(split, before, worker.rank, copies)
        seconds: list[float] = []
        for _ in range(times):
            together(group)
            began = time.perf_counter()
            result = had.brought(group, after, (), torch.device("cpu"))
            meet(group, split, result, exact=True)
            seconds.append(time.perf_counter() - began)
        right = all(
            torch.equal(tensor, truth(shard.segment, name))
            for shard in result.shards
            for name, tensor in shard.tensors.items()
        )
        gather_s = 0.0
        if beside and step < 3:
            together(group)
            began = time.perf_counter()
            full_gather(group, split, had, before, copies)
            together(group)
            gather_s = time.perf_counter() - began
        worker.send(str(before), str(after), result.bytes, result.most, seconds, gather_s, right)
        worker.meet(f"{size} {step}")


def by_dcp(worker: Worker, size: str, folder: str) -> None:
    """Torch's distributed checkpoint: save rows over all workers, load over half as many rows, two columns each."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard as Rows
    from torch.distributed.tensor import empty

    dist.init_process_group(
        "gloo", store=dist.PrefixStore("dcp", worker.store), rank=worker.rank, world_size=worker.size
    )
    split = gpt(*SIZES[size])
    flat = init_device_mesh("cpu", (worker.size,))
    half = init_device_mesh("cpu", (worker.size // 2, 2))

    def made(mesh: Any, placements: list[Any]) -> dict[str, Any]:
        return {
            f"{param_block.name}/{name}": empty(param_block.size, device_mesh=mesh, placements=placements)
            for param_block in split.param_blocks
            for name in NAMES
        }

    kept = made(flat, [Rows(0)])
    for value in kept.values():
        value.to_local().fill_(worker.rank)
    dist.barrier()
    began = time.perf_counter()
    dcp.save(kept, checkpoint_id=folder)
    dist.barrier()
    saved = time.perf_counter()
    dcp.load(made(half, [Rows(0), Rows(0)]), checkpoint_id=folder)
    dist.barrier()
    worker.send(saved - began, time.perf_counter() - saved)
    worker.meet("saved")


def chain_of(size: str, workers: int) -> list[str]:
    """The meshes to go through: of 100M parameters without those for which a machine of 24 GiB has no room, since what
    8 workers hold before a change and after it is there at once."""
    return [mesh for mesh in CHAINS[workers] if size != "100M" or mesh not in ("data=8", "data=4,shard=2")]


def reshapes(size: str, workers: int, times: int, beside: bool) -> list[dict[str, Any]]:
    """The rows of one size and number of workers."""
    chain, split, copies = chain_of(size, workers), gpt(*SIZES[size]), 2
    rows = []
    with processes(workers, through_meshes, size, chain, times, copies, beside) as them:
        for before, after in pairwise(chain):
            results = [them.receive(rank) for rank in range(workers)]
            slowest = [max(of[4][i] for of in results) for i in range(times)]
            moved, minimum = results[0][2], least(split, Mesh.parse(before), Mesh.parse(after), copies)
            ms = 1e3 * statistics.median(slowest)
            row = {
                "parameters": size,
                "workers": workers,
                "from": before,
                "to": after,
                "moved_mb": moved / 1e6,
                "of_minimum": moved / minimum if minimum else float(moved == 0),
                "most_sent_mb": results[0][3] / 1e6,
                "ms": ms,
                "ms_least": 1e3 * min(slowest),
                "ms_most": 1e3 * max(slowest),
                "s_per_100_mb": ms / 1e3 / (moved / 1e8) if moved else None,
                "full_gather_ms": 1e3 * max(of[5] for of in results) or None,
                "same_bits": all(of[6] for of in results),
            }
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def checkpointed(size: str, workers: int) -> dict[str, Any]:
    """DCP's seconds for the same state."""
    with tempfile.TemporaryDirectory() as folder, processes(workers, by_dcp, size, f"{folder}/kept") as them:
        results = [them.receive(rank) for rank in range(workers)]
        shutil.rmtree(f"{folder}/kept", ignore_errors=True)
    row = {"parameters": size, "workers": workers, "save_ms": 1e3 * results[0][0], "load_ms": 1e3 * results[0][1]}
    print(json.dumps({"dcp": row}), flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="the smallest size on 4 workers, once")
    parser.add_argument("--large", action="store_true", help="100M parameters, too")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    sizes = ["1M"] if asked.smoke else ["1M", "10M", *(["100M"] if asked.large else [])]
    times = 1 if asked.smoke else 3
    cells = [(size, workers) for size in sizes for workers in ((4,) if asked.smoke else (4, 8))]
    results: dict[str, Any] = {}
    rows = [row for size, workers in cells for row in reshapes(size, workers, times, not asked.smoke)]
    results["reshapes"] = rows
    results["dcp"] = [] if asked.smoke else [checkpointed(size, workers) for size, workers in cells]
    results["machine"] = machine_context()
    if asked.out is not None:
        write_result(asked.out, results)
    good = all(row["same_bits"] and abs(row["of_minimum"] - 1) < 1e-9 for row in rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
