"""Benchmarks of many minutes that may be cut: the same command goes on from what their result tells by then."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastune.core.errors import UserError
from elastune.job.machine import machine_context
from elastune.journal.atomic import atomic_write


def begun(out: Path | None, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """What an earlier run with these settings has left in ``out``, if any. Raises ``UserError`` for other settings."""
    if out is None or not out.exists():
        return None
    told: dict[str, Any] = json.loads(out.read_text())
    if told.get("settings") != json.loads(json.dumps(settings)):
        raise UserError("a result goes on with its own settings", str(out), "use another --out, or remove it")
    return told


def write(out: Path | None, settings: Mapping[str, Any], told: Mapping[str, Any]) -> None:
    """All that is ``told`` by now, under what it was asked and measured with; ``out`` None: nowhere."""
    if out is None:
        return
    head = {"command": "python " + " ".join(sys.argv), "machine": machine_context(), "settings": settings}
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, json.dumps({**head, **told}, indent=1).encode() + b"\n")


def ended(run: Callable[[], int]) -> int:
    """The exit code of ``run``. What the user can mend, and that it was interrupted, is one line."""
    try:
        return run()
    except UserError as problem:
        print(problem, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
