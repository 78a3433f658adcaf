"""What ``strategies.py`` trains: a CNN on Fashion-MNIST and a GRU on characters; data, models, one training loop."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pydoc_data.topics import topics  # type: ignore[import-untyped,unused-ignore]

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from elastune.recipes.datasets import Splits, digits, fashion_mnist
from elastune.train.session import Session

LENGTH = 16
"""Characters of a sequence; each is to be told from those before it."""
BLOCK = 4096
"""Characters of text that go to one split together, so that no two splits share a sentence."""


@dataclass(frozen=True)
class Task:
    """One data set with its network and optimizer, of which all strategies get the same number of samples.

    ``every``: batches from one look at validation data to the next, and of a learner's round. A pass over the training
    set has a whole number of them.
    """

    name: str
    batch: int
    samples: int
    epochs: int
    every: int
    lrs: tuple[float, ...]
    judged: int = 1000  # samples of the validation set that are looked at
    collapsed: float = 0.15  # accuracy of a training that has come to nothing

    @property
    def steps(self) -> int:
        """Global batches of a training."""
        return self.samples // self.batch * self.epochs

    def factor(self, step: int) -> float:
        """Of the learning rate: it rises over a tenth of the steps, then falls as a cosine does, to zero."""
        rising, falling = (step + 1) / (self.steps / 10), step / self.steps
        return min(rising, 0.5 + 0.5 * math.cos(math.pi * falling))

    def model(self) -> nn.Module:
        """Not yet trained, from torch's random stream."""
        return Characters() if self.name.startswith("gru") else cnn()

    def optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        """The one that each learner has."""
        if self.name.startswith("gru"):
            return torch.optim.AdamW(model.parameters(), lr=lr)
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

    def data(self) -> Splits:
        """``samples`` to train, ``judged`` to validate, and the whole test set."""
        sets = load(self.name)
        return Splits(_first(sets.train, self.samples), _first(sets.validation, self.judged), sets.test)


CNN = Task("cnn", batch=256, samples=12_800, epochs=8, every=25, lrs=(0.03, 0.06, 0.12, 0.2))
GRU = Task("gru", batch=128, samples=6_400, epochs=4, every=25, lrs=(0.006, 0.012, 0.024, 0.048))
CNN_LONG = replace(CNN, name="cnn_long", samples=25_600, epochs=12)
GRU_LONG = replace(GRU, name="gru_long", samples=19_200, epochs=6)
SMOKE = Task("digits", batch=64, samples=256, epochs=3, every=4, lrs=(0.02, 0.05), judged=100, collapsed=0.0)
TASKS = {task.name: task for task in (CNN, CNN_LONG, GRU, GRU_LONG)}


def cnn() -> nn.Module:
    """212,682 parameters: most of them in one layer, so that a step has few operations for its bytes."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(800, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip


class Characters(nn.Module):
    """The next character after each of a sequence: 97 kinds, a GRU of 96 units."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(KINDS, 32)
        self.gru = nn.GRU(32, 96, batch_first=True)
        self.head = nn.Linear(96, KINDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of shape (batch, kinds, length), as ``cross_entropy`` takes it."""
        out: torch.Tensor = self.head(self.gru(self.embed(x))[0])
        return out.transpose(1, 2)


KINDS = 97
"""Newline, the 95 printable characters of ASCII, and one for all others."""


@functools.cache
def text() -> str:
    """English that comes with every CPython: what its ``help()`` tells of the language (the PSF's; versions differ)."""
    return "\n".join(topics[name] for name in sorted(topics))


def text_sha256() -> str:
    """Of ``text``: results of another text are other results."""
    return sha256(text().encode()).hexdigest()


@functools.cache
def load(name: str) -> Splits:
    """The whole data set."""
    if name.startswith("gru"):
        return characters()
    sets = digits() if name == "digits" else fashion_mnist()
    mean, std = sets.train.tensors[0].mean(), sets.train.tensors[0].std()

    def ready(part: TensorDataset) -> TensorDataset:
        images, labels = part.tensors
        images = images if images.shape[-1] == 28 else F.interpolate(images, size=28)
        return TensorDataset((images - mean) / std, labels)

    return Splits(*map(ready, (sets.train, sets.validation, sets.test)))


def characters() -> Splits:
    """Sequences of the text: of ten blocks one validates and one tests."""
    codes = [0 if c == "\n" else ord(c) - 31 if " " <= c <= "~" else KINDS - 1 for c in text()]
    parts: dict[str, list[torch.Tensor]] = {"train": [], "validation": [], "test": []}
    for at in range(len(codes) // BLOCK):
        rows = torch.tensor(codes[at * BLOCK : (at + 1) * BLOCK]).unfold(0, LENGTH + 1, LENGTH)
        parts[{8: "validation", 9: "test"}.get(at % 10, "train")].append(rows)
    # Neighbours of a text are alike: the first samples of each split are to be of all its parts.
    mixed = {
        name: (rows := torch.cat(result))[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
        for name, result in parts.items()
    }
    return Splits(*(TensorDataset(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in mixed.values()))


def _first(part: TensorDataset, count: int) -> TensorDataset:
    assert len(part) >= count, f"{len(part)} samples, {count} asked for"
    return TensorDataset(*(tensor[:count] for tensor in part.tensors))


def train(
    session: Session, task: Task, lr: float, after: Callable[[nn.Module], None], data: TensorDataset | None = None
) -> None:
    """Cosine decay to zero over the whole training; ``after``: called where workers have met: after each step of
    ``allreduce``, and each round of the others."""
    torch.manual_seed(session.seed)
    model = task.model()
    optimizer = task.optimizer(model, lr)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, task.factor)
    model, optimizer, decay = session.prepare(model, optimizer, decay)
    for _ in session.epochs(task.epochs):
        for x, y in session.batches(data or task.data().train, batch_size=task.batch):
            session.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            decay.step()
            if session.ends_step:
                after(model)


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Of all labels, or next characters, how many are what the model holds most likely."""
    inputs, labels = data.tensors
    pairs = zip(inputs.split(500), labels.split(500), strict=True)
    return sum(int((model(x).argmax(dim=1) == y).sum()) for x, y in pairs) / labels.numel()
