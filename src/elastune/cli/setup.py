"""From options to what jobs and studies take: the output folder, the data folder, workers, the device."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from elastune.cli.output import print_error
from elastune.cli.parse import duration, worker_bounds
from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import Elastic
from elastune.job.mirror import Mirror, is_url
from elastune.job.output_dir import JOURNAL, next_folder

_copies: list[Mirror] = []


def choose_out(given: str | Path | None, file: Path, command: str, resume: bool) -> Path:
    """The folder of a command's results: ``given`` or the next free ``elastune-out/NAME-COMMAND-N``.

    Of a URL it is a folder here, which is copied there until ``finish_copies``. A job script may say ``resume`` from
    its first start on, so an empty folder is told, not refused.
    """
    if given is not None:
        out = _mirrored(str(given), resume) if is_url(str(given)) else Path(given)
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
    """Have all results where they were to go. Raises ``UserError`` where one cannot go there."""
    while _copies:
        _copies.pop().finish()


def use_data(data: Path | None) -> None:
    """Let the program and its workers find data sets in ``data``: they look into ``ELASTUNE_DATA``."""
    if data is None:
        return
    if not data.is_dir():
        raise UserError("--data must be a folder", data, "check the path")
    os.environ["ELASTUNE_DATA"] = str(data.resolve())


def choose_workers(
    text: str | None, heartbeat: str, collective_timeout_s: float, mesh: Mesh | None = None
) -> tuple[int, Elastic]:
    """With how many workers a run begins, and how they may change: of "LOW:HIGH" as many as there are cores for.

    With a ``mesh`` it begins with those.
    """
    meshed = 1 if mesh is None else mesh.workers
    low, high = (1, meshed) if text is None else worker_bounds(text)
    elastic = Elastic(low, heartbeat_s=duration(heartbeat, "--heartbeat"), collective_timeout_s=collective_timeout_s)
    if text is None or ":" not in text:
        return high, elastic
    if mesh is not None:
        return meshed, replace(elastic, high=high)
    from elastune.train.machine import cores

    return min(high, max(low, cores())), replace(elastic, high=high)


def choose_device(wanted: str, *, here: bool = True) -> str:
    """The device of a run; "auto" becomes "cuda" or "cpu", as this machine has it.

    ``here``: whether workers run on this machine. A login node may lack what the hosts of its cluster have, which each
    say for themselves.
    """
    if wanted == "cpu" or (not here and re.fullmatch(r"cuda(:[0-9]{1,3})?", wanted)):
        return wanted
    from elastune.cluster.devices import assign, devices

    assigned = assign(wanted, 0, devices())  # refuses what this machine lacks
    if wanted == "auto":
        return assigned.partition(":")[0]  # a command printed for another day names the kind, not the number
    return wanted
