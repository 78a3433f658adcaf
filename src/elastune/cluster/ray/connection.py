"""The Ray cluster to be used: joined, and what its nodes have."""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from elastune.core.errors import UserError

AUTO = "auto"
ADDRESS = "RAY_ADDRESS"  # Ray's own variable; jobs have it
REACH_LIMIT_S = 5.0
INSTALL = "pip install 'elastune[ray]'"


@dataclass(frozen=True)
class WorkerShape:
    """What Ray is asked for, for one worker."""

    cpus: float = 1.0
    gpus: float = 0.0

    def of(self, workers: int) -> dict[str, float]:
        """For so many on one node. Ray gives parts of one GPU, but no parts of several."""
        gpus = self.gpus * workers
        return {"num_cpus": self.cpus * workers, "num_gpus": math.ceil(gpus) if gpus > 1 else gpus}

    def room(self, resources: Mapping[str, float]) -> int:
        """How many a node with ``resources`` has room for."""
        asked = ((resources.get("CPU", 0.0), self.cpus), (resources.get("GPU", 0.0), self.gpus))
        return int(min(has // each for has, each in asked if each))


def usual_room(nodes: Sequence[Mapping[str, float]], shape: WorkerShape) -> int:
    """The workers that most of the ``nodes`` with room for any have room for; 0 where none has."""
    rooms = Counter(room for node in nodes if (room := shape.room(node)))
    return max(rooms, key=lambda room: (rooms[room], room), default=0)


def join_ray(address: str | None) -> Callable[[], None]:
    """Become a driver of the Ray cluster at ``address`` ("host:port"), by default the one of this job or machine.

    What to call when it is not needed any more; a process that was a driver stays one. Raises ``UserError``.
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
    """What Ray says, often in many."""
    return " ".join(str(error).split())[:300]


def need_ray() -> Any:
    """The package. Raises ``UserError`` where it is not installed."""
    try:
        import ray
    except ImportError:
        raise UserError("--cluster ray needs the package ray", "it is not installed", INSTALL) from None
    return ray


def nodes() -> list[dict[str, float]]:
    """The resources of each node that lives. To be asked while joined."""
    return [node["Resources"] for node in need_ray().nodes() if node["Alive"]]


def own_address() -> str:
    """That of this node, by which the others reach it. To be asked while joined."""
    return str(need_ray().util.get_node_ip_address())


def _reach(where: str) -> None:
    """Ray itself would try for minutes. Raises ``UserError``."""
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
    """``ray.init`` has SIGTERM end the process at once, wherever it is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
