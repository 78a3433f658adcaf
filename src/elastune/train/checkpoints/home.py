"""The output folder as a worker found it: whatever takes its place while something runs is left as it is."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastune.core.errors import UserError

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
