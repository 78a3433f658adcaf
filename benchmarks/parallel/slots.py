"""What a worker's slots cost: CPU time of a step in ``exact`` mode over that of plain PyTorch, by slots a worker.

One worker, one thread. All variants take turns in one process, on models of their own that begin equal, a block of
steps each; the figures are medians and quartiles over rounds of (variant / plain), of CPU time, which other programs on
the machine disturb less than they do a clock. ``passes``: plain PyTorch that accumulates the same batch over as many
passes as there are slots. What it costs over ``plain`` is the price of small passes; what ``exact`` costs beyond it is
elastune's own.

    python -m benchmarks.parallel.slots [--smoke] [--models lenet ...] [--out benchmarks/results/slots.json]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.common.result_file import write_result
from benchmarks.parallel.overhead import lenet
from tests.support.sessions import lone_session
from torch import nn
from torch.utils.data import TensorDataset

from elastune.core.run import ExecutionSettings

SLOTS = (1, 2, 4, 8)
SAMPLES = 512
TOKENS, WORDS = 64, 65
Stepper = Callable[[int], None]


class Residual(nn.Module):
    """Two 3x3 convolutions and a shortcut, after He et al. 2016, "Deep Residual Learning for Image Recognition"."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        shortcut = [nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width)]
        self.shortcut = nn.Sequential(*(shortcut if stride > 1 else []))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet18() -> nn.Module:
    """For 28x28 pixels: 11.2 million parameters, 20 BatchNorms."""
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2)]
    blocks = [Residual(*sizes) for sizes in [*widths, (512, 512, 1)]]
    first = [nn.Conv2d(1, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class SmallGPT(nn.Module):
    """A decoder of 4 layers and width 128 over 64 tokens: 0.8 million parameters."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, width), nn.Embedding(TOKENS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, F.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(TOKENS), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x) + self.places.weight
        return self.head(self.layers(hidden, mask=self.mask, is_causal=True)).transpose(1, 2)


def images() -> TensorDataset:
    return TensorDataset(torch.randn(SAMPLES, 1, 28, 28), torch.randint(0, 10, (SAMPLES,)))


def texts() -> TensorDataset:
    return TensorDataset(torch.randint(0, WORDS, (SAMPLES, TOKENS)), torch.randint(0, WORDS, (SAMPLES, TOKENS)))


@dataclass(frozen=True)
class Case:
    """A model and its global batch; ``steps`` of a block."""

    build: Callable[[], nn.Module]
    data: Callable[[], TensorDataset]
    batch: int
    steps: int
    rounds: int


CASES = {
    "lenet": Case(lenet, images, 64, 4, 20),
    "resnet18": Case(resnet18, images, 32, 1, 8),
    "small_gpt": Case(SmallGPT, texts, 32, 1, 16),
}


def plain(case: Case, data: TensorDataset, passes: int) -> Stepper:
    """The loop a user would write with torch alone, its batch cut into ``passes``."""
    torch.manual_seed(0)
    model = case.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)

    def indices() -> Iterator[torch.Tensor]:
        while True:
            order = torch.randperm(SAMPLES)
            yield from order.split(case.batch)[: SAMPLES // case.batch]

    source = indices()

    def step(count: int) -> None:
        for index in itertools.islice(source, count):
            for part in index.chunk(passes):
                x, y = (t[part] for t in data.tensors)
                loss = F.cross_entropy(model(x), y)
                (loss / passes if passes > 1 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def exact(case: Case, data: TensorDataset, slots: int) -> Stepper:
    session = lone_session(Path(tempfile.gettempdir()), execution=ExecutionSettings(mode="exact", num_slots=slots))
    torch.manual_seed(0)
    model = case.build()
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9))
    source = (xy for _ in session.epochs(10**9) for xy in session.batches(data, batch_size=case.batch, drop_last=True))

    def step(count: int) -> None:
        for x, y in source:
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            count -= session.ends_step
            if not count:
                return

    return step


def measure(name: str, slots: tuple[int, ...], rounds: int | None = None) -> dict[str, Any]:
    case = CASES[name]
    rounds = rounds or case.rounds
    torch.manual_seed(0)
    data = case.data()
    steppers = {"plain": plain(case, data, 1), "again": plain(case, data, 1)}
    steppers |= {f"passes_{n}": plain(case, data, n) for n in slots if n > 1}
    steppers |= {f"exact_{n}": exact(case, data, n) for n in slots}
    cpu_s: dict[str, list[float]] = {variant: [] for variant in steppers}
    for step in steppers.values():
        step(1)
    for round_ in range(rounds):
        at = round_ % len(steppers)
        for variant in [*steppers][at:] + [*steppers][:at]:
            started = time.process_time()
            steppers[variant](case.steps)
            cpu_s[variant].append((time.process_time() - started) / case.steps)
    cell: dict[str, Any] = {"model": name, "batch": case.batch, "rounds": rounds, "steps": case.steps}
    cell["cpu_ms"] = {variant: statistics.median(values) * 1e3 for variant, values in cpu_s.items()}
    cell["over_plain"] = {
        variant: _spread([a / b for a, b in zip(values, cpu_s["plain"], strict=True)])
        for variant, values in cpu_s.items()
        if variant != "plain"
    }
    return cell


def _spread(ratios: list[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"median": middle, "quartiles": [low, high]}


def shown(cell: dict[str, Any]) -> str:
    results = {name: f"{f['median']:.2f} [{f['quartiles'][0]:.2f}-{f['quartiles'][1]:.2f}]" for name, f in
            cell["over_plain"].items()}  # fmt: skip
    return f"{cell['model']}: plain {cell['cpu_ms']['plain']:.1f} ms of CPU a step\n  " + "\n  ".join(
        f"{name:9} {text}" for name, text in results.items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="LeNet on few slots, a few seconds")
    parser.add_argument("--models", nargs="+", choices=[*CASES], default=[*CASES])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cells = []
    for name in ["lenet"] if args.smoke else args.models:
        cells.append(measure(name, (2, 8), 3) if args.smoke else measure(name, SLOTS, args.rounds))
        print(shown(cells[-1]), flush=True)
        if args.out:
            result = {"cells": cells}
            write_result(args.out, result)


if __name__ == "__main__":
    main()
