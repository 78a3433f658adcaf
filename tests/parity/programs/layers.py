"""Models whose layers are divided, with a plan or without: a CNN, a GPT with tied words, and with what stays whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import TensorDataset

config = {"model": "gpt", "max_norm": 0.5, "optimizer": "adamw", "plan": ""}
WORDS, LENGTH, FEATURES = 20, 6, 16


class Cnn(nn.Module):
    """A convolution and its BatchNorm, divided by channels; FC layers; dropout inside of what is divided."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm, self.conv2 = nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 8, 3)
        self.fc1, self.drop, self.fc2 = nn.Linear(128, 600), nn.Dropout(0.2), nn.Linear(600, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.relu(self.norm(self.conv1(x)))))
        result: torch.Tensor = self.fc2(self.drop(F.relu(self.fc1(x.flatten(1)))))
        return result


class Gpt(nn.Module):
    """torch's encoder layers, causal; a GRU, which stays whole; the output layer's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, FEATURES)
        layer = nn.TransformerEncoderLayer(FEATURES, 4, 72, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.gru = nn.GRU(FEATURES, FEATURES, batch_first=True)
        self.head = nn.Linear(FEATURES, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=self.gru.weight_ih_l0.dtype)
        y = self.gru(self.layers(self.words(x), mask=mask, is_causal=True))[0]
        result: torch.Tensor = self.head(y[:, -1])
        return result


def _row() -> nn.Sequential:
    """Each layer a part by itself: blocks go from one to the next."""
    wide = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), *wide, nn.Linear(32, WORDS))


columns, rows = ColwiseParallel(), RowwiseParallel()
PLANS: dict[str, dict[str, Any]] = {
    "": {},
    "cnn": {"conv1": columns, "conv2": rows, "fc1": columns, "fc2": rows},
    "fc": {"fc1": columns, "fc2": rows},
    "tied": {"words": rows, "head": columns, "layers.layers.*": columns},
    "nothing": {"layers.layers.7": columns},
    "half tied": {"words": rows},
}


def data(kind: str) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, WORDS, (60,), generator=generator)
    if kind in ("cnn", "row"):
        return TensorDataset(torch.randn(60, 1, 8, 8, generator=generator), labels)
    return TensorDataset(torch.randint(0, WORDS, (60, LENGTH), generator=generator), labels)


def train(session: Any) -> None:
    chosen = session.config
    model: nn.Module = {"cnn": Cnn, "gpt": Gpt, "row": _row}[chosen["model"]]()
    optimizer: optim.Optimizer = optim.AdamW(model.parameters(), lr=0.01)
    if chosen["optimizer"] == "adafactor":
        optimizer = optim.Adafactor(model.parameters())
    plan = PLANS[chosen["plan"]] or None
    model, optimizer = session.prepare(model, optimizer, plan=plan)
    samples, norms = data(chosen["model"]), 0.0
    for _ in session.epochs(2):
        for x, y in session.batches(samples, batch_size=24):
            session.backward(F.cross_entropy(model(x), y))
            norms += session.clip_grad_norm_(chosen["max_norm"])
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        right = loss = 0.0
        with torch.no_grad():
            for x, y in session.batches(samples, batch_size=10, train=False):
                output = model(x)
                right += float((output.argmax(1) == y).sum())
                loss += float(F.cross_entropy(output, y, reduction="sum"))
        model.train()
        session.report(accuracy=session.sum(right) / 60, loss=session.sum(loss) / 60, norms=norms)
