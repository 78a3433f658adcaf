"""Mechanisms by name, and how a name with its parts (``zero+pipeline``) becomes one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from elastune.core.errors import UserError
from elastune.core.mesh import INSTALLED
from elastune.core.run import ExecutionSettings, RunSpec
from elastune.parallel.mechanisms.base import Mechanism, Parallelize, Replicated
from elastune.parallel.mechanisms.deepspeed import DeepSpeed
from elastune.parallel.mechanisms.fairscale import FairScale
from elastune.parallel.mechanisms.fsdp2 import Fsdp2
from elastune.parallel.mechanisms.horovod import Horovod
from elastune.parallel.mechanisms.owned.mechanism import Owned
from elastune.parallel.mechanisms.pipeline.pipeline_parallel import Pipeline, divide_into_stages, plan_stages
from elastune.parallel.mechanisms.tensor.tensor_parallel import DataParallelTrunk, Plan, plan_layers
from elastune.parallel.mechanisms.tensor.trunk import divide_layers

_WHOLE: tuple[Mechanism, ...] = (Replicated(), DeepSpeed(), FairScale(), Fsdp2(), Horovod())
MECHANISMS: Mapping[str, Mechanism] = {mechanism.name: mechanism for mechanism in _WHOLE}
DIVIDES: Mapping[str, Parallelize] = {"tensor": divide_layers, "pipeline": divide_into_stages}
"""The functions that divide the arithmetic of a replica, by name; applied in the order of ``MechanismName.words``."""
Plans = Plan | DataParallelTrunk | Pipeline
"""The plans that a program may give: which layers to divide, and where a pipeline is cut."""
STATES = ("zero", "sharded")
"""The words for state in shares: optimizer state and gradients (``zero``), or parameters too (``sharded``)."""


def mechanism_for(execution: ExecutionSettings) -> Mechanism:
    """The mechanism that ``execution`` names.

    Raises:
        UserError: Where no mechanism has that name, or where it cannot do what ``execution`` asks.
    """
    parts = execution.parts
    if parts.installed:
        mechanism = installed_mechanism(parts.foreign)
    elif str(parts) in MECHANISMS:
        mechanism = MECHANISMS[str(parts)]
    else:
        divides = [DIVIDES[word] for word in parts.words if word in DIVIDES]
        mechanism = Owned(str(parts), parts.dividing, divides, frees=parts.state == "sharded")
    if execution.mode == "exact" and not mechanism.exact:
        rule = "exact mode needs a mechanism that promises equal bits"
        raise UserError(rule, execution.mechanism, "use --mode fast, or another mechanism")
    _check_abilities(mechanism, execution)
    mechanism.check(execution, execution.first_mesh)
    return mechanism


def installed_mechanism(name: str) -> Mechanism:
    """The mechanism that another package offers as ``name`` (entry points ``elastune.mechanisms``).

    Raises:
        UserError: If its package cannot be imported, or offers anything but a ``Mechanism`` of that name.
    """
    kind = INSTALLED.load_class(name, Mechanism)
    try:
        mechanism: Mechanism = kind()
    except Exception as error:  # the constructor of another package may raise anything
        rule = f"an installed mechanism must be made without arguments: {type(error).__name__}: {error}"
        raise UserError(rule, f"{name} = {kind.__name__}()", INSTALLED.fix(name)) from error
    return mechanism


def _check_abilities(mechanism: Mechanism, execution: ExecutionSettings) -> None:
    """Raise ``UserError`` where ``mechanism`` lacks a capability that ``execution`` asks for, or its package."""
    name, can = mechanism.name, mechanism.capabilities
    if execution.precision == "bf16" and not can.bf16:
        raise UserError(f"{name} trains in fp32 here", "bf16", "use --precision fp32, or another mechanism")
    if execution.zero_stage is not None and can.stages and execution.zero_stage not in can.stages:
        stages = ", ".join(map(str, sorted(can.stages)))
        raise UserError(f"{name} has no such stage", execution.zero_stage, f"use --zero-stage {stages}")
    if not can.installed:
        raise UserError(f"{name} must be installed", f"no module {can.package}", can.install)


def check_workers(spec: RunSpec) -> None:
    """Raise ``UserError`` where the number of workers may change and the mechanism cannot change it."""
    mechanism, low, high = mechanism_for(spec.execution), spec.elastic.low, spec.elastic.high
    if not mechanism.capabilities.elastic and high is not None and low != high:
        rule = f"the workers of {mechanism.name} stay as they are"
        raise UserError(rule, f"from {low} to {high}", f"use --workers {spec.execution.workers}")


def note_plan(model: nn.Module, plan: Plans | None) -> None:
    """Record on ``model`` how the program wants it to be divided, for the mechanism that the plan belongs to."""
    if isinstance(plan, Pipeline):
        plan_stages(model, plan)
    else:
        plan_layers(model, plan)
