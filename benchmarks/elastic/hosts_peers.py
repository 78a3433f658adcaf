"""torchrun and Ray Train on the hosts of ``hosts.py``: the last of four joins, and is killed. With short time limits.

torchrun runs in this interpreter. Ray Train is installed into a virtual environment of its own below ``--peers-dir``,
which sees this interpreter's torch.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.pauses import reached
from benchmarks.elastic.elastic_peers import CHECKPOINT_EVERY, PROGRAMS, between_checkpoints, torchrun_row
from benchmarks.elastic.peer_processes import Processes, job, peer_python
from tests.support.hosts import INTERFACE, Network

HOSTS, EACH = 4, 2
MOST, FEWER = HOSTS * EACH, (HOSTS - 1) * EACH
SIZE, BATCH = "light", 96
LINK_BURST = "512k"
PORT = 29600
RAY_PORT = 6379
RAY = "ray[train]==2.60.0"
STORE_BYTES = 80 << 20
# A node counts as lost after 1.5 s; by default after 15.
SHORT_HEALTH = {"initial_delay_ms": 0, "period_ms": 500, "timeout_ms": 1000, "failure_threshold": 2}
AFTER = 5  # steps after an event's effect
PEERS = ("torchrun", "ray")


class Torchrun:
    """An agent a host, by c10d's rendezvous on the first. Who joins is waited for 1 s, not 30."""

    name = "torchrun"

    def __init__(self, here: Processes, network: Network, rounds: int) -> None:
        self._job, self._network = here, network
        self._restarts = 4 * rounds + 4
        # Without this, restarted workers of torch 2.13 look for each other in the store of the agents before.
        here.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

    def start(self) -> None:
        for at in range(HOSTS - 1):
            self.join(at)

    def join(self, at: int = HOSTS - 1) -> None:
        host = self._network.hosts[at]
        short = f"is_host={int(at == 0)},last_call_timeout=1,keep_alive_interval=1"
        options = (
            f"--nnodes={HOSTS - 1}:{HOSTS}", f"--nproc-per-node={EACH}", "--rdzv-backend=c10d", "--rdzv-id=hosts",
            f"--rdzv-endpoint={self._network.hosts[0].address}:{PORT}", f"--rdzv-conf={short}",
            f"--local-addr={host.address}", f"--max-restarts={self._restarts}",
        )  # fmt: skip
        program = (PROGRAMS / "torchrun_train.py", SIZE, BATCH, self._job.folder, CHECKPOINT_EVERY)
        command = (sys.executable, "-m", "torch.distributed.run", *options, *program)
        self._job.start(f"agent-{at}", *host.space.command(*map(str, command)))


class RayTrain:
    """A node a host, the head on the first; the elastic trainer looks for room every second, not every 60."""

    name = "ray"

    def __init__(self, here: Processes, network: Network, python: Path) -> None:
        self._job, self._network, self._python = here, network, python
        self._temporary = tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True)
        limits = {f"RAY_health_check_{name}": str(value) for name, value in SHORT_HEALTH.items()}
        here.environment.update(
            {**limits, "RAY_AUTH_MODE": "disabled", "RAY_TRAIN_V2_ENABLED": "1", "PYTHONPATH": str(PROGRAMS)}
        )

    @property
    def _address(self) -> str:
        return f"{self._network.hosts[0].address}:{RAY_PORT}"

    def start(self) -> None:
        for at in range(HOSTS - 1):
            self.join(at)
        arguments = (SIZE, BATCH, self._job.folder, CHECKPOINT_EVERY, self._address, FEWER, MOST)
        command = (self._python, PROGRAMS / "ray_train.py", *arguments)
        self._job.start("driver", *self._network.hosts[0].space.command(*map(str, command)))

    def join(self, at: int = HOSTS - 1) -> None:
        host = self._network.hosts[at]
        head = ("--head", f"--port={RAY_PORT}", "--include-dashboard=false", f"--temp-dir={self._temporary.name}")
        where = head if at == 0 else (f"--address={self._address}",)
        room = (f"--num-cpus={EACH}", f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats")
        options = ("start", *where, f"--node-ip-address={host.address}", *room)
        command = (self._python, "-m", "ray.scripts.scripts", *options)
        if self._job.start(f"node-{at}", *host.space.command(*map(str, command))).wait() != 0:
            raise RuntimeError(f"no node of Ray on host {at}: {(self._job.folder / f'node-{at}.log').read_text()}")


def peer_rows(
    who: str, rounds: int, folder: Path, link: str, tell: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """The last host joins, and dies by SIGKILL, ``rounds`` times; a row for each, which ``tell`` is told, too."""
    rows: list[dict[str, Any]] = []
    with Network(HOSTS) as network, job() as here:
        for host in network.hosts:
            host.slow(link, LINK_BURST)
        here.environment["GLOO_SOCKET_IFNAME"] = INTERFACE
        peer: Torchrun | RayTrain
        if who == "torchrun":
            peer = Torchrun(here, network, rounds)
        else:
            peer = RayTrain(here, network, peer_python(folder, "ray", RAY))

        def measure(event: str, world: int, turn: int, act: Callable[[], object]) -> None:
            here.until_steps(between_checkpoints(turn, rounds))
            since = time.monotonic()
            act()

            def effect() -> float | None:
                # A step beyond the newest checkpoint: what is done again counts as part of the pause until a new step.
                return reached(here.ticks, since, lambda tick: tick.world == world and tick.rank == 0, CHECKPOINT_EVERY)

            rows.append(torchrun_row(here, event, since, effect))
            tell(rows[-1])

        try:
            peer.start()
            here.until_world(FEWER, 0.0, f"{who}'s start")
            for turn in range(rounds):
                measure("join", MOST, turn, peer.join)
                measure("lost", FEWER, turn, network.hosts[-1].kill)
        finally:
            for host in network.hosts:
                host.kill()
    return rows
