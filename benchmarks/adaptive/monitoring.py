"""Step time with a monitor over that without, paired in one run: what it costs to be measured.

One cell is a model, a number of workers, a mode and a monitor. Four trainings take turns in the same processes on the
same data, a block of ten steps each: without monitors, without once more (``again``: how far two equal trainings are
apart, so how much of a ratio is noise), with the monitor at every step, and at every tenth. A block holds one reading
of the latter. The figures are medians and quartiles over rounds of (variant / without): of wall time, where a block
ends with its slowest worker, and of worker 0's CPU time, which other programs on the machine disturb less. SGD with
momentum; Adam under the monitor that needs it. ``exact`` runs eight slots, so that each step takes the norms
of eight gradients; ``fast`` those of one gradient a worker.

It fails (exit code 1) where a monitor that reads every tenth step costs more CPU time than ``BOUNDS`` allow, by the
median of its rounds. Rounds go on until the median's 99 % interval (order statistics) lies on one side of the bound, up
to ``MOST`` times ``--rounds``. ``--smoke`` has the same bound, for the noise scale in ``exact`` and in ``fast`` mode.
It takes at most 16 rounds, beside other work, and fails where all of that interval lies above the bound.

    python -m benchmarks.adaptive.monitoring [--smoke] [--monitors noise_scale ...] \\
        [--out benchmarks/results/monitoring.json]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.common.forked import on_workers
from benchmarks.common.result_file import write_result
from benchmarks.parallel.overhead import MODELS, SAMPLES
from torch import nn
from torch.utils.data import TensorDataset

from elastune.adapt.monitors.registry import MONITORS
from elastune.core.run import Adapt, ExecutionSettings, Place, Program, RunSpec
from elastune.elastic.worker.group import WorkerGroup
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.process_groups import join
from elastune.train.session import Session

BLOCK = 10  # steps; a multiple of the longest interval
BATCH_PER_WORKER = 64
BOUNDS = {"noise_scale": 1.05, "noise_scale_adam": 1.1, "performance": 1.05, "curvature": 3.0, "loss": 1.05}
"""The most of (CPU time with a reading every tenth step / without). A reading of the curvature is about ten steps'
work; it takes one every hundred unless told otherwise."""
MOST = 4  # times the rounds that were asked for, while the machine is too busy to tell
SMOKE_MOST = 2
LOOK = 4  # rounds between two looks at the interval
ERROR = 0.01
Stepper = Callable[[int], None]


def variants(monitor: str, *, gate_only: bool) -> dict[str, tuple[str, ...]]:
    gate = {"off": (), "every_10": (f"{monitor}:every=10",)}
    return gate if gate_only else {**gate, "again": (), "every_1": (f"{monitor}:every=1",)}


def median_interval(values: Sequence[float], error: float = ERROR) -> tuple[float, float]:
    """Bounds of the median of what ``values`` were drawn from, wrong in ``error`` of all cases at most.

    They are order statistics, so nothing is assumed of the distribution. Where there are too few values for any, they
    are the least and the greatest.
    """
    ordered, n = sorted(values), len(values)
    below, k = 0.0, 0  # P(fewer than k + 1 of n values are below the median)
    while k < n // 2 and 2 * (below := below + math.comb(n, k) / 2**n) <= error:
        k += 1
    at = max(0, k - 1)
    return ordered[at], ordered[n - 1 - at]


def is_decided(ratios: Sequence[float], bound: float) -> bool:
    """Whether the median lies surely on one side of ``bound``; fewer than 8 rounds never tell."""
    low, high = median_interval(ratios)
    return 2 / 2 ** len(ratios) <= ERROR and (high <= bound or low > bound)


def training(group: Group, data: TensorDataset, cell: dict[str, Any], monitors: tuple[str, ...]) -> Stepper:
    """A training of its own: ``step(n)`` takes n more steps."""
    torch.manual_seed(0)
    model: nn.Module = MODELS[cell["model"]]()
    execution = ExecutionSettings(workers=group.size, mode=cell["mode"], num_slots=8)
    spec = RunSpec(
        Program(Path(__file__)),
        Path(tempfile.gettempdir()),
        execution=execution,
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
    wanted = variants(cell["monitor"], gate_only=cell["gate_only"])
    steppers = {name: training(group, data, cell, texts) for name, texts in wanted.items()}
    times: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in steppers} for kind in ("wall", "cpu")}
    for step in steppers.values():
        step(BLOCK)
    for round_ in range((SMOKE_MOST if cell["gate_only"] else MOST) * cell["rounds"]):
        at = round_ % len(steppers)
        for name in [*steppers][at:] + [*steppers][:at]:
            group.gather_floats([0.0])  # start together
            started, started_cpu = time.perf_counter(), time.process_time()
            steppers[name](BLOCK)
            group.gather_floats([0.0])
            times["wall"][name].append((time.perf_counter() - started) / BLOCK)
            times["cpu"][name].append((time.process_time() - started_cpu) / BLOCK)
        if round_ + 1 >= cell["rounds"] and (round_ + 1) % LOOK == 0:
            ratios = [a / b for a, b in zip(times["cpu"]["every_10"], times["cpu"]["off"], strict=True)]
            decided = is_decided(ratios, BOUNDS[cell["monitor"]])
            if group.gather_floats([float(decided)])[0][0]:  # as worker 0 says, whose time it is
                break
    if rank == 0:
        Path(out).write_text(json.dumps(times))
    os._exit(0)  # as elastune's workers end: see comm.group.join


def measure(model: str, world: int, mode: str, monitor: str, rounds: int, *, gate_only: bool = False) -> dict[str, Any]:
    cell: dict[str, Any] = {"model": model, "workers": world, "mode": mode, "monitor": monitor, "rounds": rounds}
    cell["gate_only"] = gate_only
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/times.json"
        on_workers(worker, world, world, f"file://{folder}/rendezvous", cell, out)
        times: dict[str, dict[str, list[float]]] = json.loads(Path(out).read_text())
    for kind, of_kind in times.items():
        for name in [*of_kind][1:]:
            ratios = [a / b for a, b in zip(of_kind[name], of_kind["off"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            sure = median_interval(ratios)
            cell[f"{name}_over_off_{kind}"] = {"median": middle, "quartiles": [low, high], "median_interval": sure}
        cell["rounds"] = len(of_kind["off"])
        cell[f"{kind}_ms"] = {name: statistics.median(values) * 1e3 for name, values in of_kind.items()}
    return cell


def shown(cell: dict[str, Any]) -> str:
    lines = [f"{cell['model']} {cell['workers']} workers {cell['mode']} {cell['monitor']}, {cell['rounds']} rounds"]
    for kind in ("wall", "cpu"):
        names = [name for name in ("again", "every_1", "every_10") if f"{name}_over_off_{kind}" in cell]
        figures = {name: cell[f"{name}_over_off_{kind}"] for name in names}
        ratios = (
            f"{n} {f['median']:.3f} [{f['quartiles'][0]:.3f}-{f['quartiles'][1]:.3f}]" for n, f in figures.items()
        )
        lines.append(f"  {kind:4} off {cell[f'{kind}_ms']['off']:8.2f} ms  " + "  ".join(ratios))
    return "\n".join(lines)


def too_dear(cell: dict[str, Any], *, surely: bool = False) -> str:
    """What is wrong with ``cell``; empty where its monitor keeps its bound.

    ``surely``: only what the whole interval shows, since few rounds on a busy machine scatter about the bound.
    """
    result, bound = cell["every_10_over_off_cpu"], BOUNDS[cell["monitor"]]
    low, high = result["median_interval"]
    if (low if surely else result["median"]) <= bound:
        return ""
    where = f"{cell['monitor']} ({cell['model']}, {cell['workers']} workers, {cell['mode']}, {cell['rounds']} rounds)"
    return f"{where} costs {result['median']:.3f} x [{low:.3f}-{high:.3f}]; its bound is {bound:.3g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="two small cells, half a minute")
    parser.add_argument("--monitors", nargs="+", choices=[*MONITORS], default=[*MONITORS])
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--modes", nargs="+", choices=["exact", "fast"], default=["exact", "fast"])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sizes = [("lenet", 2, mode, "noise_scale", 8) for mode in ("exact", "fast")] if args.smoke else [
        (model, world, mode, monitor, args.rounds)
        for monitor in args.monitors for model in args.models for world in args.workers for mode in args.modes
    ]  # fmt: skip
    cells = []
    for size in sizes:
        cells.append(measure(*size, gate_only=args.smoke))
        print(shown(cells[-1]), flush=True)
        if args.out:
            result = {"cells": cells}
            write_result(args.out, result)
    wrong = [outcome for cell in cells if (outcome := too_dear(cell, surely=args.smoke))]
    print("\n".join(wrong) or f"ok: {len(cells)} cells keep their bounds")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
