"""What a command needs of this machine: the folder of its results, its data, its workers and its device."""

from __future__ import annotations

import os
import re
from pathlib import Path

from elastune.cli.output import print_error
from elastune.core.errors import UserError
from elastune.runtime.job.output import JOURNAL, Mirror, is_url, next_folder

# --- folders, data and devices of this machine ---

_copies: list[Mirror] = []


def choose_out(out_option: str | Path | None, file: Path, command: str, resume: bool) -> Path:
    """The folder of a command's results: ``out_option`` or the next free ``elastune-out/NAME-COMMAND-N``.

    For a URL it is a local folder that is copied to the URL until ``finish_copies``. A job script may set ``resume``
    from its first start on, so ``resume`` with an empty folder prints a line and starts from the beginning.
    """
    if out_option is not None:
        out = _mirrored(str(out_option), resume) if is_url(str(out_option)) else Path(out_option)
        if resume and not os.path.lexists(out / JOURNAL):
            print_error(f"{out} holds nothing to go on with, so this starts from the beginning")
        return out
    if resume:
        raise UserError("--resume needs to know what to go on with", "no --out", "give --out of the earlier run")
    return next_folder(file, command)


def _mirrored(url: str, resume: bool) -> Path:
    mirror = Mirror(url, print_error)
    mirror.begin(resume)
    _copies.append(mirror)
    return mirror.folder


def finish_copies() -> None:
    """Complete the copies of all results to their URLs. Raises ``UserError`` if a copy fails."""
    while _copies:
        _copies.pop().finish()


def use_data(data: Path | None) -> None:
    """Set ``ELASTUNE_DATA`` to ``data``: the program and its workers look for data sets in it."""
    if data is None:
        return
    if not data.is_dir():
        raise UserError("--data must be a folder", data, "check the path")
    os.environ["ELASTUNE_DATA"] = str(data.resolve())


def choose_device(wanted: str, *, local: bool = True) -> str:
    """The device of a run; "auto" becomes "cuda" or "cpu", whichever this machine has.

    ``local``: whether workers run on this machine. If not, the hosts check the device: a login node may lack GPUs that
    the hosts of its cluster have.
    """
    if wanted == "cpu" or (not local and re.fullmatch(r"cuda(:[0-9]{1,3})?", wanted)):
        return wanted
    from elastune.runtime.placement import assign, devices

    assigned = assign(wanted, 0, devices())  # refuses what this machine lacks
    if wanted == "auto":
        return assigned.partition(":")[0]  # a command printed for another day names the kind, not the number
    return wanted
