"""What a process holds of the system, to see whether it leaks."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HeldTrials:
    """Open file descriptors, those of them that are sockets, threads, and resident memory in MB."""

    files: int
    sockets: int
    threads: int
    memory_mb: float


def holding(pid: int) -> HeldTrials | None:
    """What ``pid`` holds now; None where it has ended."""
    files = sockets = 0
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            files += 1
            try:
                sockets += os.readlink(entry.path).startswith("socket:")
            except FileNotFoundError:  # closed meanwhile
                files -= 1
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if "VmRSS" not in status:  # a zombie
        return None
    return HeldTrials(files, sockets, int(status["Threads"]), int(status["VmRSS"].split()[0]) / 1024)


def marked(variable: str, value: str) -> list[int]:
    """The processes that were started with ``variable=value``, without this one."""
    wanted, result = f"{variable}={value}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted in environment and int(folder.name) != os.getpid():
            result.append(int(folder.name))
    return result


def growth(series: Sequence[Sequence[HeldTrials]]) -> dict[str, float]:
    """Over processes that were looked at often: the median of what each gained from its first third to its last."""
    gains: dict[str, list[float]] = {"files": [], "sockets": [], "threads": [], "memory_mb": []}
    for one in series:
        third = len(one) // 3
        if third == 0:
            continue
        for name, values in gains.items():
            first, last = (statistics.median(getattr(h, name) for h in part) for part in (one[:third], one[-third:]))
            values.append(last - first)
    return {name: round(statistics.median(values), 1) if values else 0.0 for name, values in gains.items()}
