"""Whether a run can have a strategy: at its start, by its schedule, or because a policy or the program asks for it."""

from __future__ import annotations

from elastune.core.errors import UserError
from elastune.core.run import RunSpec
from elastune.core.sync_plan import SyncPlan
from elastune.core.sync_schedule import MOST_STEP


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


def check_schedule(spec: RunSpec) -> None:
    """Raise ``UserError`` for changes of strategy that come when the run is over, where its end is known."""
    late = spec.sync_schedule.beyond(MOST_STEP + 1 if spec.max_steps is None else spec.max_steps)
    if late.changes:
        rule, told = "a schedule of strategies must end before the run does", f"{late}, {spec.max_steps} steps"
        raise UserError(rule, told, "use an earlier step, or more --max-steps, or leave it out")


def refuse_turns(plan: SyncPlan) -> None:
    """Raise ``UserError`` where a program takes several steps with each batch, and learners would not."""
    if plan.in_rounds:
        raise UserError("turns need workers that agree in each step", plan, "use --sync allreduce")
