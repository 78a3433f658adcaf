"""``elastune plan``: how to split a cluster to tune a program. Rehearse it, measure it here, judge every plan."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from elastune.cluster.base import Cluster
from elastune.cluster.kinds.kind import ClusterRequest, RoomWanted, opened
from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import Config, Program
from elastune.core.text import byte_count
from elastune.frontier.earlier_probes import journals_in
from elastune.frontier.held_memory import beside_bytes, held_by
from elastune.frontier.machine_probes import MachineProbes, NodeLink, work_of
from elastune.frontier.measured_plans import MeasuredPlan, measure_plans, plans_here, plans_on
from elastune.frontier.plan_commands import program_facts
from elastune.plan.cluster_plan import ClusterPlan, PlanBounds, ProgramForecast, best_plans, check_fits
from elastune.plan.devices import Device, device_named
from elastune.plan.divisions import Allowed, Nodes
from elastune.plan.fitting import fit_in_words
from elastune.plan.model_size import unused_text
from elastune.plan.next_doubling import Doubling, doublings
from elastune.plan.search_time import BLIND, CROWDING, KEPT, VARIATION, SearchModel, Stopping
from elastune.plan.steps.step_model import StepModel
from elastune.search.samplers.registry import check_sampler, generation_size, generational
from elastune.search.space.overrides import override
from elastune.train.machine import cores
from elastune.train.machine_memory import machine_memory_bytes
from elastune.train.program.load import load_as_guest
from elastune.train.rehearsal import ProgramSize
from elastune.train.rehearse_apart import rehearse_apart

NoiseFrom = Literal["told", "measured", "unknown"]
LARGER = 16  # times the program's own batch: the largest that is looked at
MOST_SHOWN = 100
MOST_COPIES = 8
FLOAT_BYTES = 4
CONSIDERED = 2_000  # plans, the best, of which some are measured
BLOCKS = 8  # that tensor divides layers into at most
STAGES = 16  # of a pipeline at most
UNTAUGHT = ("random", "grid")  # samplers whose proposals rest on no result: as many at once as one likes lose nothing


@dataclass(frozen=True)
class PlanRequest:
    """What ``elastune plan`` is asked. ``noise_scale``: None: measured here, in few steps.

    ``crowding``: what further trainings at once cost a search, and ``variation`` of their lengths: None: as simulated
    studies had. ``generations``: whether the search waits for each of its rounds. ``sampler``: what proposes, as
    ``elastune tune`` names it: nothing is lost by what runs at once under ``UNTAUGHT`` ones and within a generation of
    a genetic search that waits for each; any other is taken for TPE. ``stopping``: what ends trainings early, which
    saves what it saved simulated studies. ``mesh``: the only one of a training that is looked at.
    ``measured``: so many of the best plans are run, once all are judged: here, or on ``cluster``. ``out``: a
    folder, not there yet, that keeps the runs that were measured; ``earlier``: folders of runs, of which those of like
    programs and hardware count. ``cluster_words``: the options that name the cluster in the commands of the plan; "":
    none were given. ``device``: what workers have, a name of ``plan.devices``: times and memory are then by its data
    sheet. ``probe``: short runs on ``cluster`` calibrate the model, none here. ``copies``: holders of each
    part of divided state.
    """

    program: Program
    nodes: Nodes
    bounds: PlanBounds
    runs: int
    link: NodeLink
    calibrate_s: float
    config: Config
    seed: int = 0
    noise_scale: float | None = None
    crowding: float | None = None
    variation: float | None = None
    generations: bool = False
    sampler: str = "auto"
    stopping: Stopping = "none"
    mesh: Mesh | None = None
    shown: int = 5
    measured: int = 0
    cluster: Cluster | ClusterRequest | None = None
    out: Path | None = None
    earlier: tuple[Path, ...] = ()
    cluster_words: str = ""
    device: str | None = None
    probe: bool = False
    copies: int = 1

    def __post_init__(self) -> None:
        check_sampler(self.sampler, ())
        if self.runs < 1:
            raise UserError("a search has at least one training", self.runs, "use --runs 1 or more")
        if not 1 <= self.shown <= MOST_SHOWN:
            raise UserError(f"from 1 to {MOST_SHOWN} plans can be shown", self.shown, "such as --top 5")
        if not 0 <= self.measured <= MOST_SHOWN:
            raise UserError(f"from 0 to {MOST_SHOWN} plans can be measured", self.measured, "such as --measure 3")
        for name, value, fix in (
            ("the noise scale", self.noise_scale or 0.0, "such as --noise-scale 1000"),
            ("crowding", self.crowding or 0.0, "such as --crowding 0.01"),
            ("the variation of trainings' lengths", self.variation or 0.0, "such as --variation 0.4"),
            ("the time to calibrate", self.calibrate_s, "such as --calibrate 60s"),
        ):
            if not 0 <= value < math.inf:
                raise UserError(f"{name} must be a number, not negative", value, fix)
        if not 1 <= self.copies <= MOST_COPIES:
            raise UserError(f"a part has from 1 to {MOST_COPIES} holders", self.copies, "use --copies 1 or 2")
        on_cluster = self.probe or (self.measured and self.cluster is not None)
        if on_cluster and self.out is None:
            raise UserError("runs on a cluster need a folder", "no --out", "add --out with a folder for its runs")
        if self.probe and self.cluster is None:
            raise UserError("--probe runs on a node of the cluster", "no --cluster", "name it, or leave --probe out")
        if self.device is not None:
            self._check_device(device_named(self.device))
        elif self.probe and self.bounds.memory_bytes is None:
            rule = "the memory of a cluster's workers is not measured"
            raise UserError(rule, "--probe alone", "add --memory, or --device with its name")
        if self.stopping not in KEPT:
            fix = f"use one of {', '.join(KEPT)}"
            raise UserError("a plan knows what early stopping saves of some kinds alone", self.stopping, fix)

    def _check_device(self, device: Device) -> None:
        if device.memory_bytes is None and self.bounds.memory_bytes is None:
            raise UserError(f"the memory of a worker on {device.name} must be given", "none", "such as --memory 8GiB")
        if self.measured and self.cluster is None:
            rule = "plans for another device are measured on its cluster"
            raise UserError(rule, f"--device {self.device}", "add --cluster, or leave --measure out")


@dataclass(frozen=True)
class PlanFound:
    """The answer of ``elastune plan``.

    Attributes:
        plans: The plans, the best first.
        doublings: For the best plan, what twice the workers along each axis would bring, and why.
        noise: Where the search's noise scale is from. An unknown one counts as 0, so that a larger batch saves no step.
        probed: Measured seconds of a step, by mesh and samples of a pass.
        refused: What could not be run, and why.
        memory: Whether one worker holds the program, in words.
        worker_bytes: What one worker may hold of the memory that plans count: as asked, or its share of this machine,
            without ``beside_bytes``.
        beside_bytes: What the worker's process takes besides.
        constants: Those of the step model, in seconds.
        unmeasured: Why nothing was run here, so that times are those of any machine; "" where something was.
        measured: The plans that were run, in the order of predictions.
        assumed: What is taken of ``PlanRequest.device``, in words; "" where none was named.
        too_small: Why one training cannot use all workers; "" where it can.
        lacks: What the program's file needs before ``elastune tune`` can search it; "" where it has all.
        chosen: Settings of the program that its space chooses.
    """

    plans: tuple[ClusterPlan, ...]
    doublings: dict[str, Doubling]
    size: ProgramSize
    search: SearchModel
    noise: NoiseFrom
    probed: dict[str, float]
    refused: dict[str, str]
    memory: str
    worker_bytes: float
    beside_bytes: float
    constants: dict[str, float]
    unmeasured: str = ""
    measured: tuple[MeasuredPlan, ...] = ()
    assumed: str = ""
    too_small: str = ""
    lacks: str = ""
    chosen: tuple[str, ...] = ()


def plan_cluster(request: PlanRequest) -> PlanFound:
    """Answer ``request``. Whether anything fits is asked before a worker is started, here or anywhere.

    Raises:
        UserError: For a request that is wrong, a program that fails, memory that nothing fits, and a deadline that no
            plan keeps.
    """
    if request.out is not None and request.out.exists():
        raise UserError("the folder of a plan must not be there yet", str(request.out), "use another --out")
    for folder in request.earlier:
        journals_in(folder)
    loaded = load_as_guest(request.program)
    override(loaded.config, request.config, loaded.space)
    size = rehearse_apart(request.program, request.config, request.seed)
    facts = program_facts(request.program, request.config, request.seed)
    device = None if request.device is None else device_named(request.device)
    work, here = work_of(size), float(machine_memory_bytes())
    elsewhere = device is not None or request.probe
    room = math.inf if elsewhere else here
    worker_bytes = request.bounds.memory_bytes or (device and device.memory_bytes) or here / request.nodes.workers_each
    bounds = replace(request.bounds, memory_bytes=worker_bytes)
    may = partial(allowed_for, size, request.runs, settable=facts.batch_settable, mesh=request.mesh)
    copies = request.copies
    check_fits(held_by(size, copies=copies), work, request.nodes, may(), bounds)
    near = request.nodes.workers_each if elsewhere else cores()
    probes = MachineProbes(request.program, request.config, size, near, request.calibrate_s, request.seed, room)
    probes.out, probes.earlier, probes.assumed, probes.copies = request.out, request.earlier, device, copies
    probes.wants_noise = request.noise_scale is None
    unmeasured = ""
    if device is not None and not request.probe:
        unmeasured = "times are by what is published of the device"
    elif not probes.has_room(Mesh(), size.batch_size):
        unmeasured = fit_in_words(held_by(size), work, room, size.batch_size, 1, "this machine")
        if request.measured and request.cluster is None:
            raise UserError("plans are measured where this machine holds the program", unmeasured, "no --measure")
    model = _learned(request, probes, elsewhere=elsewhere)
    alone = probes.held.get((Mesh(), size.batch_size), [])
    held, beside = held_by(size, alone, copies), max(beside_bytes(alone), beside_bytes(probes.several))
    if beside >= worker_bytes:
        value = f"{byte_count(round(worker_bytes))}, of which its process takes {byte_count(round(beside))} here"
        raise UserError("a worker's memory must hold more than its process alone", value, "use a larger --memory")
    bounds = replace(bounds, memory_bytes=worker_bytes - beside)
    noise = probes.noise_scale if request.noise_scale is None else request.noise_scale
    search = search_of(request, size, noise or 0.0, probes.beside_s)
    forecast = ProgramForecast(model, work, held, search)
    allowed = may(probes.refused)
    plans = best_plans(forecast, request.nodes, allowed, bounds, request.shown)
    more = doublings(forecast, plans[0], request.nodes, allowed)
    probed = {
        f"{mesh}, {micro} samples a pass{' (earlier run)' if (mesh, micro) in probes.carried else ''}": step_s
        for (mesh, micro), step_s in probes.measured.items()
    }
    told: NoiseFrom = "told" if request.noise_scale is not None else "unknown" if noise is None else "measured"
    assert bounds.memory_bytes is not None
    words = fit_in_words(held, work, bounds.memory_bytes, min(allowed.micros), request.nodes.workers)
    found = PlanFound(
        plans=plans,
        doublings=more,
        size=size,
        search=search,
        noise=told,
        probed=probed,
        refused=probes.refused,
        memory=words,
        worker_bytes=bounds.memory_bytes,
        beside_bytes=beside,
        constants=model.constants(),
        unmeasured=unmeasured,
        assumed="" if device is None else device.line,
        too_small=unused_text(forecast, request.nodes, size.batch_size, size.parameter_bytes / FLOAT_BYTES),
        lacks=facts.lacks,
        chosen=facts.chosen,
    )
    if not request.measured:
        return found
    likely = best_plans(forecast, request.nodes, allowed, bounds, CONSIDERED, of_a_kind=False)
    if request.cluster is None:
        return replace(found, measured=measure_plans(plans_here(likely, probes, request.measured), forecast, probes))
    return replace(found, measured=_measured_on(request.cluster, likely, request, forecast, probes))


def _learned(request: PlanRequest, probes: MachineProbes, *, elsewhere: bool) -> StepModel:
    """From probes on one node of the cluster, from probes here, or from nothing but what is published."""
    if not elsewhere:
        return probes.learn(request.link)
    if not request.probe:
        return probes.prior(request.link)
    assert request.cluster is not None
    assert request.out is not None
    room = RoomWanted(request.out, probes.cores, probes.cores, grows=False)
    with opened(request.cluster, room) as cluster:
        return probes.learn(request.link, cluster)


def _measured_on(
    where: Cluster | ClusterRequest,
    likely: tuple[ClusterPlan, ...],
    request: PlanRequest,
    forecast: ProgramForecast,
    probes: MachineProbes,
) -> tuple[MeasuredPlan, ...]:
    """The best plans, measured on the cluster itself, once it has room for the largest of them."""
    assert request.out is not None
    chosen = plans_on(likely, probes, request.measured)
    most = max((each.mesh.workers for each in chosen), default=1)
    with opened(where, RoomWanted(request.out, most, request.nodes.workers, grows=False)) as cluster:
        return measure_plans(chosen, forecast, probes, cluster, None if cluster is None else request.nodes.workers_each)


def search_of(request: PlanRequest, size: ProgramSize, noise_scale: float, beside_s: float = 0.0) -> SearchModel:
    """The search that was asked for; what was not told of it is as simulated studies had it."""
    crowding, within = CROWDING[request.generations]
    generation = generation_size(request.sampler) if generational(request.sampler) else 0
    untaught = bool(generation) or request.sampler in UNTAUGHT
    declared = 0.0 if untaught and request.crowding is None else request.crowding
    return SearchModel(
        runs=request.runs,
        steps=size.steps,
        base_batch=size.batch_size,
        noise_scale=noise_scale,
        crowding=crowding if declared is None else declared,
        variation=VARIATION if request.variation is None else request.variation,
        generations=request.generations,
        kept=KEPT[request.stopping],
        crowding_within=within if declared is None else None,
        blind=BLIND if declared is None else math.inf,
        generation=generation,
        beside_s=beside_s,
    )


def allowed_for(
    size: ProgramSize,
    runs: int,
    refused: Collection[str] = (),
    *,
    settable: bool = True,
    mesh: Mesh | None = None,
) -> Allowed:
    """What the program can be given: its own batch and larger ones, passes from a whole batch down to an eighth.

    Its own chain of layers is cut by pipelines. ``refused``: axes that were tried here, and failed. ``settable``:
    whether a command can give it another batch. ``mesh``: as of ``PlanRequest``.
    """
    batches = tuple(size.batch_size * 2**power for power in range(LARGER.bit_length() if settable else 1))
    micros = tuple(sorted({max(1, size.batch_size // part) for part in (1, 2, 4, 8)}))
    tensor = BLOCKS if "tensor" not in refused and size.divided > 0 else 1
    pipeline = min(STAGES, size.layers) if "pipeline" not in refused else 1
    fitting = tuple(b for b in batches if b <= max(size.batch_size, size.samples))
    return Allowed(fitting, micros, runs, tensor, pipeline, mesh=mesh)
