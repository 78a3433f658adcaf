"""A model of which a worker has room for a part alone. Reports how much memory (MB) building and training took."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

config = {"width": 64, "layers": 4, "context": True, "spare_mb": 0, "again": False}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(width, 2 * width), nn.Dropout(0.1), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(self.drop(torch.relu(self.up(x))))
        return result


class Stack(nn.Module):
    def __init__(self, width: int, layers: int, again: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.again = again
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x


def status(kind: str) -> float:
    """Of this process, in MB: VmData (what RLIMIT_DATA bounds), VmRSS, VmHWM (the most of that)."""
    return next(int(line.split()[1]) for line in Path("/proc/self/status").open() if line.startswith(kind)) / 1024


def train(session: Any) -> None:
    chosen = session.config
    if chosen["spare_mb"]:
        limit = int((status("VmData") + chosen["spare_mb"]) * 2**20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    with session.model_context() if chosen["context"] else contextlib.nullcontext():
        model = Stack(chosen["width"], chosen["layers"], chosen["again"])
    size = sum(p.nbytes for p in model.parameters()) / 2**20
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(32, chosen["width"], generator=generator))
    for _ in session.epochs(1):
        for (x,) in session.batches(data, batch_size=16):
            session.backward((model(x) - 1).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        session.report(model_mb=size, most_mb=status("VmHWM") - before)
