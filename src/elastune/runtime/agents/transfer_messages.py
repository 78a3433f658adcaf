"""Messages between an agent and its controller about files; ``elastic.wire.transport`` gives their form.

Files have a connection of their own, so that no message about a worker waits behind a checkpoint. Content is base64
in lines of bounded length. That is a third more bytes to send, for one kind of line on all connections.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Literal

from pydantic import Field

from elastune.elastic.wire.contact import SALT_DIGITS
from elastune.elastic.wire.transport import MessageCodec, message
from elastune.train.checkpoints.spool import Digest, DraftName, FileName, Size, Step, Whose

PURPOSE = "files"  # of a controller that listens for them, in handshakes
PIECE_BYTES = 1 << 19
MOST_FILES = 1 << 14  # of one checkpoint
Run = Annotated[str, Field(pattern=f"^[0-9a-f]{{{SALT_DIGITS}}}$")]
"""A run, by the salt of its token."""
Content = Annotated[str, Field(max_length=PIECE_BYTES * 4 // 3 + 4)]


# -- messages of an agent ---------------------------------------------------------------------------------------------
@message
class FilesHello:
    """The first message of an agent on this connection."""

    kind: Literal["files_hello"] = "files_hello"

    @property
    def stays(self) -> bool:
        """Whether the connection lasts: an agent stays."""
        return True


@message
class Offer:
    """The agent has this file of the checkpoint ``draft`` of ``run``."""

    run: Run
    draft: DraftName
    name: FileName
    size: Size
    sha256: Digest
    kind: Literal["offer"] = "offer"


@message
class FilePiece:
    """The next part of a file."""

    content: Content
    kind: Literal["file_piece"] = "file_piece"


@message
class Ask:
    """Asks for the names of the files of one checkpoint.

    Attributes:
        run: The run.
        whose: Whether the checkpoint is the run's or its parent's.
        step: The checkpoint's step; None: the newest checkpoint.
        before: With no ``step``: the newest checkpoint of an earlier step than this.
    """

    run: Run
    whose: Whose
    step: Step | None = None
    before: Step | None = None
    kind: Literal["ask"] = "ask"


@message
class Fetch:
    """Asks for the content of one of these files, from ``offset`` on."""

    run: Run
    whose: Whose
    step: Step
    name: FileName
    offset: Size
    kind: Literal["fetch"] = "fetch"


# -- messages of the controller ---------------------------------------------------------------------------------------
@message
class FilesWelcome:
    """The controller admits the agent."""

    kind: Literal["files_welcome"] = "files_welcome"


@message
class SendFrom:
    """The agent is to send the file that it offered, from ``offset`` on."""

    offset: Size
    kind: Literal["send_from"] = "send_from"


@message
class FileTaken:
    """The offered file is complete on the controller's disk, or the controller has no use for it."""

    kind: Literal["file_taken"] = "file_taken"


@message
class Refused:
    """The controller cannot do what the agent asks, and says ``why``. ``again``: it may succeed later."""

    why: Annotated[str, Field(max_length=1 << 12)]
    again: bool = False
    kind: Literal["refused"] = "refused"


@message
class Contents:
    """The files of a checkpoint.

    Attributes:
        step: The checkpoint's step; -1: there is no checkpoint.
        files: The size of each file.
        mark: Differs between two checkpoints of the same step.
    """

    step: Annotated[int, Field(ge=-1, lt=10**12)]
    files: Annotated[dict[FileName, Size], Field(max_length=MOST_FILES)] = Field(default_factory=dict)
    mark: Annotated[str, Field(max_length=64)] = ""
    kind: Literal["contents"] = "contents"


FileRequest = FilesHello | Offer | FilePiece | Ask | Fetch
FileReply = FilesWelcome | SendFrom | FileTaken | Refused | Contents | FilePiece
FROM_AGENT: MessageCodec[FileRequest] = MessageCodec(FileRequest)
FROM_CONTROLLER: MessageCodec[FileReply] = MessageCodec(FileReply)


def piece_of(data: bytes) -> FilePiece:
    """Return ``data`` as a message."""
    return FilePiece(base64.b64encode(data).decode("ascii"))


def data_of(piece: FilePiece) -> bytes:
    """Return the data in ``piece``.

    Raises:
        ValueError: If its content is not base64.
    """
    try:
        return base64.b64decode(piece.content, validate=True)
    except binascii.Error as error:
        raise ValueError(f"no content: {error}") from None
