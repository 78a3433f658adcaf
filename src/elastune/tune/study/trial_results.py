"""From a suggestion to the settings of a run, and from the outcome of a run to the result of a trial. Pure.

The time to a target is one such result. A program reports its metrics now and then, so the exact moment is unknown:
the first report that meets the target counts. A training that never meets it is censored: it has no time, only the
distance by which its best report missed the target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from elastune.core.communication import Topology
from elastune.core.cost import Cost
from elastune.core.errors import UserError
from elastune.core.journal.records import RunFailed, TrialFinished, TrialStarted
from elastune.core.journal.trials import TrialSummary
from elastune.core.mesh import AXES, STAGED, MechanismName, Mesh
from elastune.core.run import Adapt, Config, ExecutionSettings
from elastune.core.sync_plan import SYNC_NAMES, in_full, strategy_settings
from elastune.runtime.job.pool import JobEvent
from elastune.runtime.job.validation import NO_POLICY, policies_of
from elastune.train.program.load import merge
from elastune.tune.search.constraint import Constraint, violations
from elastune.tune.search.objective import Objective
from elastune.tune.search.schedule import IntermediateResult
from elastune.tune.study.time_to_target import SECONDS_TO_TARGET, TargetReached, shortfall, time_to

ALWAYS = ("workers", "mode", "mechanism", "micro_batch")
OF_MESHES = ("mesh", "copies", "virtual_tensor", "schedule", "zero_stage", "offload")  # where they say something
SAID = (*OF_MESHES, "compress", "topology")
EXECUTION_PARAMETERS = (*ALWAYS, *SAID)
SYSTEM_PARAMETERS = (
    *EXECUTION_PARAMETERS,
    "policy",
    *SYNC_NAMES,
)  # what a space may set beside the program's own settings
UNREPORTED = "reports no "


@dataclass(frozen=True)
class Pricing:
    """What is optimised, what must hold, what a worker costs; and to which ``target`` time is taken."""

    objectives: tuple[Objective, ...]
    constraints: tuple[Constraint, ...] = ()
    price_per_worker_hour: float = 1.0
    target: Constraint | None = None

    @property
    def wants_target(self) -> bool:
        """Whether anything is judged by the time to the target."""
        names = {o.name for o in self.objectives}.union(*(c.names for c in self.constraints))
        return SECONDS_TO_TARGET in names

    @property
    def learnt(self) -> tuple[Constraint, ...]:
        """What samplers learn to hold: where the time to the target is wanted, to reach it."""
        reach = (self.target,) if self.target is not None and self.wants_target else ()
        return (*self.constraints, *reach)


def system_defaults(execution: ExecutionSettings, chosen: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The system parameters where a space, which has set those that are ``chosen``, does not set them.

    A chosen mesh says how many workers there are, and the mechanism is the study's where that can serve it, else the
    least that can. What goes with some mechanisms only (copies, blocks, a schedule) is left out with others.
    """
    mesh = execution.mesh if chosen.get("mesh") is None else _mesh(chosen["mesh"])
    name, workers = execution.parts, execution.workers
    if mesh is not None and mesh != execution.mesh:
        workers = mesh.workers
        if not {axis for axis in AXES if axis != "data" and mesh.size(axis) > 1} <= set(name.dividing):
            name = MechanismName.minimal_for(mesh)
    mechanism = chosen.get("mechanism", str(name))
    found: dict[str, Any] = {"workers": workers, "mode": execution.mode, "mechanism": mechanism, "policy": NO_POLICY}
    found["micro_batch"] = execution.micro_batch
    found |= {} if execution.compress is None else {"compress": execution.compress}
    found |= {} if execution.topology == Topology() else {"topology": str(execution.topology)}
    parts, told = MechanismName.parse(mechanism), execution.to_json()
    goes_with = {
        "mesh": "workers" not in chosen,
        "copies": parts != MechanismName() and not parts.foreign,
        "virtual_tensor": parts.tensor,
        "schedule": parts.pipeline,
        "zero_stage": parts.foreign in STAGED,
        "offload": parts.state != "replicated",
    }
    return {**found, **{name: told[name] for name in OF_MESHES if name in told and goes_with[name]}}


def execution_settings_of(told: Mapping[str, Any]) -> ExecutionSettings:
    """The means among what a trial's record has of them: without how its workers agreed and what adapted it."""
    own = {each.name for each in fields(ExecutionSettings)}
    return ExecutionSettings.from_json({name: value for name, value in told.items() if name in own})


def known(started: TrialStarted) -> dict[str, Any]:
    """Configuration and system parameters by name, for constraints."""
    execution = {name: started.execution.get(name) for name in (*ALWAYS, "policy")}
    said = {name: started.execution[name] for name in (*SAID, *SYNC_NAMES) if name in started.execution}
    return in_full({**started.config, **execution, **said}, started.config)


def settings(
    suggested: Mapping[str, Any], config: Config, execution: ExecutionSettings, capacity: int
) -> tuple[Config, ExecutionSettings, Adapt]:
    """A suggestion's configuration, its means, and what adapts it.

    System parameters set means and policies (and how workers agree, see ``SyncChoice``), all else must be known to
    ``config``. What is in ``OF_MESHES`` and is not
    suggested is left to the mechanism.
    """
    unsaid = {
        "mesh": None,
        "copies": None,
        "virtual_tensor": None,
        "schedule": ExecutionSettings.schedule,
        "zero_stage": None,
    }
    system = {
        **unsaid,
        "offload": False,
        **{name: suggested[name] for name in EXECUTION_PARAMETERS if name in suggested},
    }
    if system["mesh"] is not None:
        system = {"workers": None, "mechanism": None, **system, "mesh": _mesh(system["mesh"])}
    changed = replace(execution, **system)
    workers = changed.workers
    if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= capacity:
        rule = f"a trial's workers must be a whole number from 1 to the study's {capacity}"
        raise UserError(rule, workers, "change space(trial) or --workers")
    changed = replace(changed, num_slots=max(changed.num_slots, workers))
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
    """Metrics with time and cost beside them, after ``seconds`` of training on ``workers`` on average.

    The cost is what was ``paid`` (``job.meter``) where prices of hosts are known, else the time that the training's
    workers took, at one price.
    """
    cost = Cost(workers * seconds, price_per_worker_hour).total if paid is None else paid
    return {**metrics, "seconds": seconds, "cost": cost}


def intermediate_result(life: TrialSummary, pricing: Pricing) -> IntermediateResult | None:
    """What early stopping may see of a trial's newest report.

    None where it lacks an objective, or does not tell how far it is.
    """
    report, _ = life.reports[-1]
    workers = life.average or float(life.first_workers)
    price = pricing.price_per_worker_hour
    metrics = visible(measured(life.metrics, report.seconds, workers, price, life.cost))
    short = -math.inf
    if pricing.target is not None:  # what is not there yet takes longer than now
        there = _time_to_target(life, pricing.target)
        metrics[SECONDS_TO_TARGET] = report.seconds if there is None else there.seconds
        short = _shortfall(life, pricing.target) if there is None and pricing.wants_target else short
    if not report.epochs or any(o.name not in metrics for o in pricing.objectives):
        return None
    names = {**known(life.started), **metrics}
    decided = [c for c in pricing.constraints if c.decidable(names)]
    worst = max([short, *violations(decided, names).values()] if decided or short > 0 else [0.0])
    values = tuple(metrics[o.name] for o in pricing.objectives)
    return IntermediateResult(life.number, report.epoch, report.epochs, values, worst)


def judge(life: TrialSummary, ended: JobEvent, pricing: Pricing) -> TrialFinished:
    """The trial's result: complete with a value for every objective, or infeasible with its reason.

    One that does not report what is to be optimised is infeasible. Constraints may speak of settings and of metrics.
    Raises ``UserError`` where the program does not report what is constrained: no trial could succeed.
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
        there = _time_to_target(life, pricing.target)
        if there is not None:
            metrics[SECONDS_TO_TARGET] = there.seconds
        elif pricing.wants_target:
            short = _shortfall(life, pricing.target)
            return TrialFinished(
                life.number,
                "infeasible",
                metrics=metrics,
                violations={pricing.target.text: short} if short < math.inf else {},
                seconds=seconds,
                reason=f"never reached {pricing.target.text}" + (f" (short by {short:g})" if short < math.inf else ""),
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
    found = violations(pricing.constraints, everything)
    if pricing.target is not None and pricing.wants_target:  # at its best, whatever it ended with
        found[pricing.target.text] = _shortfall(life, pricing.target)
    broken = [f"breaks {text} (by {by:g})" for text, by in found.items() if by > 0]
    broken += [f"has {name} {value}" for name, value in values.items() if not math.isfinite(value)]
    return TrialFinished(
        life.number,
        "infeasible" if broken else "complete",
        values=values,
        metrics=metrics,
        violations=found,
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
    """Without what no search may see."""
    return {name: value for name, value in metrics.items() if not name.startswith("test_")}
