"""``hosts:PORT``: workers run on the machines whose agents come to this port.

``HostsCluster`` is also what Slurm, Ray and detached local workers build on. Where hosts do not see the folder of
the run, ``TransferredRuns`` receives the checkpoints that their agents send.
"""

from __future__ import annotations

import os
import resource
import ssl
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from elastune.core.cost import SPOT
from elastune.core.errors import UserError
from elastune.core.run import RunSpec
from elastune.elastic.wire.contact import Contact
from elastune.elastic.wire.handshake import SALT_DIGITS
from elastune.runtime.agents.host_report import HostReport, place, remove_stale_markers, write_folder_mode
from elastune.runtime.agents.hosts import AgentHost
from elastune.runtime.agents.launcher import AgentLauncher
from elastune.runtime.agents.transfer_server import FileTransferServer
from elastune.runtime.clusters.base import Handle, SurvivingRun
from elastune.runtime.clusters.elastic_cluster import ElasticCluster
from elastune.runtime.clusters.kind import Access, CapacityRequest, ClusterKind, Folder, has_own_folders
from elastune.runtime.elastic_run import ElasticRun
from elastune.runtime.spot import SpotState, SpotWatch
from elastune.runtime.worker import WORK
from elastune.train.machine import software

# The files that agents push, and the runs that they are of.


class TransferredRuns:
    """Of the runs of one controller. ``address``, ``token``, ``tls``: see ``FileTransferServer``; ``tell`` takes lines
    for the user. ``ring``: has the controller look; any thread calls it."""

    def __init__(self, address: str, token: str, tls: ssl.SSLContext | None, tell: Callable[[str], None]) -> None:
        self.ring: Callable[[], None] = lambda: None
        self._tell = tell
        self._server = FileTransferServer(address, token, tls=tls, ring=lambda: self.ring(), tell=tell)
        self.port = self._server.port
        self._runs: dict[str, ElasticRun] = {}  # by the salts of their tokens, which agents know

    def add(self, run: ElasticRun, *, goes_on: bool) -> None:
        """Take what is pushed of ``run``. ``goes_on``: a controller before this one had it."""
        salt = run.coordinator.token[:SALT_DIGITS]
        self._runs[salt] = run
        self._server.open_run(salt, run.spec.out, run.spec.parent, goes_on=goes_on)

    def forget(self, out: Path) -> None:
        """Nobody goes on with the run in ``out``: what may still come of it is not to meet what begins there now."""
        for salt in [salt for salt, run in self._runs.items() if run.spec.out == out]:
            del self._runs[salt]
            self._server.close_run(salt)

    def look(self) -> None:
        """Tell runs what has come of their checkpoints, and take no more of those that are over."""
        for salt, record in self._server.news():
            if salt in self._runs:
                self._runs[salt].tell(record)
        for salt, run in list(self._runs.items()):
            if run.closed:
                del self._runs[salt]
                for lacks in self._server.close_run(salt):
                    self._tell(f"{run.spec.out.name}: a checkpoint is not complete, and is not used: {lacks}")

    def close(self) -> None:
        """Idempotent."""
        self._server.close()


# Hosts that have come, by their kind: what is paid for (all their room, used or not), and whom they have.


def rooms_paid(agents: Iterable[AgentHost]) -> dict[str, int]:
    """Workers that there is room for on all hosts that are there, those too that will go and get no more workers."""
    found: Counter[str] = Counter()
    for agent in agents:
        found[agent.kind] += max(agent.room, len(agent.workers) + agent.unnamed)
    return dict(found)


def members_on_spot(agents: Iterable[AgentHost], coordinator: str, members: Collection[int]) -> int:
    """How many ``members`` of the run whose coordinator listens at that address are on spot hosts that stay."""
    staying = (agent for agent in agents if agent.kind == SPOT and not agent.notice)
    own = (worker for agent in staying for worker in agent.workers.values() if worker.coordinator == coordinator)
    return sum(worker.worker in members for worker in own)


def workers_held(agents: Iterable[AgentHost], coordinator: str) -> dict[str, int]:
    """Workers of the run whose coordinator listens at that address, from the moment that a host was told to start
    them until it has told of their end."""
    found: Counter[str] = Counter()
    for agent in agents:
        found[agent.kind] += sum(worker.coordinator == coordinator for worker in agent.workers.values())
    return {kind: workers for kind, workers in found.items() if workers}


# A cluster of any hosts: it has the workers of the agents that have come to it.

if TYPE_CHECKING:
    pass
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

        def push() -> TransferredRuns:

            return TransferredRuns(address, token, tls, tell)

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
            self.gather(spec.execution.workers, self._gather_s)
        return self._grown(super().start(spec))

    def adopt(self, left: Sequence[SurvivingRun]) -> list[Handle | None]:
        found = super().adopt(left)
        for one, run in zip(left, found, strict=True):
            if isinstance(run, ElasticRun):
                self._grown(run)
            elif self._pushed:
                self._pushed.forget(one.spec.out.resolve())
        return found

    def _grown(self, run: ElasticRun) -> ElasticRun:
        if self._grows and run.high > run.spec.execution.workers:
            run.resize(run.high, "as many as there is room for")
        return run

    def _add(self, run: ElasticRun, *, goes_on: bool = False) -> None:
        super()._add(run, goes_on=goes_on)
        if self._results is not None:  # and nobody else has the run: its journal was locked before
            write_folder_mode(self._results, local=self._pushed is not None)
            remove_stale_markers(self._results, self._mark)
        self._undecided = False
        if self._pushed:
            self._pushed.add(run, goes_on=goes_on)

    def pump(self, timeout_s: float) -> None:
        super().pump(timeout_s)
        for host in self.launcher.hosts_without_folder():
            self._check_host_without_folder(host)
        if self._pushed:  # after the launcher's news: who has ended there has had all of its files taken before
            self._pushed.look()
        if self._spot is not None and time.monotonic() >= self._next_spot:
            self._next_spot = time.monotonic() + SPOT_LOOK_S
            self._weigh(self._spot)

    def _check_host_without_folder(self, host: str) -> None:
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
            known = [steps for steps in (run.record_filter.planned_steps, run.spec.max_steps) if steps is not None]
            planned = min(known, default=None)
            choice = spot.look(SpotState(room.by_kind, room.on_demand, len(run.members), run.step, planned))
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


# ``hosts:PORT``: workers run wherever somebody starts agents that come to this port.

NOBODYS = "-"  # the text of no file


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class HostsKind(ClusterKind):
    """``port``: where agents come to. ``token_file``, ``interface``, ``tls``: see ``Access``, which has precedence.

    ``folder``: "local" where hosts do not see the run's folder: their agents then push checkpoints to the controller;
    "shared": they have to see it. By default the first that come are asked.
    """

    port: Annotated[int, Field(ge=1, le=65535)]
    token_file: Path | None = None
    interface: str | None = None
    tls: bool = False
    folder: Folder = "auto"

    name = "hosts"
    form = "hosts:PORT[,token_file=FILE,interface=NAME,tls=true,folder=local], such as hosts:7070"
    first = "port"

    @property
    def reports_host_kind(self) -> bool:
        return True

    def check(self, access: Access) -> None:
        if access.token_file is None and self.token_file is None:
            raise UserError("a cluster of agents needs a secret", "no --token-file", "--token-file FILE, made if new")

    def open(self, access: Access, room: CapacityRequest) -> HostsCluster:
        later_s = access.gather_s if room.adopts and room.grows else 0.0  # who gives workers out waits by himself
        own = has_own_folders(self.folder, room)
        cluster = self.listen(
            access,
            grows=room.grows,
            grace_s=room.grace_s,
            spot=room.spot,
            gather_s=later_s,
            out=room.out,
            own_folders=own,
        )
        if room.adopts:
            return cluster
        access.tell(f"waiting for agents with room for {room.workers} workers: {self.join_command(access)}")
        return cluster.gathered(room.workers, access.gather_s)

    def listen(
        self,
        access: Access,
        *,
        grows: bool = True,
        grace_s: float = 0.0,
        gather_s: float = 0.0,
        spot: SpotWatch | None = None,
        out: Path | None = None,
        own_folders: bool | None = False,
    ) -> HostsCluster:
        """The cluster before any agent has come. ``out``, ``own_folders``: as of ``HostsCluster``. Raises
        ``UserError``."""
        from elastune.runtime.agents.credentials import credentials

        self.check(access)
        access = self._completed(access)
        assert access.token_file is not None
        address, own = self._address(access), credentials(access.token_file, tls=access.tls)
        return HostsCluster(
            address,
            self.port,
            own.token,
            tls=own.tls,
            grows=grows,
            grace_s=grace_s,
            gather_s=gather_s,
            tell=access.tell,
            spot=spot,
            out=out,
            own_folders=own_folders,
        )

    def inspect(self, access: Access, out: Path | None) -> list[HostReport]:
        cluster = self.listen(access)
        with cluster, _marked(None if self.folder == "local" else out) as (path, text):
            access.tell(f"listening for agents for {access.gather_s:g} s: {self.join_command(access)}")
            until = time.monotonic() + access.gather_s
            while (left_s := until - time.monotonic()) > 0:
                cluster.pump(min(left_s, LOOK_S))
                cluster.launcher.probe(path, text)
            return cluster.launcher.reports

    def join_command(self, access: Access) -> str:
        """What is to be run on each host."""
        access = self._completed(access)
        address = self._address(access)
        where = f"[{address}]" if ":" in address else address
        return f"elastune agent --join {where}:{self.port} --token-file {access.token_file}"

    def _completed(self, access: Access) -> Access:
        token_file, interface = access.token_file or self.token_file, access.interface or self.interface
        return replace(access, token_file=token_file, interface=interface, tls=access.tls or self.tls)

    def _address(self, access: Access) -> str:
        from elastune.parallel.comm.sockets import address_of

        return "127.0.0.1" if access.interface is None else address_of(access.interface)


@contextmanager
def _marked(folder: Path | None) -> Iterator[tuple[str, str]]:
    """A file in ``folder``, while the block lasts, and the text that nobody else would write into it; "" without."""
    if folder is None:
        yield "", NOBODYS
        return
    mark = place(folder)
    try:
        yield str(mark.path), mark.text
    finally:
        mark.remove()
