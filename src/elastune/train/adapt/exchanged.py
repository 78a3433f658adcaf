"""What a run's exchanges tell of themselves, to be journaled: bytes a step, and how far apart learners were."""

from __future__ import annotations

LEARNERS_DISTANCE, MIX_STALENESS, SENT_BYTES = "learners_distance", "mix_staleness", "sent_bytes"


class Exchanged:
    """Counts on each worker alike; what a worker has sent for one exchange is told in the next one."""

    def __init__(self) -> None:
        self._distance: float | None = None
        self._staleness: float | None = None
        self._told_bytes = self._telling_bytes = 0  # of this worker's own
        self._bytes, self._steps = 0.0, 0  # of all workers', since the last signals
        self._newest_steps = 0  # whose bytes are not told yet

    def since(self, sent_bytes: int) -> float:
        """What this worker adds to the next exchange: of ``sent_bytes`` so far, those that were not told yet."""
        self._telling_bytes = sent_bytes
        return float(max(0, sent_bytes - self._told_bytes))

    def reduced(
        self,
        sent_bytes: float,
        steps: int,
        distance: float | None,
        staleness: float | None = None,
        *,
        contributed: bool,
    ) -> None:
        """An exchange for ``steps`` steps is complete: ``sent_bytes`` is what all workers told in it.

        ``contributed``: this worker was one of them. ``distance``: that of learners, where it ended a round of them.
        ``staleness``: how many global batches old in it what learners took of others without waiting was.
        """
        if contributed:
            self._told_bytes = self._telling_bytes
        if self._newest_steps:  # else they are of what came before the first step
            self._bytes, self._steps = self._bytes + sent_bytes, self._steps + self._newest_steps
        self._newest_steps, self._distance, self._staleness = steps, distance, staleness

    def signals(self) -> dict[str, tuple[float, float | None]]:
        """As a record has them, without errors: bytes a step since this was asked last, the newest round's
        distance and staleness."""
        told: dict[str, tuple[float, float | None]] = {}
        if self._steps:
            told[SENT_BYTES] = (self._bytes / self._steps, None)
        if self._distance is not None:
            told[LEARNERS_DISTANCE] = (self._distance, None)
        if self._staleness is not None:
            told[MIX_STALENESS] = (self._staleness, None)
        self._bytes, self._steps = 0.0, 0
        return told
