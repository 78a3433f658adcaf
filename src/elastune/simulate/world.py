"""What all runs of a simulated cluster share: its clock and agenda, its workers, and who has news."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from elastune.core.clock import VirtualClock
from elastune.simulate.trial_model import TrialModel


@dataclass(frozen=True)
class Losses:
    """Workers die: each after ``every_s`` seconds on average, independently (exponential). ``seed`` decides when."""

    every_s: float = math.inf
    seed: int = 0


class SimulatedRun(Protocol):
    """What the world asks of a run."""

    def wake(self, plan: int) -> None:
        """The moment of plan number ``plan`` has come."""
        ...

    def room(self) -> None:
        """Workers have become free."""
        ...


R = TypeVar("R", bound=SimulatedRun)


class World(Generic[R]):
    """Time and ``capacity`` workers for runs that go as ``model`` says."""

    def __init__(self, capacity: int, model: TrialModel, clock: VirtualClock, losses: Losses) -> None:
        self.capacity = capacity
        self.model = model
        self.clock = clock
        self.losses = losses
        self.news: dict[R, None] = {}  # runs that have events to poll
        self.runs: dict[R, None] = {}
        self._used = 0
        self._busy_s = 0.0
        self._busy_at = clock.now()
        self._due: list[tuple[float, int, int, R]] = []  # when, in which order, of which plan, whose
        self._order = 0
        self._waiting: dict[R, None] = {}

    @property
    def free(self) -> int:
        """Workers that no run has."""
        return self.capacity - self._used

    @property
    def busy_s(self) -> float:
        """Worker-seconds that runs have had until now, those of starting and of pauses included."""
        return self._busy_s + self._used * (self.clock.now() - self._busy_at)

    def go_on(self, until_s: float) -> None:
        """Move the clock to the next moment at which a run has news, at most to ``until_s``."""
        while not self.news and self._due and self._due[0][0] <= until_s:
            at = self._due[0][0]
            self.clock.advance_to(at)
            while self._due and self._due[0][0] <= at:
                _, _, plan, run = heapq.heappop(self._due)
                run.wake(plan)
        if not self.news and until_s < math.inf:
            self.clock.advance_to(until_s)

    def schedule(self, at: float, plan: int, run: R) -> None:
        """Wake ``run`` at time ``at``, unless its plans have changed by then."""
        self._order += 1
        heapq.heappush(self._due, (max(at, self.clock.now()), self._order, plan, run))

    def hold(self, more: int) -> None:
        """A run has ``more`` workers more (or fewer) from now on."""
        now = self.clock.now()
        self._busy_s += self._used * (now - self._busy_at)
        self._used, self._busy_at = self._used + more, now
        if more < 0:
            for run in list(self._waiting):
                run.room()

    def tell(self, run: R, has_news: bool) -> None:
        """Whether ``run`` has events to poll."""
        if has_news:
            self.news[run] = None
        else:
            self.news.pop(run, None)

    def want(self, run: R, more: bool) -> None:
        """Whether ``run`` waits for workers that are not free."""
        if more:
            self._waiting[run] = None
        else:
            self._waiting.pop(run, None)

    def count_from_now(self) -> None:
        """What workers did until now was somebody else's study to count."""
        self._busy_s, self._busy_at = 0.0, self.clock.now()

    def forget(self, run: R) -> None:
        """``run`` is over."""
        self._waiting.pop(run, None)
        self.runs.pop(run, None)
