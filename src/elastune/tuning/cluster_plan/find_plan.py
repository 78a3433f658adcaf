"""``find_plan`` and ``elastune plan``: how to split a cluster to tune a program, and the commands that do it there.

The program is rehearsed, its steps are measured here in a few short runs, and every possible plan is then judged by
the step model. ``keep_plan`` writes the result as the plain JSON that ``--json`` prints, the journal keeps and a
report reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from elastune.core.errors import UserError
from elastune.core.fields import keywords_of, values_of
from elastune.core.formatting import byte_count, count, number
from elastune.core.journal.files import JournalWriter
from elastune.core.journal.records import PlanMade
from elastune.core.mesh import Mesh
from elastune.core.plan.cluster_plan import (
    CROWDING,
    KEPT,
    RANDOM_SEARCH_FACTOR,
    VARIATION,
    Allowed,
    ClusterPlan,
    Doubling,
    Nodes,
    PlanBounds,
    ProgramForecast,
    SearchModel,
    Stopping,
    best_plans,
    check_fits,
    doublings,
    unused_workers_text,
)
from elastune.core.plan.memory import fit_text
from elastune.core.plan.step_model import Device, StepModel, device_named
from elastune.core.run import Config, Program
from elastune.runtime.clusters.base import Cluster
from elastune.runtime.clusters.kind import CapacityRequest, ClusterRequest, opened
from elastune.runtime.clusters.registry import print_line
from elastune.runtime.job.output import JOURNAL
from elastune.train.machine import cores, machine_memory_bytes
from elastune.train.program.load import load_as_guest, merge
from elastune.train.program.overrides import override
from elastune.train.program.space import corners
from elastune.train.rehearsal import ProgramSize, rehearse_apart
from elastune.tuning.cluster_plan.probes import (
    BATCH,
    MachineProbes,
    MeasuredPlan,
    NodeLink,
    beside_bytes,
    held_by,
    journals_in,
    measure_plans,
    plans_here,
    plans_on,
    step_work,
    training_of,
)
from elastune.tuning.cluster_plan.settings import PlanOwnSettings, PlanSettings
from elastune.tuning.search.registry import check_sampler, generation_size, generational
from elastune.tuning.study.api import Train, program_of
from elastune.tuning.study.run_command import own_arguments, run_command

# The commands of a cluster's plan. A command runs as it is printed on its cluster, or it is not printed.
#
# A command names the cluster, the device and the settings of the program that the plan changes. ``elastune tune``
# needs a search space in the program's file. If the file has none, the answer lists what to add.

PLACEHOLDER = "--cluster hosts:7070 --token-file elastune.token --interface eth0"
"""The cluster in the commands of a plan for several nodes, if the user did not name a cluster."""


@dataclass(frozen=True)
class ProgramFacts:
    """What a program's file allows in commands.

    Attributes:
        batch_settable: Whether commands can set ``batch_size``.
        lacks: The code that the file needs before ``elastune tune`` can search it; "" if it has all of it.
        chosen: Settings that its space chooses, so that commands must not set them.
    """

    batch_settable: bool
    lacks: str = ""
    chosen: tuple[str, ...] = ()


def program_facts(program: Program, config: Config, seed: int = 0) -> ProgramFacts:
    """Load the file of ``program`` and find what commands can set.

    Args:
        program: The program.
        config: Settings that replace its own.
        seed: The seed of the space's first sample.

    Returns:
        What the file allows in commands.

    Raises:
        UserError: For a file that cannot be loaded, and for a setting that it does not have.

    Example:
        >>> program_facts(Program(Path("train.py")), {}).lacks
        ''
    """
    loaded = load_as_guest(program, seed)
    settings = merge(loaded.config, config)
    if loaded.space is None:
        also = "" if loaded.objectives else ', and objectives = {"accuracy": "max"} (or --objective accuracy:max)'
        lacks = f'def space(trial): return {{"lr": trial.suggest_float("lr", 1e-4, 1.0, log=True)}}{also}'
        return ProgramFacts(BATCH in settings, lacks)
    lacks = "" if loaded.objectives else 'objectives = {"accuracy": "max"}, or --objective accuracy:max in the command'
    sampled = {name for sample in corners(loaded.space, seed) for name in sample.values}
    return ProgramFacts(BATCH in settings, lacks, tuple(sorted(sampled)))


def command_of(
    plan: ClusterPlan,
    program: Program,
    config: Mapping[str, Any],
    seed: int,
    own_batch: int,
    *,
    copies: int = 1,
    device: str | None = None,
    where: str = "",
) -> str:
    """Return the command that trains once as ``plan`` does.

    Args:
        plan: The plan.
        program: The program.
        config: Settings that replace its own.
        seed: The run's seed.
        own_batch: The program's own batch, which needs no setting.
        copies: Holders of each part of divided state.
        device: The value of ``--device``; None: the machine's device.
        where: Options that name the cluster; "": this machine.

    Returns:
        One line for a POSIX shell.

    Example:
        >>> command_of(plan, Program(Path("train.py")), {}, 0, 64, where="--cluster slurm:nodes=2")
        'elastune run train.py --mode fast ... --cluster slurm:nodes=2'
    """
    command = _options_of(plan, program, config, seed, own_batch, copies, device)
    return (f"{command} {where}" if where else command) + own_arguments(program.arguments)


def _options_of(
    plan: ClusterPlan,
    program: Program,
    config: Mapping[str, Any],
    seed: int,
    own_batch: int,
    copies: int = 1,
    device: str | None = None,
) -> str:
    """The command without the options of a cluster and the program's own arguments."""
    execution = training_of(plan, copies).execution
    settings = {**config, **({} if plan.batch == own_batch else {BATCH: plan.batch})}
    options = {name: value for name, value in execution.to_json().items() if value is not None and name != "device"}
    if device is not None:
        options["device"] = device
    return run_command(str(program.path), settings, options, seed, data=program.data_text)


def search_command_of(
    plan: ClusterPlan,
    program: Program,
    config: Mapping[str, Any],
    seed: int,
    own_batch: int,
    search: SearchModel,
    sampler: str = "auto",
    *,
    chosen: tuple[str, ...] = (),
    **more: Any,
) -> str:
    """Return the command that searches as ``plan`` does, with its number of trainings at once and in all.

    Args:
        plan: The plan.
        program: The program.
        config: Settings that replace its own.
        seed: The search's seed.
        own_batch: The program's own batch.
        search: The model of the search.
        sampler: The sampler of the search.
        chosen: Settings that the program's space chooses; the command leaves them out.
        more: Further keywords of ``command_of``.

    Returns:
        One line for a POSIX shell.

    Example:
        >>> search_command_of(plan, program, {}, 0, 64, search)
        'elastune tune train.py ... --workers 16 --trials 212'
    """
    batch = own_batch if BATCH not in chosen else plan.batch  # a batch chosen by the space is not set
    where = more.pop("where", "")
    config = {name: value for name, value in config.items() if name not in chosen}
    command = _options_of(plan, program, config, seed, batch, **more).replace("elastune run ", "elastune tune ", 1)
    stopping = "" if search.kept == 1 else " --stopping asha"
    by = "" if sampler == "auto" else f" --sampler {sampler}"
    words = f"{command} --workers {plan.workers} --trials {trials_of(plan, search)}{by}{stopping}"
    return (f"{words} {where}" if where else words) + own_arguments(program.arguments)


def trials_of(plan: ClusterPlan, search: SearchModel) -> int:
    """How many trainings the search needs with the number at once of ``plan``."""
    return math.ceil(float(search.needed(np.array([float(plan.width)]))[0]))


def trials_note(plan: ClusterPlan, search: SearchModel) -> str:
    """Return why the search's command has another number of trials than ``--runs``; "" if it has the same.

    Args:
        plan: The plan of the command.
        search: The model of the search.

    Returns:
        The reason, with the figures that it rests on.

    Example:
        >>> trials_note(plan, search)
        '--trials 692: --runs 128 counts trainings one after another. ...'
    """
    trials = trials_of(plan, search)
    if trials == search.runs:
        return ""
    within = search.crowding_within
    source = "as you said"
    if within is not None:
        source = f"80 % of simulated studies {within[0]:.1%} to {within[1]:.1%}"
    bound = ""
    if trials >= search.runs * search.blind:
        bound = f", up to the {number(search.blind)} x that random search needs"
    return (
        f"--trials {trials:,}: --runs {search.runs:,} counts trainings one after another. With {plan.width:,} at once "
        f"proposals know less of one another: each further one at once costs {search.crowding:.1%} more trainings "
        f"({source}){bound}. --crowding sets your own figure"
    )


def placeholder_note(nodes: int) -> str:
    """How to replace ``PLACEHOLDER`` on a cluster of so many nodes."""
    return (
        f"the cluster was not named (--cluster), so the commands have a placeholder: {PLACEHOLDER}. Put in your port, "
        f"token file and network interface, and start on each of the {count(nodes, 'node')} elastune agent --join "
        "HOST:7070 --token-file elastune.token. With Slurm or Ray, plan with --cluster slurm:... or ray"
    )


def lacks_note(lacks: str) -> str:
    """The code to add to a program's file before it can be searched."""
    return f"no search command: elastune tune cannot search this program before its file has {lacks}"


# ``find_plan`` and ``elastune plan``: how to split a cluster to tune a program.

NoiseFrom = Literal["given", "measured", "unknown"]
LARGER = 16  # the largest batch that plans consider, over the program's own
MOST_SHOWN = 100
MOST_COPIES = 8
FLOAT_BYTES = 4
BITS = 8  # of a byte
FOLDERS = ("out", "earlier")  # the settings that name folders
CONSIDERED = 2_000  # the number of best plans, of which some are measured
BLOCKS = 8  # the most blocks that tensor divides layers into
STAGES = 16  # the most stages of a pipeline
INDEPENDENT_SAMPLERS = ("random", "grid")
"""Samplers whose proposals rest on no result, so trainings at once cost nothing."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest(PlanOwnSettings):
    """A request of ``elastune plan``.

    Trainings at once cost nothing under the samplers of ``INDEPENDENT_SAMPLERS``, and within a generation of a genetic
    search; any other sampler counts as TPE. Early stopping saves as much as in simulated studies.

    Attributes:
        program: The program.
        cluster: The cluster on which probes and measured plans run; None: this machine.
        cluster_words: The options that name the cluster in commands; "": none were given.
    """

    program: Program
    cluster: Cluster | ClusterRequest | None = None
    cluster_words: str = ""

    @classmethod
    def of(cls, settings: PlanSettings, program: Program, notify: Callable[[str], None]) -> PlanRequest:
        """Return the request of ``settings``. ``notify`` is called with one line when agents come and go."""
        used = isinstance(settings.cluster, Cluster) or (
            not settings.local and bool(settings.probe or settings.measure)
        )
        return cls(
            program=program,
            cluster=settings.place(0.0, notify) if used else None,
            cluster_words=settings.words,
            **values_of(PlanOwnSettings, settings),
        )

    @property
    def all_nodes(self) -> Nodes:
        """The nodes, and the workers on each."""
        return Nodes(self.nodes, self.workers_per_node)

    @property
    def bounds(self) -> PlanBounds:
        """Memory of a worker, deadline and price."""
        return PlanBounds(self.memory_bytes, self.deadline_s, self.price_per_worker_hour)

    @property
    def link(self) -> NodeLink:
        """The declared link between nodes."""
        return NodeLink(BITS / (self.link_gbit_s * 1e9))

    @property
    def one_mesh(self) -> Mesh | None:
        """The only mesh of a training to consider; None: all."""
        return None if self.mesh is None else Mesh.parse(self.mesh)

    @property
    def folder(self) -> Path | None:
        """The new folder that keeps the plan and the measured runs, if any."""
        return None if self.out is None else Path(self.out)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sampler(self.sampler, ())
        if not 0 < self.link_gbit_s < math.inf:
            raise UserError("link_gbit_s must be a number above 0", self.link_gbit_s, "such as 10.0")
        _ = self.all_nodes, self.bounds, self.one_mesh  # each checks its own values
        if self.runs < 1:
            raise UserError("a search has at least one training", self.runs, "use --runs 1 or more")
        if not 1 <= self.top <= MOST_SHOWN:
            raise UserError(f"from 1 to {MOST_SHOWN} plans can be shown", self.top, "such as --top 5")
        if not 0 <= self.measure <= MOST_SHOWN:
            raise UserError(f"from 0 to {MOST_SHOWN} plans can be measured", self.measure, "such as --measure 3")
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
        on_cluster = self.probe or (self.measure and self.cluster is not None)
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
        if self.measure and self.cluster is None:
            rule = "plans for another device are measured on its cluster"
            raise UserError(rule, f"--device {self.device}", "add --cluster, or leave --measure out")


@dataclass(frozen=True)
class ClusterPlanResult:
    """The answer of ``elastune plan``.

    Attributes:
        plans: The plans, the best first.
        doublings: For the best plan, the gain of twice the workers along each axis, and why.
        size: The size of the program, from its rehearsal.
        search: The model of the search.
        noise: The source of the search's noise scale. An unknown one counts as 0, so a larger batch saves no step.
        probed: Measured seconds of a step, by mesh and samples of a pass.
        refused: The axes that could not run, and why.
        memory: Whether one worker holds the program, in words.
        worker_bytes: The memory of one worker that plans count: as requested, or its share of this machine, without
            ``beside_bytes``.
        beside_bytes: The other memory of the worker's process.
        constants: The constants of the step model, in seconds.
        unmeasured: Why nothing was run here, so that times hold for any machine; "" if something was run.
        measured: The plans that were run, in the order of predictions.
        assumed: The data sheet of ``PlanRequest.device``, in words; "" if none was named.
        too_small: Why one training cannot use all workers; "" if it can.
        lacks: The code that the program's file needs before ``elastune tune`` can search it; "" if it has all of it.
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


@keywords_of(PlanSettings)
def find_plan(train: Train, settings: PlanSettings) -> ClusterPlanResult:
    """Find how to split a cluster to tune ``train``.

    This is ``elastune plan`` (docs/planning.md) as a function. It rehearses one step without workers, calibrates the
    step model by short runs on this machine, and judges every division of the cluster. All times of plans are modelled.

    Args:
        train: A plain function at the top level of a file, ``train(session)``.
        settings: The cluster, the search, and what may be measured. Each field of ``PlanSettings`` is a keyword; names
            that end in ``_s`` are seconds.

    Returns:
        The plans, the best first; what was measured for them; and what the program is made of.

    Raises:
        UserError: For a wrong request, a program that fails, memory that nothing fits, and a deadline that no plan
            keeps.

    Example:
        >>> found = elastune.find_plan(train, nodes=16, workers_per_node=8, memory_bytes=24 * 2**30)
        >>> print(found.plans[0].mesh, found.plans[0].interval_s)
    """
    request = PlanRequest.of(settings, program_of(train), print_line)
    result = plan_cluster(request)
    keep_plan(request, result)
    return result


def plan_cluster(request: PlanRequest) -> ClusterPlanResult:
    """Find the best plans for ``request``. No worker starts before it is known that something fits into memory.

    Raises:
        UserError: For a wrong request, a program that fails, memory that nothing fits, and a deadline that no plan
            keeps.
    """
    if request.folder is not None and request.folder.exists():
        raise UserError("the folder of a plan must not be there yet", str(request.folder), "use another --out")
    earlier = tuple(map(Path, request.earlier))
    for folder in earlier:
        journals_in(folder)
    loaded = load_as_guest(request.program, request.seed)
    override(loaded.config, request.config, loaded.space)
    loaded.check(request.config)
    size = rehearse_apart(request.program, request.config, request.seed)
    facts = program_facts(request.program, request.config, request.seed)
    device = None if request.device is None else device_named(request.device)
    work, machine_bytes = step_work(size), float(machine_memory_bytes())
    elsewhere = device is not None or request.probe
    room = math.inf if elsewhere else machine_bytes
    worker_bytes = (
        request.bounds.memory_bytes
        or (device and device.memory_bytes)
        or machine_bytes / request.all_nodes.workers_each
    )
    bounds = replace(request.bounds, memory_bytes=worker_bytes)
    may = partial(allowed_for, size, request.runs, settable=facts.batch_settable, mesh=request.one_mesh)
    copies = request.copies
    check_fits(held_by(size, copies=copies), work, request.all_nodes, may(), bounds)
    near = request.all_nodes.workers_each if elsewhere else cores()
    probes = MachineProbes(request.program, request.config, size, near, request.calibrate_s, request.seed, room)
    probes.out, probes.earlier, probes.assumed, probes.copies = request.folder, earlier, device, copies
    probes.wants_noise = request.noise_scale is None
    unmeasured = ""
    if device is not None and not request.probe:
        unmeasured = "times are by what is published of the device"
    elif not probes.has_room(Mesh(), size.batch_size):
        unmeasured = fit_text(held_by(size), work, room, size.batch_size, 1, "this machine")
        if request.measure and request.cluster is None:
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
    plans = best_plans(forecast, request.all_nodes, allowed, bounds, request.top)
    more = doublings(forecast, plans[0], request.all_nodes, allowed)
    probed = {
        f"{mesh}, {micro} samples a pass{' (earlier run)' if (mesh, micro) in probes.carried else ''}": step_s
        for (mesh, micro), step_s in probes.measured.items()
    }
    noise_from: NoiseFrom = "given" if request.noise_scale is not None else "unknown" if noise is None else "measured"
    assert bounds.memory_bytes is not None
    words = fit_text(held, work, bounds.memory_bytes, min(allowed.micros), request.all_nodes.workers)
    result = ClusterPlanResult(
        plans=plans,
        doublings=more,
        size=size,
        search=search,
        noise=noise_from,
        probed=probed,
        refused=probes.refused,
        memory=words,
        worker_bytes=bounds.memory_bytes,
        beside_bytes=beside,
        constants=model.constants(),
        unmeasured=unmeasured,
        assumed="" if device is None else device.line,
        too_small=unused_workers_text(forecast, request.all_nodes, size.batch_size, size.parameter_bytes / FLOAT_BYTES),
        lacks=facts.lacks,
        chosen=facts.chosen,
    )
    if not request.measure:
        return result
    likely = best_plans(forecast, request.all_nodes, allowed, bounds, CONSIDERED, of_a_kind=False)
    if request.cluster is None:
        return replace(result, measured=measure_plans(plans_here(likely, probes, request.measure), forecast, probes))
    return replace(result, measured=_measured_on(request.cluster, likely, request, forecast, probes))


def _learned(request: PlanRequest, probes: MachineProbes, *, elsewhere: bool) -> StepModel:
    """The step model from probes on one node of the cluster, from probes here, or from published data alone."""
    if not elsewhere:
        return probes.learn(request.link)
    if not request.probe:
        return probes.prior(request.link)
    assert request.cluster is not None
    assert request.folder is not None
    room = CapacityRequest(request.folder, probes.cores, probes.cores, grows=False)
    with opened(request.cluster, room) as cluster:
        return probes.learn(request.link, cluster)


def _measured_on(
    where: Cluster | ClusterRequest,
    likely: tuple[ClusterPlan, ...],
    request: PlanRequest,
    forecast: ProgramForecast,
    probes: MachineProbes,
) -> tuple[MeasuredPlan, ...]:
    """Measure the best plans on the cluster, once it has room for the largest of them."""
    assert request.folder is not None
    chosen = plans_on(likely, probes, request.measure)
    most = max((each.mesh.workers for each in chosen), default=1)
    with opened(where, CapacityRequest(request.folder, most, request.all_nodes.workers, grows=False)) as cluster:
        return measure_plans(
            chosen, forecast, probes, cluster, None if cluster is None else request.all_nodes.workers_each
        )


def search_of(request: PlanRequest, size: ProgramSize, noise_scale: float, beside_s: float = 0.0) -> SearchModel:
    """The model of the requested search. Values that the request leaves open come from simulated studies."""
    crowding, within = CROWDING[request.generations]
    generation = generation_size(request.sampler) if generational(request.sampler) else 0
    untaught = bool(generation) or request.sampler in INDEPENDENT_SAMPLERS
    declared = 0.0 if untaught and request.crowding is None else request.crowding
    return SearchModel(
        runs=request.runs,
        steps=size.steps,
        base_batch=size.batch_size,
        noise_scale=noise_scale,
        crowding=crowding if declared is None else declared,
        variation=VARIATION if request.variation is None else request.variation,
        generations=request.generations,
        kept=KEPT[cast("Stopping", request.stopping)],
        crowding_within=within if declared is None else None,
        blind=RANDOM_SEARCH_FACTOR if declared is None else math.inf,
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
    """The batches, passes and axes that plans of the program may use.

    Batches are its own and larger ones; passes hold from a whole batch down to an eighth. Pipelines cut the program's
    own chain of layers.

    Args:
        size: The size of the program.
        runs: The number of trainings.
        refused: Axes that were tried here and failed.
        settable: Whether a command can set the batch.
        mesh: The only mesh to consider; None: all.
    """
    batches = tuple(size.batch_size * 2**power for power in range(LARGER.bit_length() if settable else 1))
    micros = tuple(sorted({max(1, size.batch_size // part) for part in (1, 2, 4, 8)}))
    tensor = BLOCKS if "tensor" not in refused and size.divided > 0 else 1
    pipeline = min(STAGES, size.layers) if "pipeline" not in refused else 1
    fitting = tuple(b for b in batches if b <= max(size.batch_size, size.samples))
    return Allowed(fitting, micros, runs, tensor, pipeline, mesh=mesh)


# --- the answer as plain JSON: ``--json`` prints it, the journal keeps it, a report reads it ---
def record_of(request: PlanRequest, result: ClusterPlanResult) -> PlanMade:
    """The record of a plan in its journal."""
    return PlanMade(
        str(request.program.path), request_json(request), plan_json(request, result), dict(result.constants)
    )


def keep_plan(request: PlanRequest, result: ClusterPlanResult) -> PlanMade:
    """The record of a plan, written to the request's folder if it has one."""
    record = record_of(request, result)
    if request.folder is not None:
        with JournalWriter(request.folder / JOURNAL) as journal:
            journal.write(record, durable=True)
    return record


def request_json(request: PlanRequest) -> dict[str, Any]:
    """The settings of the request and the words of its cluster, without the program's path and the folders."""
    settings = values_of(PlanOwnSettings, request)
    return {
        **{name: value for name, value in settings.items() if name not in FOLDERS},
        "cluster": request.cluster_words,
    }


def plan_json(request: PlanRequest, result: ClusterPlanResult) -> dict[str, Any]:
    """The answer as plain JSON; numbers that are not finite become None."""
    plain = asdict(result)
    plain["plans"] = [_plan(each, request, result) for each in result.plans]
    plain["measured"] = [_measured(each) for each in result.measured]
    plain["command_notes"] = command_notes(request, result)
    del plain["doublings"]
    plain["gains"] = {axis: each.factor for axis, each in result.doublings.items() if each.factor is not None}
    plain["reasons"] = {axis: each.why for axis, each in result.doublings.items()}
    answer: dict[str, Any] = _finite(plain)
    return answer


def _plan(each: ClusterPlan, request: PlanRequest, result: ClusterPlanResult) -> dict[str, Any]:
    deadline_s, own_batch = request.bounds.deadline_s, result.size.batch_size
    positional = each, request.program, request.config, request.seed, own_batch
    device = None if request.device is None else device_named(request.device).kind
    more: dict[str, Any] = {"copies": request.copies, "device": device, "where": _where(request)}
    search = search_command_of(*positional, result.search, request.sampler, chosen=result.chosen, **more)
    return {
        **asdict(each),
        "mesh": str(each.mesh),
        "workers": each.workers,
        "cost_interval": each.cost_interval,
        "odds": None if deadline_s is None else each.odds(deadline_s),
        "command": command_of(*positional, **more),
        "search_command": None if result.lacks else search,
    }


def _where(request: PlanRequest) -> str:
    """The options that name the cluster in commands: as given, or a placeholder for several nodes."""
    return request.cluster_words or (PLACEHOLDER if request.all_nodes.count > 1 else "")


def command_notes(request: PlanRequest, result: ClusterPlanResult) -> list[str]:
    """Notes about the commands of the first plan."""
    best = result.plans[0]
    notes = [lacks_note(result.lacks)] if result.lacks else [trials_note(best, result.search)]
    other = {BATCH} if best.batch != result.size.batch_size else set[str]()
    if not result.lacks and (left := sorted({*request.config, *other} & set(result.chosen))):
        notes.append(f"the search's command leaves {', '.join(left)} to space(trial), which chooses it")
    if not request.cluster_words and request.all_nodes.count > 1:
        notes.append(placeholder_note(request.all_nodes.count))
    return [note for note in notes if note]


def _measured(each: MeasuredPlan) -> dict[str, Any]:
    errors = {"step_error": each.step_error, "memory_error": each.memory_error, "within": each.within}
    return {**asdict(each), "mesh": str(each.mesh), **errors}


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
