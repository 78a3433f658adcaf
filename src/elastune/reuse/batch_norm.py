"""Estimate the running statistics of BatchNorm layers again: a mean of weights has other activations than its parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from elastune.core.errors import UserError


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether a layer of the model keeps running statistics of batches."""
    return bool(_layers(model))


def estimate_batch_norm(model: nn.Module, batches: Iterable[Any]) -> None:
    """Set the running statistics of the BatchNorm layers to those of ``batches`` (inputs), with equal weights.

    Every other layer is in evaluation mode meanwhile.

    Raises:
        UserError: Where there is no batch.
    """
    with fresh_statistics(model):
        for batch in batches:
            model(*batch) if isinstance(batch, tuple | list) else model(batch)


@contextmanager
def fresh_statistics(model: nn.Module) -> Iterator[None]:
    """Estimate BatchNorm statistics from the batches that go through ``model`` inside of the block, with equal weights.

    Batches from before do not count, and no other layer trains.

    Raises:
        UserError: Where no batch has gone through.
    """
    layers, counted = _layers(model), 0
    model.eval()

    def trains(layer: nn.Module, inputs: object) -> None:
        nonlocal counted
        counted += 1
        layer.training = True  # whatever mode the caller has set

    with ExitStack() as stack, torch.no_grad():
        for layer in layers:
            stack.callback(setattr, layer, "momentum", layer.momentum)
            layer.reset_running_stats()
            layer.momentum = None  # torch: the plain mean of all batches
            stack.callback(layer.register_forward_pre_hook(trains).remove)
        yield
    model.eval()
    if layers and not counted:
        raise UserError("statistics of BatchNorm need at least one batch", "none", "let there be training inputs")


def _layers(model: nn.Module) -> list[_BatchNorm]:
    return [layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats]
