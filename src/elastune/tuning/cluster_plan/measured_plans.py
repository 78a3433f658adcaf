"""The best plans, run for some steps: predicted beside measured figures of each.

One training of a plan runs alone, on this machine or on a cluster. So the figures do not show how trainings at once
slow each other down.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from elastune.core.errors import UserError
from elastune.core.journal.records import RunFinished
from elastune.core.mesh import MechanismName, Mesh
from elastune.core.mesh_choice import least_slots
from elastune.core.plan.cluster_plan import ClusterPlan, ProgramForecast, step_estimates
from elastune.core.plan.memory import peak_bytes
from elastune.core.plan.step_time import StepSplits
from elastune.core.run import ExecutionSettings
from elastune.runtime.clusters.base import Cluster
from elastune.runtime.clusters.local import LocalCluster
from elastune.train.program.load import load_as_guest, merge
from elastune.tuning.cluster_plan.probes import MachineProbes, beside_bytes

BATCH = "batch_size"
"""The setting of a program's config for its batch. A program without it has a fixed batch."""


@dataclass(frozen=True)
class MeasuredPlan:
    """One training's plan: seconds of a step and bytes of its fullest worker, predicted and measured.

    The predictions are for the place of the measurement: this machine, whose workers share its fast link, or nodes like
    it.

    Attributes:
        step_interval_s: The 80 % interval of the predicted seconds.
        measured_memory_bytes: None if the system does not report it.
        failed: Why nothing was measured.
    """

    mesh: Mesh
    mechanism: str
    batch: int
    micro: int
    step_s: float
    step_interval_s: tuple[float, float]
    memory_bytes: float
    measured_step_s: float | None = None
    measured_memory_bytes: float | None = None
    failed: str = ""

    @property
    def step_error(self) -> float | None:
        """The error of the predicted time of a step, relative to the measured one."""
        return None if self.measured_step_s is None else self.step_s / self.measured_step_s - 1

    @property
    def memory_error(self) -> float | None:
        """The error of the predicted memory, relative to the measured one."""
        return None if self.measured_memory_bytes is None else self.memory_bytes / self.measured_memory_bytes - 1

    @property
    def within(self) -> bool | None:
        """Whether the measured time of a step is in the interval."""
        low, high = self.step_interval_s
        return None if self.measured_step_s is None else low <= self.measured_step_s <= high


@dataclass(frozen=True)
class TrainingPlan:
    """How one training is split over workers.

    ``micro``: samples of a pass. ``mechanism``: None: the one that mesh and ``sharded`` imply. ``copies``: holders of
    each part of divided state.
    """

    mesh: Mesh
    batch: int
    micro: int
    sharded: bool = False
    mechanism: str | None = None
    copies: int = 1

    @property
    def execution(self) -> ExecutionSettings:
        """Its execution settings: ``fast`` mode, with the number of holders that its memory is counted with."""
        mesh = self.mesh
        whole = mesh.shard * mesh.tensor * mesh.pipeline == 1
        words = [axis for axis in ("tensor", "pipeline") if mesh.size(axis) > 1]
        words += ["sharded"] if self.sharded else ["zero"] if mesh.shard > 1 else []
        name = self.mechanism or "+".join(words) or "replicated"
        copies = None if whole or MechanismName.parse(name).foreign else min(self.copies, mesh.workers)
        execution = ExecutionSettings(mode="fast", mesh=mesh, mechanism=name, micro_batch=self.micro, copies=copies)
        # Enough for the workers that are left after a loss, too.
        return replace(execution, num_slots=least_slots(execution, mesh.workers))


def training_of(plan: ClusterPlan, copies: int = 1) -> TrainingPlan:
    """How one training of ``plan`` is split."""
    return TrainingPlan(plan.mesh, plan.batch, plan.micro, plan.sharded, copies=copies)


def plans_here(plans: Iterable[ClusterPlan], probes: MachineProbes, most: int) -> tuple[TrainingPlan, ...]:
    """The first different trainings of ``plans`` that this machine has cores and memory for.

    Plans with another batch are left out if the program has no setting for it.
    """
    settable = BATCH in merge(load_as_guest(probes.program).config, probes.config)
    trainings = (training_of(plan, probes.copies) for plan in plans)
    fitting = (
        plan
        for plan in trainings
        if plan.mesh.workers <= probes.cores
        and (settable or plan.batch == probes.size.batch_size)
        and probes.has_room(plan.mesh, plan.micro, plan.batch, plan.sharded)
    )
    return tuple(dict.fromkeys(fitting))[:most]


def plans_on(plans: Iterable[ClusterPlan], probes: MachineProbes, most: int) -> tuple[TrainingPlan, ...]:
    """The first different trainings of ``plans`` for a cluster that has room for all of them."""
    settable = BATCH in merge(load_as_guest(probes.program).config, probes.config)
    trainings = (training_of(plan, probes.copies) for plan in plans)
    return tuple(dict.fromkeys(each for each in trainings if settable or each.batch == probes.size.batch_size))[:most]


def measure_plans(
    plans: Sequence[TrainingPlan],
    forecast: ProgramForecast,
    probes: MachineProbes,
    cluster: Cluster | None = None,
    per_node: int | None = None,
) -> tuple[MeasuredPlan, ...]:
    """Run each of ``plans`` for some steps; the row of a failed plan has the reason.

    Args:
        plans: Each with no more workers a training than there are cores, or room in ``cluster``.
        forecast: The forecast that gave the predictions.
        probes: The program, and how to run it. Measured memory is reported without the part that plans do not count,
            as probes measured it on one worker or two.
        cluster: Where they run; None: this machine.
        per_node: How many workers share a fast link; None: all that this machine has cores for.
    """
    near = per_node or probes.cores
    if cluster is not None:
        return tuple(_measured(plan, forecast, probes, cluster, near) for plan in plans)
    with LocalCluster(capacity=probes.cores) as local:
        return tuple(_measured(plan, forecast, probes, local, near) for plan in plans)


def predicted_plan(plan: TrainingPlan, forecast: ProgramForecast, near: int) -> MeasuredPlan:
    """The predictions for ``plan``. ``near``: how many workers share a fast link."""
    mesh = plan.mesh
    columns = (plan.batch, plan.micro, mesh.data, mesh.shard, mesh.tensor, mesh.pipeline, near)
    splits = StepSplits(*(np.array([each], float) for each in columns))
    estimates = step_estimates(forecast, splits, np.array([plan.sharded]))
    return MeasuredPlan(
        mesh=mesh,
        mechanism=plan.execution.mechanism,
        batch=plan.batch,
        micro=plan.micro,
        step_s=float(estimates.step_s[0]),
        step_interval_s=(float(estimates.low_s[0]), float(estimates.high_s[0])),
        memory_bytes=float(peak_bytes(forecast.held, forecast.work, splits, plan.sharded)[0]),
    )


def with_measured(row: MeasuredPlan, ran: RunFinished, beside: float) -> MeasuredPlan:
    """``row`` with the measurements of ``ran``. ``beside``: bytes of a process that plans do not count."""
    peak = max((each.peak for each in ran.memory), default=0)
    failed = "" if ran.step_s is not None else f"{ran.steps} steps: too few to be timed"
    return replace(
        row, measured_step_s=ran.step_s, measured_memory_bytes=peak - beside if peak else None, failed=failed
    )


def _measured(
    plan: TrainingPlan, forecast: ProgramForecast, probes: MachineProbes, cluster: Cluster, near: int
) -> MeasuredPlan:
    row = predicted_plan(plan, forecast, near)
    config = {} if plan.batch == probes.size.batch_size else {BATCH: plan.batch}
    try:
        ran = probes.run(cluster, plan.execution, **config)
    except UserError as error:
        return replace(row, failed=str(error))
    alone = probes.held.get((Mesh(), probes.size.batch_size), [])  # empty if times are assumed
    return with_measured(row, ran, beside_bytes((probes.several or alone) if plan.mesh.workers > 1 else alone))
