"""From options to what the drivers take: the output folder, the means of a run, the data folder."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from elastune.cli.output import print_error
from elastune.cli.parse import LONGEST_S, duration, worker_bounds
from elastune.core.errors import UserError
from elastune.core.run import DEFAULT_SLOTS, Elastic, Means
from elastune.job.output_dir import JOURNAL, next_folder

if TYPE_CHECKING:
    from elastune.cluster.notices import NoticeSource


def choose_out(out: Path | None, file: Path, command: str, resume: bool) -> Path:
    """The folder of a command's results: ``out`` or the next free ``elastune-out/NAME-COMMAND-N``.

    A job script may say ``resume`` from its first start on, so an empty folder is told, not refused.
    """
    if out is not None:
        if resume and not (out / JOURNAL).exists():
            print_error(f"{out} holds nothing to go on with, so this begins anew")
        return out
    if resume:
        raise UserError("--resume needs to know what to go on with", "no --out", "give --out of the earlier run")
    return next_folder(file, command)


def use_data(data: Path | None) -> None:
    """Let the program and its workers find data sets in ``data``: they look into ``ELASTUNE_DATA``."""
    if data is None:
        return
    if not data.is_dir():
        raise UserError("--data must be a folder", data, "check the path")
    os.environ["ELASTUNE_DATA"] = str(data.resolve())


def choose_means(
    workers: int,
    *,
    mode: str,
    slots: int | None,
    micro_batch: int | None,
    precision: str,
    threads: int,
    device: str,
    most_workers: int | None = None,
) -> Means:
    """The system parameters asked for. Only the device is settled here: the driver checks the others.

    ``most_workers``: how many there may be later.
    """
    return Means(
        workers=workers,
        mode=mode,  # type: ignore[arg-type]  # checked by job.run.check_means
        num_slots=max(DEFAULT_SLOTS, workers, most_workers or 0) if slots is None else slots,
        threads=threads,
        device=_device(device),
        precision=precision,  # type: ignore[arg-type]
        micro_batch=micro_batch,
    )


def choose_workers(text: str, heartbeat: str) -> tuple[int, Elastic]:
    """With how many workers a run begins, and how they may change: of "LOW:HIGH" as many as there are cores for."""
    low, high = worker_bounds(text)
    heartbeat_s = duration(heartbeat, "--heartbeat")
    if ":" not in text:
        return high, Elastic(low, heartbeat_s=heartbeat_s)
    from elastune.cluster.devices import cores

    return min(high, max(low, cores())), Elastic(low, high, heartbeat_s)


def choose_notices(file: Path | None, url: str | None, seconds: float) -> list[NoticeSource]:
    """Where to look for the news that this machine will be taken away."""
    from elastune.cluster.notices import FileNotice, UrlNotice

    if not 0 < seconds <= LONGEST_S:
        raise UserError("--notice-seconds must be above 0", seconds, "such as 120")
    sources: list[NoticeSource] = [] if file is None else [FileNotice(file, seconds)]
    return sources if url is None else [*sources, UrlNotice(url, seconds)]


def check_price(price: float) -> float:
    """A price of a worker-hour that costs can be made of."""
    if not (math.isfinite(price) and price > 0):
        raise UserError("--price must be above 0", price, "use 1 for costs in worker-hours")
    return price


def _device(wanted: str) -> str:
    if wanted == "cpu":
        return wanted
    from elastune.cluster.devices import assign, devices

    assigned = assign(wanted, 0, devices())  # refuses what this machine lacks
    if wanted == "auto":
        return assigned.partition(":")[0]  # a command printed for another day names the kind, not the number
    return wanted
