"""What a thread is to do at a time to come."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

Action = Callable[[], None]


class Later:
    """Actions, by when they are due; those of one moment in the order in which they were put."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Action]] = []
        self._nth = count()

    def put(self, at: float, action: Action) -> None:
        """Have ``action`` done at ``at``."""
        heapq.heappush(self._heap, (at, next(self._nth), action))

    @property
    def next_at(self) -> list[float]:
        """When the first is due; empty where there is none."""
        return [at for at, *_ in self._heap[:1]]

    def run(self, now: float) -> None:
        """Do what is due."""
        while self._heap and self._heap[0][0] <= now:
            heapq.heappop(self._heap)[2]()
