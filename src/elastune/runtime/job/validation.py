"""Checks of a run before a worker starts: hyperparameters, execution settings, policies and monitors.

It imports torch and the program, which takes a second or more: import this module when it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from elastune.adapt.monitors.registry import choose
from elastune.adapt.policies.host import PolicyEntry
from elastune.adapt.policies.library.registry import build, monitors_for
from elastune.adapt.policies.library.spot import Spot
from elastune.core.cost import ON_DEMAND
from elastune.core.errors import UserError
from elastune.core.formatting import count
from elastune.core.mesh import AXES, STAGED, MechanismName, Mesh
from elastune.core.mesh_choice import MeshChoice
from elastune.core.run import (
    Adapt,
    Config,
    ExecutionSettings,
    RunSpec,
    Schedule,
    check_schedule,
    check_strategy,
    check_verification,
)
from elastune.core.slots import MOST_EXACT_WORKERS
from elastune.core.sync_plan import SyncPlan
from elastune.parallel.mechanisms.registry import check_workers, mechanism_for
from elastune.runtime.spot import SpotWatch, read_host_prices
from elastune.train.checkpoints.start_from import check_source
from elastune.train.program.load import LoadedProgram, load_as_guest
from elastune.train.program.overrides import override

CHANGEOVER_S = 10.0  # a generous estimate of the time until a warm worker trains, with all pauses


def spot_of(adapt: Adapt, program: LoadedProgram) -> list[Spot]:
    """Return the requested policies ``spot``. Raises ``UserError`` for a wrong policy."""
    policies = [build(text, program.policies).policy for text in adapt.policies]
    return [policy for policy in policies if isinstance(policy, Spot)]


def spot_watch(spec: RunSpec, program: LoadedProgram) -> SpotWatch | None:
    """Return the ``SpotWatch`` of a run; None if the user does not request the policy ``spot``.

    The controller runs this policy, because only the controller knows the hosts.

    Raises:
        UserError: For wrong options of the policy.
    """
    settings = spot_of(spec.adapt, program)
    if not settings:
        return None
    if len(settings) > 1:
        raise UserError("a run has one deadline", f"the policy spot {len(settings)} times", "leave the others out")
    prices = read_host_prices(Path(settings[0].prices), ON_DEMAND, any_kind=True)
    return SpotWatch(settings[0].rules(spec.most_workers, CHANGEOVER_S), prices)


def check_adapt(adapt: Adapt, program: LoadedProgram, spec: RunSpec | None = None) -> None:
    """Raise ``UserError`` for policies and monitors that are wrong or contradict each other.

    Args:
        adapt: The policies and monitors.
        program: The program, which may have policies of its own.
        spec: The run that they will adapt, if it is known.
    """
    policies = [build(text, program.policies) for text in adapt.policies]
    monitors = choose([*adapt.monitors, *monitors_for(policies)])
    if spec is None:
        return
    _check_monitors([monitor.name for monitor in monitors if monitor.needs - {"times"}], spec)
    for named in policies:
        _check_strategies(named, spec)


def _check_monitors(measuring: Sequence[str], spec: RunSpec) -> None:
    """Raise ``UserError`` if the run cannot measure gradients."""
    execution, sync = spec.execution, spec.sync
    if measuring and sync.in_rounds:
        rule = "learners' gradients are not summed up, so nothing is measured of them"
        fix = "begin with --sync allreduce, or leave it out"
        raise UserError(rule, f"the monitor {measuring[0]} with {sync}", fix)
    if measuring and execution.compression is not None and execution.compression.keeps_residual:
        rule = "if most of a gradient is sent in later steps, its norms do not show its noise"
        raise UserError(rule, f"the monitor {measuring[0]}, --compress {execution.compress}", "use --compress int8")
    if measuring and not mechanism_for(execution).capabilities.measures:
        rule = f"{execution.mechanism} does not measure gradients' norms or the loss's curvature"
        raise UserError(rule, f"the monitor {measuring[0]}", "use another mechanism, or leave it out")


def _check_strategies(named: PolicyEntry, spec: RunSpec) -> None:
    """Raise ``UserError`` if the run cannot have a strategy of the policy: it would never switch to it."""
    for text in named.policy.strategies(spec.execution.num_slots, spec.most_workers):
        try:
            check_strategy(SyncPlan.parse(text), spec)
        except UserError as error:
            rule, value, fix, page = error.parts
            raise UserError(rule, f"{value}, of the policy {named.name}", fix, page) from None


SHORTEST_HEARTBEAT_S = 0.1
MOST_SLOTS = 65_536
MOST_THREADS = 4_096
MOST_BLOCKS = 1_024
LARGEST_SEED = 2**63 - 1
ZERO_STAGES = (0, 1, 2, 3)


def check_execution(spec: RunSpec) -> None:
    """Raise ``UserError`` for execution settings that are wrong or contradict each other."""
    check_values(spec)
    if (impossible := why_impossible(spec)) is not None:
        raise impossible


def why_impossible(spec: RunSpec) -> UserError | None:
    """Return the error of workers, mesh, mechanism and slots that contradict each other; None if they do not."""
    execution = spec.execution
    most = execution.workers if spec.elastic.high is None else spec.elastic.high
    try:
        _check_mesh(execution, most)
        parts = MeshChoice.of(execution).most_parts(most)
        if execution.num_slots < parts:
            rule = "there must be a slot for every worker" + (" that has samples of its own" if parts < most else "")
            numbers = f"{count(execution.num_slots, 'slot')}, {count(parts, 'worker')}"
            raise UserError(rule, numbers, f"use --slots {parts} or more, or fewer --workers")
        check_workers(spec)
        for plan in (spec.sync, *(plan for _, plan in spec.sync_schedule.changes)):
            check_strategy(plan, spec)
        check_schedule(spec)
        check_verification(spec)
        _check_compression(spec)
        execution.topology.check(execution.workers, execution.mechanism)
    except UserError as error:
        return error
    return None


def check_values(spec: RunSpec) -> None:
    """Raise ``UserError`` for an execution setting that is wrong, whatever the others are."""
    execution = spec.execution
    if execution.workers < 1:
        raise UserError("workers must be at least 1", execution.workers, "use --workers 1 or more")
    low, most = spec.elastic.low, execution.workers if spec.elastic.high is None else spec.elastic.high
    if not 1 <= low <= execution.workers <= most:
        rule = "a run must begin with workers within its bounds"
        raise UserError(rule, f"{execution.workers}, from {low} to {most}", "use --workers LOW:HIGH")
    if execution.mode == "exact" and most > MOST_EXACT_WORKERS:
        rule = f"exact mode sums over at most {MOST_EXACT_WORKERS:,} workers"
        raise UserError(rule, f"{most:,} workers", "use fewer --workers, or --mode fast")
    if spec.elastic.heartbeat_s < SHORTEST_HEARTBEAT_S:
        rule = f"a heartbeat must be at least {SHORTEST_HEARTBEAT_S:g} s, or busy workers count as lost"
        raise UserError(rule, f"{spec.elastic.heartbeat_s:g} s", "use --heartbeat 5s")
    if spec.elastic.collective_timeout_s < SHORTEST_HEARTBEAT_S:
        rule = f"workers must wait for each other for at least {SHORTEST_HEARTBEAT_S:g} s"
        raise UserError(rule, f"{spec.elastic.collective_timeout_s:g} s", "use --collective-timeout 30m")
    if execution.num_slots < 1:
        raise UserError("a run has at least one slot", f"{execution.num_slots} slots", "leave --slots out or raise it")
    if execution.num_slots > MOST_SLOTS:
        rule = f"a batch is cut into at most {MOST_SLOTS:,} slots"
        raise UserError(rule, execution.num_slots, "use fewer --slots: a slot holds at least one sample")
    if execution.threads > MOST_THREADS:
        raise UserError(f"threads must be at most {MOST_THREADS:,}", execution.threads, "use --threads 1")
    if not 0 <= spec.seed <= LARGEST_SEED:
        raise UserError("a seed must be from 0 to 2**63 - 1", spec.seed, "for example --seed 0")
    if execution.mode not in ("exact", "fast"):
        raise UserError("mode must be exact or fast", execution.mode, "use --mode exact or --mode fast")
    if execution.precision not in ("fp32", "bf16"):
        raise UserError("precision must be fp32 or bf16", execution.precision, "use --precision fp32 or bf16")
    if execution.micro_batch is not None and not (type(execution.micro_batch) is int and execution.micro_batch >= 1):
        rule = "micro_batch must be at least 1, a whole number"
        raise UserError(rule, repr(execution.micro_batch), "leave it out or raise it")
    if execution.bucket_bytes is not None and not execution.bucket_bytes >= 1:
        raise UserError("a bucket must have at least one byte", execution.bucket_bytes, "leave --bucket-bytes out")
    sums_whole = execution.mechanism == "replicated" and execution.compress is None and not spec.sync.in_rounds
    if execution.bucket_bytes is not None and not sums_whole:
        rule = "a bucket size is that of gradients which replicated workers sum in each step, not compressed"
        got = f"{execution.mechanism}, {execution.compress or 'not compressed'}, {spec.sync}"
        raise UserError(rule, got, "leave --bucket-bytes out")
    if execution.threads < 1:
        raise UserError("threads must be at least 1", execution.threads, "use --threads 1 or more")


def _check_mesh(execution: ExecutionSettings, most: int) -> None:
    """Raise ``UserError`` if workers, mesh, mechanism and its settings contradict each other.

    ``most``: the run may have so many workers later.
    """
    parts, mesh = execution.parts, execution.first_mesh
    if mesh.workers != execution.workers:
        value = f"{execution.workers} workers, {mesh} ({mesh.workers})"
        raise UserError("workers and mesh must agree", value, "leave --workers or --mesh out")
    _check_axes(execution, mesh)
    if not 1 <= execution.virtual_tensor <= MOST_BLOCKS:
        raise UserError(
            f"virtual blocks must be from 1 to {MOST_BLOCKS:,}", execution.virtual_tensor, "--virtual-tensor 4"
        )
    if execution.virtual_tensor > 1 and not parts.tensor:
        rule = "virtual blocks are of layers that the mechanism tensor divides"
        fix = "use --mechanism tensor, or leave --virtual-tensor out"
        raise UserError(rule, f"--virtual-tensor {execution.virtual_tensor} with {parts}", fix)
    if parts.tensor and mesh.tensor > execution.virtual_tensor:
        rule = "the tensor axis must have at most as many workers as there are virtual blocks"
        fix = f"use --virtual-tensor {mesh.tensor}, or fewer workers along tensor"
        raise UserError(rule, f"tensor={mesh.tensor}, {execution.virtual_tensor} blocks", fix)
    _check_copies(execution, most)
    if execution.schedule not in get_args(Schedule):
        raise UserError(
            "a pipeline's schedule must be known", execution.schedule, f"use one of {', '.join(get_args(Schedule))}"
        )
    if execution.schedule != ExecutionSettings.schedule and not parts.pipeline:
        fix = "use --mechanism pipeline, or leave --schedule out"
        raise UserError("a schedule is that of a pipeline", f"{execution.schedule} with {parts}", fix)
    if execution.offload and parts.state == "replicated":  # engines of other packages cannot offload here
        fix = "use --mechanism zero or sharded, or leave --offload out"
        raise UserError("optimizer state is offloaded where zero or sharded divides it", parts, fix)
    if execution.zero_stage is not None and parts.foreign not in STAGED:
        fix = "use --mechanism zero (2) or sharded (3), or leave the stage out"
        raise UserError(f"a ZeRO stage is chosen for {' and '.join(STAGED)}", f"{execution.zero_stage}, {parts}", fix)
    if execution.zero_stage is not None and execution.zero_stage not in ZERO_STAGES:
        raise UserError("a ZeRO stage is 0, 1, 2 or 3", execution.zero_stage, "for example --zero-stage 2")


def _check_compression(spec: RunSpec) -> None:
    """Raise ``UserError`` if gradients cannot be compressed: their sum is rounded, and elastune must make it."""
    execution = spec.execution
    if execution.compress is None:
        return
    value, fix = f"--compress {execution.compress}", "or leave --compress out"
    if execution.mode != "fast":
        rule = "compressed gradients do not add up to the same bits"
        raise UserError(rule, f"{value} --mode {execution.mode}", f"use --mode fast, {fix}")
    if execution.parts != MechanismName():
        rule = "gradients are compressed where every worker holds all of the model"
        raise UserError(rule, f"{value} --mechanism {execution.mechanism}", f"use --mechanism replicated, {fix}")
    if execution.topology.routed:
        rule = "each worker sends compressed gradients to all others"
        raise UserError(rule, f"{value} --topology {execution.topology}", f"leave --topology out, {fix}")


def _check_axes(execution: ExecutionSettings, mesh: Mesh) -> None:
    """Raise ``UserError`` for an axis along which the mechanism does not divide a replica."""
    for axis in AXES:
        if axis != "data" and mesh.size(axis) > 1 and axis not in execution.parts.dividing:
            rule = f"workers along {axis} need a mechanism that divides a replica along it"
            other = "" if execution.parts.foreign else f"use --mechanism {execution.parts.serving(mesh)}, or "
            raise UserError(rule, f"{mesh} with {execution.mechanism}", f"{other}leave {axis} out of the mesh")


def _check_copies(execution: ExecutionSettings, most: int) -> None:
    if execution.copies is None:
        return
    if execution.parts == MechanismName() or execution.parts.foreign:
        why = "its engine decides" if execution.parts.foreign else "every worker holds all of it"
        rule = "copies are of state that elastune divides"
        raise UserError(rule, f"--copies {execution.copies}, {execution.mechanism}", f"leave --copies out: {why}")
    if not 1 <= execution.copies <= most:
        rule = "each piece of state has from 1 to as many copies as there are workers"
        raise UserError(rule, f"--copies {execution.copies}, {most} workers", "use fewer --copies or more workers")


def check_run(spec: RunSpec) -> Config:
    """Return the program's own config.

    Raises ``UserError`` for settings, policies and monitors of a run that are wrong or contradict each other.
    """
    check_execution(spec)
    if spec.start_from is not None and not spec.resume:
        check_source(spec.start_from.source)
    program = load_as_guest(spec.program, spec.seed)
    override(program.config, spec.config, program.space)
    program.check(spec.config)
    check_adapt(spec.adapt, program, spec)
    return program.config
