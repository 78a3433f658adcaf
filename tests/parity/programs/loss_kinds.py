"""A small network under losses that are no means over samples: on a session, and as a plain loop."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

IGNORED, BATCH, EPOCHS = -100, 16, 2


def data() -> TensorDataset:
    """40 texts of 5 places; the first ones have few targets, and every eighth pair has none."""
    stream = torch.Generator().manual_seed(1)
    x, y = torch.rand(40, 5, 6, generator=stream), torch.randint(0, 4, (40, 5), generator=stream)
    kept = torch.rand(40, 5, generator=stream) < torch.linspace(0.1, 1.0, 40)[:, None]
    kept[::8] = kept[1::8] = kept[2::8] = kept[3::8] = False
    return TensorDataset(x, torch.where(kept, y, IGNORED))


def built() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8), nn.Linear(8, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def mean_over_targets(outputs: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """As a language model's, on padded texts."""
    targets = (y != IGNORED).sum()
    loss = F.cross_entropy(outputs.flatten(0, 1), y.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss / targets.clamp(min=1), {"count": targets}


def summed(outputs: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """As a variational autoencoder's."""
    return outputs.square().sum() / 50, {"reduction": "sum"}


KINDS = {"mean_over_targets": mean_over_targets, "summed": summed}


def train(session: Any, kind: str) -> tuple[str, list[float]]:
    """The digest of the state, and the losses of the steps."""
    model, optimizer = session.prepare(*built())
    losses = []
    for _ in session.epochs(EPOCHS):
        for x, y in session.batches(data(), BATCH, shuffle=False):
            loss, options = KINDS[kind](model(x), x, y)
            session.backward(loss, **options)
            session.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            if session.ends_step:
                losses.append(session.loss)
    session.finish()
    return session.trained.fingerprint(session.state.workers), losses


def plain(kind: str) -> list[float]:
    """The losses of the plain loop."""
    model, optimizer = built()
    losses = []
    for _ in range(EPOCHS):
        x, y = data().tensors
        for start in range(0, len(x), BATCH):
            rows = slice(start, start + BATCH)
            loss, _ = KINDS[kind](model(x[rows]), x[rows], y[rows])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses
