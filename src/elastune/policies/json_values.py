"""Values that can travel as JSON."""

from __future__ import annotations

from typing import Any

from elastune.core.errors import UserError

_ATOMS = frozenset((int, float, str, bool, type(None)))


class NotJson(Exception):
    """``value``, at the place ``where`` in the state to send, is no JSON value."""

    def __init__(self, where: str, value: object) -> None:
        super().__init__(where, value)
        self.where, self.value = where, value

    def of(self, owner: str) -> UserError:
        """Return the error for the user, which names the ``owner`` of the value."""
        fix = "keep numbers, strings, lists and dicts in attributes"
        return UserError(f"{owner}: attribute {self.where} must be JSON, for it travels", repr(self.value), fix)


def copied(value: Any, where: str = "") -> Any:
    """Return a deep copy of a JSON value, in which tuples stay tuples. Raises ``NotJson``."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is dict:
        for key in value:
            if type(key) is not str:
                raise NotJson(f"{where}[{key!r}]", value)
        return {key: part if type(part) in _ATOMS else copied(part, f"{where}.{key}") for key, part in value.items()}
    if kind is list or kind is tuple:
        parts = [part if type(part) in _ATOMS else copied(part, f"{where}[{i}]") for i, part in enumerate(value)]
        return parts if kind is list else tuple(parts)
    for base in (bool, int, float, str):  # NumPy's double is a float, too
        if isinstance(value, base):
            return base(value)
    raise NotJson(where, value)
