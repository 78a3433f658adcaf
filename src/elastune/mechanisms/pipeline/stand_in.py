"""What a call of the model returns where the model's output is another stage's, or nobody's any more."""

from __future__ import annotations

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
        layers, trains = self._layers, torch.is_grad_enabled()
        buffers = [(b, b.detach().clone()) for b in layers.module.buffers()]
        given: Any = values
        with torch.no_grad(), torch.random.fork_rng():
            for layer in range(layers.count):
                names = layers.handed_on(layer) or layers.inputs
                given = self._run(layer, dict(zip(names, given, strict=True)))
        for buffer, before in buffers:
            buffer.copy_(before)

        def as_output(t: torch.Tensor) -> torch.Tensor:
            return t.requires_grad_() if trains and t.is_floating_point() else t

        return map_tensors(as_output, given)

    def _run(self, layer: int, values: dict[str, Any]) -> Any:
        layers, own = self._layers, range(layer, layer + 1)
        away = [p for p in layers.parameters_of(own) if not p.untyped_storage().size()]
        kept = [p.data for p in away]
        for p in away:
            p.data = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
        try:
            return layers.run(own, values, layers.handed_on(layer + 1))
        finally:
            for p, data in zip(away, kept, strict=True):
                p.data = data
