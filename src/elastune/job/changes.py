"""What has changed in a program since its run was begun: refused before anything is written, or accepted and told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elastune.core.errors import UserError
from elastune.core.run import RunSpec
from elastune.job.output_dir import JOURNAL
from elastune.journal.reader import read
from elastune.journal.records import ChangesAccepted, Checkpointed, Record, Reported, RunStarted
from elastune.train.program.source import differences, source_of

FIX = "undo that, or add --accept-changes to go on with it"
_MARKS = b'"checkpointed"', b'"run_started"'  # in the lines of a journal that is worth a look


def with_source(spec: RunSpec) -> RunSpec:
    """Return ``spec`` with the source of its program, as it is now."""
    return replace(spec, source=source_of(spec.program))


def accepted_changes(spec: RunSpec) -> ChangesAccepted | None:
    """Compare the program of ``spec``, which is to go on, with that of the run in its folder.

    Returns:
        What has changed, where that is accepted; None where nothing has, or there is no checkpoint to go on from.

    Raises:
        UserError: Where something has changed and is not accepted: names file, line and part.
    """
    path = spec.out / JOURNAL
    if not spec.resume or not path.is_file():
        return None
    text = path.read_bytes()
    if not all(mark in text for mark in _MARKS):
        return None
    records = [entry.record for entry in read(path)]
    started = [record for record in records if isinstance(record, RunStarted)]
    saved = [record.step for record in records if isinstance(record, Checkpointed)]
    what = differences(started[-1].source, spec.program) if started and saved else []
    if not what:
        return None
    refuse_unless(spec.accept_changes, what, "a run")
    return ChangesAccepted(what, saved[-1], _epochs(records, saved[-1]))


def refuse_unless(accepted: bool, what: Sequence[str], whose: str, fix: str = FIX) -> None:
    """Raise ``UserError`` for changes that were not accepted; ``whose``: "a run", "a study"."""
    if not accepted:
        raise UserError(f"{whose} goes on with the program that it was begun with", "; ".join(what), fix)


def _epochs(records: Sequence[Record], step: int) -> int:
    """How many epochs were completed after ``step``, as far as reports tell."""
    reports = [record for record in records if isinstance(record, Reported) and record.step <= step]
    return reports[-1].epoch if reports else 0
