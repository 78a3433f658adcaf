"""The CNN for MNIST whose largest pair of layers, which holds nearly all parameters, is what splitting it divides."""

from __future__ import annotations

import torch
from torch import nn


def network() -> nn.Sequential:
    """Two convolutions, and a pair of layers with nearly all parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(800, 3072), nn.ReLU(), nn.Linear(3072, 10),
    )  # fmt: skip
