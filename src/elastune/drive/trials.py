"""From a suggestion to a run, and from a run's outcome to a trial's result: pure decisions of a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastune.core.cost import Cost
from elastune.core.errors import UserError
from elastune.core.run import Adapt, Config, Means
from elastune.drive.adapting import NO_POLICY, policies_of
from elastune.journal.records import RunFailed, RunFinished, TrialFinished
from elastune.search.constraint import Constraint, violations
from elastune.search.objective import Objective
from elastune.train.program import merge

OF_MEANS = ("workers", "mode", "mechanism", "micro_batch")
SYSTEM_PARAMETERS = (*OF_MEANS, "policy")  # what a space may set beside the program's own settings
CLOCKED = ("seconds", "cost")  # objectives that elastune measures itself


@dataclass(frozen=True)
class Pricing:
    """What is optimised, what must hold, and what a worker costs."""

    objectives: tuple[Objective, ...]
    constraints: tuple[Constraint, ...] = ()
    price_per_worker_hour: float = 1.0


def system_defaults(means: Means) -> dict[str, Any]:
    """The system parameters where a space does not set them."""
    return {**{name: getattr(means, name) for name in OF_MEANS}, "policy": NO_POLICY}


def settings(suggested: Mapping[str, Any], config: Config, means: Means, capacity: int) -> tuple[Config, Means, Adapt]:
    """A suggestion's configuration, its means, and what adapts it.

    System parameters set means and policies, all else must be known to ``config``.
    """
    system = {name: suggested[name] for name in OF_MEANS if name in suggested}
    changed = replace(means, **system)
    workers = changed.workers
    if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= capacity:
        rule = f"a trial's workers must be a whole number from 1 to the study's {capacity}"
        raise UserError(rule, workers, "change space(trial) or --workers")
    changed = replace(changed, num_slots=max(changed.num_slots, workers))
    plain = {name: value for name, value in suggested.items() if name not in SYSTEM_PARAMETERS}
    return merge(config, plain), changed, Adapt(policies=policies_of(suggested.get("policy", NO_POLICY)))


def measured(run: RunFinished, price_per_worker_hour: float) -> dict[str, float]:
    """A run's metrics with its time and cost beside them."""
    cost = Cost(run.workers * run.seconds, price_per_worker_hour).total
    return {**run.metrics, "seconds": run.seconds, "cost": cost}


def judge(
    trial: int, outcome: RunFinished | RunFailed, known: Mapping[str, Any], seconds: float, pricing: Pricing
) -> TrialFinished:
    """The trial's result: complete with a value for every objective, or infeasible with its reason.

    ``known``: configuration and means, by name, for constraints that speak of both settings and metrics. Raises
    ``UserError`` where the program does not report what is to be optimised or constrained: no trial could succeed.
    """
    if isinstance(outcome, RunFailed):
        reason = f"{outcome.reason}: {outcome.detail}"
        return TrialFinished(trial, "infeasible", seconds=seconds, reason=reason)
    metrics = measured(outcome, pricing.price_per_worker_hour)
    visible = {name: value for name, value in metrics.items() if not name.startswith("test_")}
    _refuse_unknown(pricing.objectives, visible)
    values = {o.name: visible[o.name] for o in pricing.objectives}
    everything = {**known, **visible}
    for constraint in pricing.constraints:
        if missing := sorted(constraint.names - set(everything)):
            known_names = ", ".join(sorted(everything))
            raise UserError("a constraint may name settings and reported metrics", missing[0], f"known: {known_names}")
    found = violations(pricing.constraints, everything)
    broken = [f"{text} (by {by:g})" for text, by in found.items() if by > 0]
    return TrialFinished(
        trial,
        "infeasible" if broken else "complete",
        values=values,
        metrics=metrics,
        violations=found,
        seconds=seconds,
        reason=f"breaks {' and '.join(broken)}" if broken else "",
        run=outcome,
    )


def _refuse_unknown(objectives: Sequence[Objective], metrics: Mapping[str, float]) -> None:
    for objective in objectives:
        if objective.name not in metrics:
            fix = f"report it, or use one of {', '.join(sorted(metrics))}"
            raise UserError("an objective must be a metric that the program reports", objective.name, fix)
