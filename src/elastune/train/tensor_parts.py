"""What ``tensor`` would divide of a forward pass, and what it would sum: seen while one worker runs it whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle

from elastune.core.errors import UserError
from elastune.mechanisms.tensor.plan import chosen


@dataclass(frozen=True)
class PartsFound:
    """``whole``: the share of operations in layers that stay whole. ``sums``: forward and backward together, of
    ``summed_bytes``."""

    whole: float
    sums: int
    summed_bytes: float


class TensorParts:
    """Watches the layers of ``model`` that are divided unasked; ``flops`` says how many operations there have been.

    A layer by columns sums the gradient of its input, one by rows its output; attention has its output layer inside.
    """

    def __init__(self, model: nn.Module, flops: Callable[[], int]) -> None:
        try:
            ways = chosen(model, 1, None)
        except UserError:
            ways = {}
        self._ways = [(model.get_submodule(name), way) for name, way in ways.items()]
        self._flops = flops
        self._begun: list[int] = []
        self._divided = self._sums = self._bytes = 0

    def watch(self) -> list[RemovableHandle]:
        """Until the handles are removed."""
        handles = []
        for layer, way in self._ways:
            inside = isinstance(layer, nn.MultiheadAttention)
            ends = (way == "columns" or inside, way == "rows" or inside or isinstance(layer, nn.Embedding))
            handles.append(layer.register_forward_pre_hook(self._enter))
            handles.append(layer.register_forward_hook(self._leaver(*ends), with_kwargs=True))
        return handles

    @property
    def found(self) -> PartsFound:
        """Of the pass so far. Where no divided layer computed anything, nothing is known to stay whole."""
        done = self._flops()
        whole = 1 - self._divided / done if self._divided and done else 0.0
        return PartsFound(max(0.0, whole), self._sums, float(self._bytes))

    def _enter(self, layer: nn.Module, given: Any) -> None:
        self._begun.append(self._flops())

    def _leaver(self, takes: bool, gives: bool) -> Callable[..., None]:
        def leave(layer: nn.Module, given: Any, named: Any, made: Any) -> None:
            self._divided += self._flops() - self._begun.pop()
            for counts, of in ((takes and not isinstance(layer, nn.Embedding), (given, named)), (gives, made)):
                first = next((each for each in tree_iter(of) if isinstance(each, torch.Tensor)), None)
                if counts and first is not None:
                    self._sums += 1
                    self._bytes += first.numel() * first.element_size()

        return leave
