"""A policy of a run: what it is named and guarded by, what of it changes, and how both go through one hook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from elastune.core.signals import Decision
from elastune.policies.base import Hook, Policy
from elastune.policies.guards import Guard, GuardStates, screen
from elastune.policies.json_values import copied
from elastune.policies.run import Run


@dataclass(frozen=True)
class Named:
    """A policy of a run: its name in journals, and what holds it back."""

    name: str
    policy: Policy
    guards: tuple[Guard, ...] = ()


@dataclass(frozen=True)
class Standing:
    """What of a policy changes: its own state, its guards', and how often each of its hooks has failed in a row.

    ``off``: it is not called any more.
    """

    state: Any
    guards: GuardStates = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    off: bool = False


def begin(named: Named) -> Standing:
    """Before training. Raises ``UserError`` where the policy's attributes cannot be written as JSON."""
    return Standing(named.policy.init())


def decide(named: Named, standing: Standing, hook: Hook, run: Run) -> tuple[Standing, Decision]:
    """The standing after ``hook``, and what its guards let through of what it asked ``run`` for.

    Where they let nothing through, the policy never decided, and keeps its state: a schedule is late rather than lost.
    """
    after = named.policy.decide(hook, standing.state, run)
    asked = run.decision
    decision, guards = screen(named.guards, hook, asked, run.snapshot, standing.guards)
    state = standing.state if decision.empty and not asked.empty else after
    return replace(standing, state=state, guards=guards), decision


def to_json(standing: Standing) -> dict[str, Any]:
    """For a checkpoint, or another worker."""
    state = standing.state
    return {
        "state": asdict(state) if is_dataclass(state) and not isinstance(state, type) else copied(state),
        "guards": copied(standing.guards),
        "failures": dict(standing.failures),
        "off": standing.off,
    }


def from_json(named: Named, told: Mapping[str, Any]) -> Standing:
    """What ``to_json`` told. Raises ``ValueError`` where the policy has no such state."""
    state = TypeAdapter(type(named.policy.init())).validate_python(told["state"])
    return Standing(state, dict(told["guards"]), dict(told["failures"]), told["off"])
