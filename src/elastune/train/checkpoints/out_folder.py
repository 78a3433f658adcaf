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

FOLDER = "once"  # in the output folder: the marks of what was done once
FILE = "begun.json"  # in the output folder: what the run began with
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True)
class OutFolder:
    """The output folder ``path``, and its identity when the work began: a folder put in its place stays untouched.

    ``identity`` is the device and the inode; None: the folder did not exist yet.
    """

    path: Path
    identity: tuple[int, int] | None

    @classmethod
    def at(cls, path: Path) -> OutFolder:
        """The folder at ``path`` as it is now."""
        with suppress(FileNotFoundError):
            return cls(path, _identity(path.stat()))
        return cls(path, None)

    def check(self) -> None:
        """Raise ``UserError`` if another folder has taken the place of this one."""
        if self.identity is not None and OutFolder.at(self.path) != self:
            raise self._gone()

    def make(self, folder: Path) -> None:
        """Make ``folder``, which is inside this one, and the folders between.

        Each is made in the descriptor of the one before, not by its path, which may belong to another folder by then.

        Raises:
            UserError: Another folder has taken the place of this one.
            OSError: A folder cannot be made.
        """
        if self.identity is None:
            folder.mkdir(parents=True, exist_ok=True)
            return
        try:
            descriptor = os.open(self.path, _OPEN)
        except (FileNotFoundError, NotADirectoryError):
            raise self._gone() from None
        try:
            if _identity(os.fstat(descriptor)) != self.identity:
                raise self._gone()
            for name in folder.relative_to(self.path).parts:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=descriptor)
                inner = os.open(name, _OPEN, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
        except FileNotFoundError:  # the folder was removed while it was open
            raise self._gone() from None
        finally:
            os.close(descriptor)

    def _gone(self) -> UserError:
        rule = "an output folder must stay where it is while something runs"
        return UserError(rule, f"{self.path} was removed or replaced", "begin again in a folder that stays")


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


# --- what a run does at most once ---


def claim(home: OutFolder, name: str, who: str) -> bool:
    """Whether this is the first call for ``name`` in the life of the run whose folder is ``home``.

    The mark, ``once/NAME``, is on the disk before this returns; it names ``who`` made it. So an effect after the mark
    never happens twice, but may be missing or half done if the worker was killed.

    Raises:
        UserError: The folder cannot be written.
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
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError:  # a full disk may have room for the name, but not for the mark
            (folder / name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UserError("a run's folder must be writable", error, "free space, or use another --out") from None
    return True


# --- what a run began with ---


def note_beginning(home: OutFolder, initial_weights: Sequence[StartedFrom]) -> None:
    """Write down what ``session.start_from`` took so far, so that joiners need not read the source.

    Raises ``UserError`` if it cannot be written.
    """
    try:
        home.make(home.path)
        atomic_write(home.path / FILE, json.dumps([asdict(each) for each in initial_weights]).encode())
    except OSError as error:
        raise UserError("a run's folder must be writable", error, "free space, or use another --out") from None


def noted_beginning(out: Path) -> list[StartedFrom]:
    """The note in ``out``; empty if it is missing or damaged, as in a folder of each host's own."""
    try:
        notes = json.loads((out / FILE).read_bytes())
        return TypeAdapter(list[StartedFrom]).validate_python(notes)
    except (OSError, ValueError, ValidationError, RecursionError):  # the caller reads the source instead
        return []
