"""What is known of a run's workers: the state of ``elastic.coordinator.machine``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal

from elastune.core.mesh_choice import MeshChoice
from elastune.elastic.protocol.view import View

Phase = Literal["starting", "connected", "ready", "member"]
Stage = Literal["open", "stopping", "finishing", "over"]


class ProtocolViolation(ValueError):
    """What was said contradicts what happened before: one side has a bug."""


NUMBER = attrgetter("number")


@dataclass(frozen=True)
class Numbers:
    """A set of worker numbers, a bit for each: one more costs next to nothing, however many there are."""

    bits: int = 0

    def __contains__(self, number: int) -> bool:
        return bool(self.bits >> number & 1)

    def __len__(self) -> int:
        return self.bits.bit_count()

    def plus(self, number: int) -> Numbers:
        """As this, with ``number``."""
        return Numbers(self.bits | 1 << number)


@dataclass(frozen=True)
class Worker:
    """A worker that is not gone. ``member``: it holds the run's state, or begins with the others of an initial view.

    ``preempted``: it will be taken away. ``to_replace``: another is to take its place, without hurry. ``excluded``: a
    view without it was installed while it was a member. ``host``: where it runs. ``late``: others of its host have
    waited for it for long enough.
    """

    number: int
    phase: Phase = "starting"
    preempted: bool = False
    to_replace: bool = False
    done: bool = False
    excluded: bool = False
    host: str = ""
    late: bool = False


@dataclass(frozen=True)
class Membership:
    """The state of the machine.

    ``workers``: all that are not gone, in the order of their numbers. ``current``: the newest complete view (all its
    members said Running), None while nobody holds state. ``proposed``: the newest view, as long as it is not complete,
    and ``running``: its members that have said Running. ``free``: how many more workers could be started;
    ``capacity_stale``: a worker has gone since that was told, so there may be more room by now. ``max_first_step``: the
    highest first step of any view; ``consecutive_failures``: breaks since it rose, or since a checkpoint or a report
    told of more steps than any before; ``failed_starts``: workers lost before they became members, since the last one
    that did. ``meshes``: how its workers are to stand.
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
    running: Numbers = Numbers()
    first_step: int = -1
    free: int = 0
    capacity_stale: bool = False
    max_first_step: int = -1
    consecutive_failures: int = 0
    failed_starts: int = 0
    stage: Stage = "open"
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

    @property
    def missing(self) -> int:
        """Workers that are to be started once there is room."""
        return max(0, self.target - len(self.wanted)) if self.stage == "open" else 0

    def find(self, number: int) -> Worker | None:
        """Worker ``number``, if it is not gone."""
        at = self._place(number)
        return self.workers[at] if at < len(self.workers) and self.workers[at].number == number else None

    @property
    def by_number(self) -> Mapping[int, Worker]:
        """All that are not gone: for those who look many up."""
        return {worker.number: worker for worker in self.workers}

    def get(self, number: int) -> Worker:
        """Worker ``number``. Raises ``KeyError`` where it is gone."""
        worker = self.find(number)
        if worker is None:
            raise KeyError(number)
        return worker

    def put(self, number: int, **facts: Any) -> Membership:
        """As this, with these facts about worker ``number``."""
        worker = self.find(number)
        if worker is None:
            return self
        at = self._place(number)
        return replace(self, workers=(*self.workers[:at], replace(worker, **facts), *self.workers[at + 1 :]))

    def put_all(self, numbers: Sequence[int], **facts: Any) -> Membership:
        """As this, with these facts about each of ``numbers``."""
        of = set(numbers)
        workers = (replace(worker, **facts) if worker.number in of else worker for worker in self.workers)
        return replace(self, workers=tuple(workers))

    def _place(self, number: int) -> int:
        """Where in ``workers`` a worker of this number stands, or would."""
        return bisect_left(self.workers, number, key=NUMBER)

    def without(self, number: int) -> Membership:
        """As this, with worker ``number`` gone."""
        workers = tuple(worker for worker in self.workers if worker.number != number)
        return replace(self, workers=workers, capacity_stale=True)


def begin(
    workers: Sequence[int], low: int, high: int, most_losses: int = 8, meshes: MeshChoice | None = None
) -> Membership:
    """A run whose ``workers`` are being started; none where they come back. It may have ``low`` to ``high`` of them."""
    numbers = sorted(set(workers))
    if len(numbers) < len(workers) or min(numbers, default=0) < 0:
        raise ValueError(f"a run begins with workers of different numbers, not with {list(workers)}")
    if not 1 <= low <= high or most_losses < 1:
        raise ValueError(f"1 <= low <= high and most_losses >= 1 must hold, not {low}, {high}, {most_losses}")
    target = min(max(len(numbers), low), high)
    started = tuple(Worker(number) for number in numbers)
    next_worker = max(numbers, default=-1) + 1
    return Membership(low, high, target, most_losses, next_worker, started, meshes=meshes or MeshChoice())
