"""Where results go: one folder a run or study, never one that holds another's."""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elastune.core.errors import UserError
from elastune.journal.reader import read
from elastune.journal.records import RunStarted, StudyStarted, WarmStarted
from elastune.journal.writer import JournalWriter

JOURNAL = "journal.jsonl"
DEFAULT_ROOT = Path("elastune-out")
_OPENINGS = (RunStarted, StudyStarted, WarmStarted)  # what is journaled before anything runs
_CLAIMED: set[Path] = set()  # folders that this process has made, and nothing may have come of yet


def next_folder(program: Path, kind: str) -> Path:
    """The next free ``elastune-out/PROGRAM-KIND-N``, made here: no other command that begins now has the same.

    ``release_unused`` removes it where nothing came of it. Raises ``UserError``.
    """
    stem = f"{program.stem}-{kind}"
    try:
        DEFAULT_ROOT.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            folder = DEFAULT_ROOT / f"{stem}-{number}"
            with suppress(FileExistsError):
                folder.mkdir()
                break
    except OSError as error:
        rule = "a command needs a folder for its results"
        raise UserError(rule, error, "give --out a folder that can be written") from None
    if not _CLAIMED:
        atexit.register(release_unused)
    _CLAIMED.add(folder.absolute())
    return folder


def release_unused() -> None:
    """Remove the folders that were made for commands which have left nothing in them. Idempotent."""
    for folder in _CLAIMED:
        with suppress(OSError):  # it is used
            folder.rmdir()
            folder.parent.rmdir()
    _CLAIMED.clear()


def check_out(out: Path, resume: bool) -> Path:
    """The path of the journal in ``out``. Refuses to mix a new run into an old one's folder."""
    path = out / JOURNAL
    if os.path.lexists(path) and not path.is_file():
        raise UserError("a journal must be a file", path, "use another --out")
    if path.exists() and not resume:
        raise UserError("--out must be a new or empty folder", out, "use another --out, or --resume to go on")
    return path


@contextmanager
def journal_in(out: Path, resume: bool, wall: Callable[[], float] = time.time) -> Iterator[JournalWriter]:
    """The journal of ``out``, which is made if needed.

    What is refused before anything has run leaves no folder that was not there. Raises ``UserError`` as ``check_out``,
    and for a folder that cannot be written.
    """
    path = check_out(out, resume)
    made = [folder for folder in (out, *out.parents) if not folder.exists() or folder.absolute() in _CLAIMED]
    begins = not path.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("--out must be a folder that can be written", error, "use another --out") from None
    with JournalWriter(path, wall=wall) as journal:  # from here on nobody else writes there
        try:
            yield journal
        except UserError:
            if begins and all(isinstance(entry.record, _OPENINGS) for entry in read(path)):
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
