"""What adapts a run, checked before it starts: the policies and monitors that a command line or a space names."""

from __future__ import annotations

from elastune.core.errors import UserError
from elastune.core.run import Adapt, Means
from elastune.core.sync_plan import SyncPlan
from elastune.mechanisms.registry import mechanism_for
from elastune.monitors.registry import choose
from elastune.policies.library.registry import build, monitors_for
from elastune.train.program.load import LoadedProgram

NO_POLICY = "none"


def check_adapt(adapt: Adapt, program: LoadedProgram, means: Means | None = None, sync: SyncPlan | None = None) -> None:
    """Raise ``UserError`` for policies and monitors that cannot be made from their texts, or not together.

    ``program``: its own policies can be named too. ``means``, ``sync``: under which they are to run, where that is
    known.
    """
    policies = [build(text, program.policies) for text in adapt.policies]
    monitors = choose([*adapt.monitors, *monitors_for(policies)])
    measuring = [monitor.name for monitor in monitors if monitor.needs - {"times"}]
    if measuring and sync is not None and sync.in_rounds:
        rule = "learners' gradients are not summed up, so nothing is measured of them"
        fix = "begin with --sync allreduce, or leave it out"
        raise UserError(rule, f"the monitor {measuring[0]} with {sync}", fix)
    if measuring and means is not None and means.compression is not None and means.compression.keeps_residual:
        rule = "where most of a gradient is sent in later steps, its norms tell nothing of its noise"
        raise UserError(rule, f"the monitor {measuring[0]}, --compress {means.compress}", "use --compress int8")
    if measuring and means is not None and not mechanism_for(means).abilities.measures:
        rule = f"{means.mechanism} does not tell gradients' norms or the loss's curvature"
        raise UserError(rule, f"the monitor {measuring[0]}", "use another mechanism, or leave it out")


def policies_of(value: object) -> tuple[str, ...]:
    """The policies that a space names as ``policy``: "none", the text of one, or a list of texts."""
    texts = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        fix = "such as 'gns:max_batch=2048', ['warmup', 'gns'] or 'none'"
        raise UserError("a policy must be text, or a list of texts", repr(value), fix)
    named = tuple(str(text).strip() for text in texts)
    if NO_POLICY in named and len(named) > 1:
        raise UserError(f"{NO_POLICY!r} goes with no other policy", repr(value), "leave it out of the list")
    return () if named == (NO_POLICY,) else named
