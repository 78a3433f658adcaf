"""A script with a ``main()`` that knows no session, since an adapter finds it: its settings come to it all the same."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

ADAPTERS = "elastune.adapters"


def training_of(module: ModuleType, path: Path) -> Callable[[Any], None] | None:
    """``main()`` of a file that uses an adapter, as a training function; None where the file is none of that kind.

    Settings go into the file's ``config``, where it has one, before ``main`` begins; else they are the arguments of its
    command line: ``lr=0.1`` is ``--lr 0.1``.
    """
    main = getattr(module, "main", None)
    if not callable(main) or not _uses_adapter(module) or not _takes_nothing(main):
        return None

    def train(session: Any) -> None:
        settings = dict(session.config)
        declared: Any = getattr(module, "config", None)
        arguments = as_arguments(settings) if not declared else []
        if declared:
            declared.update(settings)
        before, sys.argv = sys.argv, [str(path), *arguments]
        try:
            main()
        finally:
            sys.argv = before

    return train


def as_arguments(settings: Mapping[str, Any]) -> list[str]:
    """Settings as argparse takes them: what is True is an option without a value, what is False or None is left out."""
    found: list[str] = []
    for name, value in settings.items():
        if value is True:
            found.append(f"--{name}")
        elif value is not False and value is not None:
            values = value if isinstance(value, list) else [value]
            found += [f"--{name}", *map(str, values)]
    return found


def _uses_adapter(module: ModuleType) -> bool:
    homes = (getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in vars(module).values())
    return any(isinstance(home, str) and home.startswith(ADAPTERS) for home in homes)


def _takes_nothing(main: Callable[..., Any]) -> bool:
    try:
        inspect.signature(main).bind()
    except (TypeError, ValueError):
        return False
    return True
