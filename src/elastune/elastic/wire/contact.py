"""How another process finds a run's coordinator: its address and token, and the host of the next controller.

The file that names the host of the next controller is not trusted: the process that listens there must prove that it
has the token.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from elastune.core.errors import UserError
from elastune.core.journal.files import atomic_write
from elastune.elastic.wire.handshake import ServerBusy, TokenRefused, enter_at
from elastune.elastic.wire.messages import PURPOSE, Answer, Hello, Message, decode, encode
from elastune.elastic.wire.transport import Lines, ProtocolError, Unreachable, split_address

LOOK_S = 1.0  # between two looks at the file, which may lie on a network file system
HOST_FILE_LIMIT_BYTES = 4096
CONTACT_NAME = ".coordinator.json"
ANSWER_LIMIT_S = 10.0
DIAL_LIMIT_S = 1.0
CONTACT_LIMIT_BYTES = 4096


def _is_address(text: str) -> str:
    split_address(text)
    return text


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Contact:
    """How to reach a run's coordinator. A process that has it may change the run, so only the run's owner can read it.

    Attributes:
        address: The coordinator's address, "host:port".
        token: The secret of the run.
        grace_s: The workers look for the next coordinator for this long, should this one die.
    """

    address: Annotated[str, AfterValidator(_is_address)]
    token: str
    grace_s: float = 0.0


_CONTACT_ADAPTER = TypeAdapter(Contact)


def write_contact(folder: Path, address: str, token: str, grace_s: float = 0.0) -> None:
    """Write the file by which ``ask`` finds the coordinator of the run in ``folder``.

    The next controller finds the run's workers by it, too.
    """
    contact = json.dumps({"address": address, "token": token, "grace_s": grace_s}).encode()
    atomic_write(folder / CONTACT_NAME, contact, mode=0o600)


def remove_contact(folder: Path) -> None:
    """Remove that file, as the run in ``folder`` has ended. Idempotent."""
    with contextlib.suppress(FileNotFoundError):
        (folder / CONTACT_NAME).unlink()


def read_contact(folder: Path) -> Contact:
    """Read how to reach the run in ``folder``. Raises ``UserError`` if it does not run, or may not be asked."""
    path = folder / CONTACT_NAME
    try:
        with path.open("rb") as file:
            return _CONTACT_ADAPTER.validate_json(file.read(CONTACT_LIMIT_BYTES), strict=True)
    except (FileNotFoundError, NotADirectoryError):
        raise _not_running(folder) from None
    except PermissionError:
        fix = "ask as the user who started it"
        raise UserError("a run can be changed by its owner only", folder, fix) from None
    except (ValidationError, OSError):
        fix = "remove that file: a run that still trains goes on, but can no longer be asked or taken over"
        raise UserError("the file must hold the address of a coordinator", path, fix) from None


def left_behind(folder: Path) -> Contact | None:
    """The contact of a run whose workers may have outlived their coordinator; None if they cannot have."""
    if not (folder / CONTACT_NAME).is_file():
        return None
    contact = read_contact(folder)
    return contact if contact.grace_s > 0 else None


def ask(folder: Path, message: Message, contact: Contact | None = None) -> Answer:
    """Send ``message``, a request, to the coordinator of the run in ``folder``, and return its answer.

    ``contact``: how to reach it, if the folder is on another machine. Raises ``UserError``.
    """
    contact = contact or read_contact(folder)
    lines = encode(Hello()) + encode(message)
    try:
        entered = enter_at(contact.address, Lines(), contact.token, PURPOSE, lines, ANSWER_LIMIT_S, dial_s=DIAL_LIMIT_S)
        entered.connection.close()
        answer = decode(entered.line)
    except ServerBusy as error:
        raise UserError("a run must have room for a question", f"{folder}: {error}", "ask again") from None
    except (Unreachable, ConnectionError, TokenRefused):  # the port may belong to another run's coordinator now
        raise _not_running(folder) from None
    except (OSError, ValueError, ProtocolError) as error:
        why = f"{folder}: {error}"
        raise UserError("a run must answer", why, "look at its log; if it hangs, end it and use --resume") from None
    if not isinstance(answer, Answer):
        raise UserError("a run must answer", f"{folder}: {answer.kind}", "use the same version of elastune as the run")
    return answer


def _looked_up(host: str) -> str:
    host.encode("idna")  # as ``socket`` does, which raises ``UnicodeError`` for a part that is empty or too long
    return host


HostName = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[^\s/]+$"), AfterValidator(_looked_up)]
"""The name or address of a host, in a form that can be looked up."""


@dataclass(frozen=True, config=ConfigDict(extra="ignore"))
class _HostFile:
    address: HostName


_HOST_ADAPTER = TypeAdapter(_HostFile)


class ControllerLocator:
    """Finds the address of the next controller, which may run on another host than the one before.

    Args:
        home: The address ("host:port") of the controller until now. The port stays the same.
        file: A JSON file with the host of the next controller as ``address``; "": the host stays the same, too.
    """

    def __init__(self, home: str, file: str = "") -> None:
        self._where, self._file = home, file
        self._next_look = 0.0

    @property
    def now(self) -> str:
        """The address ("host:port"). The file is read once a second at most."""
        if self._file and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_S
            try:
                with Path(self._file).open("rb") as file:
                    content = _HOST_ADAPTER.validate_json(file.read(HOST_FILE_LIMIT_BYTES), strict=True)
            except (OSError, ValueError):  # no file yet, half of a file, or no host in it
                return self._where
            self._where = at_host(self._where, content.address)
        return self._where


def at_host(address: str, host: str) -> str:
    """The address of the port of ``address`` ("host:port") at another ``host``."""
    port = address.rpartition(":")[2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _not_running(folder: Path) -> UserError:
    return UserError("the run must be running", folder, "start it, or go on with it: elastune run ... --resume")
