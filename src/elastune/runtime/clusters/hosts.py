"""``hosts:PORT``: workers run on the machines whose agents connect to this port of the controller.

``HostsKind`` is the cluster's name with its settings, ``HostsCluster`` the open cluster. Slurm, Ray and detached local
workers build on ``HostsCluster``. Where hosts do not see the output folder, ``TransferredRuns`` receives the
checkpoints that their agents push. An agent's room is the number of workers that its host takes.
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
from typing import Annotated, Self

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from elastune.core.cost import SPOT
from elastune.core.errors import UserError
from elastune.core.journal import logs
from elastune.core.run import RunSpec
from elastune.elastic.wire.contact import SALT_DIGITS, Contact
from elastune.runtime.agents.host_report import HostReport, place_marker, remove_stale_markers, write_folder_mode
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

LOOK_S = 0.2  # between two looks at the agents while waiting
SPOT_LOOK_S = 1.0  # between two decisions of ``SpotWatch``
DESCRIPTORS = 1 << 17  # where the system sets no limit
NO_TEXT = "-"  # the text of no marker


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class HostsKind(ClusterKind):
    """The settings of a cluster ``hosts:PORT``. The same settings of ``Access`` have precedence.

    Attributes:
        port: The port to which agents connect.
        token_file: As of ``Access``.
        interface: As of ``Access``.
        tls: As of ``Access``.
        folder: "local": hosts do not see the output folder, so their agents push checkpoints to the controller.
            "shared": hosts must see it. "auto": the first hosts that come decide.
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
        # A caller that distributes the workers (not ``grows``) waits itself.
        gather_s = access.gather_s if room.adopts and room.grows else 0.0
        own_folders = has_own_folders(self.folder, room)
        cluster = self.listen(
            access,
            grows=room.grows,
            grace_s=room.grace_s,
            spot=room.spot,
            gather_s=gather_s,
            out=room.out,
            own_folders=own_folders,
        )
        if room.adopts:
            return cluster
        access.notify(f"waiting for agents with room for {room.workers} workers: {self.join_command(access)}")
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
        """Open the cluster without waiting for agents.

        Args:
            access: The secret, the network interface, and where lines for the user go.
            grows: As of ``HostsCluster``, like all further arguments.

        Raises:
            UserError: As of ``check`` and ``HostsCluster``.
        """
        from elastune.runtime.agents.credentials import credentials

        self.check(access)
        access = self._completed(access)
        assert access.token_file is not None
        address, secrets = self._address(access), credentials(access.token_file, tls=access.tls)
        return HostsCluster(
            address,
            self.port,
            secrets.token,
            tls=secrets.tls,
            grows=grows,
            grace_s=grace_s,
            gather_s=gather_s,
            notify=access.notify,
            spot=spot,
            out=out,
            own_folders=own_folders,
        )

    def inspect(self, access: Access, out: Path | None) -> list[HostReport]:
        cluster = self.listen(access)
        with cluster, _marker_in(None if self.folder == "local" else out) as (path, text):
            access.notify(f"listening for agents for {access.gather_s:g} s: {self.join_command(access)}")
            until = time.monotonic() + access.gather_s
            while (left_s := until - time.monotonic()) > 0:
                cluster.pump(min(left_s, LOOK_S))
                cluster.launcher.probe(path, text)
            return cluster.launcher.reports

    def join_command(self, access: Access) -> str:
        """The command line that starts an agent on a host."""
        access = self._completed(access)
        address = self._address(access)
        host = f"[{address}]" if ":" in address else address
        return f"elastune agent --join {host}:{self.port} --token-file {access.token_file}"

    def _completed(self, access: Access) -> Access:
        token_file, interface = access.token_file or self.token_file, access.interface or self.interface
        return replace(access, token_file=token_file, interface=interface, tls=access.tls or self.tls)

    def _address(self, access: Access) -> str:
        from elastune.parallel.comm.sockets import address_of

        return "127.0.0.1" if access.interface is None else address_of(access.interface)


@contextmanager
def _marker_in(folder: Path | None) -> Iterator[tuple[str, str]]:
    """The path and text of a marker file that is in ``folder`` during the block. Without a folder the path is ""."""
    if folder is None:
        yield "", NO_TEXT
        return
    marker = place_marker(folder)
    try:
        yield str(marker.path), marker.text
    finally:
        marker.remove()


class HostsCluster(ElasticCluster):
    """A cluster of all hosts whose agents connect to ``address``:``port`` with ``token``, at any time.

    A run that may have more workers than it begins with gets those of agents that come later, also in place of lost
    workers. The coordinators of the runs listen on ``address`` too.

    Args:
        address: The address to listen on.
        port: The port for agents.
        token: The secret that agents must have.
        tls: The certificate that ``token`` names, if it names one.
        entry: The ``module:function`` that a worker runs.
        silence_s: As of ``ElasticRun``.
        grows: Whether a run gets all room that there is; False where the caller distributes the workers.
        grace_s: How long agents and their workers continue without a controller, and look for the next one.
        gather_s: How long a run waits for agents with room for its first workers.
        notify: Called with one line whenever an agent comes or goes.
        spot: Decides how many workers on on-demand hosts the run may have; None: it may use all hosts alike.
        out: The output folder. Each host is asked whether it sees this folder before it gets workers.
        own_folders: Whether hosts do not see the output folder, so that their agents push checkpoints to the controller
            and fetch them from it. None: the first hosts that answer decide.

    Raises:
        UserError: It cannot listen, or the output folder cannot be written.
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
        notify: Callable[[str], None] = lambda line: None,
        spot: SpotWatch | None = None,
        out: Path | None = None,
        own_folders: bool | None = False,
    ) -> None:
        allow_many_connections()

        def receive() -> TransferredRuns:
            return TransferredRuns(address, token, tls, notify)

        self._receive = receive
        self._received = receive() if own_folders else None
        files_port = self._received.port if self._received else 0
        try:
            launcher = AgentLauncher(
                address,
                port,
                token,
                tls=tls,
                versions=software(),
                grace_s=grace_s,
                files_port=files_port,
                notify=notify,
            )
        except UserError:
            if self._received:
                self._received.close()
            raise
        if self._received:
            self._received.ring = launcher.ring
        super().__init__(launcher, host=address, entry=entry, silence_s=silence_s)
        launcher.runs = self._contacts
        self._grows = grows
        self._gather_s = gather_s
        self._notify = logs.logged(__name__, notify)
        self._spot, self._next_spot, self._spent = spot, 0.0, False
        self._results, self._undecided, self._marker = out, own_folders is None, None
        if out is not None:
            try:
                self._marker = None if own_folders else place_marker(out)
            except UserError:
                HostsCluster.close(self)
                raise
            self.launcher.look_for(*(("", "") if self._marker is None else (str(self._marker.path), self._marker.text)))

    def _contacts(self) -> dict[Path, Contact]:
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
        adopted = super().adopt(left)
        for surviving, run in zip(left, adopted, strict=True):
            if isinstance(run, ElasticRun):
                self._grown(run)
            elif self._received:
                self._received.forget(surviving.spec.out.resolve())
        return adopted

    def _grown(self, run: ElasticRun) -> ElasticRun:
        if self._grows and run.high > run.spec.execution.workers:
            run.resize(run.high, "as many as there is room for")
        return run

    def _add(self, run: ElasticRun, *, goes_on: bool = False) -> None:
        super()._add(run, goes_on=goes_on)
        if self._results is not None:  # the journal's lock keeps other controllers out
            write_folder_mode(self._results, local=self._received is not None)
            remove_stale_markers(self._results, self._marker)
        self._undecided = False
        if self._received:
            self._received.add(run, goes_on=goes_on)

    def pump(self, timeout_s: float) -> None:
        super().pump(timeout_s)
        for host in self.launcher.hosts_without_folder():
            self._check_host_without_folder(host)
        if self._received:  # after the launcher's events: an end comes after all files of its worker
            self._received.look()
        if self._spot is not None and time.monotonic() >= self._next_spot:
            self._next_spot = time.monotonic() + SPOT_LOOK_S
            self._weigh(self._spot)

    def _check_host_without_folder(self, host: str) -> None:
        """Use or refuse ``host``, which does not see the output folder."""
        assert self._results is not None
        if self._received is not None:
            return  # an earlier host has decided already
        problem = f"host {host} does not see {self._results.resolve()}"
        if not self._undecided:
            self._notify(f"{problem}, and gets no workers: share that folder, or say folder=local where there is none")
            return
        self._notify(f"{problem}: folder=local is used, agents push checkpoints to this machine")
        self._received = self._receive()
        self._received.ring = self.launcher.ring
        self._remove_marker()
        self.launcher.take_files(self._received.port)

    def _remove_marker(self) -> None:
        if self._marker is not None:
            self._marker.remove()
            self._marker = None

    def _weigh(self, spot: SpotWatch) -> None:
        """Limit each run to the on-demand workers that ``spot`` chooses."""
        launcher, room = self.launcher, self.launcher.room
        for run in [run for run in self._runs.values() if not run.over]:
            limits = [steps for steps in (run.record_filter.planned_steps, run.spec.max_steps) if steps is not None]
            planned = min(limits, default=None)
            choice = spot.look(SpotState(room.by_kind, room.on_demand, len(run.members), run.step, planned))
            if choice is None:
                continue
            if spot.spent >= spot.rules.budget and not self._spent:
                self._spent = True
                self._notify(f"the budget is spent: {spot.spent:.2f}")
                run.stop()
            # The members hold the run's state: an on-demand member stays until a spot worker has replaced it.
            needed = run.low - members_on_spot(launcher.agents.values(), run.coordinator.address, run.members)
            launcher.bound_on_demand(max(choice.on_demand, needed), "the deadline can be met without it")

    def close(self) -> None:
        super().close()
        if os.getpid() == self._owner:
            self._remove_marker()
        if self._received and os.getpid() == self._owner:
            self._received.close()

    def gather(self, workers: int, limit_s: float, ends: Callable[[], bool] = lambda: False) -> int:
        """Wait until there is room for ``workers``, or ``ends`` returns True. Returns the free room.

        Raises:
            UserError: There is not enough room after ``limit_s``.
        """
        until = time.monotonic() + limit_s
        while self.free < workers and not ends():
            if time.monotonic() >= until:
                rule = f"agents with room for {workers} workers must come within {limit_s:g} s"
                raise UserError(rule, f"room for {self.free}", "start them: elastune agent --join ... --token-file ...")
            self.pump(LOOK_S)
        return self.free

    def gathered(self, workers: int, limit_s: float) -> Self:
        """As ``gather``, but returns this cluster, and closes it on any error."""
        try:
            self.gather(workers, limit_s)
        except BaseException:
            self.close()
            raise
        return self


class TransferredRuns:
    """Receives the files that agents push, and passes the resulting records to the runs of one controller.

    Args:
        address: As of ``FileTransferServer``.
        token: As of ``FileTransferServer``.
        tls: As of ``FileTransferServer``.
        notify: Called with each line for the user.

    Attributes:
        ring: Wakes the controller, which then calls ``look``. Any thread may call it.
        port: The port to which agents push.
    """

    def __init__(self, address: str, token: str, tls: ssl.SSLContext | None, notify: Callable[[str], None]) -> None:
        self.ring: Callable[[], None] = lambda: None
        self._notify = notify = logs.logged(__name__, notify)
        self._server = FileTransferServer(address, token, tls=tls, ring=lambda: self.ring(), notify=notify)
        self.port = self._server.port
        self._runs: dict[str, ElasticRun] = {}  # by the salt of the run's token: agents know the salt

    def add(self, run: ElasticRun, *, goes_on: bool) -> None:
        """Accept the files of ``run``. ``goes_on``: the run has outlived an earlier controller."""
        salt = run.coordinator.token[:SALT_DIGITS]
        self._runs[salt] = run
        spec = run.spec
        self._server.open_run(salt, spec.out, spec.parent, spec.keep_checkpoints, goes_on=goes_on)

    def forget(self, out: Path) -> None:
        """Accept no more files of the earlier run in ``out``: another run begins in that folder."""
        for salt in [salt for salt, run in self._runs.items() if run.spec.out == out]:
            del self._runs[salt]
            self._server.close_run(salt)

    def look(self) -> None:
        """Pass the records about received checkpoints to their runs. Accept no more files of closed runs."""
        for salt, record in self._server.news():
            if salt in self._runs:
                self._runs[salt].take_record(record)
        for salt, run in list(self._runs.items()):
            if run.closed:
                del self._runs[salt]
                for problem in self._server.close_run(salt):
                    self._notify(f"{run.spec.out.name}: a checkpoint is not complete, and is not used: {problem}")

    def close(self) -> None:
        """End the server. Idempotent."""
        self._server.close()


def rooms_paid(agents: Iterable[AgentHost]) -> dict[str, int]:
    """The room that is paid for, by kind of host. Hosts count too that will leave and get no more workers."""
    room: Counter[str] = Counter()
    for agent in agents:
        room[agent.kind] += max(agent.room, len(agent.workers) + agent.unnamed)
    return dict(room)


def workers_held(agents: Iterable[AgentHost], coordinator: str) -> dict[str, int]:
    """Count the workers of the run of ``coordinator`` (its address), by kind of host.

    A worker counts from the moment that its host is asked to start it until the host reports its end.
    """
    held: Counter[str] = Counter()
    for agent in agents:
        held[agent.kind] += sum(worker.coordinator == coordinator for worker in agent.workers.values())
    return {kind: workers for kind, workers in held.items() if workers}


def members_on_spot(agents: Iterable[AgentHost], coordinator: str, members: Collection[int]) -> int:
    """Count the ``members`` of the run of ``coordinator`` (its address) on spot hosts without a notice."""
    staying = (agent for agent in agents if agent.kind == SPOT and not agent.notice)
    workers = (worker for agent in staying for worker in agent.workers.values() if worker.coordinator == coordinator)
    return sum(worker.worker in members for worker in workers)


def allow_many_connections() -> None:
    """Raise this process's limit of open files to the system's maximum.

    Each agent and each worker takes one descriptor, and many systems begin with 1,024.
    """
    current, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if most == resource.RLIM_INFINITY else most
    if current not in (resource.RLIM_INFINITY, wanted):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
