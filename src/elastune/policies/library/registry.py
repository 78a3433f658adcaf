"""Policies by name: the library's, those of the user's program, and third parties' (entry points)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from elastune.core.errors import UserError
from elastune.core.options import Option, options_of, read, split
from elastune.policies.base import Policy
from elastune.policies.guards import GUARD_OPTIONS, guarded, guards_for
from elastune.policies.library.adascale import AdaScale
from elastune.policies.library.cost import CostCap
from elastune.policies.library.divergence import DivergenceGuard
from elastune.policies.library.gns import GrowWithNoise
from elastune.policies.library.goodput import Goodput
from elastune.policies.library.provisioning import Provisioning
from elastune.policies.library.scheduled_batch import ScheduledBatch
from elastune.policies.library.scheduled_workers import ScheduledWorkers
from elastune.policies.library.straggler import StragglerResponse
from elastune.policies.library.warmup import WarmUp

ENTRY_POINTS = "elastune.policies"
POLICIES: Mapping[str, type[Policy]] = MappingProxyType(
    {
        "gns": GrowWithNoise,
        "adascale": AdaScale,
        "scheduled_batch": ScheduledBatch,
        "scheduled_workers": ScheduledWorkers,
        "warmup": WarmUp,
        "goodput": Goodput,
        "provisioning": Provisioning,
        "straggler": StragglerResponse,
        "divergence": DivergenceGuard,
        "cost": CostCap,
    }
)


def build(text: str, extra: Mapping[str, type[Policy]] = MappingProxyType({})) -> Policy:
    """The policy of "name:option=value,...". ``extra``: the classes of the user's program by name; they come first.

    Every policy takes the guards' options, too; one that it has itself (as gns has max_batch) is its own. What a class
    names in ``default_guards`` counts where the text says nothing of it. Raises ``UserError`` for what is not known.
    """
    name, options = split_policy(text)
    kind = _find(name, extra)
    own = options_of(kind)
    shared = {option: Option(of, default=None) for option, of in GUARD_OPTIONS.items() if option not in own}
    given = read(name, options, {**shared, **own})
    guarding = {**_default_guards(kind), **{option: given[option] for option in shared if option in given}}
    if guarding.get("patience", 1) > 1 and "every" in own:
        fix = "leave patience out: it counts calls in a row, and most calls of this policy ask for nothing"
        raise UserError(f"{name} looks at every few steps only", f"patience={guarding['patience']}", fix)
    guards = guards_for(guarding)
    try:
        policy = kind(**{option: value for option, value in given.items() if option in own})
    except ValueError as error:
        raise UserError(f"{name} must accept its options", f"{text}: {error}", "give others") from None
    return guarded(policy, guards) if guards else policy


def split_policy(text: str) -> tuple[str, str]:
    """The name of the policy that ``text`` asks for, and the text of its options."""
    return split(text, "a policy", "gns:max_batch=2048,lr=sqrt")


def build_all(
    texts: Sequence[str], extra: Mapping[str, type[Policy]] = MappingProxyType({})
) -> tuple[tuple[str, Policy], ...]:
    """The policies of ``texts`` in order, each with a name of its own: "gns", "warmup", "warmup-2"."""
    found: dict[str, Policy] = {}
    for text in texts:
        name, _ = split_policy(text)
        same = sum(known.partition("-")[0] == name for known in found)
        found[name if not same else f"{name}-{same + 1}"] = build(text, extra)
    return tuple(found.items())


def monitors_for(policies: Iterable[Policy]) -> tuple[str, ...]:
    """The monitors that ``policies`` need, each once, in the order in which they are first asked for."""
    return tuple(dict.fromkeys(monitor for policy in policies for monitor in policy.monitors))


def _find(name: str, extra: Mapping[str, type[Policy]]) -> type[Policy]:
    if name in extra:
        return extra[name]
    if name in POLICIES:
        return POLICIES[name]
    installed = entry_points(group=ENTRY_POINTS)
    if name not in installed.names:
        known = ", ".join(dict.fromkeys([*extra, *POLICIES, *sorted(installed.names)]))
        raise UserError("a policy must be known", name, f"use one of {known}, or define a class {name} in the program")
    kind: Any = installed[name].load()
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise UserError(f"the entry point {name} must name a subclass of elastune.Policy", kind, "fix its package")
    return kind


def _default_guards(kind: type[Policy]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = getattr(kind, "default_guards", {})
    return found
