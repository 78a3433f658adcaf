"""What cannot be changed but matters: the machine and software a figure was measured on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any


def machine_context() -> dict[str, Any]:
    """Cores, processor, memory and versions, for the journal."""
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "processor": _first("/proc/cpuinfo", "model name"),
        "memory_gib": _memory_gib(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "elastune": version("elastune"),
    }


def _first(path: str, key: str) -> str:
    file = Path(path)
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), platform.machine())


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
