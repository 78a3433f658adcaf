"""A cluster that only reckons: what its runs would do, told in the order in which it would happen, on a virtual clock.

Drivers, policies of search and brokers run on it unchanged, thousands of workers in seconds.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from elastune.cluster.base import Cluster, Handle
from elastune.core.clock import VirtualClock
from elastune.core.errors import UserError
from elastune.core.run import RunSpec
from elastune.simulate.handle import SimulatedHandle
from elastune.simulate.trial_model import TrialModel


@dataclass(frozen=True)
class Losses:
    """Workers die: each after ``every_s`` seconds on average, independently (exponential). ``seed`` decides when."""

    every_s: float = math.inf
    seed: int = 0


class SimulatedCluster(Cluster):
    """Room for ``capacity`` simulated workers, whose trials go as ``model`` says.

    ``clock`` is the time of all; ``wait`` moves it. Nobody else need.
    """

    patience_s = math.inf

    def __init__(
        self, capacity: int, model: TrialModel, clock: VirtualClock | None = None, losses: Losses | None = None
    ) -> None:
        if capacity < 1:
            raise UserError("a cluster needs room for at least one worker", capacity, "give a capacity of 1 or more")
        self.capacity = capacity
        self.model = model
        self.clock = clock or VirtualClock()
        self.losses = losses or Losses()
        self._used = 0
        self._busy_s = 0.0
        self._busy_at = self.clock.now()
        self._due: list[tuple[float, int, int, SimulatedHandle]] = []  # when, in which order, of which plan, whose
        self._order = 0
        self._runs: dict[SimulatedHandle, None] = {}
        self._hungry: dict[SimulatedHandle, None] = {}
        self._news: dict[Handle, None] = {}
        self._closed = False

    @property
    def free(self) -> int:
        """Workers that could be started now."""
        return self.capacity - self._used

    @property
    def busy_s(self) -> float:
        """Worker-seconds that runs have had until now, those of starting and of pauses included."""
        return self._busy_s + self._used * (self.clock.now() - self._busy_at)

    def start(self, spec: RunSpec) -> SimulatedHandle:
        if self._closed:
            raise RuntimeError("this cluster was closed")
        count = spec.means.workers
        if not 1 <= count <= self.free:
            rule = f"workers must be from 1 to the {self.free} that are free of {self.capacity} simulated ones"
            raise UserError(rule, count, "ask for fewer, or simulate a larger cluster")
        run = SimulatedHandle(spec, self)
        self._runs[run] = None
        run.begin()
        return run

    def wait(self, timeout_s: float) -> None:
        """Go on to the next moment at which a run has news, at most ``timeout_s``. Without any to come, an endless wait
        returns at once."""
        until = self.clock.now() + timeout_s
        while not self._news and self._due and self._due[0][0] <= until:
            self._happen(self._due[0][0])
        if not self._news and until < math.inf:
            self.clock.advance_to(until)

    def news(self) -> list[Handle]:
        """The runs that have events to poll."""
        return list(self._news)

    def close(self) -> None:
        for run in list(self._runs):
            run.kill()
        self._closed = True

    # -- for the runs -------------------------------------------------------------------------------------------------

    def schedule(self, at: float, plan: int, run: SimulatedHandle) -> None:
        """Wake ``run`` at time ``at``, unless its plans have changed by then."""
        self._order += 1
        heapq.heappush(self._due, (max(at, self.clock.now()), self._order, plan, run))

    def hold(self, more: int) -> None:
        """A run has so many workers more (or fewer) from now on."""
        now = self.clock.now()
        self._busy_s += self._used * (now - self._busy_at)
        self._used, self._busy_at = self._used + more, now
        if more < 0:
            for run in list(self._hungry):
                run.room()

    def tell(self, run: SimulatedHandle, has_news: bool) -> None:
        """Whether ``run`` has events to poll."""
        if has_news:
            self._news[run] = None
        else:
            self._news.pop(run, None)

    def want(self, run: SimulatedHandle, more: bool) -> None:
        """Whether ``run`` waits for workers that are not free."""
        if more:
            self._hungry[run] = None
        else:
            self._hungry.pop(run, None)

    def forget(self, run: SimulatedHandle) -> None:
        """``run`` is over."""
        self._hungry.pop(run, None)
        self._runs.pop(run, None)

    def _happen(self, at: float) -> None:
        """All that happens at this moment."""
        self.clock.advance_to(at)
        while self._due and self._due[0][0] <= at:
            _, _, plan, run = heapq.heappop(self._due)
            run.wake(plan)
