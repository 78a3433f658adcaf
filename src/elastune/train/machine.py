"""The machine that a worker or controller runs on: processors, memory limit, device, software. Imports no torch."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from elastune.core.journal.records import DataContext, RunContext

if TYPE_CHECKING:
    import torch

MEMORY_LIMITS = ("memory.max", "memory.limit_in_bytes")  # files of control groups, of versions 2 and 1


def run_context(device: torch.device, data: DataContext, parameters: int) -> RunContext:
    """All that a run's result depends on and that the run cannot change: data, model size, device, software."""
    import torch  # here: the command line asks for cores() before it needs torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    return RunContext(data, parameters, device.type, name, cores(), link(), software())


def link(root: Path = Path("/")) -> str:
    """The network interface that workers meet over, and its speed where the system knows: "eth0, 10000 Mbit/s"."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    speed = _read(root / "sys/class/net" / interface / "speed")
    return f"{interface}, {speed} Mbit/s" if speed.isdigit() else interface


def cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: its affinity, or the CPU quota of its control group, rounded down."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(allowed, quota_cores(root))))


def quota_cores(root: Path = Path("/")) -> float:
    """The smallest CPU quota, in cores, on this process's path of control groups; infinite where it has none.

    Version 2: ``cpu.max`` holds "max" or "QUOTA_US PERIOD_US"; version 1: ``cpu.cfs_quota_us`` (-1: none) and
    ``cpu.cfs_period_us``. In a container the path named in ``/proc/self/cgroup`` may not be mounted; its parents are.
    """
    return min((_quota(group) for group in control_groups("cpu", root)), default=math.inf)


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """The folders of this process's control groups that may limit ``controller``, of version 2 and of version 1."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        folder = mount / group.lstrip("/")
        for place in (folder, *folder.parents):
            if not place.is_relative_to(mount):
                break
            yield place


def _quota(group: Path) -> float:
    quota, _, period = _read(group / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else math.inf


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


@cache
def processor() -> str:
    """The CPU's name, or else its architecture."""
    file = Path("/proc/cpuinfo")
    if file.is_file():
        with file.open() as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.machine()


def software() -> dict[str, str]:
    """The versions that a result may depend on."""
    try:
        elastune = version("elastune")
    except PackageNotFoundError:  # run from its source folder
        elastune = "not installed"
    return {"python": platform.python_version(), "torch": version("torch"), "elastune": elastune}


def machine_memory_bytes(root: Path = Path("/")) -> int:
    """The machine's memory, or the smallest limit on this process's path of control groups."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in control_groups("memory", root):
        files = [group / name for name in MEMORY_LIMITS if (group / name).is_file()]
        texts = [file.read_text(encoding="utf-8").strip() for file in files]
        sizes += [int(text) for text in texts if text.isdigit()]  # else "max": no limit
    return min(sizes)
