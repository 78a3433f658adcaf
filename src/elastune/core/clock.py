"""Time as a dependency: real runs use the system clock, simulations use a virtual one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    def now(self) -> float:
        """Seconds on a clock that never goes back; only differences have a meaning."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch, for people."""
        ...


class SystemClock:
    """The machine's own clock.

    ``wall`` reads the machine's date once and then counts seconds, so a change of the date has no effect on costs and
    times. On Linux the time in which the machine sleeps counts.
    """

    def __init__(self) -> None:
        self._offset_s = time.time() - _passed()

    now = staticmethod(time.monotonic)

    def wall(self) -> float:
        return round(self._offset_s + _passed(), 6)


def _passed() -> float:
    """Seconds by a clock that nobody sets."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class VirtualClock:
    """Time that moves only by ``advance_to``, so that a simulated week costs nothing.

    It begins at ``now_s``; ``wall`` is ``wall_s`` more, in seconds since the epoch.
    """

    def __init__(self, wall_s: float = 0.0, *, now_s: float = 0.0) -> None:
        self._now = now_s
        self._wall_s = wall_s

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._wall_s + self._now

    def advance_to(self, now: float) -> None:
        """Make it ``now``. Raises ``ValueError`` for a time that has passed."""
        if not self._now <= now < float("inf"):
            raise ValueError(f"a clock goes forward: it is {self._now:g} s, not to be {now:g} s")
        self._now = now
