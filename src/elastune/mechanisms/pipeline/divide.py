"""The ``pipeline`` part of a mechanism: how a model is to be cut, and the division that comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import Means
from elastune.mechanisms.division import Division
from elastune.mechanisms.pipeline.division import PipelineDivision
from elastune.mechanisms.pipeline.layers import Layers, layers_of


@dataclass(frozen=True)
class Pipeline:
    """How a model is cut into stages, see ``plan_stages``.

    Attributes:
        cuts: Names of modules (as ``named_modules`` has them) before which it may be cut, and nowhere else; none:
            before every module that its forward pass calls. With one fewer than there are stages, this is the cut.
        costs: What each layer costs, in any unit; they begin with the model's first and at each of ``cuts``. None:
            by the number of its parameters.
    """

    cuts: tuple[str, ...] = ()
    costs: tuple[float, ...] | None = None


def plan_stages(model: nn.Module, plan: Pipeline) -> nn.Module:
    """Note how ``model`` is to be cut where the mechanism ``pipeline`` is asked for; the model itself.

    Example:
        >>> model = plan_stages(model, Pipeline(cuts=("blocks.4", "blocks.8")))
        >>> model, optimizer = session.prepare(model, optimizer)
    """
    model.__dict__["_pipeline_plan"] = plan
    return model


def divide(division: Division, means: Means) -> PipelineDivision:
    """``division`` in stages, as ``plan_stages`` has noted.

    Raises:
        UserError: Where the model cannot be followed or has fewer layers than the mesh has stages; the same on every
            worker.
    """
    plan: Pipeline = division.module.__dict__.get("_pipeline_plan") or Pipeline()
    layers = layers_of(division.module, plan.cuts)
    layers = layers.without_cuts(division.in_parts([str(n.target) for n in layers.nodes if n.op == "call_module"]))
    check_stages(layers, means.mesh or Mesh())
    costs = plan.costs if plan.costs is not None else estimated_costs(layers)
    if len(costs) != layers.count:
        rule = "a plan's costs are those of its layers"
        raise UserError(rule, f"{len(costs)} costs of {layers.count} layers", "give one for the start and one a cut")
    return PipelineDivision(division, layers, means.schedule, costs)


def check_stages(layers: Layers, mesh: Mesh) -> None:
    """Raise ``UserError`` where there are fewer layers than stages."""
    if mesh.pipeline > layers.count:
        told = f"pipeline={mesh.pipeline}, {layers.count} layers"
        raise UserError("a pipeline has at least one layer a stage", told, f"use pipeline={layers.count} or fewer")


def estimated_costs(layers: Layers) -> Sequence[float]:
    """By layer: the numbers in its parameters, as *modelled* time; a layer without any costs a little."""
    sizes = [sum(p.numel() for p in layers.parameters_of(range(i, i + 1))) for i in range(layers.count)]
    return [size + max(1, max(sizes)) * 1e-3 for size in sizes]
