"""Messages between an agent and its controller about files: JSON, one object a line, checked when it is read.

Files have a connection of their own, so that no message about a worker waits behind a checkpoint. Content is base64
in lines of bounded length. That is a third more bytes to send, for one kind of line on all connections.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import asdict
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from elastune.elastic.wire.handshake import SALT_DIGITS
from elastune.train.checkpoints.spool import Digest, DraftName, FileName, Size, Step, Whose

_RULES = ConfigDict(extra="forbid")
PURPOSE = "files"  # of a controller that listens for them, in handshakes
PIECE_BYTES = 1 << 19
MOST_FILES = 1 << 14  # of one checkpoint
Run = Annotated[str, Field(pattern=f"^[0-9a-f]{{{SALT_DIGITS}}}$")]
"""A run, by the salt of its token."""
Content = Annotated[str, Field(max_length=PIECE_BYTES * 4 // 3 + 4)]


# -- messages of an agent ---------------------------------------------------------------------------------------------
@dataclass(frozen=True, config=_RULES)
class FilesHello:
    """The first line."""

    kind: Literal["files_hello"] = "files_hello"

    @property
    def stays(self) -> bool:
        """An agent is no guest."""
        return True


@dataclass(frozen=True, config=_RULES)
class Offer:
    """I have this file of the checkpoint ``draft`` of ``run``."""

    run: Run
    draft: DraftName
    name: FileName
    size: Size
    sha256: Digest
    kind: Literal["offer"] = "offer"


@dataclass(frozen=True, config=_RULES)
class FilePiece:
    """More of the file that was wanted, in order."""

    content: Content
    kind: Literal["piece"] = "piece"


@dataclass(frozen=True, config=_RULES)
class Ask:
    """Which files has the checkpoint after ``step``; None: the newest one, below ``before`` if that is told?"""

    run: Run
    whose: Whose
    step: Step | None = None
    before: Step | None = None
    kind: Literal["ask"] = "ask"


@dataclass(frozen=True, config=_RULES)
class Fetch:
    """Send what one of them has from ``offset`` on."""

    run: Run
    whose: Whose
    step: Step
    name: FileName
    offset: Size
    kind: Literal["fetch"] = "fetch"


# -- messages of the controller ---------------------------------------------------------------------------------------
@dataclass(frozen=True, config=_RULES)
class FilesWelcome:
    """The agent is let in."""

    kind: Literal["files_welcome"] = "files_welcome"


@dataclass(frozen=True, config=_RULES)
class SendFrom:
    """Send the file that you have offered, from ``offset`` on."""

    offset: Size
    kind: Literal["wanted"] = "wanted"


@dataclass(frozen=True, config=_RULES)
class FileTaken:
    """The file is here, as it was offered, on the disk; or there is no use for it."""

    kind: Literal["stored"] = "stored"


@dataclass(frozen=True, config=_RULES)
class Refused:
    """That cannot be: ``why``. ``again``: it may later."""

    why: Annotated[str, Field(max_length=1 << 12)]
    again: bool = False
    kind: Literal["refused"] = "refused"


@dataclass(frozen=True, config=_RULES)
class Contents:
    """The checkpoint after ``step``, -1 where there is none, has files of these sizes.

    ``mark``: another one of the same step has another."""

    step: Annotated[int, Field(ge=-1, lt=10**12)]
    files: Annotated[dict[FileName, Size], Field(max_length=MOST_FILES)] = Field(default_factory=dict)
    mark: Annotated[str, Field(max_length=64)] = ""
    kind: Literal["contents"] = "contents"


FileRequest = FilesHello | Offer | FilePiece | Ask | Fetch
FileReply = FilesWelcome | SendFrom | FileTaken | Refused | Contents | FilePiece
_SAID: TypeAdapter[FileRequest] = TypeAdapter(Annotated[FileRequest, Field(discriminator="kind")])
_TOLD: TypeAdapter[FileReply] = TypeAdapter(Annotated[FileReply, Field(discriminator="kind")])


def encode(message: FileRequest | FileReply) -> bytes:
    """One line of JSON, with its line end."""
    return json.dumps(asdict(message), separators=(",", ":")).encode() + b"\n"


def decode_from_agent(line: bytes) -> FileRequest:
    """Decode a message of an agent. Raises ``ValueError`` for anything else."""
    return _SAID.validate_json(line, strict=True)


def decode_from_controller(line: bytes) -> FileReply:
    """Decode a message of the controller. Raises ``ValueError`` for anything else."""
    return _TOLD.validate_json(line, strict=True)


def piece_of(data: bytes) -> FilePiece:
    """With ``data`` in it."""
    return FilePiece(base64.b64encode(data).decode("ascii"))


def data_of(piece: FilePiece) -> bytes:
    """What is in it. Raises ``ValueError``."""
    try:
        return base64.b64decode(piece.content, validate=True)
    except binascii.Error as error:
        raise ValueError(f"no content: {error}") from None
