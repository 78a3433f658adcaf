"""How far one worker's run has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from elastune.core.divergence import LossTrack
from elastune.core.run import Position
from elastune.train.data.sample_log import SampleSpans
from elastune.train.memory import StepMemory
from elastune.train.timing import StepTimes


@dataclass
class Progress:
    """Changed in place as training goes on; a part of a run's state.

    Attributes:
        times: How long training and its steps took.
        memory: What a step needed.
        position: Where the run is.
        metrics: The newest value of everything that was reported.
        evaluated_on: How many samples metrics were measured on, where the program told.
        stopped: Why training ended.
        batch_size: What the run was changed to use instead of what the program asks for.
        micro_batch: What the run was changed to use instead of what its means ask for.
        reports: How many were made since the last step.
        spans: Which samples were used.
        losses: What divergence is judged by: the training loss, under no name, and metrics that should go down.
    """

    name: ClassVar[str] = "progress"

    times: StepTimes
    memory: StepMemory = field(default_factory=StepMemory)
    position: Position = field(default_factory=Position)
    metrics: dict[str, float] = field(default_factory=dict)
    evaluated_on: dict[str, int] = field(default_factory=dict)
    stopped: str = "complete"
    batch_size: int | None = None
    micro_batch: int | None = None
    reports: int = 0
    spans: SampleSpans = field(default_factory=list)
    losses: dict[str, LossTrack] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": asdict(self.position),
            "metrics": self.metrics,
            "evaluated_on": self.evaluated_on,
            "batch_size": self.batch_size,
            "micro_batch": self.micro_batch,
            "reports": self.reports,
            "spans": self.spans,
            "seconds": self.times.seconds,
            "losses": {name: track.to_json() for name, track in self.losses.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = position_of(state["position"])
        self.metrics = {str(name): float(value) for name, value in state["metrics"].items()}
        self.evaluated_on = {str(name): int(n) for name, n in state.get("evaluated_on", {}).items()}
        self.batch_size = None if state["batch_size"] is None else int(state["batch_size"])
        self.micro_batch = None if state["micro_batch"] is None else int(state["micro_batch"])
        self.reports = int(state["reports"])
        self.spans = spans_of(state)
        self.losses = {str(name): LossTrack.from_json(told) for name, told in state.get("losses", {}).items()}
        self.times.go_on_from(float(state["seconds"]))


def position_of(state: Mapping[str, Any]) -> Position:
    """The position that was saved by ``asdict``. Raises ``TypeError`` or ``ValueError`` for anything else."""
    return Position(**{str(name): int(number) for name, number in state.items()})


def spans_of(state: Mapping[str, Any]) -> SampleSpans:
    """The samples used, from the state of a ``Progress``."""
    return [[int(number) for number in piece] for piece in state["spans"]]
