"""Where twice the workers would go: by what factor each axis would shorten a plan, and in words why. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from elastune.core.mesh import Mesh
from elastune.core.text import byte_count, count, duration, number
from elastune.plan.cluster_plan import ClusterPlan, ProgramForecast, step_parts
from elastune.plan.divisions import Allowed, Nodes
from elastune.plan.steps.memory import peak_bytes
from elastune.plan.steps.splits import StepSplits
from elastune.plan.steps.work import Floats

AXES = ("width", "data", "shard", "tensor", "pipeline")
TOLD = 0.02  # of a step: what changes by less is not worth a word


@dataclass(frozen=True)
class Doubling:
    """``factor`` by which a plan would be faster, and ``why``. ``factor`` None: it cannot be, for the reason told."""

    factor: float | None
    why: str


def doublings(forecast: ProgramForecast, plan: ClusterPlan, nodes: Nodes, allowed: Allowed) -> dict[str, Doubling]:
    """What twice the workers along each axis of ``plan`` would bring, the most first; what cannot be stands last."""
    found = {axis: _doubled(axis, forecast, plan, nodes, allowed) for axis in AXES}
    return dict(sorted(found.items(), key=lambda each: -(each[1].factor or 0.0)))


def _doubled(axis: str, forecast: ProgramForecast, plan: ClusterPlan, nodes: Nodes, allowed: Allowed) -> Doubling:
    if (never := _never(axis, plan, allowed)) is not None:
        return Doubling(None, never)
    if axis == "width":
        return _wider(forecast, plan)
    mesh = replace(plan.mesh, **{axis: 2 * plan.mesh.size(axis)})  # type: ignore[arg-type]
    now, then = _column(plan, plan.mesh, nodes), _column(plan, mesh, nodes)
    sharded = np.array([plan.sharded])
    before, after = step_parts(forecast, now, sharded), step_parts(forecast, then, sharded)
    why = _changes(before[1], after[1], float(before[0][0]))
    if axis != "data":
        held = [peak_bytes(forecast.held, forecast.work, each, plan.sharded)[0] for each in (now, then)]
        why += f"; a worker holds {byte_count(round(held[1]))} in place of {byte_count(round(held[0]))}"
    batch, search = np.array([float(plan.batch)]), forecast.search
    factor = search.training_s(batch, before[0]) / search.training_s(batch, after[0])
    return Doubling(float(factor[0]), why)


def _never(axis: str, plan: ClusterPlan, allowed: Allowed) -> str | None:
    """Why an axis cannot be doubled; None where it can."""
    mesh = plan.mesh
    if axis == "width" and 2 * plan.width > allowed.width:
        return f"the search has {count(allowed.width, 'training')} in all"
    if axis in ("data", "shard") and 2 * mesh.batch > plan.batch:
        return f"a batch of {plan.batch} cannot be cut into more than {mesh.batch} equal parts again"
    if axis == "shard" and not allowed.shard:
        return "the program's state is not divided"
    if axis == "tensor" and 2 * mesh.tensor > allowed.tensor:
        most = f"are divided into {allowed.tensor} at most" if allowed.tensor > 1 else "are not such as can be divided"
        return f"its layers {most}"
    if axis == "pipeline" and 2 * mesh.pipeline > allowed.pipeline:
        return f"its chain of layers is cut into {count(allowed.pipeline, 'stage')} at most"
    return None


def _wider(forecast: ProgramForecast, plan: ClusterPlan) -> Doubling:
    search = forecast.search
    now, then = (float(each) for each in search.rounds(np.array([plan.width, 2.0 * plan.width])))
    why = f"{number(now, 3)} rounds of trainings become {number(then, 3)}"
    if now / then < 2 - TOLD:
        reasons = ["proposals made at once know less of one another"] if search.crowding else []
        reasons += ["the last trainings are waited for"] if search.variation else ["rounds are whole"]
        why += f", not half as many: {' and '.join(reasons)}"
    return Doubling(now / then, why)


def _changes(before: Mapping[str, Floats], after: Mapping[str, Floats], step_s: float) -> str:
    """Which part of a step falls most, and which grows most."""
    changes = {name: float(after[name][0] - before[name][0]) for name in before}
    least, most = min(changes, key=changes.__getitem__), max(changes, key=changes.__getitem__)
    words = []
    for name, change, more in ((least, -changes[least], "less"), (most, changes[most], "more")):
        if change > TOLD * step_s:
            now, then = (duration(float(each[name][0])) for each in (before, after))
            words.append(f"{more} of a step for {name} ({then}, not {now})")
    return ", ".join(words) if words else "next to nothing of a step changes"


def _column(plan: ClusterPlan, mesh: Mesh, nodes: Nodes) -> StepSplits:
    micro = min(plan.micro, -(-plan.batch // mesh.batch))
    told = (plan.batch, micro, mesh.data, mesh.shard, mesh.tensor, mesh.pipeline, nodes.workers_each)
    return StepSplits(*(np.array([each], float) for each in told))
