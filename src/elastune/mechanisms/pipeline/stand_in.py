"""What a call of the model returns where the model's output is another stage's, or nobody's any more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from elastune.mechanisms.pipeline.layers import Layers
from elastune.mechanisms.pipeline.parcel import blank, map_tensors


class StandIns:
    """Tensors of the output's shape for a call of ``layers``' model on ``device``.

    Descriptions (``parcel.pack``) are kept by what the call was made with, a ``key``.
    """

    def __init__(self, layers: Layers, device: torch.device) -> None:
        self._layers, self._device = layers, device
        self._known: dict[str, str] = {}

    def knows(self, key: str) -> bool:
        """Whether the output of such a call was described."""
        return key in self._known

    def describe(self, key: str, text: str) -> None:
        """The output of such a call is ``text``."""
        self._known[key] = text

    def zeros(self, key: str) -> Any:
        """For a call that was described."""
        return map_tensors(lambda t: t.to(self._device), blank(self._known[key]))

    def made_up(self, key: str, values: list[Any]) -> Any:
        """For any call: this worker cannot ask what its output would be. It then runs all layers by itself, with zeros
        for parameters of other stages, a layer's at a time.
        """
        if self.knows(key):
            return self.zeros(key)
        given, trains = self._layers.probe(values, self._zeros_for), torch.is_grad_enabled()

        def as_output(t: torch.Tensor) -> torch.Tensor:
            return t.requires_grad_() if trains and t.is_floating_point() else t

        return map_tensors(as_output, given)

    @contextmanager
    def _zeros_for(self, layer: int) -> Iterator[None]:
        """Around a layer: its parameters are zeros where they are not here."""
        away = [p for p in self._layers.parameters_of(range(layer, layer + 1)) if not p.untyped_storage().size()]
        kept = [p.data for p in away]
        for p in away:
            p.data = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
        try:
            yield
        finally:
            for p, data in zip(away, kept, strict=True):
                p.data = data
