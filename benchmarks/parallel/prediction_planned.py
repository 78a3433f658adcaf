"""What the planner says of the rows of ``prediction_here.py``, before any is measured, from short runs on one host.

It is told the program and the declared link, and measures here, on as many workers as a host has: at most 8 runs that
it chooses itself, and one run of each mechanism that these did not have. Of each of these two numbers are kept: what
it takes beyond the step model, and what its process holds beside the program. It hears nothing of hosts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from elastune.core.errors import UserError
from elastune.core.mesh import FOREIGN, Mesh
from elastune.core.plan.cluster_plan import ProgramForecast, SearchModel
from elastune.core.run import Program
from elastune.runtime.clusters.local import LocalCluster
from elastune.train.rehearsal import rehearse_apart
from elastune.tuning.cluster_plan.probes import (
    MachineProbes,
    MeasuredPlan,
    NodeLink,
    TrainingPlan,
    beside_bytes,
    held_by,
    predicted_plan,
    step_work,
    with_measured,
)

Found = dict[str, Any]
GATHERS = ("sharded", "fsdp2")  # parameters, in every pass
SUMS = ("deepspeed",)  # gradients, in every pass


class Planned:
    """The program learnt, and what it says of plans. ``each``: workers of a host."""

    def __init__(self, program: Program, config: Found, each: int, link_s_a_byte: float, calibrate_s: float) -> None:
        self.each, self.size = each, rehearse_apart(program, config)
        self._probes = MachineProbes(program, config, self.size, each, calibrate_s, wants_noise=False)
        model = self._probes.learn(NodeLink(link_s_a_byte))
        alone = self._probes.held[Mesh(), self.size.batch_size]
        search = SearchModel(1, self.size.steps, self.size.batch_size, 0.0)
        self._forecast = ProgramForecast(model, step_work(self.size), held_by(self.size, alone), search)
        self.beside = {"alone": beside_bytes(alone), "several": beside_bytes(self._probes.several or alone)}
        self.constants = model.constants()
        self.probed = {f"{mesh} by {micro}": step_s for (mesh, micro), step_s in self._probes.measured.items()}
        self.noise, self.more_s, self.refused = self._probes.noise, dict[str, float](), dict(self._probes.refused)

    def learn_mechanisms(self, names: Iterable[str], micro: int) -> None:
        """Run each once on one host: how much longer than the step model says it takes, and what it holds."""
        with LocalCluster(capacity=self.each) as cluster:
            for name in names:
                plan = plan_of(name, Mesh(shard=self.each), self.size.batch_size, micro)
                try:
                    ran = self._probes.run(cluster, plan.execution)
                except UserError as error:
                    self.refused[name] = str(error)
                    continue
                row = with_measured(predicted_plan(plan, self._forecast, self.each), ran, 0.0)
                if row.measured_memory_bytes is not None:
                    self.beside[name] = row.measured_memory_bytes - row.memory_bytes
                if row.measured_step_s is not None:
                    self.probed[f"{name} on {plan.mesh} by {micro}"] = row.measured_step_s
                    self.more_s[name] = self._beyond(row.step_s, row.measured_step_s) / times(plan)

    def _beyond(self, told_s: float, measured_s: float) -> float:
        """How much longer, as far as it is more than two runs of one plan are apart. Nothing is done in less than no
        time: what took less than was told says that the rest of the model is off."""
        return max(0.0, measured_s - told_s - self.noise * told_s)

    def row(self, plan: TrainingPlan) -> MeasuredPlan:
        """What is said of it."""
        result = predicted_plan(plan, self._forecast, self.each)
        more = self.more_s.get(own_part(plan), 0.0) * times(plan)
        step_s = result.step_s + more
        low, high = (math.exp(math.log(step_s) + math.log(end / result.step_s)) for end in result.step_interval_s)
        return replace(result, step_s=step_s, step_interval_s=(low, high))


def plan_of(name: str, mesh: Mesh, batch: int, micro: int) -> TrainingPlan:
    """``name`` on ``mesh``, in passes of ``micro`` samples, or as many as a worker has."""
    micro = min(micro, math.ceil(batch / mesh.batch))
    return TrainingPlan(mesh, batch, micro, name in GATHERS, name if name in FOREIGN else None)


def own_part(plan: TrainingPlan) -> str:
    """The part of the mechanism that says where state lies."""
    return plan.mechanism or ("sharded" if plan.sharded else "zero" if plan.mesh.shard > 1 else "replicated")


def times(plan: TrainingPlan) -> int:
    """How often in a step a mechanism does what the step model does not know of: at every hop of each pass where it
    gathers parameters, in each pass where it sums gradients by itself, else once."""
    passes = math.ceil(plan.batch / (plan.mesh.batch * plan.micro))
    own = own_part(plan)
    return passes * (plan.mesh.batch - 1) if own in GATHERS else passes if own in SUMS else 1
