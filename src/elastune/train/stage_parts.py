"""What a pipeline's stages would do of a forward pass: seen while one worker runs it whole."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from elastune.core.errors import UserError
from elastune.core.leaves import cut_by_cost
from elastune.mechanisms.pipeline.divide import Pipeline, estimated_costs, pipeline_of
from elastune.mechanisms.pipeline.layers import Layers, layers_of

STAGES = 16  # looked at, at most
SEEN = 0.9  # of all operations, in layers: else nobody knows where they are


@dataclass(frozen=True)
class StagesFound:
    """By the number of stages, from one on: which part of all operations the stage has that has most of them, and of
    all parameters. Empty where layers are not seen."""

    flops: tuple[float, ...] = ()
    parameters: tuple[float, ...] = ()


class StageParts:
    """Watches the layers of ``model`` that a pipeline cuts; ``flops`` says how many operations there have been."""

    def __init__(self, model: nn.Module, flops: Callable[[], int]) -> None:
        self._plan: Pipeline = pipeline_of(model)
        self._layers: Layers | None = None
        with suppress(UserError):  # nobody can follow them
            self._layers = layers_of(model, self._plan.cuts)
        self._flops = flops
        self._begun: list[int] = []
        self._done = [0.0] * self.count

    @property
    def count(self) -> int:
        """How many layers there are; 1 where nobody can follow them."""
        return 1 if self._layers is None else self._layers.count

    def watch(self) -> list[RemovableHandle]:
        """Until the handles are removed."""
        handles = list[RemovableHandle]()
        if self._layers is None:
            return handles
        users: dict[nn.Module, list[int]] = {}
        for layer in range(self.count):
            for module in self._layers.modules_of(range(layer, layer + 1)):
                users.setdefault(module, []).append(layer)
        for module, layers in users.items():
            handles.append(module.register_forward_pre_hook(self._enter))
            handles.append(module.register_forward_hook(self._leaver(layers)))
        return handles

    @property
    def found(self) -> StagesFound:
        """Of the pass so far. Stages are cut by what layers are taken to cost, which need not be operations."""
        whole, done = sum(self._done), self._flops()
        if self._layers is None or not done or whole < SEEN * done:
            return StagesFound()
        costs = self._plan.costs or (self._done if self._plan.example else estimated_costs(self._layers))
        if len(costs) != self.count:
            return StagesFound()
        cuts = [cut_by_cost(costs, stages) for stages in range(1, min(STAGES, self.count) + 1)]
        held = [[sum(p.numel() for p in self._layers.parameters_of(run)) for run in runs] for runs in cuts]
        return StagesFound(
            tuple(max(sum(self._done[i] for i in run) for run in runs) / whole for runs in cuts),
            tuple(max(parts) / max(1, sum(parts)) for parts in held),
        )

    def _enter(self, *_: Any) -> None:
        self._begun.append(self._flops())

    def _leaver(self, layers: list[int]) -> Callable[..., None]:
        """Of a module that several layers call each has one call in so many."""

        def leave(*_: Any) -> None:
            done = self._flops() - self._begun.pop()
            for layer in layers:
                self._done[layer] += done / len(layers)

        return leave
