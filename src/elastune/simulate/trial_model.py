"""What a simulated run has to know of its trial, and how far it is: pure, but for the file that keeps it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from elastune.core.divergence import LossTrack
from elastune.core.errors import UserError
from elastune.core.run import Config, Position
from elastune.journal.atomic import atomic_write

PROGRESS = "simulated.json"
_SAME = 1e-6  # of a step: times this close to a step's end are its end


class TrialModel(Protocol):
    """How trials would go. Pure: the same arguments give the same answer.

    Epochs are counted from 1. What a method raises is the failure of the run that asked.
    """

    start_s: float
    """From the start of a worker to its first step."""
    resize_pause_s: float
    """What training stands still for when workers change."""

    def epochs(self, config: Config, asked: int | None) -> int:
        """Planned training passes, of which the user ``asked`` for so many (None: what the program says)."""
        ...

    def samples(self, config: Config) -> int:
        """Samples of one training pass."""
        ...

    def batch(self, config: Config) -> int:
        """Samples of one step."""
        ...

    def metrics(self, config: Config, seed: int, epoch: int) -> dict[str, float]:
        """What is reported after ``epoch`` training passes."""
        ...

    def epoch_s(self, config: Config, workers: int, epoch: int) -> float:
        """Seconds of training pass number ``epoch`` on so many workers."""
        ...


@dataclass(frozen=True)
class Progress:
    """How far a simulated run is: what its checkpoint holds.

    ``history``: (digest of configuration and seed, the step up to which it was trained with these). ``losses``: what
    divergence is judged by.
    """

    position: Position = field(default_factory=Position)
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    history: tuple[tuple[str, int], ...] = ()
    losses: dict[str, LossTrack] = field(default_factory=dict)

    def trained(self, digest: str, position: Position, seconds: float) -> Progress:
        """Further progress, with the configuration and seed of ``digest``."""
        earlier = self.history[:-1] if self.history and self.history[-1][0] == digest else self.history
        return replace(self, position=position, seconds=seconds, history=(*earlier, (digest, position.step)))

    @property
    def sha256(self) -> str:
        """Equal for runs that trained as many steps with the same configurations and seeds: their states are equal."""
        return hashlib.sha256(json.dumps(self.history).encode()).hexdigest()


@dataclass(frozen=True)
class Leg:
    """Steps at one pace, from second ``since`` on: at most ``steps``, to the end of an epoch of ``samples`` samples."""

    since: float
    start: Position
    batch: int
    samples: int
    step_s: float

    @property
    def steps(self) -> int:
        return -(-(self.samples - self.start.offset) // self.batch)

    def when(self, steps: int) -> float:
        """The time at which so many steps are completed."""
        return self.since + steps * self.step_s

    def done(self, now: float) -> int:
        """Steps completed by ``now``."""
        return self.steps if self.step_s == 0 else min(self.steps, max(0, math.floor(self._steps_by(now) + _SAME)))

    def boundary(self, at: float) -> int:
        """Steps completed at the first step boundary at or after ``at``; more than there are, if it is past the end."""
        return 0 if self.step_s == 0 else max(0, math.ceil(self._steps_by(at) - _SAME))

    def after(self, steps: int) -> Position:
        """Where the run is then."""
        used = min(steps * self.batch, self.samples - self.start.offset)
        offset = self.start.offset + used
        over = offset == self.samples
        return Position(
            epoch=self.start.epoch + over,
            offset=0 if over else offset,
            step=self.start.step + steps,
            samples=self.start.samples + used,
        )

    def _steps_by(self, at: float) -> float:
        return (at - self.since) / self.step_s


def digest_of(config: Config, seed: int) -> str:
    """A name for a run's meaning."""
    return hashlib.sha256(json.dumps([config, seed], sort_keys=True).encode()).hexdigest()[:16]


def save_progress(folder: Path, progress: Progress, at: float) -> None:
    """Keep it in ``folder``, whole or not at all, as of time ``at``; and what was kept there before that time.

    A run whose end nobody heard of ends again under the next controller, and the next: what it began from must stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = _read(folder)
    earlier = before.pop("before", {})
    if before.get("at", -math.inf) >= at - _SAME:
        before = earlier
    atomic_write(folder / PROGRESS, json.dumps({**asdict(progress), "at": at, "before": before}).encode())


def load_progress(folder: Path, at: float) -> Progress | None:
    """What ``folder`` held at time ``at``; None where it held nothing.

    A journal may be behind the folder, by one end that nobody heard of. Raises ``UserError`` for anything else than
    progress.
    """
    tree = _read(folder)
    if tree and tree.get("at", 0.0) > at:
        tree = tree["before"]
    if not tree:
        return None
    losses = {name: LossTrack.from_json(told) for name, told in tree["losses"].items()}
    return Progress(Position(**tree["position"]), tree["seconds"], tree["metrics"], _pairs(tree["history"]), losses)


def _read(folder: Path) -> dict[str, Any]:
    try:
        tree: dict[str, Any] = json.loads((folder / PROGRESS).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError("a simulated run goes on from what it kept", f"{folder}: {error}", "start it again") from error
    return tree


def _pairs(history: Sequence[Any]) -> tuple[tuple[str, int], ...]:
    return tuple((digest, step) for digest, step in history)
