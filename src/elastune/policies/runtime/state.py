"""A policy's state as JSON values: copied, checked, put back."""

from __future__ import annotations

from typing import Any

from elastune.core.errors import UserError
from elastune.policies.base import Policy

_ATOMS = frozenset((int, float, str, bool, type(None)))


def put_back(policy: Policy, state: dict[str, Any]) -> None:
    """Make ``policy`` be as ``state``, its own, says, and nothing else."""
    if type(policy).load is Policy.load and type(policy).state is Policy.state:
        vars(policy).clear()  # of what the hook has added, too
    policy.load(copied(state))


def as_tuples(state: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``state`` in which lists that JSON made of tuples are tuples again, as they are in ``like``."""
    return {
        name: tuple(copied(value)) if isinstance(value, list) and isinstance(like.get(name), tuple) else copied(value)
        for name, value in state.items()
    }


def state_of(name: str, policy: Policy) -> dict[str, Any]:
    """A copy of the policy's state. Raises ``UserError`` where it is not JSON."""
    state = policy.state()
    if not isinstance(state, dict):
        raise UserError(f"state() of policy {name} must give a dict", repr(state), "return names and JSON values")
    try:
        found: dict[str, Any] = copied(state)
    except _NotJson as error:
        where, value = error.args
        fix = "keep numbers, strings, lists and dicts, or override state() and load()"
        raise UserError(f"policy {name}: attribute {where} must be JSON, for it travels", repr(value), fix) from error
    return found


class _NotJson(Exception):
    """(path of the value, the value)."""


def copied(value: Any, where: str = "") -> Any:
    """A deep copy of a JSON value; raises ``_NotJson``."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is dict:
        found = {}
        for key, part in value.items():
            if type(key) is not str:
                raise _NotJson(f"{where}[{key!r}]", value)
            found[key] = part if type(part) in _ATOMS else copied(part, f"{where}.{key}" if where else key)
        return found
    if kind is list or kind is tuple:
        parts = [part if type(part) in _ATOMS else copied(part, f"{where}[{i}]") for i, part in enumerate(value)]
        return parts if kind is list else tuple(parts)
    for base in (bool, int, float, str):  # NumPy's double is a float, too
        if isinstance(value, base):
            return base(value)
    raise _NotJson(where, value)
