"""The changes of a program, its space or its data that a run or a study went on with, from its journal."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from elastune.core.text import plain
from elastune.journal.entry import Entry
from elastune.journal.records import ChangesAccepted, RunStarted


def accepted_lines(entries: Iterable[Entry]) -> tuple[str, ...]:
    """Return a line for each time that changes were accepted: from where on, when, and what they are."""
    lines, of_run = [], False
    for entry in entries:
        of_run = of_run or isinstance(entry.record, RunStarted)
        if isinstance(entry.record, ChangesAccepted):
            lines.append(_line(entry.record, entry.at, of_run=of_run))
    return tuple(lines)


def what_text(record: ChangesAccepted) -> str:
    """Return the changes in one line."""
    return plain("; ".join(record.what), 400)


def _line(record: ChangesAccepted, at: float, *, of_run: bool) -> str:
    when = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")
    place = f"step {record.step + 1} (epoch {record.epoch + 1})" if of_run else f"trial {record.first_trial}"
    return f"from {place} on, {when}: {what_text(record)}"
