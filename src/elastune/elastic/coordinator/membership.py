"""What is known of a run's workers: the state of ``elastic.coordinator.machine``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from elastune.core.mesh_choice import MeshChoice
from elastune.elastic.protocol.view import View

Phase = Literal["starting", "connected", "ready", "member"]


class ProtocolViolation(ValueError):
    """What was said contradicts what happened before: one side has a bug."""


@dataclass(frozen=True)
class Worker:
    """A worker that is not gone. ``member``: it holds the run's state, or begins with the others of an initial view.

    ``preempted``: it will be taken away. ``to_replace``: another is to take its place, without hurry. ``excluded``: a
    view without it was installed while it was a member. ``host``: where it runs.
    """

    number: int
    phase: Phase = "starting"
    preempted: bool = False
    to_replace: bool = False
    done: bool = False
    excluded: bool = False
    host: str = ""


@dataclass(frozen=True)
class Membership:
    """The state of the machine.

    ``workers``: all that are not gone, by number. ``current``: the newest complete view (all its members said Running),
    None while nobody holds state. ``proposed``: the newest view, as long as it is not complete. ``free``: how many more
    workers could be started; ``capacity_stale``: a worker has gone since that was told, so there may be more room by
    now. ``max_first_step``: the highest first step of any view; ``consecutive_failures``: breaks since it rose, or
    since a checkpoint or a report told of more steps than any before; ``failed_starts``: workers lost before they
    became members, since the last one that did. ``meshes``: how its workers are to stand.
    """

    low: int
    high: int
    target: int
    most_losses: int
    next_worker: int
    workers: tuple[Worker, ...]
    next_view: int = 1
    current: View | None = None
    proposed: View | None = None
    running: frozenset[int] = frozenset()
    first_step: int = -1
    free: int = 0
    capacity_stale: bool = False
    max_first_step: int = -1
    consecutive_failures: int = 0
    failed_starts: int = 0
    stage: Literal["open", "stopping", "finishing", "over"] = "open"
    meshes: MeshChoice = field(default_factory=MeshChoice)

    @property
    def members(self) -> tuple[Worker, ...]:
        """Who holds the run's state, by number."""
        return tuple(worker for worker in self.workers if worker.phase == "member")

    @property
    def live(self) -> tuple[View, ...]:
        """The views whose members may train now, oldest first: the one before a scheduled one goes on until that is
        complete."""
        before = self.proposed is None or self.proposed.scheduled
        return tuple(v for v in (self.current if before else None, self.proposed) if v is not None)

    @property
    def wanted(self) -> tuple[Worker, ...]:
        """Who will be there when all that is under way is done."""
        leaving: set[int] = set()
        if self.current is not None and self.proposed is not None:
            leaving = set(self.current.members) - set(self.proposed.members)
        leaving |= {worker.number for worker in self.workers if worker.preempted or worker.to_replace}
        return tuple(worker for worker in self.workers if worker.number not in leaving)

    def find(self, number: int) -> Worker | None:
        """Worker ``number``, if it is not gone."""
        return next((worker for worker in self.workers if worker.number == number), None)

    def get(self, number: int) -> Worker:
        """Worker ``number``. Raises ``KeyError`` where it is gone."""
        worker = self.find(number)
        if worker is None:
            raise KeyError(number)
        return worker

    def put(self, number: int, **facts: Any) -> Membership:
        """As this, with these facts about worker ``number``."""
        workers = (replace(worker, **facts) if worker.number == number else worker for worker in self.workers)
        return replace(self, workers=tuple(workers))

    def without(self, number: int) -> Membership:
        """As this, with worker ``number`` gone."""
        workers = tuple(worker for worker in self.workers if worker.number != number)
        return replace(self, workers=workers, capacity_stale=True)


def begin(
    workers: Sequence[int], low: int, high: int, most_losses: int = 8, meshes: MeshChoice | None = None
) -> Membership:
    """A run whose ``workers`` are being started. It may have from ``low`` to ``high`` of them."""
    numbers = sorted(set(workers))
    if not numbers or len(numbers) < len(workers) or numbers[0] < 0:
        raise ValueError(f"a run begins with workers of different numbers, not with {list(workers)}")
    if not 1 <= low <= high or most_losses < 1:
        raise ValueError(f"1 <= low <= high and most_losses >= 1 must hold, not {low}, {high}, {most_losses}")
    target = min(max(len(numbers), low), high)
    started = tuple(Worker(number) for number in numbers)
    return Membership(low, high, target, most_losses, numbers[-1] + 1, started, meshes=meshes or MeshChoice())
