"""How far one worker's run has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Final

from elastune.core.divergence import LossTrack
from elastune.core.run import Position
from elastune.core.topology import Topology
from elastune.journal.records import StartedFrom
from elastune.train.data.sample_log import SampleSpans
from elastune.train.memory import StepMemory
from elastune.train.timing import StepTimes

BY_PROGRAM: Final = "program"
"""That ``session.stop`` ended training."""


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
        stop_why: What the program gave to ``session.stop``.
        loss: The mean loss of the newest step; None: nobody has looked. ``loss_wanted``: the program looks at it.
        best: The value of each metric whose best checkpoint is kept.
        batch_size: What the run was changed to use instead of what the program asks for.
        micro_batch: What the run was changed to use instead of what its means ask for.
        topology: By which routes sums were changed to travel instead of those that its means ask for.
        reports: How many were made since the last step.
        newest_steps: How many steps the newest round had.
        spans: Which samples were used.
        begun: What ``session.start_from`` has taken, call by call.
        losses: What divergence is judged by: the training loss, under no name, and metrics that should go down.
    """

    name: ClassVar[str] = "progress"

    times: StepTimes
    memory: StepMemory = field(default_factory=StepMemory)
    position: Position = field(default_factory=Position)
    metrics: dict[str, float] = field(default_factory=dict)
    evaluated_on: dict[str, int] = field(default_factory=dict)
    stopped: str = "complete"
    stop_why: str = ""
    loss: float | None = None
    loss_wanted: bool = False
    best: dict[str, float] = field(default_factory=dict)
    batch_size: int | None = None
    micro_batch: int | None = None
    topology: str | None = None
    reports: int = 0
    newest_steps: int = 1
    spans: SampleSpans = field(default_factory=list)
    begun: list[StartedFrom] = field(default_factory=list)
    losses: dict[str, LossTrack] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": asdict(self.position),
            "metrics": self.metrics,
            "evaluated_on": self.evaluated_on,
            "batch_size": self.batch_size,
            "micro_batch": self.micro_batch,
            "topology": self.topology,
            "reports": self.reports,
            "newest_steps": self.newest_steps,
            "spans": self.spans,
            "seconds": self.times.seconds,
            "stop_why": self.stop_why,
            "best": self.best,
            "begun": [asdict(told) for told in self.begun],
            "loss": [self.loss, self.loss_wanted],
            "losses": {name: track.to_json() for name, track in self.losses.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = position_of(state["position"])
        self.metrics = {str(name): float(value) for name, value in state["metrics"].items()}
        self.evaluated_on = {str(name): int(n) for name, n in state.get("evaluated_on", {}).items()}
        self.batch_size = None if state["batch_size"] is None else int(state["batch_size"])
        self.micro_batch = None if state["micro_batch"] is None else int(state["micro_batch"])
        self.topology = None if state.get("topology") is None else str(Topology.parse(str(state["topology"])))
        self.reports = int(state["reports"])
        self.newest_steps = int(state["newest_steps"])
        self.spans = spans_of(state)
        self.losses = {str(name): LossTrack.from_json(told) for name, told in state.get("losses", {}).items()}
        self.begun = begun_of(state)
        self.stop_why = str(state["stop_why"])
        if self.stop_why:
            self.stopped = BY_PROGRAM
        loss, self.loss_wanted = state["loss"]
        self.loss = None if loss is None else float(loss)
        self.best = {str(name): float(value) for name, value in state["best"].items()}
        self.times.go_on_from(float(state["seconds"]))


def position_of(state: Mapping[str, Any]) -> Position:
    """The position that was saved by ``asdict``. Raises ``TypeError`` or ``ValueError`` for anything else."""
    return Position(**{str(name): int(number) for name, number in state.items()})


def begun_of(state: Mapping[str, Any]) -> list[StartedFrom]:
    """What ``session.start_from`` had taken, from the state of a ``Progress``; nothing in those of older versions."""
    return [StartedFrom(**told) for told in state.get("begun", [])]


def spans_of(state: Mapping[str, Any]) -> SampleSpans:
    """The samples used, from the state of a ``Progress``."""
    return [[int(number) for number in piece] for piece in state["spans"]]
