"""The settings that say how long a training is. More of them continues it; any other change makes another training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LENGTHS = ("epochs", "num_epochs", "max_epochs", "num_train_epochs", "max_steps")


def changed_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names of the settings that differ, sorted, but for lengths of the training that have grown.

    Args:
        then: The settings that a training was begun with.
        now: Those that it is to continue with.

    Example:
        >>> changed_settings({"lr": 0.1, "epochs": 2}, {"lr": 0.2, "epochs": 4})
        ['lr']
    """
    return sorted(name for name in {*then, *now} if not _continues(name, then, now))


def grown(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names of the lengths of which ``now`` has more than ``then``."""
    return [name for name in LENGTHS if name in then and name in now and _more(then[name], now[name])]


def _continues(name: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    if name not in then or name not in now:
        return False
    old, new = then[name], now[name]
    if old == new and isinstance(old, bool) == isinstance(new, bool):
        return True
    return name in LENGTHS and _more(old, new)


def _more(old: object, new: object) -> bool:
    numbers = [each for each in (old, new) if isinstance(each, (int, float)) and not isinstance(each, bool)]
    return len(numbers) == 2 and numbers[1] > numbers[0]
