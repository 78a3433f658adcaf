"""LeNet with dropout and BatchNorm on real MNIST (digits, enlarged, where MNIST is absent)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from elastune.core.errors import UserError
from elastune.recipes.datasets import digits, mnist

config = {
    "optimizer": "sgd",
    "batch_size": 100,
    "plain": False,
    "schedule": "none",
    "epochs": 100,
    "double": False,
    "own_clip": True,  # torch's; or the session's
    "samples": "",  # a file with what data() gives: to read all of MNIST takes every worker longer than to train
}


class LeNet(nn.Module):
    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.norm = nn.Identity() if plain else nn.BatchNorm2d(20)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc1 = nn.Linear(800, 500)
        self.dropout = nn.Identity() if plain else nn.Dropout(0.5)
        self.fc2 = nn.Linear(500, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(self.dropout(F.relu(self.fc1(x.flatten(1)))))


def data(file: str = "") -> TensorDataset:
    """950 images: at 100 a batch the 10th of an epoch is a partial one."""
    if file:
        kept = load_file(file)
        return TensorDataset(kept["images"], kept["labels"])
    try:
        images, labels = mnist().train[:950]
    except UserError:
        images, labels = digits().train[:950]
        images = F.interpolate(images.view(-1, 1, 8, 8), size=(28, 28))
    return TensorDataset(images.view(-1, 1, 28, 28), labels)


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(session) -> None:
    config = session.config
    model = LeNet(config["plain"])
    model = model.double() if config["double"] else model
    optimizer = optimizer_of(config["optimizer"], model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99 if config["schedule"] == "step" else 1.0)
    model, optimizer, schedule = session.prepare(model, optimizer, schedule)
    samples = data(config["samples"])
    for _ in session.epochs(config["epochs"]):
        for x, y in session.batches(samples, batch_size=config["batch_size"]):
            x = x.double() if config["double"] else x
            session.backward(F.cross_entropy(model(x), y))
            if config["own_clip"]:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            else:
                session.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        session.report(step=session.step)
