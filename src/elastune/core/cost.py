"""What a run costs: workers x time x price; and the names of what is measured of every run."""

from __future__ import annotations

from dataclasses import dataclass

MEASURED = ("seconds", "cost")  # by elastune, of every training: no program may report them


@dataclass(frozen=True)
class Cost:
    """Workers held for a time, and what one of them costs an hour (price 1.0: the unit is the worker-hour)."""

    worker_seconds: float
    price_per_worker_hour: float = 1.0

    @property
    def total(self) -> float:
        """In units of the price."""
        return self.worker_seconds / 3600 * self.price_per_worker_hour
