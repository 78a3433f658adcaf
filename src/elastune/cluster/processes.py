"""What the system says of a process of this machine."""

from __future__ import annotations

import os
from pathlib import Path

from elastune.elastic.coordinator.liveness import Vitals

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def vitals_of(process: int) -> Vitals | None:
    """Its state and the processor time of all its threads; None once it is gone. See proc(5)."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return Vitals(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_S)
    except (OSError, ValueError, IndexError):
        return None
