"""A cluster of any hosts: it has the workers of the agents that have come to it."""

from __future__ import annotations

import os
import resource
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from elastune.cluster.agents.launcher import AgentLauncher
from elastune.cluster.agents.paid import members_on_spot, rooms_paid, workers_held
from elastune.cluster.agents.run_folder import place, remember, sweep
from elastune.cluster.base import Handle, LeftRun
from elastune.cluster.elastic_cluster import ElasticCluster
from elastune.cluster.elastic_run import ElasticRun
from elastune.cluster.spot_watch import Seen, SpotWatch
from elastune.cluster.worker import WORK
from elastune.core.errors import UserError
from elastune.core.run import RunSpec
from elastune.elastic.protocol.client import Contact
from elastune.train.machine import software

if TYPE_CHECKING:
    from elastune.cluster.transfer.pushed import PushedFiles

LOOK_S = 0.2
SPOT_LOOK_S = 1.0
DESCRIPTORS = 1 << 17  # where the system sets no limit


class HostsCluster(ElasticCluster):
    """Agents come to ``address``:``port`` with ``token``, at any time; coordinators of runs listen on ``address`` too.
    ``tls``: the certificate that ``token`` names, if it does.

    A run that may have more workers than it begins with takes those of agents that come later, and of agents that come
    in place of lost ones. ``grows``: false where somebody else gives the workers out. ``grace_s``: how long agents and
    their workers go on without a controller, and look for the next one here. ``gather_s``: how long a run waits for
    agents with room for its first workers. ``tell``: is called with one line whenever an agent comes or goes. ``spot``:
    says how many workers on on-demand hosts the one run may have; without it all are used alike. ``out``: the folder of
    results, which hosts are asked about before they get workers. ``own_folders``: they do not see it, so their agents
    push checkpoints here, and fetch them; None: where the first of them that answer do not. Raises ``UserError`` where
    it cannot listen.
    """

    launcher: AgentLauncher
    varies = True

    def __init__(
        self,
        address: str,
        port: int,
        token: str,
        *,
        tls: ssl.SSLContext | None = None,
        entry: str = WORK,
        silence_s: float = 30.0,
        grows: bool = True,
        grace_s: float = 0.0,
        gather_s: float = 0.0,
        tell: Callable[[str], None] = lambda line: None,
        spot: SpotWatch | None = None,
        out: Path | None = None,
        own_folders: bool | None = False,
    ) -> None:
        allow_many_connections()

        def push() -> PushedFiles:
            from elastune.cluster.transfer.pushed import PushedFiles  # here: its messages take a tenth of a second

            return PushedFiles(address, token, tls, tell)

        self._push = push
        self._pushed = push() if own_folders else None
        files_port = self._pushed.port if self._pushed else 0
        try:
            launcher = AgentLauncher(
                address, port, token, tls=tls, versions=software(), grace_s=grace_s, files_port=files_port, tell=tell
            )
        except UserError:
            if self._pushed:
                self._pushed.close()
            raise
        if self._pushed:
            self._pushed.ring = launcher.ring
        super().__init__(launcher, host=address, entry=entry, silence_s=silence_s)
        launcher.runs = self._reached
        self._grows = grows
        self._gather_s = gather_s
        self._tell, self._spot, self._next_spot, self._spent = tell, spot, 0.0, False
        self._results, self._undecided, self._mark = out, own_folders is None, None
        if out is not None:
            try:
                self._mark = None if own_folders else place(out)
            except UserError:
                HostsCluster.close(self)
                raise
            self.launcher.look_for(*(("", "") if self._mark is None else (str(self._mark.path), self._mark.text)))

    def _reached(self) -> dict[Path, Contact]:
        runs = [run for run in self._runs.values() if not run.over]
        return {run.spec.out: Contact(run.coordinator.address, run.coordinator.token) for run in runs}

    @property
    def host_rooms(self) -> tuple[int, ...]:
        return self.launcher.room.by_host

    @property
    def rooms(self) -> Mapping[str, int]:
        return rooms_paid(self.launcher.agents.values())

    def held(self, handle: Handle) -> Mapping[str, int]:
        assert isinstance(handle, ElasticRun)
        return workers_held(self.launcher.agents.values(), handle.coordinator.address)

    def start(self, spec: RunSpec) -> ElasticRun:
        if self._gather_s:
            self.gather(spec.means.workers, self._gather_s)
        return self._grown(super().start(spec))

    def adopt(self, left: Sequence[LeftRun]) -> list[Handle | None]:
        found = super().adopt(left)
        for one, run in zip(left, found, strict=True):
            if isinstance(run, ElasticRun):
                self._grown(run)
            elif self._pushed:
                self._pushed.forget(one.spec.out.resolve())
        return found

    def _grown(self, run: ElasticRun) -> ElasticRun:
        if self._grows and run.high > run.spec.means.workers:
            run.resize(run.high, "as many as there is room for")
        return run

    def _add(self, run: ElasticRun, *, goes_on: bool = False) -> None:
        super()._add(run, goes_on=goes_on)
        if self._results is not None:  # and nobody else has the run: its journal was locked before
            remember(self._results, local=self._pushed is not None)
            sweep(self._results, self._mark)
        self._undecided = False
        if self._pushed:
            self._pushed.add(run, goes_on=goes_on)

    def pump(self, timeout_s: float) -> None:
        super().pump(timeout_s)
        for host in self.launcher.strangers():
            self._heed_stranger(host)
        if self._pushed:  # after the launcher's news: who has ended there has had all of its files taken before
            self._pushed.look()
        if self._spot is not None and time.monotonic() >= self._next_spot:
            self._next_spot = time.monotonic() + SPOT_LOOK_S
            self._weigh(self._spot)

    def _heed_stranger(self, host: str) -> None:
        """``host`` does not see the output folder."""
        assert self._results is not None
        if self._pushed is not None:
            return  # another one did not, either, a moment ago
        told = f"host {host} does not see {self._results.resolve()}"
        if not self._undecided:
            self._tell(f"{told}, and gets no workers: share that folder, or say folder=local where there is none")
            return
        self._tell(f"{told}: folder=local is used, agents push checkpoints to this machine")
        self._pushed = self._push()
        self._pushed.ring = self.launcher.ring
        self._unmark()
        self.launcher.take_files(self._pushed.port)

    def _unmark(self) -> None:
        if self._mark is not None:
            self._mark.remove()
            self._mark = None

    def _weigh(self, spot: SpotWatch) -> None:
        """Let the run have the on-demand workers that it needs, and no others."""
        launcher, room = self.launcher, self.launcher.room
        for run in [run for run in self._runs.values() if not run.over]:
            known = [steps for steps in (run.said.planned_steps, run.spec.max_steps) if steps is not None]
            planned = min(known, default=None)
            choice = spot.look(Seen(room.by_kind, room.on_demand, len(run.members), run.step, planned))
            if choice is None:
                continue
            if spot.spent >= spot.rules.budget and not self._spent:
                self._spent = True
                self._tell(f"the budget is spent: {spot.spent:.2f}")
                run.stop()
            # Its state lies in its workers: who is not replaced yet stays, however much time there is.
            needed = run.low - members_on_spot(launcher.agents.values(), run.coordinator.address, run.members)
            launcher.bound_on_demand(max(choice.on_demand, needed), "the deadline can be met without it")

    def close(self) -> None:
        super().close()
        if os.getpid() == self._owner:
            self._unmark()
        if self._pushed and os.getpid() == self._owner:
            self._pushed.close()

    def gather(self, workers: int, limit_s: float, ends: Callable[[], bool] = lambda: False) -> int:
        """Wait until there is room for ``workers``, or ``ends``; how much there is. Raises ``UserError`` after
        ``limit_s``."""
        until = time.monotonic() + limit_s
        while self.free < workers and not ends():
            if time.monotonic() >= until:
                rule = f"agents with room for {workers} workers must come within {limit_s:g} s"
                raise UserError(rule, f"room for {self.free}", "start them: elastune agent --join ... --token-file ...")
            self.pump(LOOK_S)
        return self.free

    def gathered(self, workers: int, limit_s: float) -> Self:
        """This cluster with room for ``workers``. Raises ``UserError`` after ``limit_s``: it is closed then."""
        try:
            self.gather(workers, limit_s)
        except BaseException:
            self.close()
            raise
        return self


def allow_many_connections() -> None:
    """Let this process have as many descriptors as the system allows it, if it does not yet: each agent takes one, and
    each worker. Many systems begin with 1,024."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if most == resource.RLIM_INFINITY else most
    if now not in (resource.RLIM_INFINITY, wanted):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
