"""``local``: workers are processes of this machine, forked from a warm server and watched until their end.

``DetachedCluster`` is for workers that may outlive their controller: they belong to an agent in its own session.
"""

from __future__ import annotations

import atexit
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from elastune.core.errors import UserError
from elastune.core.journal.files import atomic_write
from elastune.core.run import RunSpec
from elastune.runtime.agents.credentials import BYTES, read_token
from elastune.runtime.clusters.base import Handle, SurvivingRun
from elastune.runtime.clusters.elastic_cluster import ElasticCluster
from elastune.runtime.clusters.fork import PRELOAD, ForkLauncher
from elastune.runtime.clusters.hosts import HostsCluster
from elastune.runtime.clusters.kind import Access, CapacityRequest, ClusterKind
from elastune.runtime.elastic_run import ElasticRun
from elastune.runtime.worker import WORK

WARM = (*PRELOAD, WORK.partition(":")[0])  # the modules that every worker imports
LOOPBACK = "127.0.0.1"
REACH_LIMIT_S = 2.0
SILENCE_S = 120.0


def check_loopback() -> None:
    """Raise ``UserError`` if processes of this machine cannot reach each other: all workers would fail."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        try:
            socket.create_connection(listener.getsockname(), REACH_LIMIT_S).close()
        except OSError as error:
            rule = "workers on one machine need its loopback interface"
            raise UserError(rule, f"{LOOPBACK}: {error.strerror or error}", "bring it up: ip link set lo up") from None


class LocalCluster(ElasticCluster):
    """A cluster of worker processes on this machine. They end with the process that made the cluster.

    Args:
        capacity: The number of workers that it has room for.
        devices: The devices that workers may get; "auto": the devices of this machine.
        entry: The ``module:function`` that a worker runs.
        preload: The modules that the fork server imports once for all workers. It begins at once, in the background, so
            a cluster that is made early is warm when its first run starts.

    Raises:
        UserError: If this machine cannot reach itself.

    Example:
        >>> with LocalCluster(capacity=2) as cluster:
        ...     handle = cluster.start(spec)
    """

    def __init__(
        self,
        capacity: int,
        *,
        devices: Sequence[str] | Literal["auto"] = "auto",
        entry: str = WORK,
        preload: Sequence[str] = WARM,
    ) -> None:
        check_loopback()
        launcher = ForkLauncher(capacity, devices=devices, preload=preload)
        # A worker on this machine ends with its controller in any case, so a long silence does no harm.
        super().__init__(launcher, entry=entry, silence_s=SILENCE_S)
        atexit.register(self.close)

    def close(self) -> None:
        super().close()
        atexit.unregister(self.close)


# --- workers that may outlive their controller ---

LOOPBACK_ADDRESS, INTERFACE = "127.0.0.1", "lo"
TOKEN_NAME, PORT_NAME = ".agent-token", ".agent-port"
GATHER_S = 120.0  # how long the agent may take to connect: it imports torch first
CLOSE_LIMIT_S = 30.0
TRIES = 3  # the most agents that are started one after another


class DetachedCluster(HostsCluster):
    """A cluster of workers on this machine that look for the next controller when theirs has died.

    If an agent of an earlier controller may be left, the cluster listens on the port of that controller. It starts
    another agent for a run that finds no room. With ``fills``, ``fill`` starts it, and again after each loss.

    Args:
        capacity: The number of workers that it has room for.
        out: The output folder.
        grace_s: How long workers go on without a controller.
        notify: Called with a line for the user.
        fills: Whether the caller distributes the room.
    """

    def __init__(
        self, capacity: int, out: Path, grace_s: float, notify: Callable[[str], None], *, fills: bool = False
    ) -> None:
        self._out = out
        self._most, self._fills = capacity, fills
        self._agent: subprocess.Popen[bytes] | None = None
        self._owns = False  # whether this cluster has written the files by which its agent is found
        self._filled, self._starts = False, 0
        token, port = _left_in(out)
        self._token = token

        def listen(at: int) -> None:
            super(DetachedCluster, self).__init__(
                LOOPBACK_ADDRESS,
                at,
                token,
                grows=False,
                grace_s=grace_s,
                gather_s=GATHER_S,
                silence_s=SILENCE_S,
                notify=notify,
            )

        try:
            listen(port)
        except UserError:  # another process has the port, or the controller lives: the journal's lock shows that
            listen(0)

    def start(self, spec: RunSpec) -> ElasticRun:
        if not self._fills and self._agent is None and self.free < spec.execution.workers:
            self._start_agent(self._most)
        return super().start(spec)

    def adopt(self, left: Sequence[SurvivingRun]) -> list[Handle | None]:
        adopted = super().adopt(left)
        self._owns = self._owns or any(run is not None for run in adopted)
        if self._fills:
            self.fill()
        return adopted

    def fill(self) -> None:
        """Start an agent for the room that no agent of the earlier controller has. Raises ``UserError``."""
        self._filled = True
        if missing := self._start_missing():
            self.gather(self.free + missing, GATHER_S)

    def pump(self, timeout_s: float) -> None:
        super().pump(timeout_s)
        if self._filled and not self._closed:
            self._start_missing()

    def _start_missing(self) -> int:
        """Start an agent for the missing room, unless one starts already. Return its room."""
        missing = self._most - self.capacity
        starts_already = self._agent is not None and self._agent.poll() is None
        if missing <= 0 or starts_already or self._starts == TRIES:
            return 0
        self._start_agent(missing)
        return missing

    def close(self) -> None:
        super().close()
        if self._agent is not None:
            try:
                self._agent.wait(CLOSE_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._agent.kill()
                self._agent.wait()
            self._agent = None
        for name in (TOKEN_NAME, PORT_NAME) if self._owns else ():
            (self._out / name).unlink(missing_ok=True)

    def _start_agent(self, workers: int) -> None:
        logs, self._owns = self._out / "logs", True
        self._starts += 1
        try:
            logs.mkdir(parents=True, exist_ok=True)
            atomic_write(self._out / TOKEN_NAME, self._token.encode() + b"\n", mode=0o600)
            atomic_write(self._out / PORT_NAME, f"{self.launcher.port}\n".encode())
            with (logs / "agent.log").open("ab") as log:
                self._agent = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "elastune", "agent", "--workers", str(workers)),
                        *("--join", f"{LOOPBACK_ADDRESS}:{self.launcher.port}", "--interface", INTERFACE),
                        *("--token-file", str(self._out / TOKEN_NAME), "--folder", str(logs)),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                )
        except OSError as error:
            rule = "the output folder must be writable"
            raise UserError(rule, f"{self._out}: {error.strerror}", "choose another folder") from error


def _left_in(out: Path) -> tuple[str, int]:
    """Return the token and port of the earlier controller; without one, a new token and 0 (any port)."""
    try:
        port = int((out / PORT_NAME).read_text())
        return read_token(out / TOKEN_NAME), port if 0 < port < 1 << 16 else 0
    except (OSError, ValueError, UserError):
        return secrets.token_urlsafe(BYTES), 0


@dataclass(frozen=True)
class LocalKind(ClusterKind):
    """The cluster ``local``, without settings: each job has as many processes as it needs on this machine."""

    name = "local"
    form = "local"
    here = True

    def check(self, access: Access) -> None:
        options = {"--token-file": access.token_file, "--interface": access.interface, "--tls": access.tls}
        for option in (name for name, value in options.items() if value):
            raise UserError(f"{option} belongs to a cluster of agents", "--cluster local", "leave it out")

    def open(self, access: Access, room: CapacityRequest) -> DetachedCluster | None:
        if not (room.grace_s or room.adopts):
            return None
        cluster = DetachedCluster(room.most, room.out, room.grace_s, lambda line: None, fills=not room.grows)
        if not (room.grows or room.adopts):
            try:
                cluster.fill()
            except BaseException:
                cluster.close()
                raise
        return cluster
