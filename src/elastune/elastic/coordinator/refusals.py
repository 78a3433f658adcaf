"""Who was not let in, and why: told at once the first time, then once a minute how often, so a flood is a few lines."""

from __future__ import annotations

from dataclasses import dataclass

from elastune.journal.records import NotLetIn

EVERY_S = 60.0
KNOWN_LIMIT = 64
OTHERS = "other hosts"


@dataclass
class _Count:
    told_at: float
    untold: int = 0


class Refusals:
    """Counts by host and reason; of no more than ``KNOWN_LIMIT`` of them apart, however many hosts come."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], _Count] = {}
        self._new: list[NotLetIn] = []

    def note(self, host: str, why: str, now: float) -> None:
        """A connection from ``host`` was not let in, at the time ``now``."""
        key = (host, why)
        if key not in self._counts and len(self._counts) >= KNOWN_LIMIT:
            key = (OTHERS, why)
        if key in self._counts:
            self._counts[key].untold += 1
        elif len(self._counts) < 2 * KNOWN_LIMIT:
            self._counts[key] = _Count(now)
            self._new.append(NotLetIn(*key, 1))

    def due(self, now: float) -> list[NotLetIn]:
        """What is to be told now."""
        found, self._new = self._new, []
        for (host, why), count in list(self._counts.items()):
            if now >= count.told_at + EVERY_S:
                if count.untold:
                    found.append(NotLetIn(host, why, count.untold))
                    self._counts[host, why] = _Count(now)
                else:
                    del self._counts[host, why]
        return found


def refusal_line(refusal: NotLetIn) -> str:
    """In words."""
    times = f", {refusal.times} times within a minute" if refusal.times > 1 else ""
    return f"a connection from {refusal.host} was not let in: {refusal.why}{times}"
