"""A folder through which workers and their agent pass files, where workers cannot reach the run's folder.

A worker writes its part of a checkpoint here, then a *ticket*: from then on the agent owns the file and brings it
to the controller. ``seal`` writes JSON that carries the digest of its own bytes. A digest finds damage, not malice.
This file imports no torch: agents use it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from elastune.core.errors import UserError
from elastune.core.journal.files import atomic_write

DRAFTS, OUTBOX, WISHES, ANSWERS = "drafts", "outbox", "wishes", "answers"
NOTE_LIMIT_BYTES = 1 << 16
ANSWER_LIMIT_S = 900.0
LOOK_S = 0.02
LARGEST_FILE = 1 << 42  # bytes; 4 TiB
_RULES = ConfigDict(extra="forbid")

_OPENING = b'{"sha256": "'
_MIDDLE = b'", "checkpoint": '
_CLOSING = b"}"

DraftName = Annotated[str, Field(pattern=r"^\.draft-[0-9]{1,12}-[0-9]{1,12}-[0-9]{1,12}$")]
"""The name of an incomplete checkpoint: its step, the view in which it was written, and its number in that view."""
NAME_PATTERN = r"^(state\.json|tensors(-[0-9]{5,9}-of-[0-9]{5,9})?\.safetensors)$"
FileName = Annotated[str, Field(pattern=NAME_PATTERN)]
"""The name of a checkpoint's file; it cannot name a place outside of the checkpoint."""
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Size = Annotated[int, Field(ge=0, le=LARGEST_FILE)]
Step = Annotated[int, Field(ge=0, lt=10**12)]
Whose = Literal["own", "parent"]
"""Whether a checkpoint is the run's own, or that of the parent that the run begins with."""


@dataclass(frozen=True, config=_RULES)
class Ticket:
    """A file of the checkpoint ``draft`` that is to go to the controller.

    ``writer`` identifies the writer, in hexadecimal digits, and names its folder in ``DRAFTS``.
    """

    writer: Annotated[str, Field(pattern=r"^[0-9a-f]{1,32}$")]
    draft: DraftName
    name: FileName
    size: Size
    sha256: Digest


@dataclass(frozen=True, config=_RULES)
class CheckpointRequest:
    """A worker's wish for a checkpoint.

    ``step``: bring the checkpoint of this step here. None: which step has the newest one, below ``before`` if that is
    set?
    """

    whose: Whose
    step: Step | None = None
    before: Step | None = None


@dataclass(frozen=True, config=_RULES)
class CheckpointReply:
    """The answer to a wish: the ``step``, -1 if there is no such checkpoint; or the ``error`` that prevents it."""

    step: Annotated[int, Field(ge=-1, lt=10**12)] = -1
    error: str = ""


_Note = TypeVar("_Note", Ticket, CheckpointRequest, CheckpointReply)


class Spool:
    """The folder ``at``, through which workers and their agent pass files. Any number of processes may use it at once.

    Tickets, wishes and answers are small files that appear complete or not at all. An answer comes when the files of
    the checkpoint are here.
    """

    def __init__(self, at: Path) -> None:
        self.at = at

    def make(self) -> None:
        """Make the folder. Raises ``OSError``."""
        for name in (DRAFTS, OUTBOX, WISHES, ANSWERS):
            (self.at / name).mkdir(parents=True, exist_ok=True)

    # -- for workers --------------------------------------------------------------------------------------------------

    def hand_over(self, ticket: Ticket) -> None:
        """Have the agent bring a file to the controller; the files of a writer go in order. Raises ``OSError``.

        Names begin with the machine's monotonic clock, which all processes share: no spool outlives a boot.
        """
        name = f"{time.monotonic_ns():020d}-{ticket.writer}-{secrets.token_hex(4)}"
        atomic_write(self.at / OUTBOX / name, _text(ticket))

    def waiting(self, writer: str) -> int:
        """How many checkpoints of ``writer`` have files here that the controller does not have yet."""
        return len({ticket.draft for _, ticket in self.tickets() if ticket.writer == writer})

    def ask(self, wish: CheckpointRequest, limit_s: float = ANSWER_LIMIT_S) -> int:
        """Ask for a checkpoint, and wait.

        Returns its step; -1 if there is none. Raises ``UserError`` if it cannot be had.
        """
        name = secrets.token_hex(8)
        answer, until = self.at / ANSWERS / name, time.monotonic() + limit_s
        try:
            atomic_write(self.at / WISHES / name, _text(wish))
            while not answer.exists():
                if time.monotonic() > until:
                    raise TimeoutError(f"the agent has not brought it within {limit_s:g} s")
                time.sleep(LOOK_S)
            granted = _read(answer, CheckpointReply)
            answer.unlink()
        except (OSError, ValueError) as error:
            raise _not_had(str(error)) from None
        if granted.error:
            raise _not_had(granted.error)
        return granted.step

    def checkpoints(self, whose: Whose) -> Path:
        """The folder of the checkpoints that workers asked for."""
        return self.at / whose / "checkpoints"

    def checkpoint(self, whose: Whose, step: int) -> Path:
        """The folder of the checkpoint after ``step``, once it is here; named as in a run's own folder."""
        return self.checkpoints(whose) / f"step-{step:010d}"

    # -- for the agent ------------------------------------------------------------------------------------------------

    def tickets(self) -> list[tuple[Path, Ticket]]:
        """The tickets of files that are to go to the controller, the oldest first. Other files are left out."""
        return list(_notes(self.at / OUTBOX, Ticket))

    def file_of(self, ticket: Ticket) -> Path:
        """The file of ``ticket``."""
        return self.at / DRAFTS / ticket.writer / ticket.draft / ticket.name

    def gone(self, path: Path, ticket: Ticket) -> None:
        """Remove the ticket at ``path`` with its file.

        The folder stays, as the writer may be writing another file there.
        """
        self.file_of(ticket).unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    def wishes(self) -> list[tuple[Path, CheckpointRequest]]:
        """The wishes that workers wait for."""
        return list(_notes(self.at / WISHES, CheckpointRequest))

    def answer(self, path: Path, granted: CheckpointReply) -> None:
        """Answer the wish at ``path``. Raises ``OSError``."""
        atomic_write(self.at / ANSWERS / path.name, _text(granted))
        path.unlink(missing_ok=True)


def _text(note: Ticket | CheckpointRequest | CheckpointReply) -> bytes:
    return json.dumps(asdict(note)).encode()


def _read(path: Path, kind: type[_Note]) -> _Note:
    """The note at ``path``. Raises ``OSError`` and ``ValueError``."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        return TypeAdapter(kind).validate_json(file.read(NOTE_LIMIT_BYTES), strict=True)


def _notes(folder: Path, kind: type[_Note]) -> Iterator[tuple[Path, _Note]]:
    for path in sorted(path for path in folder.glob("*") if re.fullmatch("[0-9a-f-]+", path.name)):
        with suppress(OSError, ValueError):  # the note was taken meanwhile, or is another file
            yield path, _read(path, kind)


def _not_had(why: str) -> UserError:
    rule = "a checkpoint must come from the controller to the hosts that load it"
    return UserError(rule, why, "see the controller and the network, and go on with --resume")


# --- JSON that carries the digest of its own bytes ---


def seal(tree: Any) -> bytes:
    """``{"sha256": digest, "checkpoint": tree}``; the digest is that of the tree's bytes in this text."""
    return _sealed(json.dumps(tree).encode())


def unseal(content: bytes) -> Any:
    """The tree in the result of ``seal``. Raises ``ValueError`` if a byte of it has changed."""
    body = content[len(_OPENING) + 64 + len(_MIDDLE) : -len(_CLOSING)]
    if content != _sealed(body):
        raise ValueError("its bytes do not have the digest that it was written with")
    return json.loads(body)


def is_sealed(content: bytes) -> bool:
    """Whether ``content`` begins like the result of ``seal``."""
    return content.startswith(_OPENING)


def digest_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sealed(body: bytes) -> bytes:
    return _OPENING + hashlib.sha256(body).hexdigest().encode() + _MIDDLE + body + _CLOSING
