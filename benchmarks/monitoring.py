"""Step time with a monitor over that without, paired in one run: what it costs to be measured.

One cell is a model, a number of workers, a mode and a monitor. Four trainings take turns in the same processes on the
same data, a block of ten steps each: without monitors, without once more (``again``: how far two equal trainings are
apart, so how much of a ratio is noise), with the monitor at every step, and at every tenth. A block holds one reading
of the latter. The figures are medians and quartiles over rounds of (variant / without): of wall time, where a block
ends with its slowest worker, and of worker 0's CPU time, which other programs on the machine disturb less. SGD with
momentum; Adam under the monitor that needs it. ``exact`` runs the usual eight slots, so that each step takes the norms
of eight gradients; ``fast`` those of one gradient a worker.

It fails (exit code 1) where a monitor that reads every tenth step costs more CPU time than ``BOUNDS`` allow, by its
lower quartile, so that a busy machine alone does not fail it. ``--smoke`` allows half as much again.

    python benchmarks/monitoring.py [--smoke] [--monitors noise_scale ...] [--out benchmarks/results/monitoring.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from forked import on_workers
from overhead import MODELS, SAMPLES
from result_file import write_result
from torch import nn
from torch.utils.data import TensorDataset

from elastune.comm.group import Group
from elastune.comm.join import join
from elastune.core.run import Adapt, Means, Place, Program, RunSpec
from elastune.elastic.worker.group import WorkerGroup
from elastune.monitors.registry import MONITORS
from elastune.train.session import Session

BLOCK = 10  # steps; a multiple of the longest interval
BATCH_PER_WORKER = 64
BOUNDS = {"noise_scale": 1.05, "noise_scale_adam": 1.1, "performance": 1.05, "curvature": 3.0, "loss": 1.05}
"""The most of (CPU time with a reading every tenth step / without). A reading of the curvature is about ten steps'
work; it takes one every hundred unless told otherwise."""
SMOKE_SLACK = 1.5
Stepper = Callable[[int], None]


def variants(monitor: str) -> dict[str, tuple[str, ...]]:
    return {
        "off": (),
        "again": (),
        "every_1": (f"{monitor}:every=1",),
        "every_10": (f"{monitor}:every=10",),
    }


def training(group: Group, data: TensorDataset, cell: dict[str, Any], monitors: tuple[str, ...]) -> Stepper:
    """A training of its own: ``step(n)`` takes n more steps."""
    torch.manual_seed(0)
    model: nn.Module = MODELS[cell["model"]]()
    means = Means(workers=group.size, mode=cell["mode"], num_slots=8)
    spec = RunSpec(
        Program(Path(__file__)),
        Path(tempfile.gettempdir()),
        means=means,
        checkpoint_every_steps=0,
        adapt=Adapt(monitors=monitors),
    )
    session = Session(
        spec, WorkerGroup(group), torch.device("cpu"), config={}, send=lambda record: None, stop_requested=lambda: False
    )
    if cell["monitor"] == "noise_scale_adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    model, optimizer = session.prepare(model, optimizer)
    batch = BATCH_PER_WORKER * group.size
    source = (xy for _ in session.epochs(10**9) for xy in session.batches(data, batch_size=batch, drop_last=True))

    def step(count: int) -> None:
        for x, y in source:
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            count -= session.ends_step
            if not count:
                return

    return step


def worker(rank: int, world: int, rendezvous: str, cell: dict[str, Any], out: str) -> None:
    torch.set_num_threads(1)
    group = join(Place(rank=rank, world=world, rendezvous=rendezvous))
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, 1, 28, 28), torch.randint(0, 10, (SAMPLES,)))
    steppers = {name: training(group, data, cell, texts) for name, texts in variants(cell["monitor"]).items()}
    times: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in steppers} for kind in ("wall", "cpu")}
    for step in steppers.values():
        step(BLOCK)
    for round_ in range(cell["rounds"]):
        at = round_ % len(steppers)
        for name in [*steppers][at:] + [*steppers][:at]:
            group.gather_floats([0.0])  # start together
            started, started_cpu = time.perf_counter(), time.process_time()
            steppers[name](BLOCK)
            group.gather_floats([0.0])
            times["wall"][name].append((time.perf_counter() - started) / BLOCK)
            times["cpu"][name].append((time.process_time() - started_cpu) / BLOCK)
    if rank == 0:
        Path(out).write_text(json.dumps(times))
    os._exit(0)  # as elastune's workers end: see comm.group.join


def measure(model: str, world: int, mode: str, monitor: str, rounds: int) -> dict[str, Any]:
    cell: dict[str, Any] = {"model": model, "workers": world, "mode": mode, "monitor": monitor, "rounds": rounds}
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/times.json"
        on_workers(worker, world, world, f"file://{folder}/rendezvous", cell, out)
        times: dict[str, dict[str, list[float]]] = json.loads(Path(out).read_text())
    for kind, of_kind in times.items():
        for name in [*of_kind][1:]:
            ratios = [a / b for a, b in zip(of_kind[name], of_kind["off"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            cell[f"{name}_over_off_{kind}"] = {"median": middle, "quartiles": [low, high]}
        cell[f"{kind}_ms"] = {name: statistics.median(values) * 1e3 for name, values in of_kind.items()}
    return cell


def shown(cell: dict[str, Any]) -> str:
    lines = [f"{cell['model']} {cell['workers']} workers {cell['mode']} {cell['monitor']}"]
    for kind in ("wall", "cpu"):
        figures = {name: cell[f"{name}_over_off_{kind}"] for name in ("again", "every_1", "every_10")}
        ratios = (
            f"{n} {f['median']:.3f} [{f['quartiles'][0]:.3f}-{f['quartiles'][1]:.3f}]" for n, f in figures.items()
        )
        lines.append(f"  {kind:4} off {cell[f'{kind}_ms']['off']:8.2f} ms  " + "  ".join(ratios))
    return "\n".join(lines)


def too_dear(cell: dict[str, Any], slack: float) -> str:
    """What is wrong with ``cell``; empty where its monitor keeps its bound."""
    (low, _), bound = cell["every_10_over_off_cpu"]["quartiles"], BOUNDS[cell["monitor"]] * slack
    where = f"{cell['monitor']} ({cell['model']}, {cell['workers']} workers, {cell['mode']})"
    return "" if low <= bound else f"{where} costs {low:.3f} x or more; its bound is {bound:.3g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one small cell, a few seconds")
    parser.add_argument("--monitors", nargs="+", choices=[*MONITORS], default=[*MONITORS])
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--modes", nargs="+", choices=["exact", "fast"], default=["exact", "fast"])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sizes = [("lenet", 2, "exact", "noise_scale", 3)] if args.smoke else [
        (model, world, mode, monitor, args.rounds)
        for monitor in args.monitors for model in args.models for world in args.workers for mode in args.modes
    ]  # fmt: skip
    cells = []
    for size in sizes:
        cells.append(measure(*size))
        print(shown(cells[-1]), flush=True)
        if args.out:
            result = {"cells": cells}
            write_result(args.out, result)
    wrong = [found for cell in cells if (found := too_dear(cell, SMOKE_SLACK if args.smoke else 1.0))]
    print("\n".join(wrong) or f"ok: {len(cells)} cells keep their bounds")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
