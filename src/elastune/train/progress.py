"""How far one worker's run has come."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from elastune.core.run import Position
from elastune.train.data.sample_log import SampleSpans
from elastune.train.timing import StepTimes


@dataclass
class Progress:
    """Changed in place as training goes on.

    ``batch_size`` and ``micro_batch``: what the run was changed to use, instead of what the program and the run's means
    ask for. ``reports``: how many were made since the last step. ``spans``: which samples were used.
    """

    times: StepTimes
    position: Position = field(default_factory=Position)
    metrics: dict[str, float] = field(default_factory=dict)
    stopped: str = "complete"
    batch_size: int | None = None
    micro_batch: int | None = None
    reports: int = 0
    spans: SampleSpans = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """What another worker needs to go on from here."""
        return {
            "position": asdict(self.position),
            "metrics": self.metrics,
            "batch_size": self.batch_size,
            "micro_batch": self.micro_batch,
            "reports": self.reports,
            "trail": self.spans,
            "seconds": self.times.seconds,
        }

    def take(self, other: dict[str, Any]) -> None:
        """Go on from ``other``, the ``to_json`` of this worker earlier or of another."""
        self.position = Position(**other["position"])
        self.metrics = {str(name): float(value) for name, value in other["metrics"].items()}
        self.batch_size = None if other["batch_size"] is None else int(other["batch_size"])
        self.micro_batch = None if other["micro_batch"] is None else int(other["micro_batch"])
        self.spans = [[int(number) for number in piece] for piece in other["trail"]]
        self.reports = int(other["reports"])
        self.times.go_on_from(float(other["seconds"]))
