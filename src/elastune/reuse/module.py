"""An ensemble as one module: the outputs of its members, mixed by their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from elastune.reuse.task import Task

LEAST = 1e-12


class Doubt(NamedTuple):
    """For each sample, what the ensemble says and how unsure it is: see ``reuse.insight.Uncertainty``.

    ``aleatoric`` is None for values: a member does not tell its own noise.
    """

    said: torch.Tensor
    aleatoric: torch.Tensor | None
    epistemic: torch.Tensor


class EnsembleModel(nn.Module):
    """The weighted mean of its members' probabilities, or of their values.

    Attributes:
        members: Modules that take the same input.
        task: What the members give; logits are made probabilities first.
        weights: The weights of the members; they add up to 1.
    """

    weights: torch.Tensor

    def __init__(self, members: Sequence[nn.Module], weights: Sequence[float], task: Task) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.task = task
        self.register_buffer("weights", torch.tensor(list(weights)))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return probabilities of classes, or values."""
        total: torch.Tensor | None = None
        for weight, member in zip(self.weights, self.members, strict=True):
            part = weight * self._said(member, *inputs)
            total = part if total is None else total + part
        assert total is not None
        return total

    def doubt(self, *inputs: torch.Tensor) -> Doubt:
        """Return what the ensemble says of each sample, and how sure that is.

        Example:
            >>> model = elastune.load_ensemble("ensemble.safetensors", build).eval()
            >>> unsure = model.doubt(x).epistemic.topk(10).indices
        """
        said = torch.stack([self._said(member, *inputs) for member in self.members])
        weights = self.weights.reshape(-1, *[1] * (said.ndim - 1))
        mean = (weights * said).sum(0)
        if self.task.kind == "regression":
            return Doubt(mean, None, (weights * (said - mean) ** 2).sum(0))
        own = (weights[..., 0] * _entropy(said)).sum(0)
        return Doubt(mean, own, (_entropy(mean) - own).clamp_min(0))

    def _said(self, member: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
        said: torch.Tensor = member(*inputs)
        return said.softmax(-1) if self.task.says == "logits" else said


def _entropy(said: torch.Tensor) -> torch.Tensor:
    return -(said * said.clamp_min(LEAST).log()).sum(-1)
