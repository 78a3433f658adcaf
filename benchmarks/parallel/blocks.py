"""What it costs to divide layers into virtual blocks, and what a CNN with large FC layers gains when they are split.

``cost``: one worker, one thread; forward and backward pass of a model in 2, 4 and 8 blocks over the plain one, CPU
time, taken in turn; medians and quartiles of the ratios. ``split``: the CNN's FC layers on 1, 2 and 4 workers along the
tensor axis (4 blocks; the convolutions whole on each), by processes of this machine: bytes of parameters a worker, the
share of the passes' time that is spent in divided layers, traffic included (on one worker, the rest is the serial
share: what every worker does all of), bytes sent, and one hash of the outputs. Workers of one machine share its cores:
the wall times say nothing of a cluster.

    python -m benchmarks.parallel.blocks [--smoke] [--out benchmarks/results/blocks.json]
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.common.result_file import write_result
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from elastune.core.mesh import Mesh
from elastune.core.run import ExecutionSettings
from elastune.core.slots import BatchSlice
from elastune.parallel.comm.backends import GlooFactory
from elastune.parallel.comm.process_groups import form_comms
from elastune.parallel.mechanisms.base import ModelParallel
from elastune.parallel.mechanisms.tensor.tensor_parallel import Plan, TensorParallel, plan_layers
from elastune.parallel.mechanisms.tensor.trunk import divide_layers
from elastune.testing.worker_processes import LIMIT_S, Worker, processes

BLOCKS = (2, 4, 8)
FC = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}
FEATURES, BATCH = 2048, 64


class Residual(nn.Module):
    """Feed-forward layers of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(768), nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Cnn(nn.Module):
    """LeNet with FC layers of ``features``: of 2048 the FC layers have 99 % of the parameters."""

    def __init__(self, features: int = 500) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 20, 5), nn.Conv2d(20, 50, 5)
        self.fc1, self.fc2, self.out = nn.Linear(800, features), nn.Linear(features, features), nn.Linear(features, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.out(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(384, 8, 1536, dropout=0.0, batch_first=True), 3)


CASES: dict[str, tuple[Callable[[], nn.Module], Plan | None, tuple[int, ...]]] = {
    "2 x (768, 3072, 768), 16 rows": (Residual, None, (16, 768)),
    "2 x (768, 3072, 768), 64 rows": (Residual, None, (64, 768)),
    "3 encoder layers of 384, 128 tokens": (encoder, None, (4, 32, 384)),
    "LeNet, FC divided, 25 images": (Cnn, FC, (25, 1, 28, 28)),
    "LeNet, convolutions too, 25 images": (
        Cnn,
        {"conv1": ColwiseParallel(), "conv2": RowwiseParallel(), **FC},
        (25, 1, 28, 28),
    ),
}


def divided(model: nn.Module, plan: Plan | None, blocks: int) -> TensorParallel:
    if plan is not None:
        plan_layers(model, plan)
    division = divide_layers(ModelParallel(model), ExecutionSettings(mechanism="tensor", virtual_tensor=blocks))
    assert isinstance(division, TensorParallel)
    return division


def cost(name: str, rounds: int) -> dict[str, Any]:
    """CPU time over that of the plain model, by blocks."""
    make, plan, shape = CASES[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    models = {1: make(), **{blocks: divided(make(), plan, blocks).model for blocks in BLOCKS}}
    taken: dict[int, list[float]] = {blocks: [] for blocks in models}
    for turn in range(rounds + 2):
        for blocks, model in models.items():
            model.zero_grad(set_to_none=True)
            since = time.process_time()
            model(x).square().mean().backward()
            if turn >= 2:
                taken[blocks].append(time.process_time() - since)
    ratios = {b: [t / plain for t, plain in zip(taken[b], taken[1], strict=True)] for b in BLOCKS}
    return {
        "model": name,
        "plain_ms": 1e3 * statistics.median(taken[1]),
        "over_plain": {b: statistics.median(r) for b, r in ratios.items()},
        "quartiles": {b: statistics.quantiles(r, n=4)[::2] for b, r in ratios.items()},
    }


def split(worker: Worker, rounds: int) -> None:
    """What one of the workers of a split CNN does, on each width."""
    x = torch.randn(BATCH, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    whole = BatchSlice(range(BATCH), 0, 1.0, ends_slot=True, ends_step=True)
    for width in (1, 2, 4):
        if worker.rank >= width:
            continue
        comms = form_comms(GlooFactory("lo", LIMIT_S), worker.store, str(width), worker.rank, Mesh(tensor=width))
        torch.manual_seed(0)
        division = divided(Cnn(FEATURES), FC, 4)
        division.enter(comms)
        digest, taken = hashlib.sha256(), []
        for _ in range(rounds):
            division.module.zero_grad(set_to_none=True)
            since = time.perf_counter()
            out = division.model(x)
            list(division.backward(out.square().mean(), whole))
            taken.append(time.perf_counter() - since)
            digest.update(out.detach().numpy().tobytes())
        param_blocks, own = division.split.param_blocks, division.split.computed(comms.mesh, comms.rank)
        results = {
            "parameter_bytes": 4 * sum(param_blocks[i].size for i in own),
            "of": 4 * sum(param_block.size for param_block in param_blocks),
            "divided_share": division.divided_share,
            "sent_bytes": division.axis.traffic_bytes // rounds,
            "pass_ms": 1e3 * statistics.median(taken),
            "outputs": digest.hexdigest()[:16],
        }
        worker.send(results)
    worker.receive()


def split_on(rounds: int) -> list[dict[str, Any]]:
    """By width, and by worker."""
    with processes(4, split, rounds) as them:
        return [{"tensor": width, "workers": [them.receive(rank)[0] for rank in range(width)]} for width in (1, 2, 4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="few rounds, some seconds")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rounds = 3 if args.smoke else 60
    costs = []
    for name in CASES:
        costs.append(cost(name, rounds))
        ratios = ", ".join(f"{b} blocks {r:.2f}" for b, r in costs[-1]["over_plain"].items())
        print(f"{name}: plain {costs[-1]['plain_ms']:.1f} ms of CPU; {ratios}", flush=True)
    splits = split_on(rounds)
    for each in splits:
        first = each["workers"][0]
        print(
            f"CNN, FC split over {each['tensor']}: {first['parameter_bytes'] / 1e6:.1f} MB of parameters a worker "
            f"(of {first['of'] / 1e6:.1f}), {first['divided_share']:.0%} of the time in divided layers, "
            f"{first['sent_bytes'] / 1e6:.2f} MB sent a pass, {first['pass_ms']:.1f} ms (all on this machine)"
        )
    if len({outcome["outputs"] for each in splits for outcome in each["workers"]}) > 1:
        sys.exit("the width shows in the outputs")
    if args.out:
        result = {
            "cost": costs,
            "split": splits,
        }
        write_result(args.out, result)


if __name__ == "__main__":
    main()
