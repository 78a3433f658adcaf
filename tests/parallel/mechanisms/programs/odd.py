"""Models with the oddities that real ones have, one a case. ``config["case"]`` names it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

config = {"case": "plain", "batch_size": 8, "steps": 6, "samples": 25}


class Odd(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case
        self.body = nn.Linear(6, 6)
        self.rare = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)
        self.head = nn.Linear(6, 2)
        if case in ("buffers", "layouts"):
            self.norm = nn.BatchNorm1d(3)
            self.register_buffer("constant", torch.tensor([0.1, 1e-30, 1e30]))
            self.register_buffer("fine", torch.tensor([0.1, 1 / 3], dtype=torch.float64))
            self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))
        if case == "layouts":
            self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
            self.transposed = nn.Parameter(torch.randn(4, 5).t())
            self.narrow = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
            self.wide = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.register_buffer("mask", torch.tensor([True, False]))
        if case == "frozen":
            self.rare.requires_grad_(False)
        if case == "sparse":
            self.words = nn.Embedding(5, 6, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = torch.tanh(self.body(x))
        if self.case == "unused" and bool((x[:, 0] > 1.2).any()):  # of 25 samples a few
            result = result + self.rare(x)
        if self.case == "frozen":
            result = result + self.rare(x)
        if self.case in ("buffers", "layouts"):
            result = self.norm(result.view(-1, 3, 2)).view(-1, 6)
            self.calls += 1
        if self.case == "layouts":
            image = x.view(-1, 3, 1, 2).expand(-1, -1, 2, -1)
            result = result + self.conv(image).mean() + (self.transposed * self.narrow.float().sum()).sum()
            result = result + self.wide.float().sum()
        if self.case in ("frozen", "buffers", "layouts"):
            result = result + self.never(x)
        if self.case in ("buffers", "layouts"):
            result = result + self.rare(x)
        if self.case == "sparse":
            result = result + self.words((x[:, 0] > 0).long())
        if self.case == "recomputed":
            result = checkpoint(self.rare, checkpoint(self.rare, result, use_reentrant=True), use_reentrant=True)
        return self.head(result)


def data(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randn(count, 2, generator=generator))


def train(session) -> None:
    config = session.config
    model = Odd(config["case"])
    if session.rank and config["case"] == "plain":  # rank 0's state counts, whatever the others begin with
        nn.init.ones_(model.body.weight)
    # The first step of AdamW moves every weight that has a gradient, and decays it: an absent one must stay absent.
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05, weight_decay=0.1)
    model, optimizer = session.prepare(model, optimizer)
    odd = getattr(model, "module", model)
    before = {name: p.detach().clone() for name, p in odd.named_parameters()}
    for _ in session.epochs(1000):
        for x, y in session.batches(data(config["samples"]), batch_size=config["batch_size"]):
            session.backward(F.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        session.mean(0.0)
        if session.stopped != "complete":
            break
    moved = {name: float(not torch.equal(p, before[name])) for name, p in odd.named_parameters()}
    results = {f"moved_{name.replace('.', '_')}": value for name, value in moved.items()}
    if config["case"] in ("buffers", "layouts"):
        results["constant_kept"] = float(torch.equal(odd.constant, torch.tensor([0.1, 1e-30, 1e30])))
        results["fine_kept"] = float(torch.equal(odd.fine, torch.tensor([0.1, 1 / 3], dtype=torch.float64)))
        results["calls"] = float(odd.calls)
    session.report(**results)
