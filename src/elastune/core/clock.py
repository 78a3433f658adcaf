"""Time, as something that can be swapped: real runs use the system's clock, simulation a virtual one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    def now(self) -> float:
        """Seconds on a clock that never goes back; only differences mean anything."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch, for people."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
