"""The contract of a launcher: it starts and ends processes. It knows no run, no membership and no records.

A worker gets only a ``Bootstrap`` from its launcher. With it the process connects to the coordinator of its run, which
sends everything else. ``elastune.runtime.worker`` is that process. A launcher calls ``live`` in it, or runs
``python -m elastune.runtime.worker`` with the bootstrap in the environment.
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
    """Everything that a launcher gives a worker.

    Attributes:
        worker: The worker's number.
        coordinator: The address of its coordinator ("host:port").
        token: The secret of the coordinator, which must be in no command line and no log.
        device: The device that the worker may use.
        spool: The folder on its host in which it leaves files for the controller; "": it sees its run's folder.
        moves: The file on its host with the address of the next controller (``ControllerLocator``); "": the address
            stays the same.
    """

    worker: int
    coordinator: str
    token: str = field(repr=False)
    device: str = "cpu"
    spool: str = ""
    moves: str = ""

    def to_json(self) -> str:
        """The bootstrap as one line of JSON."""
        return json.dumps(asdict(self))


_BOOTSTRAPS = TypeAdapter(Bootstrap)


def read_bootstrap(text: str) -> Bootstrap:
    """Read the result of ``Bootstrap.to_json``. Raises ``ValueError``."""
    return _BOOTSTRAPS.validate_json(text, strict=True)


def bootstrap_of(environment: Mapping[str, str] = os.environ) -> Bootstrap:
    """Read the bootstrap in the environment, where a launcher has put it. Raises ``UserError`` without one."""
    try:
        return read_bootstrap(environment[VARIABLE])
    except (KeyError, ValidationError):
        fix = "let a launcher start it"
        raise UserError("a worker needs a bootstrap in its environment", VARIABLE, fix) from None


@dataclass(frozen=True, config=_RULES)
class Needs:
    """What workers need on their hosts.

    Attributes:
        device: The device of each worker: "cpu", "cuda", "auto" and so on.
        logs: The folder for their logs.
        spread: Whether they should be on as many hosts as possible.
    """

    device: str
    logs: Path
    spread: bool = False


@dataclass(frozen=True)
class ProcessStarted:
    """The worker's process runs, as ``pid`` on its host."""

    bootstrap: Bootstrap
    pid: int


@dataclass(frozen=True)
class ProcessEnded:
    """The worker's process has ended.

    Attributes:
        bootstrap: The worker.
        code: Its exit code; negative: the signal; None: unknown.
        log: The end of its output.
        why: The launcher's explanation; "": none.
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
    """Starts and ends processes on this machine or elsewhere. One thread uses it. Each launcher has a subclass."""

    interface: str = "lo"
    """The network interface by which its workers reach each other."""
    tls: ssl.SSLContext | None = None
    """The certificate that ``new_token`` names; coordinators then encrypt. None: no encryption."""
    own_environment: bool = False
    """Whether its workers have environments of their own, to which a run only adds its own variables."""

    @property
    def pause_s(self) -> float:
        """How long the caller may wait after a ``poll``, even if events arrive, so that it reads several at once."""
        return 0.0

    def new_token(self) -> str:
        """Return a new secret for the coordinator of workers that this launcher will start."""
        return secrets.token_hex(16)

    @property
    @abstractmethod
    def capacity(self) -> int:
        """The number of workers that it has room for; it may change by itself."""

    @property
    @abstractmethod
    def free(self) -> int:
        """The number of workers that it could start now. A worker takes room until its ``ProcessEnded``."""

    @abstractmethod
    def start(self, workers: Sequence[Bootstrap], needs: Needs) -> None:
        """Start ``workers``. Returns at once; a ``ProcessEnded`` will follow for each of them.

        Raises:
            UserError: If a need cannot be met.
            OSError: If the system refuses. Either no worker was started, or ``poll`` will return the ends of those that
                were.
        """

    @abstractmethod
    def end(self, workers: Sequence[Bootstrap], why: str = "") -> None:
        """Kill ``workers`` and all processes that they have started. ``why``: for their logs. Ignores ended ones."""

    def mark(self, worker: Bootstrap) -> None:  # noqa: B027 - a launcher may know no places
        """Give the place of ``worker``, who computes wrong, to no worker again."""

    @abstractmethod
    def poll(self) -> list[ProcessEvent]:
        """Return the events since the last call. Never blocks."""

    @abstractmethod
    def fileno(self) -> int | None:
        """A descriptor that is readable when ``poll`` has events; None: the caller has to poll regularly."""

    def last_line(self, worker: Bootstrap) -> str:
        """The last line of ``worker``'s output; "": unknown."""
        return ""

    def host(self, worker: Bootstrap) -> str:
        """The name of ``worker``'s host; "": unknown."""
        return ""

    def vitals(self, worker: Bootstrap) -> ProcessStatus | None:
        """The operating system's view of ``worker``'s process; None: unknown. Any thread may call this."""
        return None

    @abstractmethod
    def close(self) -> None:
        """End all processes. None is left then, and all ends can be polled. Idempotent."""
