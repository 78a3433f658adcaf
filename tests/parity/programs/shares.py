"""What a mechanism that holds state in shares must get right, in one small model, with evaluation in between."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import TensorDataset

config = {"optimizer": "adamw", "max_norm": 0.5, "odd": True}
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda groups: optim.AdamW(groups, lr=1e-2),
    "fused": lambda groups: optim.AdamW(groups, lr=1e-2, fused=True),
    "sgd": lambda groups: optim.SGD(groups, lr=0.05, momentum=0.9),
    "adagrad": lambda groups: optim.Adagrad(groups, lr=0.02),  # has state before its first step
    "adafactor": optim.Adafactor,
}


class Net(nn.Module):
    """BatchNorm, dropout, weights of more than a unit, tied, frozen and unused ones.

    ``odd``: one that is not contiguous, and a scalar.
    """

    def __init__(self, odd: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 200), nn.BatchNorm1d(200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU())
        self.drop = nn.Dropout(0.2)
        self.frozen = nn.Linear(200, 32).requires_grad_(requires_grad=False)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(32, 10)
        self.tied = nn.Linear(32, 10, bias=False)
        self.tied.weight = self.head.weight
        self.scale = nn.Parameter(torch.tensor(1.0) if odd else torch.ones(1))
        self.turned = nn.Parameter(torch.randn(40, 32).t() if odd else torch.randn(32, 40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.drop(self.body(x))) + (x @ self.turned).mean(1, keepdim=True)
        result: torch.Tensor = self.scale * self.head(x) + 0.1 * self.tied(x)
        return result


@torch.no_grad()
def glance(session: Any, model: nn.Module, data: TensorDataset) -> None:
    """An evaluation of a batch alone: who has none sees it to its end."""
    model.eval()
    for x, _ in session.batches(data, batch_size=50, train=False):
        model(x)
        break
    model.train()


def train(session: Any) -> None:
    chosen = session.config
    model = Net(chosen["odd"])
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = OPTIMIZERS[chosen["optimizer"]](groups)
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    model, optimizer, scheduler = session.prepare(model, optimizer, scheduler)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(100, 32, generator=generator), torch.randint(0, 10, (100,), generator=generator))
    norms = 0.0
    for _ in session.epochs(2):
        for x, y in session.batches(data, batch_size=28):
            session.backward(F.cross_entropy(model(x), y))
            if chosen["max_norm"] > 0:
                norms += session.clip_grad_norm_(chosen["max_norm"])
            elif chosen["max_norm"] < 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if session.ends_step and session.step == 2:
                glance(session, model, data)
        model.eval()
        for i, (x, _) in enumerate(session.batches(data, batch_size=25, train=False)):  # with gradients
            if i:  # some workers have no such batch, and see the pass to its end
                break
            model(x), model(-x)
        with torch.no_grad():
            batches = session.batches(data, batch_size=50, train=False)
            right = sum(float(((model(x) - model(-x)).argmax(1) == y).sum()) for x, y in batches)
        model.train()
        session.report(accuracy=session.sum(right) / 100, norms=norms)
    glance(session, model, data)
