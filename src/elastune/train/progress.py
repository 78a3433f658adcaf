"""How far one worker's run has come."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from elastune.core.run import Position
from elastune.train.claims import Trail
from elastune.train.timing import StepTimes


@dataclass
class Progress:
    """Changed in place as training goes on.

    ``tail``: the training pass of the epoch before ``position.epoch`` is over, but the rest of that epoch's body is to
    be run (again). ``dirty``: since its last step this worker has done what cannot be repeated without the workers it
    was done with: evaluated a part of a data set, or built what training begins with. ``batch_size``: what the run was
    changed to use, instead of what the program asks for. ``trail``: which samples were used.
    """

    times: StepTimes
    position: Position = field(default_factory=Position)
    metrics: dict[str, float] = field(default_factory=dict)
    stopped: str = "complete"
    tail: bool = False
    dirty: bool = True
    batch_size: int | None = None
    reports: int = 0
    trail: Trail = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """What another worker needs to go on from here."""
        return {
            "position": asdict(self.position),
            "metrics": self.metrics,
            "tail": self.tail,
            "batch_size": self.batch_size,
            "trail": self.trail,
            "seconds": self.times.seconds,
        }

    def take(self, other: dict[str, Any]) -> None:
        """Go on from ``other``, the ``to_json`` of this worker earlier or of another."""
        self.position = Position(**other["position"])
        self.metrics = {str(name): float(value) for name, value in other["metrics"].items()}
        self.tail = bool(other["tail"])
        self.batch_size = None if other["batch_size"] is None else int(other["batch_size"])
        self.trail = [[int(number) for number in piece] for piece in other["trail"]]
        self.times.go_on_from(float(other["seconds"]))
        self.reports = 0
