"""The contract of a launcher: it starts and ends processes. It knows no run, no membership and no records.

A worker gets a ``Bootstrap`` and nothing else from its launcher. With it the process connects to the coordinator of
its run, which sends everything else. ``elastune.runtime.worker`` is that process. A launcher calls ``live`` in it,
or runs ``python -m elastune.runtime.worker`` with the bootstrap in the environment.
"""

from __future__ import annotations

import json
import os
import secrets
import ssl
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from elastune.core.errors import UserError
from elastune.elastic.coordinator.liveness import ProcessStatus

VARIABLE = "ELASTUNE_BOOTSTRAP"
_RULES = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_RULES)
class Bootstrap:
    """All that reaches a worker from outside: its number, the address ("host:port") and token of its coordinator.

    ``token`` lets it in, so it belongs in no command line and no log. ``device``: what it may use where it runs.
    ``spool``: the folder there by which it passes files on; "": it sees its run's own folder. ``moves``: the file there
    that says on which host the next controller listens (``ControllerLocator``); "": on the same one.
    """

    worker: int
    coordinator: str
    token: str = field(repr=False)
    device: str = "cpu"
    spool: str = ""
    moves: str = ""

    def to_json(self) -> str:
        """As one line."""
        return json.dumps(asdict(self))


_BOOTSTRAPS = TypeAdapter(Bootstrap)


def read_bootstrap(text: str) -> Bootstrap:
    """What ``Bootstrap.to_json`` wrote. Raises ``ValueError``."""
    return _BOOTSTRAPS.validate_json(text, strict=True)


def bootstrap_of(environment: Mapping[str, str] = os.environ) -> Bootstrap:
    """The bootstrap that a launcher left in the environment. Raises ``UserError``."""
    try:
        return read_bootstrap(environment[VARIABLE])
    except (KeyError, ValidationError):
        fix = "let a launcher start it"
        raise UserError("a worker must find its bootstrap in its environment", VARIABLE, fix) from None


@dataclass(frozen=True, config=_RULES)
class Needs:
    """What workers need where they run: a ``device`` ("cpu", "cuda", "auto", ...) each, and a folder for their logs.

    ``spread``: they are to be on as many hosts as there are, where there are several.
    """

    device: str
    logs: Path
    spread: bool = False


@dataclass(frozen=True)
class ProcessStarted:
    """The worker's process runs, as ``pid`` where it is."""

    bootstrap: Bootstrap
    pid: int


@dataclass(frozen=True)
class ProcessEnded:
    """The worker's process has ended with ``code`` (negative: the signal; None: it cannot be known).

    ``log`` is the tail of what it printed. ``why``: what the launcher has to say about it; "" where nothing.
    """

    bootstrap: Bootstrap
    code: int | None
    log: str = ""
    why: str = ""


@dataclass(frozen=True)
class ProcessNoticed:
    """The worker's machine will be taken away in ``seconds``."""

    bootstrap: Bootstrap
    seconds: float
    why: str


ProcessEvent = ProcessStarted | ProcessEnded | ProcessNoticed


class Launcher(ABC):
    """Starts and ends processes somewhere. One thread uses it."""

    interface: str = "lo"
    """The network interface by which its workers reach each other."""
    tls: ssl.SSLContext | None = None
    """The certificate that ``new_token`` names: where there is one, coordinators encrypt."""
    own_environment: bool = False
    """Whether its workers have environments of their own, elsewhere: a run then adds to them what it sets itself."""

    @property
    def pause_s(self) -> float:
        """How long whoever has polled may leave it alone even if it has something to tell: many little news are one."""
        return 0.0

    def new_token(self) -> str:
        """A new secret, for the coordinator of workers that this will start."""
        return secrets.token_hex(16)

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Workers that there is room for; may change by itself."""

    @property
    @abstractmethod
    def free(self) -> int:
        """Workers that could be started now. One counts until its ``ProcessEnded`` was polled or is about to be."""

    @abstractmethod
    def start(self, workers: Sequence[Bootstrap], needs: Needs) -> None:
        """Start these. Returns at once; each one's ``ProcessEnded`` will come.

        Raises ``UserError`` for what the place lacks and ``OSError`` where it refuses: then none of them was started,
        or the ends of those that were will be polled.
        """

    @abstractmethod
    def end(self, workers: Sequence[Bootstrap], why: str = "") -> None:
        """Kill these, with all that they have started; ``why`` is for their logs. Those that ended are left alone."""

    @abstractmethod
    def poll(self) -> list[ProcessEvent]:
        """What happened since the last call. Never blocks."""

    @abstractmethod
    def fileno(self) -> int | None:
        """A descriptor that is readable when there is something to ``poll``; None: it has to be polled now and then."""

    def last_line(self, worker: Bootstrap) -> str:
        """The last line that ``worker`` printed, where that is known."""
        return ""

    def host(self, worker: Bootstrap) -> str:
        """What the machine is called that ``worker`` was started on, where that is known."""
        return ""

    def vitals(self, worker: Bootstrap) -> ProcessStatus | None:
        """The operating system's view of ``worker``'s process; None where it is unknown. Any thread may call this."""
        return None

    @abstractmethod
    def close(self) -> None:
        """End everything: nothing that was started is left, and all ends can be polled. Idempotent."""
