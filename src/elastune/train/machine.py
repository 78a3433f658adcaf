"""What a worker cannot change but matters: the sizes of data and model, the device, the software."""

from __future__ import annotations

import os
import platform
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from elastune.journal.records import RunContext


def run_context(device: torch.device, train_samples: int, parameters: int) -> RunContext:
    """The context of a run on this machine's ``device``, with the sizes that it has seen."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    return RunContext(train_samples, parameters, device.type, name, cores(), software())


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    return {"python": platform.python_version(), "torch": version("torch"), "elastune": version("elastune")}
