"""The memory that this process, and those that it starts, may use of this machine."""

from __future__ import annotations

import os
from pathlib import Path

from elastune.train.machine import control_groups

LIMITS = ("memory.max", "memory.limit_in_bytes")  # of versions 2 and 1


def machine_memory_bytes(root: Path = Path("/")) -> int:
    """What there is, or the smallest limit on this process's path of control groups."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in control_groups("memory", root):
        files = [group / name for name in LIMITS if (group / name).is_file()]
        texts = [file.read_text(encoding="utf-8").strip() for file in files]
        found += [int(text) for text in texts if text.isdigit()]  # others say "max"
    return min(found)
