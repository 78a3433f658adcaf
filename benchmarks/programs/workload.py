"""What every contender of ``elastic.py`` and ``hosts.py`` trains, and how it tells of its steps. Needs torch alone."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

SAMPLES = 16384
OWNER = "ELASTUNE_BENCHMARK_PID"  # the benchmark's process: its programs do not outlive it
SAMPLE_S = "ELASTUNE_BENCHMARK_SAMPLE_S"  # what a sample takes on the emulated device


def build(size: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """ "small": LeNet with momentum, 3 MB of state. "large": 8.3 million parameters with Adam, 100 MB of state.
    "light": as much state as "small", and next to no arithmetic: for emulated compute."""
    torch.manual_seed(0)
    model: nn.Module
    if size == "small":
        model = nn.Sequential(
            nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10),
        )  # fmt: skip
        return model, torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    if size == "light":
        model = nn.Sequential(nn.Flatten(), nn.Linear(784, 540), nn.ReLU(), nn.Linear(540, 10))
        return model, torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 1226),
        nn.ReLU(), nn.Linear(1226, 10),
    )  # fmt: skip
    return model, torch.optim.Adam(model.parameters(), lr=0.0001)


def samples() -> TensorDataset:
    """Noise with random labels: only time is measured."""
    source = torch.Generator().manual_seed(0)
    images = torch.rand(SAMPLES, 1, 28, 28, generator=source)
    return TensorDataset(images, torch.randint(0, 10, (SAMPLES,), generator=source))


def emulate(samples: int) -> None:
    """Emulated compute: sleep as long as the device would need for so many samples; without one, do nothing."""
    if (each_s := float(os.environ.get(SAMPLE_S, "0"))) > 0:
        time.sleep(samples * each_s)


class TickLog:
    """One line per completed step, written at once: "monotonic nanoseconds, step, world, rank, discarded so far"."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / f"{os.getpid()}.ticks", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._owner = int(os.environ.get(OWNER, "0"))

    def write(self, step: int, world: int, rank: int, discarded: int = 0) -> None:
        os.write(self._file, b"%d %d %d %d %d\n" % (time.monotonic_ns(), step, world, rank, discarded))
        if self._owner and not Path(f"/proc/{self._owner}").exists():
            os._exit(1)
