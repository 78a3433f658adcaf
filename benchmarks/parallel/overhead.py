"""Step time of elastune's ``fast`` and ``exact`` against plain DistributedDataParallel, paired in one run.

Rounds of a few steps of each variant take turns in the same processes on the same data, so that drift of the machine
hits all alike; the figures are medians over rounds of (variant / plain DDP). Exact runs one slot per worker.
Programs with more in their loop (``overhead_programs.py``) run on one worker: ``fast`` over the plain loop; and scripts
for Accelerate and Hugging Face's ``Trainer`` (``overhead_frameworks.py``): elastune's adapter over these.

    python -m benchmarks.parallel.overhead [--smoke] [--programs] [--out benchmarks/results/overhead.json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.common.forked import on_workers
from benchmarks.common.result_file import write_result
from benchmarks.parallel.overhead_programs import PROGRAMS, measure_program
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from elastune.core.run import ExecutionSettings, Place, Program, RunSpec
from elastune.elastic.worker.group import WorkerGroup
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.process_groups import join
from elastune.train.session import Session

SAMPLES = 4096


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10),
    )  # fmt: skip


def mlp() -> nn.Module:
    """10.0 million parameters."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 2560), nn.ReLU(), nn.Linear(2560, 2560), nn.ReLU(), nn.Linear(2560, 555),
        nn.ReLU(), nn.Linear(555, 10),
    )  # fmt: skip


MODELS = {"lenet": lenet, "mlp_10m": mlp}
Stepper = Callable[[int], None]


def plain(model: nn.Module, group: Group, data: TensorDataset, batch: int) -> Stepper:
    """The loop a user would write with torch alone; without a group, not even DDP."""
    wrapped = DistributedDataParallel(model) if group.size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    share = batch // group.size

    def indices() -> Iterator[torch.Tensor]:
        while True:
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
            for at in range(0, len(data) - batch + 1, batch):
                yield order[at + group.rank * share : at + (group.rank + 1) * share]

    source = indices()

    def step(count: int) -> None:
        for index in itertools.islice(source, count):
            x, y = (t[index] for t in data.tensors)
            F.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def ours(model: nn.Module, group: Group, data: TensorDataset, batch: int, mode: Any) -> Stepper:
    execution = ExecutionSettings(workers=group.size, mode=mode, num_slots=group.size)
    spec = RunSpec(Program(Path(__file__)), Path(tempfile.gettempdir()), execution=execution, checkpoint_every_steps=0)
    session = Session(
        spec, WorkerGroup(group), torch.device("cpu"), config={}, send=lambda record: None, stop_requested=lambda: False
    )
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    source = (xy for _ in session.epochs(10**9) for xy in session.batches(data, batch_size=batch, drop_last=True))

    def step(count: int) -> None:
        for x, y in itertools.islice(source, count):
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    return step


def worker(rank: int, world: int, rendezvous: str, cell: dict[str, Any], out: str) -> None:
    torch.set_num_threads(1)
    group = join(Place(rank=rank, world=world, rendezvous=rendezvous))
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, 1, 28, 28), torch.randint(0, 10, (SAMPLES,)))
    build, batch = MODELS[cell["model"]], cell["batch_per_worker"] * world
    variants = {
        "ddp": plain(build(), group, data, batch),
        "fast": ours(build(), group, data, batch, "fast"),
        "exact": ours(build(), group, data, batch, "exact"),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for step in variants.values():
        step(5)
    for round_ in range(cell["rounds"]):
        order = list(variants)[round_ % 3 :] + list(variants)[: round_ % 3]
        for name in order:
            group.gather_floats([0.0])  # start together
            started = time.perf_counter()
            variants[name](cell["steps"])
            group.gather_floats([0.0])
            times[name].append((time.perf_counter() - started) / cell["steps"])
    if rank == 0:
        Path(out).write_text(json.dumps(times))
    os._exit(0)  # as elastune's workers end: see comm.group.join


def measure(model: str, world: int, batch: int, rounds: int, steps: int) -> dict[str, Any]:
    cell = {"model": model, "workers": world, "batch_per_worker": batch, "rounds": rounds, "steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/times.json"
        on_workers(worker, world, world, f"file://{folder}/rendezvous", cell, out)
        times: dict[str, list[float]] = json.loads(Path(out).read_text())
    for name in ("fast", "exact"):
        ratios = sorted(a / b for a, b in zip(times[name], times["ddp"], strict=True))
        low, middle, high = (ratios[int(q * (len(ratios) - 1))] for q in (0.25, 0.5, 0.75))
        cell[f"{name}_over_ddp"] = {"median": middle, "quartiles": [low, high]}
    cell["ms"] = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    return cell


def told_of(cell: dict[str, Any]) -> dict[str, Any]:
    """``cell``, a program's, after it was printed."""
    of, ratio, cpu = cell["ms"]["plain"], cell["fast_over_plain"], cell["cpu_fast_over_plain"]
    (low, high), median = ratio["quartiles"], ratio["median"]
    result = f"{cell['program']:10} plain {of:7.2f} ms  fast {median:.3f} [{low:.3f}-{high:.3f}]"
    (low, high), median = cpu["quartiles"], cpu["median"]
    print(f"{result}  of CPU time {median:.3f} [{low:.3f}-{high:.3f}]", flush=True)
    return cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one small cell, a few seconds")
    parser.add_argument("--programs", action="store_true", help="the programs alone")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sizes = [("lenet", 2, 32, 4, 3)] if args.smoke else [
        (model, world, batch, 40, 5) for model, batch in (("lenet", 64), ("mlp_10m", 64)) for world in (1, 2, 4)
    ]  # fmt: skip
    cells = []
    for size in sizes if not args.programs else ():
        cells.append(measure(*size))
        cell = cells[-1]
        ratios = "  ".join(
            f"{n} {cell[f'{n}_over_ddp']['median']:.3f} [{cell[f'{n}_over_ddp']['quartiles'][0]:.3f}"
            f"-{cell[f'{n}_over_ddp']['quartiles'][1]:.3f}]"
            for n in ("fast", "exact")
        )
        print(f"{cell['model']:8} {cell['workers']} workers  DDP {cell['ms']['ddp']:7.2f} ms  {ratios}", flush=True)
    from benchmarks.parallel.overhead_frameworks import (
        FRAMEWORKS,  # takes seconds, which the workers above are not to inherit
    )

    torch.set_num_threads(1)
    rounds = (4, 3) if args.smoke else (60, 10)
    for name in ("gan", "averaged", "in_turn") if args.smoke else PROGRAMS:  # a compiler takes its time
        cells.append(told_of(measure_program(name, 64, *rounds)))
    for measure_framework in FRAMEWORKS.values():
        cells.append(told_of(measure_framework(64, *rounds)))
    if args.out:
        result = {"cells": cells}
        write_result(args.out, result)


if __name__ == "__main__":
    main()
