"""Whether hosts see the folder of a run: a file that they look for, and what came of it, for the next controller."""

from __future__ import annotations

import re
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastune.core.errors import UserError

LOCAL = ".own-folders"  # in the folder of a run whose hosts push their files
DIGITS = 32  # of a mark's text; its name has the first eight of them
_MARK = re.compile(r"\.elastune-([0-9a-f]{8})")


@dataclass(frozen=True)
class FolderMark:
    """The file ``path``, which holds ``text`` where it is the controller's own."""

    path: Path
    text: str

    def remove(self) -> None:
        """Idempotent."""
        with suppress(OSError):  # a hidden file of 32 bytes is no reason to fail
            self.path.unlink(missing_ok=True)


def place(folder: Path) -> FolderMark:
    """A file in ``folder`` with a text that nobody else would write. Raises ``UserError``."""
    text = secrets.token_hex(DIGITS // 2)
    mark = FolderMark(folder.resolve() / f".elastune-{text[:8]}", text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark.path.write_text(text)
    except OSError as error:
        rule = "the output folder must be writable"
        raise UserError(rule, f"{folder}: {error.strerror}", "choose another folder") from None
    return mark


def sweep(folder: Path, own: FolderMark | None) -> None:
    """Remove the marks in ``folder`` of controllers that were killed: every one but ``own``, and no other file.

    For whoever has the run in ``folder``: nobody else may want marks there.
    """
    for path in folder.resolve().glob(".elastune-*"):
        if (own is None or path != own.path) and (found := _MARK.fullmatch(path.name)) and _is_mark(path, found[1]):
            FolderMark(path, "").remove()


def _is_mark(path: Path, begins: str) -> bool:
    """Whether it is a file that ``place`` has written, in whole or, killed meanwhile, in part."""
    try:
        about = path.lstat()
        if not stat.S_ISREG(about.st_mode) or about.st_size > DIGITS:
            return False
        text = path.read_bytes()
    except OSError:
        return False
    return not text or (re.fullmatch(rb"[0-9a-f]+", text) is not None and text[:8] == begins.encode()[: len(text)])


def remember(folder: Path, *, local: bool) -> None:
    """For the next controller: whether hosts push the files of the run in ``folder``. Raises ``UserError``."""
    try:
        if local:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / LOCAL).touch()
        else:
            (folder / LOCAL).unlink(missing_ok=True)
    except OSError as error:
        rule = "the output folder must be writable"
        raise UserError(rule, f"{folder}: {error.strerror}", "choose another folder") from None


def was_local(folder: Path) -> bool:
    """Whether the controller before had hosts push the files of the run in ``folder``."""
    return (folder / LOCAL).is_file()
