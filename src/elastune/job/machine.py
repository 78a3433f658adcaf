"""What cannot be changed but matters: the machine and software a figure was measured on."""

from __future__ import annotations

import os
from typing import Any

from elastune.train.machine import cores, processor, software


def machine_context() -> dict[str, Any]:
    """Cores, processor, memory and versions, for the journal."""
    return {"cores": cores(), "processor": processor(), "memory_gib": _memory_gib(), **software()}


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
