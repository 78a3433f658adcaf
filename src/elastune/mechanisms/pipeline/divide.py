"""The ``pipeline`` part of a mechanism: how a model is to be cut, and the division that comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import Means
from elastune.mechanisms.division import Division
from elastune.mechanisms.pipeline.division import PipelineDivision
from elastune.mechanisms.pipeline.layers import Layers, layers_of
from elastune.mechanisms.pipeline.parcel import map_tensors


@dataclass(frozen=True)
class Pipeline:
    """A plan for ``pipeline``: how to cut a model into stages.

    Attributes:
        cuts: Names of modules (as in ``named_modules``). The model may be cut before these modules and nowhere else;
            with one name fewer than there are stages, it is cut there. Empty: it may be cut before every module that
            its forward pass calls.
        costs: What each layer costs, in any unit; layers begin with the model's first and at each of ``cuts``. None:
            costs are counted with ``example``.
        example: Inputs that the model can be called with, a few samples. A layer then costs the floating-point
            operations of its matrix products, convolutions and attention, counted in one forward pass. None: a layer
            costs the number of its parameters.

    Example:
        >>> model, optimizer = session.prepare(model, optimizer, plan=Pipeline(cuts=("blocks.4", "blocks.8")))
    """

    cuts: tuple[str, ...] = ()
    costs: tuple[float, ...] | None = None
    example: tuple[Any, ...] | None = None


def plan_stages(model: nn.Module, plan: Pipeline) -> nn.Module:
    """Note how the mechanism ``pipeline`` is to cut ``model``, and return the model itself.

    Example:
        >>> model = plan_stages(model, Pipeline(cuts=("blocks.4", "blocks.8")))
        >>> model, optimizer = session.prepare(model, optimizer)
    """
    model.__dict__["_pipeline_plan"] = plan
    return model


def pipeline_of(model: nn.Module) -> Pipeline:
    """What ``plan_stages`` has noted."""
    plan: Pipeline = model.__dict__.get("_pipeline_plan") or Pipeline()
    return plan


def divide(division: Division, means: Means) -> PipelineDivision:
    """``division`` in stages, as ``plan_stages`` has noted.

    Raises:
        UserError: Where the model cannot be followed or has fewer layers than the mesh has stages; the same on every
            worker.
    """
    plan = pipeline_of(division.module)
    layers = layers_of(division.module, plan.cuts)
    layers = layers.without_cuts(division.in_parts([str(n.target) for n in layers.nodes if n.op == "call_module"]))
    check_stages(layers, means.mesh or Mesh())
    costs, weighed = _costs(layers, plan)
    if len(costs) != layers.count:
        rule = "a plan's costs are those of its layers"
        raise UserError(rule, f"{len(costs)} costs of {layers.count} layers", "give one for the start and one a cut")
    return PipelineDivision(division, layers, means.schedule, costs, weighed)


def _costs(layers: Layers, plan: Pipeline) -> tuple[Sequence[float], str]:
    """What each layer costs, and what that is."""
    if plan.costs is not None:
        return plan.costs, "the program's costs"
    if plan.example is not None:
        return counted_costs(layers, plan.example), "counted operations"
    return estimated_costs(layers), "numbers of parameters"


def check_stages(layers: Layers, mesh: Mesh) -> None:
    """Raise ``UserError`` where there are fewer layers than stages."""
    if mesh.pipeline > layers.count:
        told = f"pipeline={mesh.pipeline}, {layers.count} layers"
        raise UserError("a pipeline has at least one layer a stage", told, f"use pipeline={layers.count} or fewer")


def estimated_costs(layers: Layers) -> Sequence[float]:
    """By layer: the numbers in its parameters, as *modelled* time; a layer without any costs a little."""
    return _none_free([sum(p.numel() for p in layers.parameters_of(range(i, i + 1))) for i in range(layers.count)])


def counted_costs(layers: Layers, example: Sequence[Any]) -> Sequence[float]:
    """By layer: floating-point operations of a forward pass of ``example``. Counts are equal on every worker, whenever
    it comes, as times would not be; what is not counted (a layer without products) costs a little.

    Raises:
        UserError: Where ``example`` is not what the model is called with.
    """
    from torch.utils.flop_counter import FlopCounterMode  # takes long to import

    if len(example) != len(layers.inputs):
        rule = f"an example has the model's inputs that have no default: {', '.join(layers.inputs)}"
        raise UserError(rule, f"{len(example)} values", "give a tuple of them")
    device = next(layers.module.parameters()).device
    counts = [FlopCounterMode(display=False) for _ in range(layers.count)]
    layers.probe(map_tensors(lambda t: t.to(device), list(example)), lambda layer: counts[layer])
    return _none_free([count.get_total_flops() for count in counts])


def _none_free(costs: Sequence[float]) -> Sequence[float]:
    return [cost + max(1, max(costs)) * 1e-3 for cost in costs]
