"""The timed part of ``gpu.py``: trainings that take turns in the same processes, on one GPU that workers share.

A cell is a model, a number of workers and a precision. Blocks of steps of each variant take turns, so that drift hits
all alike; the figures are medians and quartiles over rounds of (variant / the first one). Peak memory is the
allocator's, of worker 0, above what was allocated before the variant was built.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from benchmarks.programs.gpu_train import BATCH, build, data, loss_of, optimizer_of
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from elastune.core.run import Adapt, ExecutionSettings, Place, Program, RunSpec
from elastune.elastic.worker.group import WorkerGroup
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.process_groups import join
from elastune.train.compiling import Autocast
from elastune.train.session import Session
from elastune.train.worker import set_up_device

LEAST_ROUNDS = 3
BLOCK_S = 0.3  # a block of a variant takes about as long, where nothing else is asked for
Stepper = Callable[[int], None]
Cell = dict[str, Any]
Variant = dict[str, Any]
PLAIN: Variant = {"plain": True}
DETERMINISTIC: Variant = {"plain": True, "deterministic": True}
FAST: Variant = {"mode": "fast"}


def exact(slots: int, *monitors: str) -> Variant:
    return {"mode": "exact", "slots": slots, "monitors": monitors}


def plain(cell: Cell, group: Group, samples: TensorDataset, device: torch.device) -> Stepper:
    """The loop a user would write with torch alone; without other workers, not even DDP."""
    model = build(cell["model"], cell["size"]).to(device)
    if cell["precision"] == "bf16":
        Autocast(model, device)
    optimizer = optimizer_of(model)
    wrapped = DistributedDataParallel(model) if group.size > 1 else model
    batch = BATCH[cell["size"]][cell["model"]]
    share = batch // group.size

    def indices() -> Iterator[torch.Tensor]:
        while True:
            order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))
            for at in range(0, len(samples), batch):
                yield order[at + group.rank * share : at + (group.rank + 1) * share]

    source = indices()

    def step(count: int) -> None:
        for index in itertools.islice(source, count):
            x, y = (t[index].to(device, non_blocking=True) for t in samples.tensors)
            loss_of(wrapped, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def ours(cell: Cell, variant: Variant, group: Group, samples: TensorDataset, device: torch.device) -> Stepper:
    execution = ExecutionSettings(
        workers=group.size,
        mode=variant["mode"],
        num_slots=variant.get("slots", group.size),
        device=str(device),
        precision=cell["precision"],
    )
    out, adapt = Path(tempfile.gettempdir()), Adapt(monitors=tuple(variant.get("monitors", ())))
    spec = RunSpec(Program(Path(__file__)), out, execution=execution, checkpoint_every_steps=0, adapt=adapt)
    session = Session(
        spec, WorkerGroup(group), device, config={}, send=lambda record: None, stop_requested=lambda: False
    )
    model = build(cell["model"], cell["size"])
    model, optimizer = session.prepare(model, optimizer_of(model))
    batch = BATCH[cell["size"]][cell["model"]]
    source = (xy for _ in session.epochs(10**9) for xy in session.batches(samples, batch_size=batch))

    def step(count: int) -> None:
        for x, y in source:
            session.backward(loss_of(model, x, y))
            optimizer.step()
            optimizer.zero_grad()
            count -= session.ends_step
            if not count:
                return

    return step


@contextmanager
def settings(variant: Variant, place: Place) -> Iterator[torch.device]:
    """The process is set up as a worker of this variant is, for as long as it is its turn."""
    strict = variant.get("mode") == "exact" or variant.get("deterministic", False)
    try:
        yield set_up_device(ExecutionSettings(mode="exact" if strict else "fast"), place)
    finally:
        torch.use_deterministic_algorithms(False)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Contender:
    """A variant that trains when it is told to, and what it has taken so far."""

    def __init__(self, cell: Cell, variant: Variant, group: Group, samples: TensorDataset, place: Place) -> None:
        self._variant, self._place, self._group = variant, place, group
        self.times: list[float] = []
        self.peak_mib: float | None = None
        torch.manual_seed(0)
        with settings(variant, place) as device:
            before = 0
            if device.type == "cuda":
                before = torch.cuda.memory_allocated(device)
                torch.cuda.reset_peak_memory_stats(device)
            if variant.get("plain"):
                self._step = plain(cell, group, samples, device)
            else:
                self._step = ours(cell, variant, group, samples, device)
        self.run(2)
        self.run(1)
        self.warm_s = self.times[-1]
        self.times.clear()
        if device.type == "cuda":
            self.peak_mib = (torch.cuda.max_memory_allocated(device) - before) / 2**20

    def run(self, steps: int) -> None:
        """``steps`` more; all workers begin together and end with the slowest."""
        with settings(self._variant, self._place) as device:
            self._group.gather_floats([0.0])
            started = time.perf_counter()
            self._step(steps)
            wait_for(device)
            self._group.gather_floats([0.0])
            self.times.append((time.perf_counter() - started) / steps)


def worker(rank: int, cell: Cell, rendezvous: str, out: str) -> None:
    world = cell["workers"]
    place = Place(rank=rank, world=world, device=cell["device"], own_device=False, rendezvous=rendezvous)
    torch.set_num_threads(1)
    group = join(place)
    samples = data(cell["model"], cell["size"])
    contenders = {name: Contender(cell, variant, group, samples, place) for name, variant in cell["variants"].items()}
    slowest = max(contender.warm_s for contender in contenders.values())
    steps = cell["steps"] or max(1, round(BLOCK_S / slowest))
    (steps,) = map(int, group.gather_floats([steps])[0])  # worker 0's
    began, rounds = time.perf_counter(), 0
    while True:
        (used_s,) = group.gather_floats([time.perf_counter() - began])[0]
        if rounds >= LEAST_ROUNDS and used_s + used_s / rounds > cell["budget_s"]:
            break
        order = [*contenders]
        at = rounds % len(order)
        for name in order[at:] + order[:at]:
            contenders[name].run(steps)
        rounds += 1
    if rank == 0:
        results = {name: {"times": c.times, "peak_mib": c.peak_mib} for name, c in contenders.items()}
        Path(out).write_text(json.dumps({"steps": steps, "variants": results}))
    os._exit(0)  # as elastune's workers end: see comm.group.join


def measure(cell: Cell) -> Cell:
    """``cell`` with its figures: of each of its ``variants``, over the first."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/times.json"
        mp.spawn(worker, (cell, f"file://{folder}/rendezvous", out), nprocs=cell["workers"])
        parsed = json.loads(Path(out).read_text())
    results = {name: cell[name] for name in ("model", "workers", "precision", "device")}
    first, *others = cell["variants"]
    times = {name: variant["times"] for name, variant in parsed["variants"].items()}
    results |= {
        "global_batch": BATCH[cell["size"]][cell["model"]],
        "rounds": len(times[first]),
        "steps_a_block": parsed["steps"],
        "ms": {name: statistics.median(values) * 1e3 for name, values in times.items()},
        "peak_mib": {name: variant["peak_mib"] for name, variant in parsed["variants"].items()},
    }
    results["samples_per_s"] = results["global_batch"] / results["ms"][first] * 1e3
    for name in others:
        ratios = [a / b for a, b in zip(times[name], times[first], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        results[f"{name}_over_{first}"] = {"median": middle, "quartiles": [low, high]}
    return results


def shown(result: Cell) -> str:
    """A cell in one line."""
    first = next(iter(result["ms"]))
    line = (
        f"{result['model']:6} {result['workers']} workers {result['precision']}  {first} {result['ms'][first]:8.1f} ms"
    )
    for name in result["ms"]:
        if name != first:
            ratio = result[f"{name}_over_{first}"]
            low, high = ratio["quartiles"]
            line += f"  {name} {ratio['median']:.3f} [{low:.3f}-{high:.3f}]"
    if result["peak_mib"][first] is not None:
        line += "  peak MiB " + " ".join(f"{name} {mib:.0f}" for name, mib in result["peak_mib"].items())
    return line
