"""Where a controller's agents look for the next one, and what their jobs or actors are called: a file by the token.

The next controller may be on another machine: it writes there where it listens (``moved``), and agents that see the
file, and their workers, come to it (``protocol.elsewhere``).
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from elastune.core.errors import UserError
from elastune.elastic.protocol.elsewhere import HostName
from elastune.elastic.protocol.entry import exactly
from elastune.elastic.protocol.handshake import PROTOCOL
from elastune.elastic.protocol.tls import of_anybody
from elastune.elastic.protocol.transport import ProtocolError
from elastune.journal.atomic import atomic_write

NAME = "controller.json"
LIMIT_BYTES = 4096
REACH_S = 2.0


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Remembered:
    """``name``: of all jobs or actors of a controller; their agents come to ``address``:``port``."""

    name: Annotated[str, Field(pattern=r"^elastune-[0-9a-f]{8}$")]
    address: HostName
    port: Annotated[int, Field(ge=1, le=65535)]


_ADAPTER = TypeAdapter(Remembered)


def new_name() -> str:
    """A name that no other controller's jobs or actors have."""
    return f"elastune-{secrets.token_hex(4)}"


def remember(folder: Path, name: str, where: str) -> None:
    """For the next controller: agents called ``name`` come to ``where`` ("host:port"). Raises ``UserError``."""
    address, _, port = where.rpartition(":")
    told = Remembered(name, address.strip("[]"), int(port))
    text = json.dumps({"name": told.name, "address": told.address, "port": told.port})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / NAME, text.encode() + b"\n", mode=0o600)
    except OSError as error:
        why = f"{folder}: {error.strerror}"
        raise UserError("the next controller must find this one's agents", why, "see --out") from None


def remembered(folder: Path) -> Remembered | None:
    """What the controller before this one left in ``folder``; None where it left nothing that can be used."""
    try:
        with (folder / NAME).open("rb") as file:
            return _ADAPTER.validate_json(file.read(LIMIT_BYTES), strict=True)
    except (OSError, ValueError):
        return None


def file_in(folder: Path) -> Path:
    """The file that agents, and their workers, look at."""
    return folder / NAME


def can_follow(left: Remembered, address: str, port: int) -> bool:
    """Whether a controller at ``address``, and at ``port`` (0: any), can have the port that agents of ``left`` know."""
    if port not in (0, left.port):
        return False
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        socket.create_server((address, left.port), family=family).close()
    except OSError:
        return False
    return True


def check_gone(left: Remembered) -> None:
    """No controller listens any more where the agents of ``left`` come to, encrypted or not. Raises ``UserError``."""
    if not any(_greeting(left, encrypted=encrypted) == PROTOCOL for encrypted in (False, True)):
        return
    where = f"one listens at {left.address}:{left.port}"
    raise UserError("a run has one controller at a time", where, "end that one first, or let it go on")


def _greeting(left: Remembered, *, encrypted: bool) -> bytes:
    """What is said first at that address; empty where nobody is there, or none who speaks so."""
    try:
        with socket.create_connection((left.address, left.port), REACH_S) as plain:
            if not encrypted:
                return exactly(plain, len(PROTOCOL), time.monotonic() + REACH_S)
            with of_anybody(plain, REACH_S) as connection:
                return exactly(connection, len(PROTOCOL), time.monotonic() + REACH_S)
    except (OSError, ProtocolError):
        return b""


def forget(folder: Path) -> None:
    """Nothing is left that could be found. Idempotent."""
    (folder / NAME).unlink(missing_ok=True)
