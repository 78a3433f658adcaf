"""A holder of sharded state dies: how long the others stand still, beside what the bytes that have to move need alone.

By the product: kill -9 of one of 4 workers that hold 100 MB of AdamW state in shares (``--mechanism zero``, two
copies), in mid-step. The bytes that have to move are counted element by element; alone they go in one all-to-all among
the three workers that are left.

- "loopback": on this machine, where memory limits and not a network; and what the pause is made of.
- "hosts": four hosts with a worker each, network namespaces of this machine whose links are shaped to 1 Gbit/s.

    python -m benchmarks.elastic.reshape_killed [--smoke] [--only loopback,hosts] \\
        [--out benchmarks/results/reshape_killed.json]

It fails (exit code 1) where the weights are not those of an undisturbed run. "hosts" takes root.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from benchmarks.common.forked import on_workers
from benchmarks.common.result_file import write_result
from tests.support.agent_runs import LIMIT_S, AgentRun
from tests.support.elastic_runs import SLOTS, Runs
from tests.support.hosts import INTERFACE, Network, enter
from torch.distributed import TCPStore

from elastune.core.journal.records import Regrouped
from elastune.core.layout import ParamBlock, Split, held
from elastune.core.mesh import Mesh
from elastune.core.run import Program
from elastune.parallel.comm.backends import GlooFactory
from elastune.parallel.comm.group import Group
from elastune.runtime.clusters.local import LocalCluster
from elastune.testing.worker_processes import Worker, processes

PROGRAM = Path(__file__).parents[1] / "programs" / "reshape_train.py"
WORKERS = 4
WIDTH, SMALL = 2304, 256
LINK, BURST = "1gbit", "512k"
EPOCHS = 2  # on hosts: the last of them may join while the others train
GOAL = 2.5
WIRE_ROUNDS = 5
WHERE = ("loopback", "hosts")


def sizes(width: int) -> tuple[int, ...]:
    """Of the layers of the program's network."""
    return (784, width, width, width, 10)


def moved_bytes(width: int) -> int:
    """What those who are left lack of the moments once rank 1 of 4 has gone, counted element by element."""
    weights = [a * b for a, b in pairwise(sizes(width))]
    split = Split(tuple(ParamBlock(str(i), str(i), ((0, n),)) for i, n in enumerate(weights)))
    moved = 0
    for rank, old in {0: 0, 1: 2, 2: 3}.items():
        lacks = [torch.zeros(param_block.size, dtype=torch.bool) for param_block in split.param_blocks]
        for s in held(split, Mesh(shard=WORKERS - 1), 2)[rank]:
            lacks[s.param_block][s.start : s.stop] = True
        for s in held(split, Mesh(shard=WORKERS), 2)[old]:
            lacks[s.param_block][s.start : s.stop] = False
        moved += sum(8 * int(mask.sum()) for mask in lacks)
    return moved


def alone_s(group: Group, size: int) -> float:
    """Seconds that ``size`` bytes take in one all-to-all among all workers, each sending the same; the median."""
    each = size // (group.size * (group.size - 1))
    shares = [0 if rank == group.rank else each for rank in range(group.size)]
    data, out = torch.zeros(sum(shares), dtype=torch.uint8), torch.zeros(sum(shares), dtype=torch.uint8)
    results = []
    for _ in range(WIRE_ROUNDS):
        group.gather_floats([1.0])  # everybody is here
        began = time.perf_counter()
        group.all_to_all(out, data, shares, shares).wait()
        group.gather_floats([1.0])
        results.append(time.perf_counter() - began)
    return statistics.median(results)


# -- on this machine --------------------------------------------------------------------------------------------------


def parts_of_pause(log: Path) -> dict[str, float]:
    """Of that survivor of a kill who needed longest: seconds until it knew, to form the group, to move and place state,
    for the rest of the meeting; then a step among fewer, on memory that is new, beside the step before. And the main
    thread's CPU time of each, which the load of the machine does not show in.
    """
    values = {path.stem: json.loads(path.read_text()) for path in log.iterdir()}
    killed_at = next(span["at"] for spans in values.values() for span in spans if span["name"] == "kill")
    results = []
    for spans in values.values():
        after = [span for span in spans if span["at"] + span.get("s", 0.0) > killed_at and span["name"] != "kill"]
        steps = [span for span in spans if span["name"] == "step" and span not in after]
        if not steps or not after or spans[-1]["name"] == "kill":
            continue  # the one that was killed, and who came in its place
        met, formed, moved = (
            next(span for span in after if span["name"] == name) for name in ("recover", "take", "place")
        )
        next_step = [span for span in after if span["name"] == "step"][1]
        row = {"told_s": met["at"] - killed_at}
        for kind in ("s", "cpu_s"):
            rest = met[kind] - formed[kind] - moved[kind]
            ordinary = statistics.median(span[kind] for span in steps[1:])
            row |= {f"formed_{kind}": formed[kind], f"moved_{kind}": moved[kind], f"met_{kind}": rest}
            row |= {f"next_step_{kind}": next_step[kind], f"ordinary_step_{kind}": ordinary}
        results.append(row)
    return max(results, key=lambda row: row["formed_s"] + row["moved_s"] + row["met_s"])


def wire(worker: Worker, size: int) -> None:
    """What ``alone_s`` finds over loopback."""
    worker.send(alone_s(worker.form("wire", 3600.0), size))
    worker.meet("measured")


def over_loopback(times: int, width: int) -> dict[str, Any]:
    """Pauses, their parts and hashes."""
    pauses, parts, hashes = [], [], []
    with LocalCluster(capacity=WORKERS) as cluster, tempfile.TemporaryDirectory() as folder:
        runs, fixed = Runs(cluster, Path(folder), Program(PROGRAM)), {"checkpoint_every_steps": 0}
        alone = runs(1, spec=fixed, width=width).sha256
        for time_ in range(times):
            log = Path(folder) / f"log{time_}"
            log.mkdir()
            execution = {"mechanism": "zero"}
            ran = runs(WORKERS, execution=execution, spec=fixed, width=width, kill=1 + time_ % 3, log=str(log))
            parts.append(parts_of_pause(log))
            hashes.append(ran.sha256)
            pauses.append(next(r.pause_s for r in ran.records if isinstance(r, Regrouped)))
    moved = moved_bytes(width)
    with processes(WORKERS - 1, wire, moved) as them:
        wire_s = max(them.receive(rank)[0] for rank in range(WORKERS - 1))
    results = {name: statistics.median(of[name] for of in parts) for name in parts[0]}
    return {**row(pauses, wire_s, moved, width), "parts": results, "sha256": alone, "same_bits": set(hashes) == {alone}}


# -- on hosts ---------------------------------------------------------------------------------------------------------


def wire_on(rank: int, spaces: list[str], store: tuple[str, int], size: int, out: str) -> None:
    """What ``alone_s`` finds on the hosts' links; the first worker writes it."""
    torch.set_num_threads(1)
    enter(spaces[rank])
    factory = GlooFactory(INTERFACE, LIMIT_S)
    result = alone_s(factory.form(TCPStore(*store, is_master=False), "wire", rank, len(spaces)), size)
    if rank == 0:
        Path(out).write_text(json.dumps(result))


def over_hosts(times: int, width: int) -> dict[str, Any]:
    """Pauses and hashes; each run is the controller's and the agents' from their start."""
    pauses, hashes = [], []
    moved = moved_bytes(width)
    with Network(WORKERS) as network, tempfile.TemporaryDirectory() as folder:
        for host in network.hosts:
            host.slow(LINK, BURST)
        for time_ in range(times + 1):
            own = Path(folder) / str(time_)
            own.mkdir()
            pause, sha256 = on_agents(network, own, width, kill=1 + time_ % 3 if time_ else -1)
            hashes.append(sha256)
            pauses += [pause] if time_ else []
        store = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        spaces, out = [host.space.path for host in network.hosts[1:]], Path(folder) / "wire.json"
        on_workers(wire_on, WORKERS - 1, spaces, (network.address, store.port), moved, str(out))
        wire_s = json.loads(out.read_text())
    result = row(pauses, wire_s, moved, width)
    return {**result, "emulated": f"hosts are namespaces, links shaped to {LINK}", "same_bits": len(set(hashes)) == 1}


def on_agents(network: Network, folder: Path, width: int, kill: int) -> tuple[float, str]:
    """The pause of the others where worker ``kill`` dies (0 where it is -1), and the hash of the weights."""
    size = ["--workers", f"{WORKERS - 1}:{WORKERS}", "--slots", str(SLOTS), "--seed", "3", "--checkpoint-every", "0"]
    chosen = [f"width={width}", f"kill={kill}", f"epochs={EPOCHS}"]
    settings = [word for setting in chosen for word in ("--set", setting)]
    run = AgentRun(network, folder, "run", str(PROGRAM), *size, *settings, "--mechanism", "zero")
    try:
        run.until(run.token.exists)
        for at in range(WORKERS):
            run.agent(at, 1)
        if run.controller.wait(LIMIT_S) != 0:
            raise RuntimeError(run.said)
        after = [view for view in run.records(Regrouped) if not view.planned and kill not in view.members]
        return (after[0].pause_s if kill >= 0 else 0.0), json.loads(run.result)["sha256"]
    finally:
        run.close()


# -- both -------------------------------------------------------------------------------------------------------------


def row(pauses: list[float], wire_s: float, moved: int, width: int) -> dict[str, Any]:
    """What both tell, in seconds."""
    parameters = sum(a * b + b for a, b in pairwise(sizes(width)))
    results = {"parameters": parameters, "state_mb": 8e-6 * parameters, "moved_mb": moved / 1e6, "pauses_s": pauses}
    ratio = statistics.median(pauses) / wire_s
    return {**results, "wire_s": wire_s, "pause_of_wire": ratio, "goal": GOAL, "met": ratio <= GOAL}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a small network on this machine, once")
    parser.add_argument("--only", default=",".join(WHERE), help=" or ".join(WHERE))
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    times, width = (1, SMALL) if asked.smoke else (asked.times, WIDTH)
    results: dict[str, Any] = {}
    for where in WHERE[:1] if asked.smoke else asked.only.split(","):
        results[where] = over_loopback(times, width) if where == "loopback" else over_hosts(times, width)
        print(json.dumps({where: results[where]}), flush=True)
    if asked.out is not None:
        write_result(asked.out, results)
    return 0 if all(results[where]["same_bits"] for where in WHERE if where in results) else 1


if __name__ == "__main__":
    sys.exit(main())
