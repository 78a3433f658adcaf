"""The output folder as a worker found it, with two notes in it: what was done once, and what the run began with.

If the folder is replaced while the run uses it, the new folder stays untouched. ``claim`` makes its mark before the
effect. A worker that is killed between the two leaves an effect that may be missing or half done, never done twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from elastune.core.errors import UserError
from elastune.core.journal.files import atomic_write
from elastune.core.journal.records import StartedFrom

# [home] The output folder as a worker found it: whatever takes its place while something runs is left as it is.

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True)
class OutFolder:
    """``path``, and which folder it was (device, inode) when the work began; None: there was none yet."""

    path: Path
    identity: tuple[int, int] | None

    @classmethod
    def found(cls, path: Path) -> OutFolder:
        """As it is now."""
        with suppress(FileNotFoundError):
            return cls(path, _identity(path.stat()))
        return cls(path, None)

    def check(self) -> None:
        """Raise ``UserError`` where it is no longer the folder that it was."""
        if self.identity is not None and OutFolder.found(self.path) != self:
            raise self._gone()

    def make(self, folder: Path) -> None:
        """Make ``folder``, somewhere inside, and those between.

        Each is made in the one that was opened before it, not by its path: another folder may have the path by then.

        Raises:
            UserError: Where this is no longer the folder that it was.
            OSError: Where none can be made.
        """
        if self.identity is None:
            folder.mkdir(parents=True, exist_ok=True)
            return
        try:
            here = os.open(self.path, _OPEN)
        except (FileNotFoundError, NotADirectoryError):
            raise self._gone() from None
        try:
            if _identity(os.fstat(here)) != self.identity:
                raise self._gone()
            for name in folder.relative_to(self.path).parts:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=here)
                inner = os.open(name, _OPEN, dir_fd=here)
                os.close(here)
                here = inner
        except FileNotFoundError:  # nothing can be made in a folder that was removed
            raise self._gone() from None
        finally:
            os.close(here)

    def _gone(self) -> UserError:
        rule = "an output folder must stay where it is while something runs"
        return UserError(rule, f"{self.path} was removed or replaced", "begin again in a folder that stays")


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


# [once] What a run does at most once, whoever dies and however often it is resumed: who is to do it says so in a file first.
#
# A mark is made before the effect. So a worker that is killed between both leaves an effect that was perhaps not done, or
# half; none that is done twice.

FOLDER = "once"


def claim(home: OutFolder, name: str, who: str) -> bool:
    """Whether this is the first call for ``name`` in the life of the run whose folder ``home`` is.

    The disk has the mark, ``once/NAME``, before this returns; it says ``who`` made it.

    Raises:
        UserError: Where the folder cannot be written.
    """
    folder = home.path / FOLDER
    try:
        home.make(folder)
        try:
            mark = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        try:
            with open(mark, "wb") as file:
                file.write(f"{who}\n".encode())
                file.flush()
                os.fsync(file.fileno())
            there = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(there)
            finally:
                os.close(there)
        except OSError:  # on a full disk a name may be made, and nothing written: nothing was begun
            (folder / name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UserError("a run's folder must be writable", error, "free space, or use another --out") from None
    return True


# [beginning] What a run began with, in its folder: who joins is given the state by others, and need not read the source.

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
