"""The few short runs (probes) from which the step model learns what a program's steps take on this machine.

Only layouts that this machine has cores for are measured; links between nodes are taken as declared. Computation per
worker and memory come from the rehearsal (``train.rehearsal``), so one run needs only a few steps. Steps that
earlier runs have measured are used again, if program, settings and hardware are alike in all that a step's time
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
from elastune.core.mesh import Mesh
from elastune.core.plan.devices import Device
from elastune.core.plan.memory import BUFFERS, HeldAlone, peak_bytes
from elastune.core.plan.step_model import StepModel, prior_model, probe
from elastune.core.plan.step_time import CONSTANTS, Constant, StepSplits, StepWork, chain_of
from elastune.core.run import Adapt, Config, ConfigValue, ExecutionSettings, Program, RunSpec
from elastune.runtime.clusters.base import Cluster
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.interrupts import Interrupted
from elastune.runtime.job.output import JOURNAL
from elastune.runtime.job.run import JobFailed, run_job
from elastune.train.rehearsal import ProgramSize

# [held memory] What one worker of a program holds: state and passes from its rehearsal, corrected by what a probe measured here.


def held_by(size: ProgramSize, alone: Sequence[WorkerMemory] = (), copies: int = 1) -> HeldAlone:
    """What a worker holds that trains alone. What a pass keeps is divided with the layers as their parameters are.

    Args:
        size: From the rehearsal. It counts tensors, not what operations take for themselves while they run.
        alone: Measured here, of the program's own batch in one pass on one worker: where that is more, it counts.
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
    """The measured bytes of the kinds that a step needs, its activations among them."""
    return of.parameters + of.gradients + of.optimizer + (of.activations or 0)


def beside_bytes(memory: Sequence[WorkerMemory]) -> float:
    """What a worker's process takes beside what plans count: Python, torch, its data. From measured workers that hold
    everything."""
    beside = (each.peak - trained_bytes(each) - BUFFERS * each.gradients for each in memory)
    return float(max(0, max(beside, default=0)))


# [earlier probes] Steps that earlier runs have measured, from their journals: of the same program and settings on like hardware.
#
# A journal counts only where all is alike that a step's time depends on, but for the mesh and the samples of a pass,
# which are what it tells of. Others are left out.

FEWEST_STEPS = 8  # of a median that counts


@dataclass(frozen=True)
class EarlierProbe:
    """``step_s`` of ``mesh`` in passes of ``micro`` samples, and what its workers held."""

    mesh: Mesh
    micro: int
    step_s: float
    memory: Sequence[WorkerMemory]


def earlier_probes(
    folders: Iterable[Path], program: Program, config: Config, like: RunContext | None
) -> tuple[EarlierProbe, ...]:
    """From the runs in ``folders``, each that of a run, or one that has such folders; the last of like ones counts.

    Args:
        folders: Where to look.
        program: Of which the runs must be.
        config: That they must have been given.
        like: Data, model, hardware and software that they must have had; None: nothing is known, and nothing counts.

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
    """Of a run's folder, or of the folders in it. Raises ``UserError`` where there are none."""
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
    begun, end = started[0], finished[0]
    execution = ExecutionSettings.from_json(begun.execution)
    plain = ExecutionSettings(
        mode="fast",
        mesh=execution.mesh,
        mechanism=execution.mechanism,
        micro_batch=execution.micro_batch,
        num_slots=execution.num_slots,
        copies=execution.copies,
    )
    alike = (
        (Path(begun.program).resolve(), begun.config, end.context) == (program.path.resolve(), dict(config), like)
        and plain == execution
        and begun.sync == "allreduce"
        and not begun.sync_schedule
        and not any(begun.adapt.values())
        and (end.workers, end.hosts) == (execution.workers, 1)
    )
    if not alike or execution.micro_batch is None or end.step_s is None or end.steps < FEWEST_STEPS:
        return None
    return EarlierProbe(execution.first_mesh, execution.micro_batch, end.step_s, tuple(end.memory))


# [machine probes] What a program's steps take here, learned from a few short runs that the step model itself asks for.
#
# Only what this machine has cores for is measured; links between nodes are as declared. What a worker computes is taken
# from its rehearsal (``train.rehearsal``), so that one run is as long as a few steps.

STEPS = 12
MOST_PROBES = 8
NOISE_HERE = 0.05  # of a median over a dozen steps at least, on a machine that does other things, too
NOTHING: Mapping[str, ConfigValue] = MappingProxyType({})
NOISE, NOISE_STEPS = "noise_scale", 40
# A core of a CPU, before anything is measured: all of it is measured here, so that these only begin the fit.
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
REST = (
    Constant("update_byte_s", 1 / 1e9, 4.0),
    Constant("pass_s", 1e-3, 4.0),
    Constant("fixed_s", 1e-3, 4.0),
)


@dataclass(frozen=True)
class NodeLink:
    """What connects nodes, as declared: seconds of a byte, and of a message."""

    seconds_per_byte: float
    latency_s: float = 5e-5


@dataclass
class MachineProbes:
    """Short runs of ``program`` on this machine, each measured once, the first twice. ``refused``: what could not
    be run, and why. ``noise``: of a measured step, relative. ``out``: where its runs are kept; ``earlier``:
    folders of runs that have been kept, of which ``carried`` counted as measured. ``room_bytes``: what this machine
    has for all workers of a run: no run is begun that is modelled to need more. ``beside_s``: what a training takes
    beside its steps, of the second run, when what runs are started from was warm. ``assumed``: the device that workers
    have, if it is not this machine's; ``copies``: holders of each part of divided state."""

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
        """What is taken for the machine, or for the device that is ``assumed``, before anything is measured."""
        none = StepSplits(*(np.ones(0) for _ in range(7)))
        return prior_model(self._constants(link), step_work(self.size), none, self.noise)

    def learn(self, link: NodeLink, cluster: Cluster | None = None) -> StepModel:
        """Measure as long as the budget lasts, and the program's own batch on one worker in any case.

        Where this machine has no room for that, nothing is run: the model is then what is taken for any machine.

        Args:
            link: Between nodes, as declared.
            cluster: Where probes run; None: here.

        Raises:
            UserError: Where the program fails on one worker.
        """
        if not self.has_room(*self._first[0]):
            return self.prior(link)
        if cluster is not None:
            return self._learn_on(cluster, link)
        with LocalCluster(capacity=self.cores) as local:
            return self._learn_on(local, link)

    def _learn_on(self, cluster: Cluster, link: NodeLink) -> StepModel:
        begun = time.monotonic()
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
                return self._fit(cluster, link, plans, splits, begun)
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
        begun: float,
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
            go_on=lambda: time.monotonic() - begun < self.budget_s,
        )[0]

    def has_room(self, mesh: Mesh, micro: int, batch: int | None = None, sharded: bool = False) -> bool:
        """Whether this machine's memory has room for all workers of a training, as far as is modelled."""
        columns = (batch or self.size.batch_size, micro, mesh.data, mesh.shard, mesh.tensor, mesh.pipeline, self.cores)
        splits = StepSplits(*(np.array([each], float) for each in columns))
        each = peak_bytes(held_by(self.size, copies=self.copies), step_work(self.size), splits, sharded)[0]
        return bool(each * mesh.workers <= self.room_bytes)

    @property
    def several(self) -> list[WorkerMemory]:
        """What two workers were measured to hold; none where there was no room for two."""
        return self.held.get((Mesh(data=2), max(1, self.size.batch_size // 2)), [])

    @property
    def _first(self) -> tuple[tuple[Mesh, int], ...]:
        """The program as it is, and what two workers make of it."""
        batch = self.size.batch_size
        return (Mesh(), batch), (Mesh(data=2), max(1, batch // 2))

    def _candidates(self) -> tuple[list[tuple[Mesh, int]], StepSplits]:
        """Meshes that this machine has cores for, and samples of a pass."""
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
        """The program as it is: how far one time is from the other says how much this machine's times scatter."""
        alone = Mesh(), self.size.batch_size
        first = self._measure(cluster, *alone)
        del self.measured[alone]
        begun = time.monotonic()
        again = self._measure(cluster, *alone)
        self.beside_s = max(0.0, time.monotonic() - begun - again * self._steps)
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
        """A short run, with ``config`` over the program's. Raises ``UserError`` with why it failed."""
        try:
            return self._run(cluster, execution, STEPS, config=config)
        except _Refused as refused:
            raise UserError("a plan must run here to be measured", refused.why, "leave --measure out") from None

    def _measure_noise(self, cluster: Cluster) -> None:
        """On one worker in slots, whose gradients are told apart."""
        finished = self._run(cluster, ExecutionSettings(), NOISE_STEPS, (NOISE,))
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
    """What a run that failed says of the axes that it had."""
    for axis in ("tensor", "pipeline"):
        if execution.first_mesh.size(axis) > 1:
            return _Refused(axis, why)
    return UserError("the program must train with its own settings", why, "mend it, or its --set")


def _constants(link: NodeLink, constants: Sequence[Constant] = (*HERE, *REST)) -> tuple[Constant, ...]:
    """What is taken for a machine before anything is measured, its link between nodes as declared.

    ``own``: what is taken for its workers and the link within a node.
    """
    across = (
        Constant("across_hop_s", link.latency_s, 1.5),
        Constant("across_byte_s", link.seconds_per_byte, 1.5),
    )
    by_name = {constant.name: constant for constant in (*constants, *across)}
    return tuple(by_name[name] for name in CONSTANTS)


def step_work(size: ProgramSize) -> StepWork:
    """The program as a chain of like layers: each has its part of the arithmetic, of what is kept and of gradients."""
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
