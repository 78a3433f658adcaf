"""From a suggestion to the settings of a run, and from the outcome of a run to the result of a trial. Pure.

The time to a target is one such result (see ``time_to_target``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from elastune.adapt.policies.library.registry import NO_POLICY, policies_of
from elastune.core.communication import Topology
from elastune.core.cost import Cost
from elastune.core.errors import UserError
from elastune.core.journal.folds import TrialSummary
from elastune.core.journal.records import RunFailed, TrialFinished, TrialStarted
from elastune.core.mesh import AXES, STAGED, MechanismName, Mesh
from elastune.core.mesh_choice import least_slots
from elastune.core.run import Adapt, Config, ExecutionSettings
from elastune.core.sync_plan import SYNC_NAMES, in_full, strategy_settings
from elastune.runtime.job.pool import JobEvent
from elastune.train.program.load import merge
from elastune.tuning.search.constraint import (
    SECONDS_TO_TARGET,
    Constraint,
    TargetReached,
    shortfall,
    time_to,
    violations,
)
from elastune.tuning.search.objective import Objective
from elastune.tuning.search.schedule import IntermediateResult

ALWAYS = ("workers", "mode", "mechanism", "micro_batch")  # execution settings that each trial has
OF_MESHES = ("mesh", "copies", "virtual_tensor", "schedule", "zero_stage", "offload")  # settings of some mechanisms
OPTIONAL = (*OF_MESHES, "compress", "topology")
EXECUTION_PARAMETERS = (*ALWAYS, *OPTIONAL)
SYSTEM_PARAMETERS = (*EXECUTION_PARAMETERS, "policy", *SYNC_NAMES)
"""What a space may set beside the program's own settings."""
UNREPORTED = "reports no "


@dataclass(frozen=True)
class Pricing:
    """How trials of a study are judged.

    Attributes:
        objectives: The objectives.
        constraints: The constraints.
        price_per_worker_hour: The price of a worker-hour.
        target: The target of ``seconds_to_target``; None: there is none.
    """

    objectives: tuple[Objective, ...]
    constraints: tuple[Constraint, ...] = ()
    price_per_worker_hour: float = 1.0
    target: Constraint | None = None

    @property
    def wants_target(self) -> bool:
        """Whether an objective or a constraint uses the time to the target."""
        names = {o.name for o in self.objectives}.union(*(c.names for c in self.constraints))
        return SECONDS_TO_TARGET in names

    @property
    def learnt(self) -> tuple[Constraint, ...]:
        """The constraints that samplers learn, including the target if its time is used."""
        reach = (self.target,) if self.target is not None and self.wants_target else ()
        return (*self.constraints, *reach)


def system_defaults(execution: ExecutionSettings, chosen: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return the system parameters of a trial that its space does not set.

    A chosen mesh decides the number of workers. The mechanism is the study's if it supports the mesh, else the smallest
    one that does. Settings of some mechanisms (copies, blocks, a schedule) are left out with other mechanisms.

    Args:
        execution: The execution settings of the study.
        chosen: The system parameters that the space sets.
    """
    mesh = execution.mesh if chosen.get("mesh") is None else _mesh(chosen["mesh"])
    name, workers = execution.parts, execution.workers
    if mesh is not None and mesh != execution.mesh:
        workers = mesh.workers
        if not {axis for axis in AXES if axis != "data" and mesh.size(axis) > 1} <= set(name.dividing):
            name = MechanismName.minimal_for(mesh)
    mechanism = chosen.get("mechanism", str(name))
    defaults: dict[str, Any] = {"workers": workers, "mode": execution.mode, "mechanism": mechanism, "policy": NO_POLICY}
    defaults["micro_batch"] = execution.micro_batch
    defaults |= {} if execution.compress is None else {"compress": execution.compress}
    defaults |= {} if execution.topology == Topology() else {"topology": str(execution.topology)}
    parts, execution_values = MechanismName.parse(mechanism), execution.to_json()
    goes_with = {
        "mesh": "workers" not in chosen,
        "copies": parts != MechanismName() and not parts.foreign,
        "virtual_tensor": parts.tensor,
        "schedule": parts.pipeline,
        "zero_stage": parts.foreign in STAGED,
        "offload": parts.state != "replicated",
    }
    return {
        **defaults,
        **{name: execution_values[name] for name in OF_MESHES if name in execution_values and goes_with[name]},
    }


def execution_settings_of(recorded: Mapping[str, Any]) -> ExecutionSettings:
    """Return the execution settings in a trial's record, without its strategy and policies."""
    names = {each.name for each in fields(ExecutionSettings)}
    return ExecutionSettings.from_json({name: value for name, value in recorded.items() if name in names})


def known(started: TrialStarted) -> dict[str, Any]:
    """Return the configuration and the system parameters of a trial by name, for constraints."""
    execution = {name: started.execution.get(name) for name in (*ALWAYS, "policy")}
    optional = {name: started.execution[name] for name in (*OPTIONAL, *SYNC_NAMES) if name in started.execution}
    return in_full({**started.config, **execution, **optional}, started.config)


def settings(
    suggested: Mapping[str, Any], config: Config, execution: ExecutionSettings, capacity: int
) -> tuple[Config, ExecutionSettings, Adapt]:
    """Return the configuration, the execution settings and the policies of a suggestion.

    System parameters set execution settings and policies (and the strategy, see ``SyncChoice``). All other names must
    be in ``config``. Settings of ``OF_MESHES`` that are not suggested are left to the mechanism.

    Args:
        suggested: The values of the space.
        config: The program's config.
        execution: The execution settings of the study.
        capacity: The workers of the study.
    """
    unset = {
        "mesh": None,
        "copies": None,
        "virtual_tensor": None,
        "schedule": ExecutionSettings.schedule,
        "zero_stage": None,
    }
    system = {
        **unset,
        "offload": False,
        **{name: suggested[name] for name in EXECUTION_PARAMETERS if name in suggested},
    }
    if system["mesh"] is not None:
        system = {"workers": None, "mechanism": None, **system, "mesh": _mesh(system["mesh"])}
    changed = execution.with_values(system)
    workers = changed.workers
    wanted = suggested.get("workers")
    for count in (workers if wanted is None else wanted, workers):
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= capacity:
            rule = f"a trial's workers must be a whole number from 1 to the study's {capacity}"
            raise UserError(rule, count, "change space(trial) or --workers")
    slots = max(changed.num_slots, workers) if changed.mesh is None else least_slots(changed, workers)
    changed = replace(changed, num_slots=slots)
    system_names = {*SYSTEM_PARAMETERS, *strategy_settings(suggested, config)}
    plain = {name: value for name, value in suggested.items() if name not in system_names}
    return merge(config, plain), changed, Adapt(policies=policies_of(suggested.get("policy", NO_POLICY)))


def _mesh(text: object) -> Mesh:
    if not isinstance(text, str):
        raise UserError("a trial's mesh must be a text", repr(text), 'such as "data=2,shard=2"')
    return Mesh.parse(text)


def measured(
    metrics: Mapping[str, float], seconds: float, workers: float, price_per_worker_hour: float, paid: float | None
) -> dict[str, float]:
    """Return ``metrics`` with time and cost, after ``seconds`` of training on ``workers`` on average.

    The cost is the ``paid`` money if prices of hosts are known, else the time of the training's workers at one price.
    """
    cost = Cost(workers * seconds, price_per_worker_hour).total if paid is None else paid
    return {**metrics, "seconds": seconds, "cost": cost}


def intermediate_result(life: TrialSummary, pricing: Pricing) -> IntermediateResult | None:
    """Return what early stopping sees of a trial's newest report.

    None if the report lacks an objective, or its number of epochs.
    """
    report, _ = life.reports[-1]
    workers = life.average or float(life.first_workers)
    price = pricing.price_per_worker_hour
    metrics = visible(measured(life.metrics, report.seconds, workers, price, life.cost))
    missed_by = -math.inf
    if pricing.target is not None:  # a target that is not reached yet takes longer than until now
        reached = _time_to_target(life, pricing.target)
        metrics[SECONDS_TO_TARGET] = report.seconds if reached is None else reached.seconds
        missed_by = _shortfall(life, pricing.target) if reached is None and pricing.wants_target else missed_by
    if not report.epochs or any(o.name not in metrics for o in pricing.objectives):
        return None
    names = {**known(life.started), **metrics}
    decided = [c for c in pricing.constraints if c.decidable(names)]
    violation = max([missed_by, *violations(decided, names).values()] if decided or missed_by > 0 else [0.0])
    values = tuple(metrics[o.name] for o in pricing.objectives)
    return IntermediateResult(life.number, report.epoch, report.epochs, values, violation)


def judge(life: TrialSummary, ended: JobEvent, pricing: Pricing) -> TrialFinished:
    """Return a trial's result: complete with a value for every objective, or infeasible with its reason.

    A trial that does not report an objective is infeasible. Constraints may name settings and metrics. Raises
    ``UserError`` if the program does not report a constrained metric, since no trial could succeed.
    """
    outcome, seconds = ended.outcome, life.seconds + ended.seconds
    worker_seconds = life.worker_seconds + ended.worker_seconds
    assert outcome is not None
    if isinstance(outcome, RunFailed):
        reason = f"{outcome.reason}: {outcome.detail}"
        return TrialFinished(life.number, "infeasible", seconds=seconds, reason=reason, worker_seconds=worker_seconds)
    workers = worker_seconds / seconds if seconds > 0 else outcome.workers
    metrics = measured(outcome.metrics, outcome.seconds, workers, pricing.price_per_worker_hour, ended.cost)
    if pricing.target is not None:
        reached = _time_to_target(life, pricing.target)
        if reached is not None:
            metrics[SECONDS_TO_TARGET] = reached.seconds
        elif pricing.wants_target:
            missed_by = _shortfall(life, pricing.target)
            return TrialFinished(
                life.number,
                "infeasible",
                metrics=metrics,
                violations={pricing.target.text: missed_by} if missed_by < math.inf else {},
                seconds=seconds,
                reason=f"never reached {pricing.target.text}"
                + (f" (short by {missed_by:g})" if missed_by < math.inf else ""),
                run=outcome,
                worker_seconds=worker_seconds,
            )
    seen = visible(metrics)
    if missing := [o.name for o in pricing.objectives if o.name not in seen]:
        return TrialFinished(
            life.number,
            "infeasible",
            metrics=metrics,
            seconds=seconds,
            reason=f"{UNREPORTED}{' nor '.join(missing)} (it reports {', '.join(sorted(seen))})",
            run=outcome,
            worker_seconds=worker_seconds,
        )
    values = {o.name: seen[o.name] for o in pricing.objectives}
    everything = {**known(life.started), **seen}
    for constraint in pricing.constraints:
        if missing := sorted(constraint.names - set(everything)):
            known_names = ", ".join(sorted(everything))
            raise UserError("a constraint may name settings and reported metrics", missing[0], f"known: {known_names}")
    measured_violations = violations(pricing.constraints, everything)
    if pricing.target is not None and pricing.wants_target:  # its best report counts, not the last one
        measured_violations[pricing.target.text] = _shortfall(life, pricing.target)
    broken = [f"breaks {text} (by {violation:g})" for text, violation in measured_violations.items() if violation > 0]
    broken += [f"has {name} {value}" for name, value in values.items() if not math.isfinite(value)]
    return TrialFinished(
        life.number,
        "infeasible" if broken else "complete",
        values=values,
        metrics=metrics,
        violations=measured_violations,
        seconds=seconds,
        reason=" and ".join(broken),
        run=outcome,
        worker_seconds=worker_seconds,
    )


def _time_to_target(life: TrialSummary, target: Constraint) -> TargetReached | None:
    return time_to(target, [report for report, _ in life.reports], known(life.started))


def _shortfall(life: TrialSummary, target: Constraint) -> float:
    return shortfall(target, [report for report, _ in life.reports], known(life.started))


def visible(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that a search may see: all but held-out ones."""
    return {name: value for name, value in metrics.items() if not name.startswith("test_")}
