"""Where results go: one folder a run or study, never one that holds another's."""

from __future__ import annotations

import atexit
import itertools
import os
from contextlib import suppress
from pathlib import Path

from elastune.core.errors import UserError

JOURNAL = "journal.jsonl"
DEFAULT_ROOT = Path("elastune-out")
CLAIMED: set[Path] = set()  # folders that this process has made, and nothing may have come of yet


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
    if not CLAIMED:
        atexit.register(release_unused)
    CLAIMED.add(folder.absolute())
    return folder


def release_unused() -> None:
    """Remove the folders that were made for commands which have left nothing in them. Idempotent."""
    for folder in CLAIMED:
        with suppress(OSError):  # it is used
            folder.rmdir()
            folder.parent.rmdir()
    CLAIMED.clear()


def check_out(out: Path, resume: bool) -> Path:
    """The path of the journal in ``out``. Refuses to mix a new run into an old one's folder."""
    path = out / JOURNAL
    if os.path.lexists(path) and not path.is_file():
        raise UserError("a journal must be a file", path, "use another --out")
    if path.exists() and not resume:
        raise UserError("--out must be a new or empty folder", out, "use another --out, or --resume to go on")
    return path
