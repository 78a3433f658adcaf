"""The best checkpoint so far, which stays when newer ones come."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from elastune.train.checkpoints import checkpoint as checkpoints
from elastune.train.checkpoints.files import NoRoom


def keep_best(out: Path, metric: str, step: int, make: Callable[[Path], None] = checkpoints.make_folder) -> bool:
    """Keep the checkpoint after ``step`` steps of the run in ``out``, which is dropped else as newer ones come, as the
    best by ``metric``, in ``best/METRIC/checkpoints``; in place of the one that was. It takes no space twice where the
    disk has hard links.

    False where there is none of that step, or no room. Raises ``UserError`` where it cannot be written.
    """
    found, folder = checkpoints.of_step(out / "checkpoints", step), out / "best" / metric / "checkpoints"
    if not found.is_dir():
        return False
    at = checkpoints.draft(folder, "best")
    try:
        with checkpoints.writing(at):
            make(folder)
            shutil.rmtree(at, ignore_errors=True)
            shutil.copytree(found, at, copy_function=_link)
            checkpoints.complete_draft(at, folder, step)
    except NoRoom:
        checkpoints.give_up(at)
        return False
    for path in checkpoints.complete(folder):
        if checkpoints.step_of(path) != step:
            shutil.rmtree(path, ignore_errors=True)
    return True


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a disk without hard links
        shutil.copy2(source, target)
