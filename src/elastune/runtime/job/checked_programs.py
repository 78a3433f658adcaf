"""Programs in which ``elastune check`` has found nothing.

Each is an empty file in ``XDG_CACHE_HOME/elastune/checked`` (``~/.cache/elastune/checked``), named by the digest of the
program. Only file names are read, so writers cannot get in each other's way. An edit of the program makes another
digest. Imports no torch.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from elastune.core.run import Program, RunSpec
from elastune.train.program.source import program_digest

MOST = 1000
"""The most programs that are remembered. With one more, the older half is forgotten."""


def checked_folder() -> Path:
    """Return the folder of the files. Raises ``OSError`` if this user has no home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elastune" / "checked"
    except RuntimeError as error:
        raise OSError(f"{error}; set XDG_CACHE_HOME") from None


def note_check(program: Program, *, passed: bool) -> None:
    """Remember the result of a check of ``program``.

    Args:
        program: The program.
        passed: Whether the check found no problem; if not, an earlier success is forgotten.

    Raises:
        OSError: If nothing can be written. The check is valid nevertheless.
    """
    folder = checked_folder()
    mark = folder / program_digest(program)
    if not passed:
        mark.unlink(missing_ok=True)
        return
    folder.mkdir(parents=True, exist_ok=True)
    mark.touch()
    _forget_oldest(folder)


def is_checked(program: Program) -> bool:
    """Return whether a check of ``program``, as its file is now, found no problem; False if that is unknown.

    Example:
        >>> is_checked(Program(Path("train.py")))
        False
    """
    try:
        return (checked_folder() / program_digest(program)).is_file()
    except (OSError, ValueError, SyntaxError, RecursionError):  # the run of the file will report the error
        return False


def with_proof(spec: RunSpec, *, unchecked: bool = False) -> RunSpec:
    """Return ``spec`` with a proof in its first step, where several slots or workers share a global batch.

    Each run proves it again. No digest of a program covers what may choose its loss: settings, data, environment
    variables, installed packages.

    Args:
        spec: The run.
        unchecked: Whether to leave the proof out.
    """
    if not spec.shares_batches:
        return spec
    # --resume may find nothing to go on with. Workers prove a first step alone, so others are not proved again.
    return replace(spec, proves=not unchecked, checked=not spec.resume and is_checked(spec.program))


def _forget_oldest(folder: Path) -> None:
    names = os.listdir(folder)
    if len(names) <= MOST:
        return
    aged = []
    for path in (folder / name for name in names):
        try:
            aged.append((path.lstat().st_mtime, path))
        except FileNotFoundError:  # another check has forgotten it
            continue
    for _, path in sorted(aged)[: len(aged) // 2]:
        if not path.is_dir():
            path.unlink(missing_ok=True)
