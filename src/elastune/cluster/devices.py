"""The accelerators that this machine offers to workers, and which worker gets which.

Nothing here initialises CUDA in the calling process: a process that did could not fork workers that use it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from elastune.core.errors import UserError

PROBE_LIMIT_S = 60.0
_PROBE = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
# The drivers' own files: NVIDIA, NVIDIA under WSL, AMD. Without any of them the probe, which imports torch, is spared.
_DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/dxg", "/dev/kfd")


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


def idlest_first(names: Sequence[str], own: Sequence[str], others: Sequence[str]) -> list[str]:
    """``names`` in the order in which a run's next workers get them: ``own`` are those that the run's workers have.

    Those come last, whatever ``others`` are busy with: NCCL takes one worker of a run on a GPU.
    """
    return sorted(names, key=lambda name: (own.count(name), others.count(name)))


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
