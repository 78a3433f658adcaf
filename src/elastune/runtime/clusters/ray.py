"""``ray[:address=...,...]``: workers run on the nodes of a Ray cluster; each agent is an actor.

An actor waits for a node with the resources of its workers, and a waiting actor makes Ray's autoscaler add a node.
Actors end with the process that started them. Actors with a name outlive it, and the next controller finds them by that
name. Ray is imported when it is first used.
"""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked

from elastune.core.cost import ON_DEMAND, SPOT
from elastune.core.errors import UserError
from elastune.runtime.clusters.fleet import NotStarted, Phase, Starter, forget
from elastune.runtime.clusters.kind import (
    Access,
    CapacityRequest,
    ClusterFinding,
    ClusterKind,
    Folder,
    HostKind,
    has_own_folders,
)
from elastune.runtime.clusters.ray_actor import CALLS, AgentActor, AgentEnd

if TYPE_CHECKING:
    from elastune.runtime.clusters.fleet import ControllerAddress, FleetCluster


AUTO = "auto"
ADDRESS = "RAY_ADDRESS"  # Ray's own variable; jobs have it
REACH_LIMIT_S = 5.0
INSTALL = "pip install 'elastune[ray]'"


@dataclass(frozen=True)
class WorkerShape:
    """The resources of one worker, as Ray counts them."""

    cpus: float = 1.0
    gpus: float = 0.0

    def of(self, workers: int) -> dict[str, float]:
        """The resources of so many workers on one node. Ray divides one GPU, but not several."""
        gpus = self.gpus * workers
        return {"num_cpus": self.cpus * workers, "num_gpus": math.ceil(gpus) if gpus > 1 else gpus}

    def room(self, resources: Mapping[str, float]) -> int:
        """The number of workers that a node with ``resources`` has room for."""
        demands = ((resources.get("CPU", 0.0), self.cpus), (resources.get("GPU", 0.0), self.gpus))
        return int(min(has // each for has, each in demands if each))


def usual_room(nodes: Sequence[Mapping[str, float]], shape: WorkerShape) -> int:
    """Return the most frequent room among ``nodes``, without those that have none; 0 if no node has room."""
    rooms = Counter(room for node in nodes if (room := shape.room(node)))
    return max(rooms, key=lambda room: (rooms[room], room), default=0)


def join_ray(address: str | None) -> Callable[[], None]:
    """Make this process a driver of a Ray cluster. A process that is a driver already stays one.

    Args:
        address: The address of the cluster ("host:port"); None: the cluster of this job or machine.

    Returns:
        A function to call when the connection is no longer needed.

    Raises:
        UserError: If the cluster cannot be reached.
    """
    ray = need_ray()
    if ray.is_initialized():
        return lambda: None
    where = address or os.environ.get(ADDRESS) or AUTO
    _reach(where)
    try:
        with _signals_kept():
            ray.init(address=where, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        why = f"{where}: {one_line(error)}"
        raise UserError("--cluster ray needs a Ray cluster", why, "ray start --head") from None
    return lambda: ray.shutdown()


def one_line(error: Exception) -> str:
    """The text of an error of Ray, which often has many lines, in one line."""
    return " ".join(str(error).split())[:300]


def need_ray() -> Any:
    """Return the package ray. Raises ``UserError`` if it is not installed."""
    try:
        import ray
    except ImportError:
        raise UserError("--cluster ray needs the package ray", "it is not installed", INSTALL) from None
    return ray


def nodes() -> list[dict[str, float]]:
    """Return the resources of each live node. The process must have joined a cluster."""
    return [node["Resources"] for node in need_ray().nodes() if node["Alive"]]


def own_address() -> str:
    """Return the address by which other nodes reach this node. The process must have joined a cluster."""
    return str(need_ray().util.get_node_ip_address())


def _reach(where: str) -> None:
    """Raise ``UserError`` if no process listens at ``where``. Ray itself would try for minutes."""
    if where == AUTO:
        return
    host, _, port = where.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_LIMIT_S).close()
    except (OSError, ValueError) as error:
        why = f"{where}: {getattr(error, 'strerror', None) or error}"
        fix = "give the HOST:PORT that ray start --head printed; ray:// is for clients, submit a job instead"
        raise UserError("a Ray cluster must be reached", why, fix) from None


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the handler of SIGTERM after the block: ``ray.init`` lets SIGTERM end the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def stay_in(folder: Path, limit_s: float = 0.0) -> None:
    """Go back into the working directory ``folder`` if it was removed, and is there again.

    Each Ray node unpacks a job's ``--working-dir`` anew. Nodes that are one machine do so in one place, so a later node
    takes it from a job that runs.

    Args:
        folder: The directory.
        limit_s: How long to wait for it.

    Raises:
        UserError: If it is still missing after ``limit_s``, unless that is 0.
    """
    until = time.monotonic() + limit_s
    while True:
        try:
            os.getcwd()
            return
        except FileNotFoundError:
            with suppress(OSError):
                os.chdir(folder)
                return
        if time.monotonic() >= until:
            break
        time.sleep(LOOK_S)
    if limit_s:
        rule, fix = "the working directory must stay while a run goes on", "run it in a folder that stays"
        raise UserError(rule, f"{folder} was removed", fix)


LOOK_S = 0.05
UNPACK_LIMIT_S = 10.0  # how long a node may take to unpack a job's working directory
PATIENCE_S = 60  # how long an agent looks for its controller
END_LIMIT_S = 5.0
ASK_S = 120.0  # how long a call that asks for an agent's end waits
NAMESPACE = "elastune"  # of actors with names
_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU"}


@dataclass(frozen=True)
class DetachedActors:
    """Actors that outlive their controller.

    Attributes:
        name: The beginning of the names of all actors. A dash and the label follow.
        folder: The folder with the controller's address.
    """

    name: str
    folder: Path


@dataclass
class _Actor:
    """A requested actor.

    Attributes:
        handle: Ray's handle.
        here: Ray's reference that is ready once the actor has a node.
        end: Ray's reference that is ready once the agent has ended, or the call has waited long enough.
    """

    handle: Any
    here: Any
    end: Any


class Actors(Starter):
    """Starts agents as actors of a Ray cluster, which the process must have joined.

    Ray knows the token: every user of its cluster may run anything there, also agents and workers. The token goes from
    this process to the actor's process and is not stored between them.

    Args:
        address: The address to which agents connect ("host:port").
        token: Their secret.
        workers: The room of each agent.
        shape: The resources of a worker.
        leave: Called when the connection to Ray is no longer needed.
        kept: The actors outlive this process; the actors of the earlier controller with that name are taken over.
        kind: The kind of the nodes.
    """

    def __init__(
        self,
        address: str,
        token: str,
        workers: int,
        shape: WorkerShape,
        leave: Callable[[], None],
        kept: DetachedActors | None = None,
        kind: str = ON_DEMAND,
    ) -> None:
        self._leave, self._kept = leave, kept
        self._ray = need_ray()
        self._token = token
        self._options = ["--join", address, "--workers", str(workers), "--patience", f"{PATIENCE_S}s", "--kind", kind]
        resources = shape.of(workers)
        amounts = [f"{resources[key]:g} {name}s" for key, name in _NAMES.items() if resources[key]]
        self._resources = " and ".join(amounts)
        self._class = self._ray.remote(AgentActor)
        self._actor_options = {
            **resources,
            "scheduling_strategy": "SPREAD",
            "max_restarts": 0,
            "max_concurrency": CALLS,
        }
        self._actors: dict[str, _Actor] = {}
        self._ends: dict[str, str] = {}
        self._number = self._waiting = 0
        self._closed = False
        self._folder = Path.cwd()
        for label, handle in ({} if kept is None else left_actors(self._ray, kept.name)).items():
            self._number = max(self._number, int(label.rpartition("-")[2]))
            self._actors[label] = self._start_actor(label, handle)
            handle.look_at.remote(address)  # another address if this controller is on another machine

    def start(self, count: int) -> None:
        for _ in range(count):
            self._number += 1
            label = f"actor-{self._number}"
            try:
                handle = self._class.options(**self._actor_options, **self._lasting(label)).remote()
                self._actors[label] = self._start_actor(label, handle)
            except (self._ray.exceptions.RayError, RuntimeError, ValueError) as error:
                raise NotStarted(f"Ray has started no actor: {one_line(error)}") from None

    def _lasting(self, label: str) -> dict[str, Any]:
        """The options that make an actor outlive this process; empty if it is not to."""
        if self._kept is None:
            return {}
        return {"name": f"{self._kept.name}-{label}", "namespace": NAMESPACE, "lifetime": "detached"}

    def _start_actor(self, label: str, handle: Any) -> _Actor:
        here = handle.here.remote()
        handle.begin.remote(self._token.encode(), [*self._options, "--label", label])
        return _Actor(handle, here, handle.end.remote(ASK_S))

    def look(self) -> dict[str, Phase]:
        stay_in(self._folder)
        for label, actor in list(self._actors.items()):
            if not self._has(actor.end):
                continue
            if (how := self._how(actor.end)) is None:
                actor.end = actor.handle.end.remote(ASK_S)
                continue
            del self._actors[label]
            self._ends[label] = how
            self._ray.kill(actor.handle)  # frees its resources
        phases: dict[str, Phase] = {
            label: "running" if self._has(actor.here) else "waiting" for label, actor in self._actors.items()
        }
        self._waiting = sum(phase == "waiting" for phase in phases.values())
        return phases

    def cancel(self, labels: Sequence[str]) -> None:
        for label in labels:
            if (actor := self._actors.pop(label, None)) is not None:
                self._ends[label] = "it was no longer needed"
                self._ray.kill(actor.handle)

    def why(self, label: str) -> str:
        return self._ends.get(label, "")

    def waits(self) -> str:
        agents = "1 agent waits" if self._waiting == 1 else f"{self._waiting} agents wait"
        return f"{agents} for Ray nodes with {self._resources} free" if self._waiting else ""

    def close(self) -> None:
        """End all actors. Agents that were asked to end get a few seconds for it."""
        if self._closed:
            return
        self._closed = True
        self.look()  # calls that ask for the end of each agent are open then
        running = [actor.end for actor in self._actors.values() if self._has(actor.here)]
        if running:
            self._ray.wait(running, num_returns=len(running), timeout=END_LIMIT_S, fetch_local=False)
        self.cancel(list(self._actors))
        if self._kept is not None:
            forget(self._kept.folder)
        self._leave()

    def _has(self, reference: Any) -> bool:
        return bool(self._ray.wait([reference], timeout=0, fetch_local=False)[0])

    def _how(self, reference: Any) -> str | None:
        try:
            end: AgentEnd | None = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            return one_line(error)
        return None if end is None else end.last_line or f"exit code {end.code}"


def left_actors(ray: Any, name: str) -> Mapping[str, Any]:
    """Return the actors ``name`` of the earlier controller, by their labels, the oldest first."""
    handles = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        match_ = re.fullmatch(rf"{re.escape(name)}-(actor-([0-9]{{1,9}}))", actor["name"])
        if match_ and actor["namespace"] == NAMESPACE:
            try:
                handles[int(match_[2])] = match_[1], ray.get_actor(actor["name"], namespace=NAMESPACE)
            except ValueError:  # it has ended meanwhile
                continue
    return {label: handle for _, (label, handle) in sorted(handles.items())}


def end_left(name: str) -> int:
    """End the actors ``name`` and return their number. The process must have joined a Ray cluster."""
    ray = need_ray()
    handles = left_actors(ray, name).values()
    for handle in handles:
        ray.kill(handle)
    return len(handles)


FOLDER = "cluster"  # in the output folder, for files that outlive this controller
NO_ROOM = "give workers_per_node=, for nodes that the autoscaler adds"
Amount = Annotated[float, Field(ge=0, le=1 << 16, allow_inf_nan=False)]


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class RayKind(ClusterKind):
    """The settings of a cluster ``ray``.

    Attributes:
        address: The address of Ray's head; None: the cluster of this job or machine.
        workers_per_node: The room of each agent; None: as much as most nodes have.
        cpus_per_worker: The CPUs of a worker.
        gpus_per_worker: The GPUs of a worker.
        idle_s: How long an agent stays without workers.
        port: The port to which agents connect; 0: any free one.
        kind: As of ``SlurmKind``.
        folder: As of ``HostsKind``.
    """

    address: Annotated[str, Field(pattern=r"^[^/\s]+:[0-9]{1,5}$")] | None = None
    workers_per_node: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    cpus_per_worker: Annotated[Amount, Field(gt=0)] = 1.0
    gpus_per_worker: Amount = 0.0
    idle_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60.0
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    kind: HostKind = "on-demand"
    folder: Folder = "auto"

    name = "ray"
    form = "ray[:HOST:PORT,workers_per_node=4,cpus_per_worker=1,gpus_per_worker=1]"
    first = "address"

    @property
    def reports_host_kind(self) -> bool:
        return self.kind == SPOT

    def check(self, access: Access) -> None:
        need_ray()

    def open(self, access: Access, room: CapacityRequest) -> FleetCluster:
        from elastune.parallel.comm.sockets import address_of
        from elastune.runtime.agents.credentials import credentials
        from elastune.runtime.clusters.fleet import FleetCluster, FleetSize

        leave, working_folder = join_ray(self.address), Path.cwd()
        try:
            each = self._workers_each(room.most)
            address = address_of(access.interface) if access.interface else own_address()
            folder = (room.out / FOLDER).resolve()
            left = self._left(folder, address, access) if room.adopts else None
            with tempfile.TemporaryDirectory() as passing:
                beside = folder if room.grace_s or left is not None else Path(passing)
                secrets = credentials(access.token_file or beside / "token", tls=access.tls)

            def starter(where: str) -> Actors:
                kept = self._keeping(folder, room, left, where)  # before an actor starts
                return Actors(where, secrets.token, each, self._shape, leave, kept, self.kind)

            cluster = FleetCluster(
                address, self.port if left is None else left.port, secrets.token, tls=secrets.tls,
                starter=starter,
                size=FleetSize(-(-room.most // each), each, idle_s=self.idle_s),
                expected=room.most, grows=room.grows, grace_s=room.grace_s,
                gather_s=access.gather_s if left is not None and room.grows else 0.0, notify=access.notify,
                spot=room.spot, out=room.out, own_folders=has_own_folders(self.folder, room),
            )  # fmt: skip
        except BaseException:
            leave()
            raise
        if left is not None:  # its agents may have no free room: adopt their workers first
            return cluster
        access.notify(f"waiting for actors with room for {room.workers} workers, {each} at each")
        gathered = cluster.gathered(room.workers, access.gather_s)
        stay_in(working_folder, UNPACK_LIMIT_S)
        return gathered

    def _left(self, folder: Path, address: str, access: Access) -> ControllerAddress | None:
        """Return the earlier controller, if its agents will connect to this one. End agents that will not."""
        from elastune.runtime.clusters.fleet import can_take_over, check_no_controller, read_controller_address

        left = read_controller_address(folder)
        if left is None or (left.address == address and self.port in (0, left.port)):
            return left
        check_no_controller(left)
        if can_take_over(left, address, self.port):
            access.notify(f"actors {left.name} will connect to {address} instead of {left.address}")
            return left
        access.notify(f"actors {left.name} look for their controller at {left.address}:{left.port}, and are ended")
        end_left(left.name)
        return None

    def _keeping(
        self, folder: Path, room: CapacityRequest, left: ControllerAddress | None, where: str
    ) -> DetachedActors | None:
        """Return how the next controller finds the actors of this one at ``where``; None if they end with this one."""
        from elastune.runtime.clusters.fleet import new_name, write_controller_address

        if not room.grace_s and left is None:
            return None
        name = new_name() if left is None else left.name
        if room.grace_s:
            write_controller_address(folder, name, where)
        return DetachedActors(name, folder)

    def examine(self) -> list[ClusterFinding]:
        leave = join_ray(self.address)
        try:
            live_nodes, address = nodes(), own_address()
        finally:
            leave()
        cpus, gpus = (sum(node.get(name, 0.0) for node in live_nodes) for name in ("CPU", "GPU"))
        room = self.workers_per_node or usual_room(live_nodes, self._shape)
        return [
            ClusterFinding("Ray", str(need_ray().__version__)),
            ClusterFinding("nodes", f"{len(live_nodes)}, with {cpus:g} CPUs and {gpus:g} GPUs"),
            ClusterFinding("workers on a node", str(room) if room else None, NO_ROOM),
            ClusterFinding("address for agents", address, "choose it by --interface"),
        ]

    @property
    def _shape(self) -> WorkerShape:
        return WorkerShape(self.cpus_per_worker, self.gpus_per_worker)

    def _workers_each(self, most: int) -> int:
        usual = self.workers_per_node or usual_room(nodes(), self._shape)
        if not usual:
            value = f"no node with {self.cpus_per_worker:g} CPUs and {self.gpus_per_worker:g} GPUs"
            raise UserError("the room of a Ray node must be known", value, NO_ROOM)
        return min(usual, most)
