"""The ``tensor`` part of a mechanism: which layers of a model are divided, and the division that comes of it."""

from __future__ import annotations

from elastune.core.errors import UserError
from elastune.core.run import Means
from elastune.mechanisms.division import Division
from elastune.mechanisms.tensor.axis import BlockAxis
from elastune.mechanisms.tensor.division import TensorDivision
from elastune.mechanisms.tensor.plan import TrunkByData, chosen, plan_of
from elastune.mechanisms.tensor.tail import tail_of
from elastune.mechanisms.tensor.trunk import TrunkDivision


def divide(division: Division, means: Means) -> Division:
    """``division`` with the layers of its module divided into ``means``' virtual blocks; itself where that is one.

    Raises:
        UserError: For a plan that does not fit the model or its mechanism, and a model of which nothing can be divided.
    """
    count = blocks_of(means)
    if count == 1:
        return division
    module, plan = division.module, plan_of(division.module)
    apart = isinstance(plan, TrunkByData)
    ways = chosen(module, count, plan.layers if isinstance(plan, TrunkByData) else plan)
    if not ways:
        fix = "give session.prepare a plan, or use another mechanism"
        raise UserError("tensor divides layers that it knows", f"none found in {type(module).__name__}", fix)
    axis = BlockAxis(count, exact=means.mode == "exact")
    if not apart:
        return TensorDivision(module, ways, axis)
    _check(means)
    return TrunkDivision(module, ways, axis, tail_of(module, ways))


def _check(means: Means) -> None:
    """Raise ``UserError`` for means by which no trunk is data parallel within a replica."""
    rule, other = "a data-parallel trunk is for exact mode, whole slots, and tensor alone or with zero", "leave it out"
    if means.mode != "exact":
        raise UserError(rule, f"{means.mode} mode", "use --mode exact, or a plan without TrunkByData")
    if means.micro_batch is not None:
        raise UserError(rule, f"--micro-batch {means.micro_batch}", f"{other}, and use more --slots")
    if means.parts.pipeline or means.parts.state == "sharded":
        raise UserError(rule, means.mechanism, "use --mechanism tensor or tensor+zero")
    if means.first_mesh.batch * means.first_mesh.tensor > means.num_slots:
        told = f"{means.first_mesh.workers} workers, {means.num_slots} slots"
        raise UserError("each worker of a data-parallel trunk has a slot of its own", told, "use more --slots")


def blocks_of(means: Means) -> int:
    """Virtual blocks: where none are asked for as many as workers, which is exact for that width alone."""
    return means.virtual_tensor if means.virtual_tensor > 1 or means.mesh is None else means.mesh.tensor
