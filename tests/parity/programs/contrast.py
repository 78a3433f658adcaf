"""Two towers under a contrastive loss, on a session and as a plain loop: dropout, a temperature, labels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

BATCH, EPOCHS = 16, 2


class Towers(nn.Module):
    """Images and texts in one space."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.images = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 5))
        self.texts = nn.Linear(4, 5)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.normalize(self.images(images), dim=1), F.normalize(self.texts(texts), dim=1)


def data() -> TensorDataset:
    """44 pairs of 7 classes; the last batch of an epoch is short."""
    stream = torch.Generator().manual_seed(1)
    images, texts = torch.rand(44, 6, generator=stream), torch.rand(44, 4, generator=stream)
    return TensorDataset(images, texts, torch.arange(44) % 7)


def built(dropout: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Towers(dropout)
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def train(session: Any, dropout: float = 0.0) -> tuple[str, list[float]]:
    """The digest of the state, and the losses of the steps."""
    towers, optimizer = session.prepare(*built(dropout))

    def encode(images: torch.Tensor, texts: torch.Tensor, classes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *towers(images, texts), classes

    def loss_of(images: torch.Tensor, texts: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return contrast(towers.scale, images, texts, classes)

    losses = []
    for _ in session.epochs(EPOCHS):
        for images, texts, classes in session.batches(data(), BATCH, shuffle=False):
            session.backward_global(loss_of, encode, images, texts, classes)
            session.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if session.ends_step:
                losses.append(session.loss)
    session.finish()
    return session.trained.fingerprint(session.state.workers), losses


def contrast(scale: torch.Tensor, images: torch.Tensor, texts: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Each image against all texts of other classes, and its own."""
    logits = images @ texts.T * scale.exp()
    own = torch.eye(len(logits), dtype=torch.bool)
    logits = logits.masked_fill((classes[:, None] == classes) & ~own, float("-inf"))
    return F.cross_entropy(logits, torch.arange(len(logits)))


def plain() -> list[float]:
    """The losses of the plain loop."""
    model, optimizer = built(0.0)
    losses = []
    for _ in range(EPOCHS):
        images, texts, classes = data().tensors
        for start in range(0, len(images), BATCH):
            rows = slice(start, start + BATCH)
            loss = contrast(model.scale, *model(images[rows], texts[rows]), classes[rows])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses
