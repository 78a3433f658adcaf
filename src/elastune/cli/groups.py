"""Groups of options that several commands take, and what each group makes of its options."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastune.cli import options, parse
from elastune.cli.setup import choose_device, choose_out, use_data
from elastune.core.divergence import FACTOR, parse_divergence
from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.mesh_choice import MeshChoice
from elastune.core.run import DEFAULT_SLOTS, Config, Means, Place, Program

if TYPE_CHECKING:
    from elastune.cli.chaos import Faults
    from elastune.cluster.notices import NoticeSource
    from elastune.study.request import StudyRequest


@dataclass(frozen=True)
class Training:
    """What is trained: the program's settings, epochs and seed, and when it has failed."""

    set_: options.Set = None
    epochs: options.Epochs = None
    seed: options.Seed = 0
    divergence: options.Divergence = f"{FACTOR:g}"

    @property
    def config(self) -> Config:
        return parse.settings(self.set_ or [])

    @property
    def factor(self) -> float | None:
        """By how much a loss has to grow to have diverged; None: it is not judged."""
        return parse_divergence(self.divergence)


@dataclass(frozen=True)
class WorkerExecution:
    """How each worker of a training works."""

    mode: options.Mode = "exact"
    micro_batch: options.MicroBatch = None
    precision: options.Precision = "fp32"
    threads: options.Threads = 1
    device: options.Device = "auto"
    mechanism: options.Mechanism = None
    virtual_tensor: options.VirtualTensor = None
    schedule: options.Schedule = "1f1b"
    zero_stage: options.ZeroStage = None
    offload: options.Offload = False

    def of_one(self) -> Means:
        """The system parameters of one worker. Only the device is checked here: the job checks the others."""
        return self.on(None)

    def on(self, workers: int | None, mesh: Mesh | None = None, copies: int | None = None) -> Means:
        """The system parameters of ``workers``, or of those of ``mesh``; what is None follows from the others."""
        said = {
            "workers": workers,
            "mode": self.mode,
            "threads": self.threads,
            "device": choose_device(self.device),
            "precision": self.precision,
            "micro_batch": self.micro_batch,
            "mechanism": self.mechanism,
            "mesh": None if mesh is None else str(mesh),
            "copies": copies,
            "virtual_tensor": self.virtual_tensor,
            "schedule": self.schedule,
            "offload": self.offload,
            "zero_stage": self.zero_stage,
        }
        return Means.from_json(said)  # words of a user, as those of a journal; the job checks what they say


@dataclass(frozen=True)
class Execution(WorkerExecution):
    """How a training is executed."""

    slots: options.Slots = None
    mesh: options.Mesh = None
    copies: options.Copies = None

    @property
    def chosen_mesh(self) -> Mesh | None:
        """The mesh that was asked for."""
        return None if self.mesh is None else Mesh.parse(self.mesh)

    def means(self, workers: int | None, most_workers: int | None = None) -> Means:
        """The system parameters asked for. ``most_workers``: how many there may be later."""
        means = self.on(workers, self.chosen_mesh, self.copies)
        least_slots = max(DEFAULT_SLOTS, MeshChoice.of(means).most_parts(max(means.workers, most_workers or 0)))
        return replace(means, num_slots=least_slots if self.slots is None else self.slots)


@dataclass(frozen=True)
class FastExecution(Execution):
    """The same, in ``fast`` mode unless told otherwise."""

    mode: options.Mode = "fast"


@dataclass(frozen=True)
class Folders:
    """Where data lie and results go."""

    data: options.Data = None
    out: options.Out = None
    resume: options.Resume = False
    json: options.Json = False

    def choose(self, file: Path, command: str) -> Path:
        """Let the program find its data; the folder of the results of ``command`` on ``file``."""
        use_data(self.data)
        return choose_out(self.out, file, command, self.resume)


@dataclass(frozen=True)
class Notices:
    """How the news arrives that this machine will be taken away."""

    notice_file: options.NoticeFile = None
    notice_url: options.NoticeUrl = None
    notice_seconds: options.NoticeSeconds = 120.0

    def sources(self) -> list[NoticeSource]:
        """Where to look for it."""
        from elastune.cluster.notices import FileNotice, UrlNotice

        if not 0 < self.notice_seconds <= parse.LONGEST_S:
            raise UserError("--notice-seconds must be above 0", self.notice_seconds, "such as 120")
        file, url = self.notice_file, self.notice_url
        sources: list[NoticeSource] = [] if file is None else [FileNotice(file, self.notice_seconds)]
        return sources if url is None else [*sources, UrlNotice(url, self.notice_seconds)]


@dataclass(frozen=True)
class FaultOptions:
    """What is to go wrong on purpose."""

    chaos: options.Chaos = None
    chaos_verify: options.ChaosVerify = False

    def choose(self, mode: str, place: Place | None) -> Faults:
        """The faults of a run in ``mode``, at ``place`` where another launcher has started it."""
        from elastune.cli.chaos import Faults

        return Faults.of(self.chaos, self.chaos_verify, mode, place)


@dataclass(frozen=True)
class Search:
    """What is searched for, how, and for how long."""

    objective: options.Objectives = None
    constraint: options.Constraints = None
    sampler: options.Sampler = "auto"
    trials: Annotated[int | None, typer.Option(help="Trials to run.")] = None
    budget: options.Budget = None
    worker_hours: options.WorkerHours = None
    until: options.Until = None
    patience: options.Patience = None
    target: options.Target = None
    stopping: options.Stopping = "none"
    trial_workers: options.TrialWorkers = None
    price: options.Price = 1.0
    trial_timeout: Annotated[str | None, typer.Option(metavar="TIME", help="Time of one trial at most.")] = None

    @property
    def budget_s(self) -> float | None:
        return None if self.budget is None else parse.duration(self.budget)

    @property
    def bounds(self) -> tuple[int, int] | None:
        """How few and how many workers a trial may have."""
        return None if self.trial_workers is None else parse.worker_bounds(self.trial_workers, "--trial-workers")

    def request(
        self, file: Path, out: Path, workers: int, means: Means, training: Training, *, resume: bool
    ) -> StudyRequest:
        """The study that these options ask for."""
        from elastune.search.space.objective import parse_objectives
        from elastune.study.request import StudyRequest

        timeout = self.trial_timeout
        return StudyRequest(
            program=Program(file),
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
            means=means,
            config=training.config,
            epochs=training.epochs,
            seed=training.seed,
            divergence=training.factor,
            price_per_worker_hour=check_price(self.price),
            trial_timeout_s=None if timeout is None else parse.duration(timeout, "--trial-timeout"),
            resume=resume,
        )


def check_price(price: float) -> float:
    """A price of a worker-hour that costs can be made of."""
    if not (math.isfinite(price) and price > 0):
        raise UserError("--price must be above 0", price, "use 1 for costs in worker-hours")
    return price
