"""The Cray seed's first table, measured: one worker, a model split over four, data parallelism over four.

Hosts are network namespaces of this machine whose links are shaped to a declared rate. Compute is paced (``paced.py``),
since four workers share two cores here: so the times are emulated; what is sent and waited for is real. The network is
the CNN for MNIST of ``examples/split_cnn.py``, whose two largest layers hold nearly all parameters, on made images;
"split" divides that pair of layers and leaves the rest whole on every worker; "trunk" divides the same pair, and the
rest is data parallel among the same workers ("one weird trick", Krizhevsky 2014).

    python -m benchmarks.parallel.splits [--smoke] [--out benchmarks/results/splits.json]

The exit code is 1 where four workers on the fast links are not faster than one. ``--smoke`` then adds two rounds first,
since one round of three steps on a busy machine shows little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.common.forked import on_workers
from benchmarks.common.paced import Paced
from benchmarks.common.result_file import write_result
from tests.support.hosts import INTERFACE, Network, enter
from torch.utils.data import TensorDataset

from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings, Place, Program, RunSpec
from elastune.elastic.worker.group import WorkerGroup
from elastune.parallel.comm.process_groups import join, stand
from elastune.parallel.mechanisms.tensor.tensor_parallel import DataParallelTrunk
from elastune.train.session import Session

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from split_cnn import network

FLOPS_A_SECOND = 1e9  # of the emulated device
LINKS = ("1gbit", "200mbit")
BURST = "512k"
BATCH, SAMPLES = 64, 1024
SEED = {"baseline": 1.0, "split": 1.5, "data": 3.5}
"""What the seed tells for four nodes: 1090, 718 and 310 s. It has no number for "trunk"."""
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "baseline": (1, {"mechanism": "replicated"}),
    "split": (4, {"virtual_tensor": 4, "mechanism": "tensor", "mesh": Mesh(tensor=4)}),
    "trunk": (4, {"virtual_tensor": 4, "mechanism": "tensor", "mesh": Mesh(tensor=4)}),
    "data": (4, {"mechanism": "replicated", "mesh": Mesh(data=4)}),
}


def worker(rank: int, world: int, spaces: list[str], rendezvous: str, case: str, steps: int, out: str) -> None:
    enter(spaces[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    torch.set_num_threads(1)
    place = Place(rank=rank, world=world, rendezvous=rendezvous if world > 1 else "")
    execution = ExecutionSettings(workers=world, num_slots=4, **CASES[case][1])
    group = join(place)
    workers = WorkerGroup(group, stand(group, place, execution.first_mesh))
    spec = RunSpec(Program(Path(__file__)), Path(tempfile.gettempdir()), execution=execution, checkpoint_every_steps=0)
    session = Session(
        spec, workers, torch.device("cpu"), config={}, send=lambda record: None, stop_requested=lambda: False
    )
    torch.manual_seed(0)
    model = network()
    plan = DataParallelTrunk() if case == "trunk" else None
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), plan=plan)
    own = sum(p.untyped_storage().nbytes() for p in model.parameters())
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(SAMPLES, 1, 28, 28), torch.randint(0, 10, (SAMPLES,)))
    source = (xy for _ in session.epochs(10**9) for xy in session.batches(data, batch_size=BATCH, drop_last=True))
    times: list[float] = []
    paced = Paced(FLOPS_A_SECOND)
    started = time.perf_counter()
    with paced:
        for x, y in source:
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if session.ends_step:
                times.append(time.perf_counter() - started)
                started = time.perf_counter()
                if len(times) == steps:
                    break
    if rank == 0:
        results = {"step_s": times[1:], "flops": paced.flops / steps, "parameter_bytes": own}
        Path(out).write_text(json.dumps(results))
    workers.gather([0.0], "the end")
    os._exit(0)  # as elastune's workers end: see comm.group.join


def measured(case: str, link: str, steps: int) -> dict[str, Any]:
    world = CASES[case][0]
    with Network(world) as hosts, tempfile.TemporaryDirectory() as folder:
        for host in hosts.hosts:
            host.slow(link, BURST)
        out = Path(folder) / "found.json"
        spaces = [host.space.path for host in hosts.hosts]
        on_workers(worker, world, world, spaces, f"file://{folder}/meet", case, steps, str(out))
        data: dict[str, Any] = json.loads(out.read_text())
    return data


def rows_of(link: str, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each case: the median of its rounds, each over the same round of one worker."""
    base = [statistics.median(run["step_s"]) for run in results["baseline"]]
    rows = []
    for case, runs in results.items():
        medians = [statistics.median(run["step_s"]) for run in runs]
        ratios = sorted(a / b for a, b in zip(base, medians, strict=True))
        row = {
            "link": link, "case": case, "workers": CASES[case][0],
            "step_ms": round(1e3 * statistics.median(medians), 1),
            "speedup": round(statistics.median(ratios), 2), "lowest": round(ratios[0], 2),
            "highest": round(ratios[-1], 2), "seed_speedup": SEED.get(case),
            "parameter_bytes_of_a_worker": runs[0]["parameter_bytes"], "flops_of_a_worker": runs[0]["flops"],
        }  # fmt: skip
        rows.append(row)
    return rows


def not_faster(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """What the table claims and these rows do not have: four workers on fast links are faster than one."""
    return [
        f"{row['link']} {row['case']}: {row['workers']} workers are {row['speedup']:.2f} times as fast as one"
        for row in rows
        if row["workers"] > 1 and row["link"] == LINKS[0] and row["speedup"] <= 1
    ]


def compared(link: str, rounds: int, steps: int, more: int = 0) -> list[dict[str, Any]]:
    """All cases at ``link``; with up to ``more`` further rounds while one of them is not faster than one worker."""
    results: dict[str, list[dict[str, Any]]] = {case: [] for case in CASES}
    rows: list[dict[str, Any]] = []
    for number in range(rounds + more):
        if number >= rounds and not not_faster(rows):
            break
        for case in CASES:
            results[case].append(measured(case, link, steps))
        rows = rows_of(link, results)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="few steps, one link; exit code 1 where none is faster")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--links", nargs="+", default=LINKS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    links, rounds, steps, more = (LINKS[:1], 1, 3, 2) if args.smoke else (args.links, args.rounds, 8, 0)
    rows: list[dict[str, Any]] = []
    for link in links:
        rows += compared(link, rounds, steps, more)
        for row in (row for row in rows if row["link"] == link):
            print(
                f"{link:8} {row['case']:9} {row['step_ms']:8.1f} ms  {row['speedup']:.2f} x "
                f"[{row['lowest']:.2f}-{row['highest']:.2f}] (seed {SEED.get(row['case'], 'has none')})  "
                f"{row['parameter_bytes_of_a_worker'] / 1e6:.1f} MB of parameters a worker",
                flush=True,
            )
    if args.out:
        result = {
            "rounds": rounds, "steps": steps,
            "emulated": f"compute paced to {FLOPS_A_SECOND:g} FLOP/s a worker, links shaped", "rows": rows,
        }  # fmt: skip
        write_result(args.out, result)
    wrong = not_faster(rows)
    print("\n".join(wrong) or "ok: four workers on fast links are faster than one")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
