"""Whether reductions still take as long as they did when their topology was chosen. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

STEPS = 5  # that are looked at together
FACTOR = 1.5  # by which a median has to differ
LEAST_S = 0.005  # and by so much


@dataclass
class LinkWatch:
    """Hears how long each step's reduction took; equal on all workers, since all hear the same.

    ``due``: links are to be measured anew.
    """

    due: bool = False
    _times: list[float] = field(default_factory=list)
    _usual_s: float | None = None

    def begin(self) -> None:
        """Links were measured, or something else has begun: what comes now is the usual."""
        self.due, self._times, self._usual_s = False, [], None

    def hear(self, waits_s: Sequence[float]) -> None:
        """How long each worker waited in a step: the last to come has waited for the links alone."""
        told = [wait_s for wait_s in waits_s if wait_s > 0]
        if not told:
            return
        self._times = [*self._times, min(told)][-STEPS:]
        if len(self._times) < STEPS:
            return
        now_s = median(self._times)
        if self._usual_s is None:
            self._usual_s, self._times = now_s, []
            return
        low, high = sorted((now_s, self._usual_s))
        self.due = self.due or (high > FACTOR * low and high > low + LEAST_S)
