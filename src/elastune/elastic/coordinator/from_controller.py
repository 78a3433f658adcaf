"""What a coordinator gets from its controller when it begins."""

from __future__ import annotations

import math
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from elastune.core.mesh_choice import MeshChoice
from elastune.elastic.coordinator.liveness import VitalsOf
from elastune.elastic.protocol.worker_spec import WorkerSpec

SILENCE_S = 30.0  # far beyond a heartbeat: a coordinator may be slow without being gone


@dataclass(frozen=True)
class CrewBounds:
    """How many workers there may be, and how they may stand.

    Attributes:
        low: The fewest that the run goes on with.
        high: The most that it may have.
        most_losses: So many in a row without progress end the run.
        meshes: How they may stand.
    """

    low: int
    high: int
    most_losses: int = 8
    meshes: MeshChoice = field(default_factory=MeshChoice)


@dataclass(frozen=True)
class Timeouts:
    """How long the sides wait for each other, in seconds.

    Attributes:
        heartbeat_s: A worker that is not heard for so long is lost.
        silence_s: So long a worker bears to hear nothing from its coordinator before it ends itself, and may itself say
            nothing while it loads its program.
        grace_s: So long it looks for the next coordinator first.
        collective_timeout_s: So long members wait for one that lives and does not come.
    """

    heartbeat_s: float
    silence_s: float = SILENCE_S
    grace_s: float = 0.0
    collective_timeout_s: float = math.inf


@dataclass(frozen=True)
class Entrance:
    """Where workers find their coordinator, and what lets them in.

    Attributes:
        host: The address to listen on; loopback unless the workers are elsewhere.
        port: Where workers look for the coordinator after another one; 0: any.
        token: The secret; "": a new one.
        tls: The certificate that the token names, if it does.
    """

    host: str = "127.0.0.1"
    port: int = 0
    token: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True)
class Lookups:
    """What the controller can tell of a worker, by its number. The coordinator's thread asks.

    Attributes:
        spec_of: What it is to do.
        last_line: The last line of its log; "" where that is not seen.
        vitals_of: What the system says of its process; None where that is not seen.
    """

    spec_of: Callable[[int], WorkerSpec | None] = lambda worker: None
    last_line: Callable[[int], str] = lambda worker: ""
    vitals_of: VitalsOf = lambda worker: None
