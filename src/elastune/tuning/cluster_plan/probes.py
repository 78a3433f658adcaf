"""The short runs of a plan: probes from which the step model learns, and trainings that measure the best plans.

Only layouts that this machine has cores for are measured; links between nodes are taken as declared. Computation per
worker and memory come from the rehearsal (``train.rehearsal``), so one run needs only a few steps. Steps that earlier
runs have measured are used again, if program, settings and hardware are equal in everything that a step's time
depends on.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import RunContext, RunFinished, RunStarted, WorkerMemory
from elastune.core.mesh import MechanismName, Mesh
from elastune.core.mesh_choice import least_slots
from elastune.core.plan.cluster_plan import ClusterPlan, ProgramForecast, step_estimates
from elastune.core.plan.memory import BUFFERS, HeldAlone, peak_bytes
from elastune.core.plan.step_model import Device, StepModel, prior_model, probe
from elastune.core.plan.step_time import CONSTANTS, Constant, StepSplits, StepWork, chain_of
from elastune.core.run import Adapt, Config, ConfigValue, ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.base import Cluster
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.interrupts import Interrupted
from elastune.runtime.job.output import JOURNAL
from elastune.runtime.job.run import JobFailed, run_job
from elastune.train.program.load import load_as_guest, merge
from elastune.train.rehearsal import ProgramSize

# The few short runs (probes) from which the step model learns what a program's steps take on this machine.

STEPS = 12
FEWEST_STEPS = 8  # the least steps of an earlier run whose median counts
MOST_PROBES = 8
NOISE_HERE = 0.05  # the relative noise of a median over a dozen steps, on a machine that also does other work
NOTHING: Mapping[str, ConfigValue] = MappingProxyType({})
NOISE, NOISE_STEPS, NOISE_SLOTS = "noise_scale", 40, 4
HERE = (
    Constant("flop_s", 1 / 3e10, 8.0),
    Constant("edge_flop_s", 1 / 3e10, 8.0),
    Constant("split_byte_s", 1 / 5e9, 8.0),
    Constant("whole_byte_s", 1 / 5e9, 8.0),
    Constant("launch_s", 1e-4, 4.0),
    Constant("tensor_begin_s", 3e-4, 4.0),
    Constant("tensor_sum_s", 1.5e-4, 4.0),
    Constant("tensor_byte_s", 1 / 1e9, 4.0),
    Constant("send_s", 3e-4, 4.0),
    Constant("send_byte_s", 1 / 1e9, 4.0),
    Constant("gradient_hop_s", 5e-4, 4.0),
    Constant("gradient_byte_s", 1 / 1e9, 4.0),
)
"""Constants of one CPU core and its links before any measurement. Probes measure all of them, so these are a start."""
REST = (
    Constant("update_byte_s", 1 / 1e9, 4.0),
    Constant("pass_s", 1e-3, 4.0),
    Constant("fixed_s", 1e-3, 4.0),
)
"""The other constants of a worker before any measurement."""


# --- memory of a worker ---
def held_by(size: ProgramSize, alone: Sequence[WorkerMemory] = (), copies: int = 1) -> HeldAlone:
    """The memory of a worker that trains alone: state and passes from the rehearsal, corrected by a probe.

    Activations are divided with the layers, as their parameters are.

    Args:
        size: From the rehearsal. It counts tensors, but no temporary memory of operations.
        alone: Measured here with the program's own batch in one pass on one worker; larger measured values count.
        copies: Holders of each part of divided state.
    """
    activations = max((each.activations for each in alone if each.activations is not None), default=0)
    kept = max(size.pass_bytes, (activations - size.pass_fixed_bytes) / size.batch_size)
    return HeldAlone(
        parameters=float(size.parameter_bytes),
        gradients=float(size.gradient_bytes),
        optimizer=float(size.optimizer_bytes),
        kept_split=kept * size.divided,
        kept_whole=kept * (1 - size.divided),
        fixed=size.pass_fixed_bytes,
        buffer=float(size.gradient_bytes),
        copies=copies,
    )


def trained_bytes(of: WorkerMemory) -> int:
    """The measured bytes that a step needs, activations included."""
    return of.parameters + of.gradients + of.optimizer + (of.activations or 0)


def beside_bytes(memory: Sequence[WorkerMemory]) -> float:
    """The memory of a worker's process that plans do not count: Python, torch, its data.

    ``memory``: of measured workers that hold the whole model.
    """
    beside = (each.peak - trained_bytes(each) - BUFFERS * each.gradients for each in memory)
    return float(max(0, max(beside, default=0)))


# --- steps that earlier runs measured ---
@dataclass(frozen=True)
class EarlierProbe:
    """A measurement of an earlier run: seconds of a step on ``mesh`` in passes of ``micro`` samples, and memory."""

    mesh: Mesh
    micro: int
    step_s: float
    memory: Sequence[WorkerMemory]


def earlier_probes(
    folders: Iterable[Path], program: Program, config: Config, like: RunContext | None
) -> tuple[EarlierProbe, ...]:
    """Read the measurements of earlier runs of the same program and settings on equal hardware.

    Of several runs with the same mesh and pass, the last one counts.

    Args:
        folders: Folders of runs, or folders that hold folders of runs.
        program: The program of the runs.
        config: The settings that the runs must have.
        like: The data, model, hardware and software that the runs must have; None: not known, and no run counts.

    Raises:
        UserError: For a folder without a journal, and for a journal that cannot be read.
    """
    probes: dict[tuple[Mesh, int], EarlierProbe] = {}
    for journal in (each for folder in folders for each in journals_in(folder)):
        probe = _probe_of(journal, program, config, like)
        if probe is not None:
            probes[probe.mesh, probe.micro] = probe
    return tuple(probes.values())


def journals_in(folder: Path) -> list[Path]:
    """The journals of a run's folder, or of the folders in it. Raises ``UserError`` if there are none."""
    journals = sorted([*folder.glob(JOURNAL), *folder.glob(f"*/{JOURNAL}")])
    if not journals:
        raise UserError("earlier runs must have journals", str(folder), "name a run's folder, or one that has such")
    return journals


def _probe_of(journal: Path, program: Program, config: Config, like: RunContext | None) -> EarlierProbe | None:
    records = [entry.record for entry in read(journal)]
    started = [record for record in records if isinstance(record, RunStarted)]
    finished = [record for record in records if isinstance(record, RunFinished)]
    if len(started) != 1 or len(finished) != 1 or like is None:
        return None
    run_start, end = started[0], finished[0]
    execution = ExecutionSettings.from_json(run_start.execution)
    plain = ExecutionSettings(
        mode="fast",
        mesh=execution.mesh,
        mechanism=execution.mechanism,
        micro_batch=execution.micro_batch,
        num_slots=execution.num_slots,
        copies=execution.copies,
    )
    alike = (
        (Path(run_start.program).resolve(), run_start.arguments, run_start.config, end.context)
        == (program.path.resolve(), list(program.arguments), dict(config), like)
        and plain == execution
        and run_start.sync == "allreduce"
        and not run_start.sync_schedule
        and not any(run_start.adapt.values())
        and (end.workers, end.hosts) == (execution.workers, 1)
    )
    if not alike or execution.micro_batch is None or end.step_s is None or end.steps < FEWEST_STEPS:
        return None
    return EarlierProbe(execution.first_mesh, execution.micro_batch, end.step_s, tuple(end.memory))


# --- probes of this machine ---
@dataclass(frozen=True)
class NodeLink:
    """The declared link between nodes: seconds of a byte, and of a message."""

    seconds_per_byte: float
    latency_s: float = 5e-5


@dataclass
class MachineProbes:
    """Short runs of a program that calibrate the step model. Each is measured once, the first one twice.

    Attributes:
        program, config, seed: The program, the settings that replace its own, and the seed.
        size: The size of the program, from its rehearsal.
        cores: The workers that this machine has cores for.
        budget_s: Seconds after which no further probe begins.
        room_bytes: The memory for all workers of a run; no run begins that is modelled to need more.
        measured: Seconds of a step, by mesh and samples of a pass.
        held: The memory of the workers, likewise.
        refused: The axes that could not run, and why.
        wants_noise: Whether to measure the noise scale.
        out: The folder that keeps the runs; None: none is kept.
        earlier: Folders of earlier runs.
        carried: The measurements that came from earlier runs.
        noise_scale: The measured gradient noise scale.
        noise: The relative noise of a measured step.
        beside_s: Seconds of a training beside its steps, from the second run, whose start was warm.
        assumed: The device of the workers, if it is not this machine's.
        copies: Holders of each part of divided state.
    """

    program: Program
    config: Config
    size: ProgramSize
    cores: int
    budget_s: float
    seed: int = 0
    room_bytes: float = math.inf
    measured: dict[tuple[Mesh, int], float] = field(default_factory=dict)
    held: dict[tuple[Mesh, int], list[WorkerMemory]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    wants_noise: bool = True
    out: Path | None = None
    earlier: tuple[Path, ...] = ()
    carried: list[tuple[Mesh, int]] = field(default_factory=list)
    noise_scale: float | None = None
    noise: float = NOISE_HERE
    beside_s: float = 0.0
    assumed: Device | None = None
    copies: int = 1
    _context: RunContext | None = None
    _runs: int = 0
    _steps: int = 0

    def prior(self, link: NodeLink) -> StepModel:
        """The step model before any measurement, for this machine or for the ``assumed`` device."""
        none = StepSplits(*(np.ones(0) for _ in range(7)))
        return prior_model(self._constants(link), step_work(self.size), none, self.noise)

    def learn(self, link: NodeLink, cluster: Cluster | None = None) -> StepModel:
        """Fit the step model to probes, which run while the budget lasts.

        The program's own batch on one worker is always measured, unless this machine has no memory for it. Then nothing
        runs, and the model is the one before any measurement.

        Args:
            link: The declared link between nodes.
            cluster: Where probes run; None: this machine.

        Raises:
            UserError: If the program fails on one worker.
        """
        if not self.has_room(*self._first[0]):
            return self.prior(link)
        if cluster is not None:
            return self._learn_on(cluster, link)
        with LocalCluster(capacity=self.cores) as local:
            return self._learn_on(local, link)

    def _learn_on(self, cluster: Cluster, link: NodeLink) -> StepModel:
        started = time.monotonic()
        self._measure_twice(cluster)
        for each in earlier_probes(self.earlier, self.program, self.config, self._context):
            if (each.mesh, each.micro) not in self.measured:
                self.measured[each.mesh, each.micro] = each.step_s
                self.held[each.mesh, each.micro] = list(each.memory)
                self.carried.append((each.mesh, each.micro))
        if self.wants_noise:
            self._measure_noise(cluster)
        while True:
            plans, splits = self._candidates()
            try:
                return self._fit(cluster, link, plans, splits, started)
            except _Refused as refused:
                self.refused[refused.axis] = refused.why

    def _constants(self, link: NodeLink) -> tuple[Constant, ...]:
        return _constants(link) if self.assumed is None else _constants(link, self.assumed.constants())

    def _fit(
        self,
        cluster: Cluster,
        link: NodeLink,
        plans: Sequence[tuple[Mesh, int]],
        splits: StepSplits,
        started: float,
    ) -> StepModel:
        def measure(i: int) -> float:
            return self._measure(cluster, *plans[i])

        return probe(
            self._constants(link),
            step_work(self.size),
            splits,
            MOST_PROBES + len(self.carried),
            measure,
            self.noise,
            first=[plans.index(each) for each in dict.fromkeys((*self._first, *self.carried)) if each in plans],
            go_on=lambda: time.monotonic() - started < self.budget_s,
        )[0]

    def has_room(self, mesh: Mesh, micro: int, batch: int | None = None, sharded: bool = False) -> bool:
        """Whether this machine has memory for all workers of a training, by the model."""
        columns = (batch or self.size.batch_size, micro, mesh.data, mesh.shard, mesh.tensor, mesh.pipeline, self.cores)
        splits = StepSplits(*(np.array([each], float) for each in columns))
        each = peak_bytes(held_by(self.size, copies=self.copies), step_work(self.size), splits, sharded)[0]
        return bool(each * mesh.workers <= self.room_bytes)

    @property
    def several(self) -> list[WorkerMemory]:
        """The measured memory of two workers; empty if the machine has no room for two."""
        return self.held.get((Mesh(data=2), max(1, self.size.batch_size // 2)), [])

    @property
    def _first(self) -> tuple[tuple[Mesh, int], ...]:
        """The first probes: the program's own batch on one worker, and divided between two."""
        batch = self.size.batch_size
        return (Mesh(), batch), (Mesh(data=2), max(1, batch // 2))

    def _candidates(self) -> tuple[list[tuple[Mesh, int]], StepSplits]:
        """All possible probes: meshes that this machine has cores and memory for, with samples of a pass."""
        batch = self.size.batch_size
        meshes = [Mesh()]
        for workers in (2**power for power in range(1, self.cores.bit_length())):
            meshes.append(Mesh(data=workers))
            if "tensor" not in self.refused and self.size.divided > 0:
                meshes.append(Mesh(tensor=workers))
            if "pipeline" not in self.refused and workers <= self.size.layers:
                meshes.append(Mesh(pipeline=workers))
        micros = sorted({max(1, batch // part) for part in (1, 2, 4, 8)})
        plans = [(mesh, micro) for mesh in meshes for micro in micros if micro * mesh.batch <= batch]
        plans = [each for each in plans if self.has_room(*each)]
        rows = [(batch, micro, m.data, m.shard, m.tensor, m.pipeline, self.cores) for m, micro in plans]
        return plans, StepSplits(*np.array(rows, float).T)

    def _measure_twice(self, cluster: Cluster) -> None:
        """Measure the program's own batch twice; the difference shows how much times scatter on this machine."""
        alone = Mesh(), self.size.batch_size
        first = self._measure(cluster, *alone)
        del self.measured[alone]
        started = time.monotonic()
        again = self._measure(cluster, *alone)
        self.beside_s = max(0.0, time.monotonic() - started - again * self._steps)
        self.measured[alone] = math.sqrt(first * again)
        self.noise = max(NOISE_HERE, abs(math.log(again / first)))

    def _measure(self, cluster: Cluster, mesh: Mesh, micro: int) -> float:
        measured_s = self.measured.get((mesh, micro))
        if measured_s is not None:
            return measured_s
        copies = self.copies if mesh.replica > 1 else None
        execution = ExecutionSettings(
            mode="fast", mesh=None if mesh == Mesh() else mesh, micro_batch=micro, copies=copies
        )
        finished = self._run(cluster, execution, STEPS)
        if finished.step_s is None:
            rule = "a program must take a few steps, so that they can be timed"
            raise UserError(rule, f"{finished.steps} steps", "use more data or epochs, or a smaller batch")
        self._steps = finished.steps
        self.measured[mesh, micro] = finished.step_s
        self.held[mesh, micro] = finished.memory
        return finished.step_s

    def run(self, cluster: Cluster, execution: ExecutionSettings, **config: ConfigValue) -> RunFinished:
        """Make a short run with ``config`` over the program's settings. Raises ``UserError`` if it fails."""
        try:
            return self._run(cluster, execution, STEPS, config=config)
        except _Refused as refused:
            raise UserError("a plan must run here to be measured", refused.why, "leave --measure out") from None

    def _measure_noise(self, cluster: Cluster) -> None:
        """Measure the noise scale on one worker with several slots, whose gradients can be compared."""
        finished = self._run(cluster, ExecutionSettings(num_slots=NOISE_SLOTS), NOISE_STEPS, (NOISE,))
        if NOISE in finished.signals:
            self.noise_scale = max(0.0, finished.signals[NOISE][0])

    def _run(
        self,
        cluster: Cluster,
        execution: ExecutionSettings,
        steps: int,
        monitors: tuple[str, ...] = (),
        config: Mapping[str, ConfigValue] = NOTHING,
    ) -> RunFinished:
        with tempfile.TemporaryDirectory(prefix="elastune-plan-") as folder:
            spec = RunSpec(
                self.program,
                Path(folder) / "run" if self.out is None else self._next_folder(),
                config={**self.config, **config},
                seed=self.seed,
                execution=execution if self.assumed is None else replace(execution, device=self.assumed.kind),
                max_steps=steps,
                checkpoint_every_steps=0,
                adapt=Adapt(monitors=monitors),
            )
            try:
                finished = run_job(spec, cluster=cluster)
            except JobFailed as failed:
                raise _refusal(execution, failed.failure.detail) from None
            except UserError as error:
                raise _refusal(execution, str(error)) from None
            if finished.stopped in ("requested", "notice"):
                raise Interrupted
            self._context = finished.context
            return finished

    def _next_folder(self) -> Path:
        assert self.out is not None
        self._runs += 1
        return self.out / f"probe-{self._runs}"


class _Refused(Exception):
    """A mesh along ``axis`` does not run."""

    def __init__(self, axis: str, why: str) -> None:
        super().__init__(why)
        self.axis = axis
        self.why = why


def _refusal(execution: ExecutionSettings, why: str) -> Exception:
    """The error for a failed run: the axis that does not run, or else a ``UserError``."""
    for axis in ("tensor", "pipeline"):
        if execution.first_mesh.size(axis) > 1:
            return _Refused(axis, why)
    return UserError("the program must train with its own settings", why, "mend it, or its --set")


def _constants(link: NodeLink, constants: Sequence[Constant] = (*HERE, *REST)) -> tuple[Constant, ...]:
    """The constants before any measurement.

    ``link``: the declared link between nodes. ``constants``: those of workers and of the link within a node.
    """
    across = (
        Constant("across_hop_s", link.latency_s, 1.5),
        Constant("across_byte_s", link.seconds_per_byte, 1.5),
    )
    by_name = {constant.name: constant for constant in (*constants, *across)}
    return tuple(by_name[name] for name in CONSTANTS)


def step_work(size: ProgramSize) -> StepWork:
    """The program as a chain of equal layers, which share its arithmetic, activations and gradients."""
    return chain_of(
        size.layers,
        size.flops,
        size.kept_bytes,
        size.gradient_bytes,
        whole_flops=size.whole_flops,
        tensor_sums=size.tensor_sums,
        summed_bytes=size.summed_bytes,
        gathered=size.gathered,
        divided=size.divided,
        fullest=size.fullest,
        fullest_bytes=size.fullest_bytes,
    )


# The best plans, run for some steps: predicted beside measured figures of each.
#
# One training of a plan runs alone, on this machine or on a cluster. So the figures do not show how trainings at once
# slow each other down.

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
