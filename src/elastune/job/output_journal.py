"""The journal of an output folder: a command that is refused leaves no trace of it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elastune.core.errors import UserError
from elastune.job.output_dir import CLAIMED, check_out
from elastune.journal.reader import read
from elastune.journal.records import RunStarted, StudyStarted, WarmStarted
from elastune.journal.writer import JournalWriter, check_unwritten

_OPENINGS = (RunStarted, StudyStarted, WarmStarted)  # what is journaled before anything runs


def check_free(out: Path, resume: bool) -> None:
    """Refuse what ``journal_in`` would, before a cluster is opened for it: another's results, and a controller that
    lives. Leaves nothing. Raises ``UserError``."""
    check_unwritten(check_out(out, resume))


@contextmanager
def journal_in(out: Path, resume: bool, wall: Callable[[], float] = time.time) -> Iterator[JournalWriter]:
    """The journal of ``out``, which is made if needed.

    What is refused before anything has run leaves no folder that was not there. Raises ``UserError`` as ``check_out``,
    and for a folder that cannot be written, or a journal to go on with that has a bad line.
    """
    path = check_out(out, resume)
    made = [folder for folder in (out, *out.parents) if not folder.exists() or folder.absolute() in CLAIMED]
    begins = not path.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("--out must be a folder that can be written", error, "use another --out") from None
    with JournalWriter(path, wall=wall) as journal:  # from here on nobody else writes there
        if not begins:
            read(path)  # what could not be told at the end is refused now
        try:
            yield journal
        except (UserError, KeyboardInterrupt):  # while hosts were awaited
            if begins and journal.in_place and all(isinstance(entry.record, _OPENINGS) for entry in read(path)):
                _take_back(path, made)
            raise


def _take_back(path: Path, made: list[Path]) -> None:
    """Remove a journal that tells of nothing, and the folders that were ``made`` for it, the innermost first."""
    if made:
        shutil.rmtree(made[0], ignore_errors=True)
    for file in (path, path.with_name(f"{path.name}.lock")):
        file.unlink(missing_ok=True)
    for folder in made[1:]:
        with suppress(OSError):  # somebody else's results have come there meanwhile
            folder.rmdir()
