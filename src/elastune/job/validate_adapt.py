"""What adapts a run, checked before it starts: the policies and monitors that a command line or a space names."""

from __future__ import annotations

from collections.abc import Sequence

from elastune.core.errors import UserError
from elastune.core.run import Adapt, RunSpec
from elastune.core.sync_check import check_strategy
from elastune.core.sync_plan import SyncPlan
from elastune.mechanisms.registry import mechanism_for
from elastune.monitors.registry import choose
from elastune.policies.library.registry import build, monitors_for
from elastune.policies.runtime.standing import Named
from elastune.train.program.load import LoadedProgram

NO_POLICY = "none"


def check_adapt(adapt: Adapt, program: LoadedProgram, spec: RunSpec | None = None) -> None:
    """Raise ``UserError`` for policies and monitors that cannot be made from their texts, or not together.

    ``program``: its own policies can be named too. ``spec``: the run that they are to adapt, where that is known.
    """
    policies = [build(text, program.policies) for text in adapt.policies]
    monitors = choose([*adapt.monitors, *monitors_for(policies)])
    if spec is None:
        return
    _check_monitors([monitor.name for monitor in monitors if monitor.needs - {"times"}], spec)
    for named in policies:
        _check_strategies(named, spec)


def _check_monitors(measuring: Sequence[str], spec: RunSpec) -> None:
    """What is measured of gradients can be."""
    means, sync = spec.means, spec.sync
    if measuring and sync.in_rounds:
        rule = "learners' gradients are not summed up, so nothing is measured of them"
        fix = "begin with --sync allreduce, or leave it out"
        raise UserError(rule, f"the monitor {measuring[0]} with {sync}", fix)
    if measuring and means.compression is not None and means.compression.keeps_residual:
        rule = "where most of a gradient is sent in later steps, its norms tell nothing of its noise"
        raise UserError(rule, f"the monitor {measuring[0]}, --compress {means.compress}", "use --compress int8")
    if measuring and not mechanism_for(means).abilities.measures:
        rule = f"{means.mechanism} does not tell gradients' norms or the loss's curvature"
        raise UserError(rule, f"the monitor {measuring[0]}", "use another mechanism, or leave it out")


def _check_strategies(named: Named, spec: RunSpec) -> None:
    """The run can have what the policy may switch to: else it would stay with what it began with, all the time."""
    for text in named.policy.strategies(spec.means.num_slots, spec.most_workers):
        try:
            check_strategy(SyncPlan.parse(text), spec)
        except UserError as error:
            rule, value, fix, page = error.told
            raise UserError(rule, f"{value}, of the policy {named.name}", fix, page) from None


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
