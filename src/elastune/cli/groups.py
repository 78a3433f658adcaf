"""Groups of options that several commands take, and the values that each group makes of its options."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastune.cli import options, parse
from elastune.cli.output import print_error
from elastune.cli.parse import choose_device, choose_out, use_data
from elastune.core.communication import Topology
from elastune.core.cost import ON_DEMAND, Prices
from elastune.core.divergence import FACTOR, parse_divergence
from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.mesh_choice import least_slots
from elastune.core.run import (
    Adapt,
    Config,
    Elastic,
    ExecutionSettings,
    Place,
    Program,
    RunSpec,
    StartFrom,
    parse_renames,
)
from elastune.core.sync_plan import SyncChoice, SyncPlan
from elastune.tuning.study.request import FrontierRequest, StudyRequest

if TYPE_CHECKING:
    from elastune.cli.chaos import Faults
    from elastune.runtime.clusters.kind import ClusterRequest
    from elastune.runtime.preemption import NoticeSource
    from elastune.tuning.study.budget import Request


LOCAL = "local"
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the secret that the controller and its agents share. It is made where there is none.",
        metavar="FILE",
    ),
]
Interface = Annotated[
    str | None,
    typer.Option(
        help="Network interface for agents and workers, such as eth0. [default: loopback for a controller of "
        "--cluster hosts, else the one that leads to the other machines]"
    ),
]


@dataclass(frozen=True)
class ClusterOptions:
    """Where workers run: --cluster and the options of connections to other machines."""

    cluster: Annotated[
        str,
        typer.Option(
            metavar="KIND[:SETTING,...]",
            help="Where workers run: local (this machine), hosts:PORT (agents that you start on other machines), "
            "slurm or ray. See docs/clusters.md.",
        ),
    ] = LOCAL
    token_file: TokenFile = None
    interface: Interface = None
    tls: Annotated[
        bool,
        typer.Option("--tls", help="Encrypt connections with TLS. The token file names the certificate."),
    ] = False
    gather: Annotated[
        str, typer.Option(metavar="TIME", help="How long to wait until agents have room for the first workers.")
    ] = "10m"

    @property
    def local(self) -> bool:
        """Whether workers run on this machine."""
        return self.cluster == LOCAL

    @property
    def words(self) -> str:
        """The options as text, for a command that runs on the same cluster; "" for this machine.

        Raises ``UserError`` if --cluster names no cluster.
        """
        if self.local:
            return ""
        from elastune.runtime.clusters.hosts import HostsKind
        from elastune.runtime.clusters.kind import Access
        from elastune.runtime.clusters.registry import parse_cluster

        kind = parse_cluster(self.cluster)
        if isinstance(kind, HostsKind):  # other kinds look for programs that only a login node may have
            kind.check(Access(self.token_file))
        words = ["--cluster", self.cluster]
        words += [] if self.token_file is None else ["--token-file", str(self.token_file)]
        words += [] if self.interface is None else ["--interface", self.interface]
        words += ["--tls"] if self.tls else []
        words += [] if self.gather == type(self).gather else ["--gather", self.gather]
        return shlex.join(words)

    def request(self) -> ClusterRequest:
        """The request for the cluster, which opens nothing yet. Raises ``UserError`` for options that contradict."""
        from elastune.runtime.clusters.kind import Access, ClusterRequest
        from elastune.runtime.clusters.registry import parse_cluster

        kind = parse_cluster(self.cluster)
        gather_s = parse.duration(self.gather, "--gather")
        access = Access(self.token_file, self.interface, gather_s, notify=print_error, tls=self.tls)
        kind.check(access)
        return ClusterRequest(kind, access)


@dataclass(frozen=True)
class InitialWeightsOptions:
    """The weights of another model that a training begins with."""

    start_from: Annotated[
        Path | None,
        typer.Option(
            "--start-from",
            metavar="SOURCE",
            help="Begin with those weights that fit of a run's folder, a trial's folder or a safetensors file. See "
            "docs/transfer.md.",
        ),
    ] = None
    rename: Annotated[
        list[str] | None,
        typer.Option(
            metavar="THERE=HERE",
            help="Beginning of tensors' names in SOURCE, and what it is here: backbone.=encoder. May be repeated.",
        ),
    ] = None
    fresh: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Tensors that are not taken from SOURCE, such as 'head.*'. May be repeated."
        ),
    ] = None

    def choose(self) -> StartFrom | None:
        """The source of the weights; None without --start-from. Raises ``UserError``, also for a missing source."""
        if self.start_from is None:
            if self.rename or self.fresh:
                raise UserError("--rename and --fresh are of --start-from", "none", "add --start-from SOURCE")
            return None
        if not self.start_from.exists():
            fix = "name the folder of a run or a trial, or a safetensors file"
            raise UserError("--start-from must be there", self.start_from, fix)
        return StartFrom(self.start_from.resolve(), parse_renames(tuple(self.rename or ())), tuple(self.fresh or ()))


@dataclass(frozen=True)
class TrainingOptions:
    """The program's settings, epochs and seed, and the loss at which a training counts as failed."""

    set_: options.Set = None
    epochs: options.Epochs = None
    seed: options.Seed = RunSpec.seed
    divergence: options.Divergence = f"{FACTOR:g}"

    @property
    def config(self) -> Config:
        return parse.settings(self.set_ or [])

    @property
    def factor(self) -> float | None:
        """The growth of the loss that counts as divergence; None: no growth does."""
        return parse_divergence(self.divergence)


@dataclass(frozen=True)
class WorkerExecutionOptions:
    """The execution settings of a single worker: mode, precision, device, mechanism."""

    mode: options.Mode = ExecutionSettings.mode
    micro_batch: options.MicroBatch = None
    precision: options.Precision = ExecutionSettings.precision
    threads: options.Threads = ExecutionSettings.threads
    device: options.Device = "auto"
    mechanism: options.Mechanism = None
    virtual_tensor: options.VirtualTensor = None
    schedule: options.Schedule = ExecutionSettings.schedule
    zero_stage: options.ZeroStage = None
    offload: options.Offload = ExecutionSettings.offload
    compress: options.Compress = None
    collective_timeout: options.CollectiveTimeout = f"{Elastic.collective_timeout_s / 60:g}m"

    @property
    def collective_timeout_s(self) -> float:
        """How long a worker waits in a collective for another worker that is alive."""
        return parse.duration(self.collective_timeout, "--collective-timeout")

    def of_one(self, *, local: bool = True) -> ExecutionSettings:
        """The execution settings of one worker. Only the device is checked: the job checks the others."""
        return self.on(None, local=local)

    def on(
        self, workers: int | None, mesh: Mesh | None = None, copies: int | None = None, *, local: bool = True
    ) -> ExecutionSettings:
        """The execution settings for ``workers`` or for the workers of ``mesh``; a None follows from the others.

        ``local``: whether the workers run on this machine. Other hosts may have devices that this machine lacks.
        """
        settings = {
            "workers": workers,
            "mode": self.mode,
            "threads": self.threads,
            "device": choose_device(self.device, local=local),
            "precision": self.precision,
            "micro_batch": self.micro_batch,
            "mechanism": self.mechanism,
            "mesh": None if mesh is None else str(mesh),
            "copies": copies,
            "virtual_tensor": self.virtual_tensor,
            "schedule": self.schedule,
            "offload": self.offload,
            "zero_stage": self.zero_stage,
            "compress": self.compress,
        }
        return ExecutionSettings.from_json(settings)  # the job checks the values, as it does those of a journal


@dataclass(frozen=True)
class ExecutionOptions(WorkerExecutionOptions):
    """All execution settings of a training: those of each worker, the mesh, slots and topology."""

    slots: options.Slots = None
    mesh: options.Mesh = None
    copies: options.Copies = None
    topology: options.Topology = Topology.shape
    bucket_bytes: options.BucketBytes = None

    @property
    def chosen_mesh(self) -> Mesh | None:
        """The mesh of --mesh, or None."""
        return None if self.mesh is None else Mesh.parse(self.mesh)

    def execution(
        self, workers: int | None, most_workers: int | None = None, learners: int = 1, *, local: bool = True
    ) -> ExecutionSettings:
        """The execution settings of the options.

        Args:
            workers: The number of workers at the beginning.
            most_workers: The number of workers that the training may have later.
            learners: The number of learners; each has equally many slots.
            local: As in ``on``.
        """
        settings = self.on(workers, self.chosen_mesh, self.copies, local=local)
        execution = replace(settings, topology=Topology.parse(self.topology), bucket_bytes=self.bucket_bytes)
        if self.slots is not None:
            return replace(execution, num_slots=self.slots)
        least = least_slots(execution, max(execution.workers, most_workers or 0))
        return replace(execution, num_slots=-(-least // learners) * learners)


@dataclass(frozen=True)
class FastExecutionOptions(ExecutionOptions):
    """The options of ``ExecutionOptions``, with ``fast`` mode as the default."""

    mode: options.Mode = StudyRequest.execution.mode


@dataclass(frozen=True)
class RunLengthOptions:
    """How far a run goes, how often it writes checkpoints, and the checkpoint that it begins with."""

    max_steps: Annotated[int | None, typer.Option(help="End the run after this many steps.")] = None
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            help="Also write a checkpoint every N steps; 0: write none at all. [default: one at each epoch's end]"
        ),
    ] = None
    from_dcp: options.FromDcp = None

    def of(self, spec: RunSpec) -> RunSpec:
        """Return ``spec`` with these options. Raises ``UserError`` for a too low value or a missing checkpoint."""
        for option, value, low in (
            ("--epochs", spec.epochs, 1),
            ("--max-steps", self.max_steps, 1),
            ("--checkpoint-every", self.checkpoint_every, 0),
        ):
            if value is not None and value < low:
                raise UserError(f"{option} must be at least {low}", value, "leave it out or raise it")
        if self.from_dcp is not None and not (self.from_dcp / ".metadata").is_file():
            rule = "--from-dcp names a checkpoint of torch.distributed.checkpoint"
            raise UserError(rule, self.from_dcp, "name the folder that has its .metadata")
        every = self.checkpoint_every
        return replace(spec, max_steps=self.max_steps, checkpoint_every_steps=every, from_dcp=self.from_dcp)


@dataclass(frozen=True)
class SyncOptions:
    """The sync strategy: how workers agree on the weights."""

    sync: options.Sync = SyncPlan.strategy
    sync_schedule: options.SyncSchedule = ""

    @property
    def choice(self) -> SyncChoice:
        """The sync strategy and its schedule. Raises ``UserError``."""
        return SyncChoice.parse(self.sync, self.sync_schedule)

    @property
    def learners(self) -> int:
        """The number of learners; the number of slots must be a multiple of it. Raises ``UserError``."""
        return self.choice.slots(1)

    def of(self, spec: RunSpec) -> RunSpec:
        """Return ``spec`` with this strategy. Raises ``UserError``."""
        return replace(spec, sync=self.choice.sync, sync_schedule=self.choice.schedule)


@dataclass(frozen=True)
class AdaptOptions:
    """The policies that adapt a run, and the monitors that measure it."""

    policy: options.Policies = None
    monitor: options.Monitors = None

    @property
    def adapt(self) -> Adapt:
        return Adapt(tuple(self.policy or ()), tuple(self.monitor or ()))


@dataclass(frozen=True)
class FolderOptions:
    """The folders of data and results, and how a run continues in its folder."""

    data: options.Data = None
    out: options.Out = None
    resume: options.Resume = False
    accept_changes: options.AcceptChanges = False
    json: options.Json = False

    def program(self, file: Path, arguments: Sequence[str] | None, out: Path) -> Program:
        """The program in ``file``. Its data folder is absolute, so that commands in a journal work in any folder.

        ``arguments``: its own; without any, a command that goes on in ``out`` has those that it was begun with.
        """
        words = tuple(arguments or ())
        if self.resume and not words:
            from elastune.runtime.job.resumption import arguments_at_start

            words = arguments_at_start(out)
        return Program(file, data=None if self.data is None else self.data.resolve(), arguments=words)

    def choose(self, file: Path, command: str) -> Path:
        """Make the data folder known to the program, and return the folder for the results of ``command``."""
        use_data(self.data)
        return choose_out(self.out, file, command, self.resume)


@dataclass(frozen=True)
class NoticeOptions:
    """The sources of notices that this machine will be taken away."""

    notice_file: options.NoticeFile = None
    notice_url: options.NoticeUrl = None
    notices: options.CloudNotices = None
    notice_seconds: options.NoticeSeconds = 120.0

    def sources(self) -> list[NoticeSource]:
        """The sources to watch. Raises ``UserError`` for a --notice-seconds out of range."""
        from elastune.runtime.preemption import CloudNotice, FileNotice, UrlNotice

        if not 0 < self.notice_seconds <= parse.LONGEST_S:
            raise UserError("--notice-seconds must be above 0", self.notice_seconds, "such as 120")
        file, url = self.notice_file, self.notice_url
        sources: list[NoticeSource] = [] if file is None else [FileNotice(file, self.notice_seconds)]
        sources += [] if url is None else [UrlNotice(url, self.notice_seconds)]
        return sources if self.notices is None else [*sources, CloudNotice(self.notices)]


@dataclass(frozen=True)
class FaultOptions:
    """The faults to inject into a run."""

    chaos: options.Chaos = None
    chaos_verify: options.ChaosVerify = False

    def choose(self, mode: str, place: Place | None) -> Faults:
        """The faults of a run in ``mode``. ``place``: the worker's place if another launcher has started it."""
        from elastune.cli.chaos import Faults

        return Faults.of(self.chaos, self.chaos_verify, mode, place)


@dataclass(frozen=True)
class SearchOptions:
    """The options of a search: objectives, sampler, early stopping, and the limits of its length."""

    objective: options.Objectives = None
    constraint: options.Constraints = None
    sampler: options.Sampler = StudyRequest.sampler
    trials: options.Trials = None
    budget: options.Budget = None
    worker_hours: options.WorkerHours = None
    until: options.Until = None
    patience: options.Patience = None
    target: options.Target = None
    stopping: options.Stopping = StudyRequest.stopping
    trial_workers: options.TrialWorkers = None
    allocation: options.Allocation = StudyRequest.allocation
    price: options.Price = StudyRequest.price_per_worker_hour
    trial_timeout: options.TrialTimeout = None

    @property
    def budget_s(self) -> float | None:
        return None if self.budget is None else parse.duration(self.budget)

    @property
    def bounds(self) -> tuple[int, int] | None:
        return parse.trial_workers(self.trial_workers)

    def request(
        self,
        program: Program,
        out: Path,
        workers: int,
        execution: ExecutionSettings,
        training: TrainingOptions,
        folders: FolderOptions,
    ) -> StudyRequest:
        """The study that these options ask for."""
        from elastune.tuning.search.objective import parse_objectives

        timeout = self.trial_timeout
        return StudyRequest(
            program=program,
            out=out,
            objectives={o.name: o.direction for o in parse_objectives(self.objective)} if self.objective else {},
            constraints=tuple(self.constraint or ()),
            sampler=self.sampler,
            trials=self.trials,
            budget_s=self.budget_s,
            worker_hours=self.worker_hours,
            until=tuple(self.until or ()),
            patience=self.patience,
            target=self.target,
            stopping=self.stopping,
            workers=workers,
            trial_workers=self.bounds,
            allocation=self.allocation,
            execution=execution,
            config=training.config,
            epochs=training.epochs,
            seed=training.seed,
            divergence=training.factor,
            price_per_worker_hour=self.price,
            trial_timeout_s=None if timeout is None else parse.duration(timeout, "--trial-timeout"),
            resume=folders.resume,
            accept_changes=folders.accept_changes,
        )


@dataclass(frozen=True)
class FrontierOptions:
    """The options of a frontier: its worker counts and meshes, and the quality that must be reached."""

    workers: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Worker counts, such as 1,2,4. [default: 1,2,4,8; beside --mesh none]"),
    ] = None
    mesh: Annotated[
        list[str] | None,
        typer.Option(metavar="AXIS=N,...", help="A mesh to measure, too, such as data=2,shard=2. May be repeated."),
    ] = None
    target: Annotated[float | None, typer.Option(help="Value of --quality that must be reached, such as 0.95.")] = None
    quality: Annotated[str | None, typer.Option(help="Objective that is the quality. [default: the first]")] = None
    margin: Annotated[
        float | None,
        typer.Option(
            help="By how much quality may be worse than on the smallest worker count and still hold. "
            "[default: a hundredth of the metric's range, or a fiftieth of its value there]"
        ),
    ] = None
    seeds: Annotated[
        int, typer.Option(help="Number of trainings, each with its own seed, for a cell of the table; at least 2.")
    ] = FrontierRequest.seeds
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:OPTION=VALUE,...]",
            help="A policy to train and compare with static settings, such as gns:max_batch=2048. May be repeated.",
        ),
    ] = None
    short: Annotated[
        bool,
        typer.Option(
            "--short", help="In a budget that is too small for a search, do the rest, and say what was left out."
        ),
    ] = False
    throughput: Annotated[
        bool,
        typer.Option(
            "--throughput",
            help="Try other threads, mechanisms, routes, bucket sizes and micro-batches in short runs, and use what "
            "gives the same bits sooner. They take part of the budget.",
        ),
    ] = False

    @property
    def counts(self) -> tuple[int, ...]:
        """The worker counts of --workers."""
        return () if self.workers is None else parse.worker_counts(self.workers)

    @property
    def meshes(self) -> tuple[Mesh, ...]:
        """The meshes of --mesh."""
        return tuple(Mesh.parse(text) for text in self.mesh or ())


@dataclass(frozen=True)
class HostPrices:
    """The price of a worker-hour, by the kind of the host and over time."""

    prices: options.Prices = None
    kind: options.HostKind = ON_DEMAND

    def read(self, *, local: bool = True) -> Prices | None:
        """Read and check the prices in the file of --prices; None without it.

        ``local``: all workers run here, so no host reports a kind other than ``kind``. Raises ``UserError``.
        """
        if self.prices is None:
            if self.kind != ON_DEMAND:
                raise UserError("--kind is of --prices", self.kind, "add --prices FILE, or leave --kind out")
            return None
        from elastune.runtime.spot import read_host_prices

        return read_host_prices(self.prices, self.kind, any_kind=not local)

    def of_study(self, request: Request, *, local: bool) -> Request:
        """Return ``request`` with these prices, if there are any. Raises ``UserError``."""
        from elastune.core.clock import SystemClock
        from elastune.tuning.study.budget import with_prices

        return with_prices(request, self.read(local=local), SystemClock())


@dataclass(frozen=True)
class RunPrices(HostPrices):
    """The prices of a run: a file of prices, or one price for all hosts."""

    price: Annotated[
        float | None,
        typer.Option(help="Price of a worker-hour in dollars. The run prints its cost at the end. [default: no price]"),
    ] = None

    def read(self, *, local: bool = True) -> Prices | None:
        if self.price is None and self.prices is None:
            return super().read(local=local)
        from elastune.runtime.spot import prices_of

        return prices_of(self.price, self.prices, self.kind, any_kind=not local)
