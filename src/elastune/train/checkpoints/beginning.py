"""What a run began with, in its folder: who joins is given the state by others, and need not read the source."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from elastune.core.errors import UserError
from elastune.journal.atomic import atomic_write
from elastune.journal.records import StartedFrom
from elastune.train.checkpoints.home import OutFolder

FILE = "begun.json"


def note_beginning(home: OutFolder, begun: Sequence[StartedFrom]) -> None:
    """Let joiners know what ``session.start_from`` took so far. Raises ``UserError`` where it cannot be written."""
    try:
        home.make(home.path)
        atomic_write(home.path / FILE, json.dumps([asdict(one) for one in begun]).encode())
    except OSError as error:
        raise UserError("a run's folder must be writable", error, "free space, or use another --out") from None


def noted_beginning(out: Path) -> list[StartedFrom]:
    """What was noted in ``out``; nothing where nobody did, in a folder of each host's own, or of a damaged note."""
    try:
        told = json.loads((out / FILE).read_bytes())
        return TypeAdapter(list[StartedFrom]).validate_python(told)
    except (OSError, ValueError, ValidationError, RecursionError):  # then the source is read
        return []
