"""Policies by name: of the library, of the user's program, and of other packages (entry points)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from elastune.adapt.policies.base import Policy
from elastune.adapt.policies.host import GUARD_OPTIONS, PolicyEntry, guards_for
from elastune.adapt.policies.library.adascale import AdaScale
from elastune.adapt.policies.library.cost import CostCap
from elastune.adapt.policies.library.divergence import DivergenceGuard
from elastune.adapt.policies.library.follow_workers import FollowWorkers
from elastune.adapt.policies.library.gns import GrowWithNoise
from elastune.adapt.policies.library.goodput import Goodput
from elastune.adapt.policies.library.provisioning import Provisioning
from elastune.adapt.policies.library.schedules import ScheduledBatch, ScheduledWorkers
from elastune.adapt.policies.library.spot import Spot
from elastune.adapt.policies.library.straggler import StragglerResponse
from elastune.adapt.policies.library.sync import SyncByLink, SyncBySize
from elastune.adapt.policies.library.warmup import WarmUp
from elastune.core.errors import UserError
from elastune.core.options import Option, options_of, read, split
from elastune.core.plugins import Plugins

INSTALLED = Plugins("elastune.policies", "policy")
"""Policies of other packages: subclasses of ``Policy``."""
NO_POLICY = "none"
"""What a space calls a trial without any policy."""
POLICIES: Mapping[str, type[Policy]] = MappingProxyType(
    {
        "gns": GrowWithNoise,
        "adascale": AdaScale,
        "scheduled_batch": ScheduledBatch,
        "scheduled_workers": ScheduledWorkers,
        "follow_workers": FollowWorkers,
        "warmup": WarmUp,
        "goodput": Goodput,
        "provisioning": Provisioning,
        "straggler": StragglerResponse,
        "divergence": DivergenceGuard,
        "cost": CostCap,
        "spot": Spot,
        "sync_by_size": SyncBySize,
        "sync_by_link": SyncByLink,
    }
)


def build(text: str, extra: Mapping[str, type[Policy]] = MappingProxyType({})) -> PolicyEntry:
    """Return the policy that "name:option=value,..." describes.

    Every policy takes the guards' options, too, unless it has an option of that name itself (as gns has max_batch).
    The class's ``default_guards`` apply where the text does not set them.

    Args:
        text: The text, as for ``--policy``.
        extra: The policy classes of the user's program, by name; they come first.

    Raises:
        UserError: For an unknown name or option.
    """
    name, options = split_policy(text)
    kind = _find(name, extra)
    policy_options = options_of(kind)
    shared = {option: Option(of, default=None) for option, of in GUARD_OPTIONS.items() if option not in policy_options}
    values = read(name, options, {**shared, **policy_options})
    guarding = {**_default_guards(kind), **{option: values[option] for option in shared if option in values}}
    if guarding.get("patience", 1) > 1 and "every" in policy_options:
        fix = "leave patience out: it counts calls in a row, and most calls of this policy ask for nothing"
        raise UserError(f"{name} looks at every few steps only", f"patience={guarding['patience']}", fix)
    guards = guards_for(guarding)
    try:
        policy = kind(**{option: value for option, value in values.items() if option in policy_options})
    except ValueError as error:
        raise UserError(f"{name} must accept its options", f"{text}: {error}", "give others") from None
    return PolicyEntry(name, policy, guards)


def split_policy(text: str) -> tuple[str, str]:
    """Return the name of the policy in ``text``, and the text of its options."""
    return split(text, "a policy", "gns:max_batch=2048,lr=sqrt")


def build_all(
    texts: Sequence[str], extra: Mapping[str, type[Policy]] = MappingProxyType({})
) -> tuple[PolicyEntry, ...]:
    """Return the policies of ``texts`` in order, each with a name of its own: "gns", "warmup", "warmup-2"."""
    entries: list[PolicyEntry] = []
    for named in (build(text, extra) for text in texts):
        same = sum(known.name.partition("-")[0] == named.name for known in entries)
        entries.append(replace(named, name=f"{named.name}-{same + 1}") if same else named)
    return tuple(entries)


def policies_of(value: object) -> tuple[str, ...]:
    """Return the texts of the policies that a space names as ``policy``.

    Args:
        value: "none", the text of one policy, or a list of such texts.

    Raises:
        UserError: For any other value.
    """
    texts = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        fix = "such as 'gns:max_batch=2048', ['warmup', 'gns'] or 'none'"
        raise UserError("a policy must be text, or a list of texts", repr(value), fix)
    named = tuple(str(text).strip() for text in texts)
    if NO_POLICY in named and len(named) > 1:
        raise UserError(f"{NO_POLICY!r} goes with no other policy", repr(value), "leave it out of the list")
    return () if named == (NO_POLICY,) else named


def monitors_for(policies: Iterable[PolicyEntry]) -> tuple[str, ...]:
    """Return the monitors that ``policies`` need, each once, in the order in which they are first asked for."""
    return tuple(dict.fromkeys(monitor for named in policies for monitor in named.policy.monitors))


def _find(name: str, extra: Mapping[str, type[Policy]]) -> type[Policy]:
    if name in extra:
        return extra[name]
    if name in POLICIES:
        return POLICIES[name]
    if name not in INSTALLED.names():
        known = ", ".join(dict.fromkeys([*extra, *POLICIES, *INSTALLED.names()]))
        raise UserError("a policy must be known", name, f"use one of {known}, or define a class {name} in the program")
    kind: type[Policy] = INSTALLED.load_class(name, Policy, named=False)
    return kind


def _default_guards(kind: type[Policy]) -> Mapping[str, Any]:
    guards: Mapping[str, Any] = getattr(kind, "default_guards", {})
    return guards
