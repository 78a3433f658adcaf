"""Mechanisms by name, and how a name with its parts (``zero+pipeline``) becomes one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from elastune.core.errors import UserError
from elastune.core.run import ExecutionSettings, RunSpec
from elastune.parallel.mechanisms.base import Mechanism, Replicated
from elastune.parallel.mechanisms.deepspeed import DeepSpeed
from elastune.parallel.mechanisms.fairscale import FairScale
from elastune.parallel.mechanisms.fsdp2 import Fsdp2
from elastune.parallel.mechanisms.horovod import Horovod
from elastune.parallel.mechanisms.model_parallel import Parallelize
from elastune.parallel.mechanisms.owned.mechanism import Owned
from elastune.parallel.mechanisms.pipeline.pipeline_parallel import Pipeline, plan_stages
from elastune.parallel.mechanisms.pipeline.pipeline_parallel import divide as divide_stages
from elastune.parallel.mechanisms.tensor.tensor_parallel import DataParallelTrunk, Plan, plan_layers
from elastune.parallel.mechanisms.tensor.trunk import divide as divide_layers

_WHOLE: tuple[Mechanism, ...] = (Replicated(), DeepSpeed(), FairScale(), Fsdp2(), Horovod())
MECHANISMS: Mapping[str, Mechanism] = {mechanism.name: mechanism for mechanism in _WHOLE}
DIVIDES: Mapping[str, Parallelize] = {"tensor": divide_layers, "pipeline": divide_stages}
"""What divides the arithmetic of a replica, by name; applied in the order of ``MechanismName.words``."""
Plans = Plan | DataParallelTrunk | Pipeline
"""What a program may say of the layers that are divided, and of where a pipeline cuts."""
STATES = ("zero", "sharded")
"""How state lies where it is held in shares."""


def mechanism_for(execution: ExecutionSettings) -> Mechanism:
    """The mechanism that ``execution`` name. Raises ``UserError`` where there is none, or it cannot do what they ask."""
    parts = execution.parts
    known = (*MECHANISMS, *STATES, *DIVIDES)
    for word in parts.words:
        if word not in known:
            raise UserError("mechanism must be known", word, f"use one of {', '.join(known)}")
    divides = [DIVIDES[word] for word in parts.words if word in DIVIDES]
    mechanism = MECHANISMS.get(str(parts)) or Owned(str(parts), parts.dividing, divides, frees=parts.state == "sharded")
    if execution.mode == "exact" and not mechanism.exact:
        rule = "exact mode needs a mechanism that promises equal bits"
        raise UserError(rule, execution.mechanism, "use --mode fast, or another mechanism")
    _check_abilities(mechanism, execution)
    mechanism.check(execution, execution.first_mesh)
    return mechanism


def _check_abilities(mechanism: Mechanism, execution: ExecutionSettings) -> None:
    """Refuse what ``mechanism`` declares that it cannot do, and what is not installed."""
    name, can = mechanism.name, mechanism.capabilities
    if execution.precision == "bf16" and not can.bf16:
        raise UserError(f"{name} trains in fp32 here", "bf16", "use --precision fp32, or another mechanism")
    if execution.zero_stage is not None and can.stages and execution.zero_stage not in can.stages:
        known = ", ".join(map(str, sorted(can.stages)))
        raise UserError(f"{name} has no such stage", execution.zero_stage, f"use --zero-stage {known}")
    if not can.installed:
        raise UserError(f"{name} must be installed", f"no module {can.package}", can.install)


def check_workers(spec: RunSpec) -> None:
    """Refuse workers that are to come and go under a mechanism that cannot change them. Raises ``UserError``."""
    mechanism, low, high = mechanism_for(spec.execution), spec.elastic.low, spec.elastic.high
    if not mechanism.capabilities.elastic and high is not None and low != high:
        rule = f"the workers of {mechanism.name} stay as they are"
        raise UserError(rule, f"from {low} to {high}", f"use --workers {spec.execution.workers}")


def note_plan(model: nn.Module, plan: Plans | None) -> None:
    """Note how the program wants ``model`` to be divided, for the mechanism that the plan is for."""
    if isinstance(plan, Pipeline):
        plan_stages(model, plan)
    else:
        plan_layers(model, plan)
