"""Whether a run can have a strategy: at its start, by its schedule, or because a policy or the program asks for it."""

from __future__ import annotations

from elastune.core.errors import UserError
from elastune.core.run import RunSpec
from elastune.core.sync_plan import SyncPlan


def check_strategy(plan: SyncPlan, spec: RunSpec) -> None:
    """Refuse a ``plan`` that ``spec`` cannot have. How long a pass is, workers find out (``train.data.planned``).

    Raises:
        UserError: For learners that do not go with slots, workers, mechanism, mode or compression, and for a round that
            is longer than the run.
    """
    means, max_steps = spec.means, spec.max_steps
    plan.check(means.num_slots, spec.most_workers, means.mechanism, means.mode)
    if max_steps is not None and plan.in_rounds and plan.every > max_steps:
        rule = "a round must not be longer than the run"
        raise UserError(rule, f"{plan}, {max_steps} steps", "use fewer steps a round (every), or more --max-steps")
    if plan.in_rounds and means.compress is not None:
        fix = "use --sync allreduce, or leave --compress out"
        raise UserError("learners exchange parameters, not gradients", f"--compress {means.compress} with {plan}", fix)


def refuse_turns(plan: SyncPlan) -> None:
    """Raise ``UserError`` where a program takes several steps with each batch, and learners would not."""
    if plan.in_rounds:
        raise UserError("turns need workers that agree in each step", plan, "use --sync allreduce")
