"""A cluster that only calculates: what its runs would do, in the order in which it would happen, on a virtual clock.

Study loops, samplers and the allocation of workers run on it unchanged, thousands of workers in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from elastune.cluster.base import Cluster, Handle, LeftRun, NoRoomError
from elastune.core.clock import VirtualClock
from elastune.core.cost import UNTOLD
from elastune.core.errors import UserError
from elastune.core.run import RunSpec
from elastune.simulate.handle import SimulatedHandle
from elastune.simulate.rerun import run_again
from elastune.simulate.trial_model import TrialModel
from elastune.simulate.world import Losses, World


class SimulatedCluster(Cluster):
    """Room for ``capacity`` simulated workers, whose trials go as ``model`` says.

    ``clock`` is the time of all; ``wait`` moves it, and nobody else needs to.
    """

    patience_s = math.inf

    def __init__(
        self, capacity: int, model: TrialModel, clock: VirtualClock | None = None, losses: Losses | None = None
    ) -> None:
        if capacity < 1:
            raise UserError("a cluster needs room for at least one worker", capacity, "give a capacity of 1 or more")
        self.clock = clock or VirtualClock()
        self._world: World[SimulatedHandle] = World(capacity, model, self.clock, losses or Losses())
        self._closed = False

    @property
    def capacity(self) -> int:
        return self._world.capacity

    @property
    def free(self) -> int:
        """Workers that could be started now."""
        return self._world.free

    @property
    def busy_s(self) -> float:
        """Worker-seconds that runs have had until now, those of starting and of pauses included."""
        return self._world.busy_s

    def held(self, handle: Handle) -> Mapping[str, int]:
        return {UNTOLD: handle.alive}

    def start(self, spec: RunSpec) -> SimulatedHandle:
        if self._closed:
            raise RuntimeError("this cluster was closed")
        count = spec.means.workers
        if not 1 <= count <= self.free:
            rule = f"workers must be from 1 to the {self.free} that are free of {self.capacity} simulated ones"
            raise NoRoomError(rule, count, "ask for fewer, or simulate a larger cluster")
        run = SimulatedHandle(spec, self._world)
        self._world.runs[run] = None
        run.begin()
        return run

    def adopt(self, left: Sequence[LeftRun]) -> list[Handle | None]:
        """All of them go on as if nothing had happened, unless their workers change: nobody kept how."""
        if self._world.losses.every_s < math.inf or any(one.spec.elastic.high is not None for one in left):
            return [None for _ in left]
        runs = run_again(left, self._world)
        self._world.runs |= dict.fromkeys(runs)
        return list(runs)

    def wait(self, timeout_s: float) -> None:
        """Go on to the next moment at which a run has news, at most ``timeout_s``.

        An endless wait returns at once where none will ever have any.
        """
        self._world.go_on(self.clock.now() + timeout_s)

    def news(self) -> list[Handle]:
        """The runs that have events to poll."""
        return list(self._world.news)

    def close(self) -> None:
        for run in list(self._world.runs):
            run.kill()
        self._closed = True
