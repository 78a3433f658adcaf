"""What this machine offers to workers: cores and accelerators, and which worker gets which.

Nothing here initialises CUDA in the calling process: a process that did could not fork workers that use it.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from elastune.core.errors import UserError

PROBE_LIMIT_S = 60.0
_PROBE = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
# The drivers' own files: NVIDIA, NVIDIA under WSL, AMD. Without any of them the probe, which imports torch, is spared.
_DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/dxg", "/dev/kfd")


def cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: its affinity, or what its control group's CPU quota amounts to, rounded down."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(allowed, quota_cores(root))))


def quota_cores(root: Path = Path("/")) -> float:
    """The smallest CPU quota, in cores, on this process's path of control groups (infinite: none).

    Version 2: ``cpu.max`` holds "max" or "QUOTA_US PERIOD_US"; version 1: ``cpu.cfs_quota_us`` (-1: none) and
    ``cpu.cfs_period_us``. In a container the path named in ``/proc/self/cgroup`` may not be mounted; its parents are.
    """
    found = [math.inf]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        mount = root / "sys/fs/cgroup" if not controllers else root / "sys/fs/cgroup/cpu"
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = mount / group.lstrip("/")
        for place in (folder, *folder.parents):
            if not place.is_relative_to(mount):
                break
            found.append(_quota(place))
    return min(found)


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
def devices() -> tuple[str, ...]:
    """The devices that workers can use: ``("cuda:0", ...)`` as torch numbers them, or ``("cpu",)`` without any.

    Where a driver is present, torch is asked in a process of its own, so its build and CUDA_VISIBLE_DEVICES count.
    """
    if not (any(Path(name).exists() for name in _DRIVER_FILES) or shutil.which("nvidia-smi")):
        return ("cpu",)
    try:
        asked = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_LIMIT_S)
    except subprocess.TimeoutExpired:
        return ("cpu",)
    answer = asked.stdout.strip().rpartition("\n")[2]
    count = int(answer) if asked.returncode == 0 and answer.isdigit() else 0
    return tuple(f"cuda:{index}" for index in range(count)) or ("cpu",)


def assign(device: str, local_rank: int, available: Sequence[str]) -> str:
    """The device of worker ``local_rank``: ``available`` CUDA devices are handed out in order, over and over.

    ``device``: "cpu", "cuda" (one of them), "cuda:N" (this one), or "auto" (one of them, or the CPU without any).
    """
    gpus = [name for name in available if name.startswith("cuda:")]
    if device == "cpu" or (device == "auto" and not gpus):
        return "cpu"
    if device in ("cuda", "auto") and gpus:
        return gpus[local_rank % len(gpus)]
    if device in gpus:
        return device
    offer = ", ".join(("cpu", "auto", *(("cuda", *gpus) if gpus else ())))
    raise UserError("the device must be one that this machine has", device, f"choose one of {offer}")


def backend(devices_of_workers: Sequence[str]) -> Literal["gloo", "nccl"]:
    """How workers on these devices communicate: by NCCL only if each has a CUDA device to itself."""
    alone = len(set(devices_of_workers)) == len(devices_of_workers)
    return "nccl" if alone and all(name.startswith("cuda") for name in devices_of_workers) else "gloo"
