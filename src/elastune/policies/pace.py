"""How fast steps go at one setting (workers, batch): each timed by itself, so that a pause spoils one at most."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from elastune.core.signals import Snapshot

MOST_STEPS = 64  # whose times are kept
_MEDIAN_ERROR = 1.2533 * 1.4826  # of a normal sample


@dataclass(frozen=True)
class Pace:
    """Seconds of the newest steps with ``workers`` and ``batch``; ``count`` were timed.

    The first step after a change is not timed, since the change itself may be in it. ``last_s``: when the last ended.
    """

    workers: int = 0
    batch: int = 0
    last_s: float = 0.0
    count: int = 0
    seconds: tuple[float, ...] = ()

    @property
    def step_s(self) -> float:
        """The median. Raises ``ValueError`` where no step was timed."""
        if not self.seconds:
            raise ValueError("no step has been timed yet")
        return median(self.seconds)

    @property
    def error(self) -> float:
        """Standard error of ``step_s`` (and of ``rate``) in parts of it, from the median absolute deviation."""
        middle = self.step_s
        spread = median(abs(took_s - middle) for took_s in self.seconds)
        return _MEDIAN_ERROR * spread / math.sqrt(len(self.seconds)) / middle

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.batch / self.step_s

    def after(self, now: Snapshot) -> Pace:
        """With the step that ``now`` comes after."""
        if (now.workers, now.batch_size) != (self.workers, self.batch):
            return Pace(now.workers, now.batch_size, now.seconds)
        took_s = now.seconds - self.last_s
        if not took_s > 0:
            return replace(self, last_s=now.seconds)
        seconds = (*self.seconds[1 - MOST_STEPS :], took_s)
        return replace(self, last_s=now.seconds, count=self.count + 1, seconds=seconds)

    def afresh(self) -> Pace:
        """The same setting, no step timed."""
        return replace(self, count=0, seconds=())

    def to_json(self) -> dict[str, Any]:
        """As JSON; ``from_json`` reads it back."""
        return {**vars(self), "seconds": list(self.seconds)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Pace:
        """What ``to_json`` wrote."""
        return cls(**{**value, "seconds": tuple(value["seconds"])})
