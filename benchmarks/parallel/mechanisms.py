"""Every mechanism beside torch's own and DeepSpeed: step time, bytes sent, memory of a worker; one run, in turns.

Rounds of a few steps of each variant take turns in the same processes on the same data, so that drift of the machine
hits all alike; figures are medians over rounds of (variant / its rival), with quartiles. Bytes are those of the
loopback device in a network namespace of this run's own, divided by workers and steps: headers are in them. Memory is
what the process has of its own (private pages) beyond what it had before the variant was built, each in processes of
its own, after the last step. State is what ours count there of parameters and optimizer state (``Replica.memory``), of
the fullest worker, over what would lie there if the whole were divided evenly: ``copies / workers`` of it.

    python -m benchmarks.parallel.mechanisms [--smoke] [--large] [--only zero,sharded] [--cells mlp_10m:2] [--rounds N]
        [--out benchmarks/results/mechanisms.json]
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from benchmarks.common.forked import on_workers
from benchmarks.common.result_file import write_result
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from elastune.core.run import ExecutionSettings, Place, Program, RunSpec
from elastune.elastic.worker.group import WorkerGroup
from elastune.parallel.comm.group import Group
from elastune.parallel.comm.process_groups import join, stand
from elastune.parallel.mechanisms.registry import MECHANISMS
from elastune.train.session import Session

SAMPLES, WIDTH, CLASSES, WORDS, CONTEXT = 512, 784, 10, 2048, 32
ISOLATED = "ELASTUNE_BENCHMARK_ISOLATED"
MOMENTS = 2  # of AdamW, each as large as the parameters


@dataclass(frozen=True)
class Loop:
    """A training: takes ``step(count)`` steps; one of ours then tells its worker's bytes by kind."""

    step: Callable[[int], None]
    state: Callable[[], Mapping[str, int]] = dict


# -- models --------------------------------------------------------------------------------------------------------


def mlp(hidden: int) -> nn.Module:
    """Four hidden layers."""
    sizes = [WIDTH, hidden, hidden, hidden, hidden]
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(hidden, CLASSES))


class Block(nn.Module):
    """Attention and MLP, normalised before each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.between(x))))


def gpt(width: int, layers: int) -> nn.Module:
    """A decoder that says what text is about: its last word's state, in ten classes."""
    return nn.Sequential(
        nn.Embedding(WORDS, width),
        *(Block(width, 8) for _ in range(layers)),
        nn.LayerNorm(width),
        nn.Flatten(),
        nn.Linear(CONTEXT * width, CLASSES),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp_small": lambda: mlp(256),
    "mlp_10m": lambda: mlp(1690),
    "mlp_100m": lambda: mlp(5640),
    "gpt_10m": lambda: gpt(336, 7),
    "gpt_100m": lambda: gpt(896, 10),
}


def data_for(model: str) -> TensorDataset:
    """Made: what it costs to train does not depend on what it means."""
    torch.manual_seed(0)
    x = torch.randint(0, WORDS, (SAMPLES, CONTEXT)) if model.startswith("gpt") else torch.randn(SAMPLES, WIDTH)
    return TensorDataset(x, torch.randint(0, CLASSES, (SAMPLES,)))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)


# -- variants ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """A way to train. ``rival``: which other one its step time is told as a multiple of; ``goal``: at most that."""

    execution: dict[str, Any] = field(default_factory=dict)
    rival: str = "ddp"
    goal: float | None = None


ALONE = ("ddp", "zero_redundancy", "fsdp2", "deepspeed")
"""Without elastune: torch's own, and DeepSpeed's ZeRO stage 2."""
VARIANTS: dict[str, Variant] = {
    "ddp": Variant(),
    "zero_redundancy": Variant(),
    "fsdp2": Variant(),
    "deepspeed": Variant(),
    "replicated": Variant({"mechanism": "replicated"}),
    "zero": Variant({"mechanism": "zero", "copies": 1}, "replicated", 1.05),
    "zero_two_copies": Variant({"mechanism": "zero", "copies": 2}, "zero", 1.10),
    "zero_fast": Variant({"mechanism": "zero", "copies": 1, "mode": "fast"}),
    "sharded": Variant({"mechanism": "sharded", "copies": 1}, "fsdp2", 1.15),
    "sharded_two_copies": Variant({"mechanism": "sharded", "copies": 2}, "sharded", 1.10),
    "tensor": Variant({"mechanism": "tensor", "virtual_tensor": 4}, "replicated"),
    "pipeline": Variant({"mechanism": "pipeline"}, "replicated"),
    "fsdp2_fast": Variant({"mechanism": "fsdp2", "mode": "fast"}, "fsdp2"),
    "fsdp2_exact": Variant({"mechanism": "fsdp2"}, "fsdp2"),
    "deepspeed_fast": Variant({"mechanism": "deepspeed", "mode": "fast"}, "deepspeed"),
}


def deepspeeds(model: nn.Module) -> Any:
    """DeepSpeed's engine, which compiles nothing."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}
    deepspeed = importlib.import_module("deepspeed")
    importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
    }
    optimizer = adamw(model.parameters())
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)[0]


def alone(name: str, model: nn.Module, group: Group, data: TensorDataset, batch: int) -> Loop:
    """The loop that a user would write without elastune."""
    wrapped: Any = model
    optimizer: Any
    if name == "fsdp2":
        for child in model.children():
            if any(True for _ in child.parameters()):
                fully_shard(child)
        fully_shard(model)
        optimizer = adamw(model.parameters())
    elif name == "deepspeed":
        wrapped = optimizer = deepspeeds(model)
    else:
        wrapped = DistributedDataParallel(model)
        if name == "zero_redundancy":
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4)
        else:
            optimizer = adamw(model.parameters())
    own = batch // group.size

    def indices() -> Iterator[torch.Tensor]:
        while True:
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
            for at in range(0, len(data) - batch + 1, batch):
                yield order[at + group.rank * own : at + (group.rank + 1) * own]

    source = indices()

    def step(count: int) -> None:
        for index in itertools.islice(source, count):
            x, y = (t[index] for t in data.tensors)
            loss = F.cross_entropy(wrapped(x), y)
            wrapped.backward(loss) if name == "deepspeed" else loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return Loop(step)


def ours(variant: Variant, model: nn.Module, group: Group, data: TensorDataset, batch: int) -> Loop:
    execution = ExecutionSettings(workers=group.size, num_slots=max(4, group.size), **variant.execution)
    spec = RunSpec(Program(Path(__file__)), Path(tempfile.gettempdir()), execution=execution, checkpoint_every_steps=0)
    workers = WorkerGroup(group, stand(group, Place(rank=group.rank, world=group.size), execution.first_mesh))
    session = Session(
        spec, workers, torch.device("cpu"), config={}, send=lambda record: None, stop_requested=lambda: False
    )
    model, optimizer = session.prepare(model, adamw(model.parameters()))
    source = (xy for _ in session.epochs(10**9) for xy in session.batches(data, batch_size=batch, drop_last=True))

    def step(count: int) -> None:
        done = 0
        for x, y in source:
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            done += session.ends_step
            if done == count:
                return

    def state() -> Mapping[str, int]:
        assert session.trained is not None
        return session.trained.replica.memory()

    return Loop(step, state)


def loop_of(name: str, model: str, group: Group, batch: int) -> Loop:
    torch.manual_seed(0)
    built, data = MODELS[model](), data_for(model)
    if name in ALONE:
        return alone(name, built, group, data, batch)
    return ours(VARIANTS[name], built, group, data, batch)


# -- what a worker does --------------------------------------------------------------------------------------------


def sent_bytes() -> int:
    """Of the loopback device, in this run's own namespace."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        device, _, numbers = line.partition(":")
        if device.strip() == "lo":
            return int(numbers.split()[8])
    return 0


def own_bytes() -> int:
    """Private memory of this process."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private"))


def timed(rank: int, world: int, rendezvous: str, cell: dict[str, Any], out: str) -> None:
    torch.set_num_threads(1)
    group = join(Place(rank=rank, world=world, rendezvous=rendezvous))
    loops = {name: loop_of(name, cell["model"], group, cell["batch"]) for name in cell["variants"]}
    results: dict[str, list[list[float]]] = {name: [] for name in loops}
    for loop in loops.values():
        loop.step(3)
    names = list(loops)
    for round_ in range(cell["rounds"]):
        turn = round_ % len(names)
        for name in names[turn:] + names[:turn]:
            group.gather_floats([0.0])  # start together
            started, cpu, before = time.perf_counter(), time.process_time(), sent_bytes()
            loops[name].step(cell["steps"])
            group.gather_floats([0.0])
            seconds, cpus = time.perf_counter() - started, time.process_time() - cpu
            all_cpu = sum(row[0] for row in group.gather_floats([cpus]))
            sent = (sent_bytes() - before) / world
            results[name].append([value / cell["steps"] for value in (seconds, all_cpu, sent)])
    if rank == 0:
        Path(out).write_text(json.dumps(results))
    os._exit(0)  # as elastune's workers end: see comm.group.join


def weighed(rank: int, world: int, rendezvous: str, cell: dict[str, Any], out: str) -> None:
    torch.set_num_threads(1)
    group = join(Place(rank=rank, world=world, rendezvous=rendezvous))
    adamw([nn.Parameter(torch.zeros(1))])  # imports what the first optimizer imports
    gc.collect()
    before = own_bytes()
    loop = loop_of(cell["variants"][0], cell["model"], group, cell["batch"])
    loop.step(3)
    gc.collect()
    own, state = own_bytes() - before, loop.state()
    rows = group.gather_floats([float(own), float(state.get("parameters", 0) + state.get("optimizer", 0))])
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    os._exit(0)


def spawned(act: Callable[..., None], world: int, cell: dict[str, Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        args = world, f"file://{folder}/rendezvous", cell, str(out)
        if act is weighed:  # what a process shares with the one that it was forked from would not count
            mp.spawn(act, args, nprocs=world)
        else:
            on_workers(act, world, *args)
        return json.loads(out.read_text())


# -- the cells -----------------------------------------------------------------------------------------------------


def even_state(variant: Variant, world: int) -> float | None:
    """Parameters and optimizer state of a worker that has its even part of what is divided, in parameters; None: where
    that depends on the model's layers.
    """
    share = variant.execution.get("copies", 1) / world
    match variant.execution.get("mechanism"):
        case "replicated":
            return 1.0 + MOMENTS
        case "zero":
            return 1.0 + MOMENTS * share
        case "sharded":
            return (1.0 + MOMENTS) * share
    return None


def quartiles(values: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": round(middle, 4), "low": round(low, 4), "high": round(high, 4)}


def measure(
    model: str, world: int, batch: int, rounds: int, steps: int, sets: list[list[str]], weigh: int | None = None
) -> dict[str, Any]:
    """One model on ``world`` workers; each of ``sets`` of variants takes turns in the same processes.

    ``weigh``: of so many variants, the last ones, memory is measured; None: of all.
    """
    parameters = sum(p.numel() for p in MODELS[model]().parameters())
    results: dict[str, Any] = {}
    for names in sets:
        cell = {"model": model, "batch": batch, "rounds": rounds, "steps": steps, "variants": names}
        result = spawned(timed, world, cell)
        for name in names:
            if name in results:
                continue
            seconds, cpus, sent = zip(*result[name], strict=True)
            results[name] = {
                "ms": round(1e3 * statistics.median(seconds), 2),
                "cpu_ms_of_all": round(1e3 * statistics.median(cpus), 2),
                "sent_over_parameters": round(statistics.median(sent) / (4 * parameters), 3)
                if ISOLATED in os.environ
                else None,
            }
            rival = VARIANTS[name].rival
            if rival in names and rival != name:
                pairs = zip(result[name], result[rival], strict=True)
                ratios = [(a[0] / b[0], a[1] / b[1]) for a, b in pairs]
                results[name][f"over_{rival}"] = quartiles([wall for wall, _ in ratios])
                results[name][f"cpu_over_{rival}"] = quartiles([cpu for _, cpu in ratios])
                results[name]["goal"] = VARIANTS[name].goal
    for name in list(results)[-(weigh or len(results)) :]:
        own = spawned(weighed, world, {"model": model, "batch": batch, "variants": [name]})
        results[name]["worker_bytes_over_parameters"] = round(max(row[0] for row in own) / (4 * parameters), 2)
        if (even := even_state(VARIANTS[name], world)) is not None and name not in ALONE:
            results[name]["state_over_parameters"] = round(max(row[1] for row in own) / (4 * parameters), 3)
            results[name]["state_over_even"] = round(max(row[1] for row in own) / (4 * parameters * even), 3)
    return {
        "model": model, "parameters": parameters, "workers": world, "batch": batch, "rounds": rounds, "steps": steps,
        "variants": results,
    }  # fmt: skip


def show(cell: dict[str, Any]) -> None:
    print(f"{cell['model']}, {cell['parameters']:,} parameters, {cell['workers']} workers", flush=True)
    for name, row in cell["variants"].items():
        ratios = " ".join(
            f"{key} {value['median']:.2f} [{value['low']:.2f}-{value['high']:.2f}]"
            for key, value in row.items()
            if "over_" in key and isinstance(value, dict)
        )
        sizes = "  ".join(
            f"{what} {'   ?' if value is None else f'{value:5.2f}'} x P"
            for what, value in (
                ("sent", row["sent_over_parameters"]),
                ("memory", row.get("worker_bytes_over_parameters")),
                ("state", row.get("state_over_parameters")),
            )
        )
        print(f"  {name:20} {row['ms']:8.1f} ms  cpu {row['cpu_ms_of_all']:8.1f}  {sizes}  {ratios}", flush=True)


def isolated() -> None:
    """Begin again in a network namespace of this process's own, where that is allowed: bytes are then this run's."""
    if ISOLATED in os.environ or shutil.which("unshare") is None:
        return
    if subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0:
        os.environ[ISOLATED] = "1"
        module = [sys.executable, "-m", "benchmarks.parallel.mechanisms", *sys.argv[1:]]
        command = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *module]
        os.execvp(command[0], command)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one small cell, a few seconds")
    parser.add_argument("--large", action="store_true", help="models of 100 million parameters, too")
    parser.add_argument("--only", help="these variants, by comma")
    parser.add_argument("--cells", help="these alone, as mlp_10m:2 (model and workers), by comma")
    parser.add_argument("--rounds", type=int, default=12, help="of models of 10 million parameters")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    isolated()
    chosen = [name for name in VARIANTS if args.only is None or name in args.only.split(",")]
    if not MECHANISMS["deepspeed"].capabilities.installed:
        print(f"without DeepSpeed: {MECHANISMS['deepspeed'].capabilities.install}")
        chosen = [name for name in chosen if not name.startswith("deepspeed")]
    if args.smoke:
        few = [name for name in chosen if args.only or name in ("ddp", "replicated", "zero", "sharded", "pipeline")]
        sizes: list[Any] = [("mlp_small", 2, 32, 3, 2, [few], 1)]
    else:
        sizes = [(model, world, 64, args.rounds, 3, [chosen]) for model in ("mlp_10m", "gpt_10m") for world in (2, 4)]
    if args.large:  # two at a time: memory holds no more
        pairs = [[v.rival, name] for name, v in VARIANTS.items() if name in chosen and v.rival != name]
        sizes += [(model, world, 16, 4, 1, pairs) for model in ("mlp_100m", "gpt_100m") for world in (2, 4)]
    if args.cells:
        sizes = [size for size in sizes if f"{size[0]}:{size[1]}" in args.cells.split(",")]
    cells = []
    for size in sizes:
        cells.append(measure(*size))
        show(cells[-1])
        if args.out:
            result = {"cells": cells}
            write_result(args.out, result)


if __name__ == "__main__":
    main()
