"""What workers, clients and the coordinator say to each other: JSON, one object a line, checked when it is read.

Reading is strict: no number out of a string, no NaN, no field too many.
"""

from __future__ import annotations

import json
from dataclasses import field
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from elastune.elastic.protocol.view import View

_RULES = ConfigDict(extra="forbid", allow_inf_nan=False)
KEY_LIMIT = 256
VALUE_LIMIT = 1 << 18
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
Doing = Literal["starting", "computing", "reducing", "gathering", "forming", "handing over", "saving", "done"]


@dataclass(frozen=True, config=_RULES)
class Hello:
    """The first line of every connection. Nothing else is read before ``token`` was found right.

    ``worker``: the number of a worker of this run; None: a client that has a request.
    """

    token: str
    worker: Count | None = None
    pid: Count = 0
    host: str = ""
    kind: Literal["hello"] = "hello"


@dataclass(frozen=True, config=_RULES)
class Ready:
    """This worker is warm and waits for a version that has it."""

    kind: Literal["ready"] = "ready"


@dataclass(frozen=True, config=_RULES)
class Running:
    """This worker holds its state under version ``version``, whose first step is ``step``."""

    version: Count
    step: Count
    kind: Literal["running"] = "running"


@dataclass(frozen=True, config=_RULES)
class Broken:
    """A collective of version ``version`` failed here."""

    version: Count
    why: str
    kind: Literal["broken"] = "broken"


@dataclass(frozen=True, config=_RULES)
class Noticed:
    """This worker will be taken away in ``seconds``: it wishes to leave before that."""

    seconds: Seconds
    why: str
    kind: Literal["noticed"] = "noticed"


@dataclass(frozen=True, config=_RULES)
class Replace:
    """A wish of this worker's, a member: let another take its place. It goes on until that one is there."""

    kind: Literal["replace"] = "replace"


@dataclass(frozen=True, config=_RULES)
class Resize:
    """A wish for ``workers`` workers; of a client, answered by ``Answer``."""

    workers: Count
    why: str = ""
    kind: Literal["resize"] = "resize"


@dataclass(frozen=True, config=_RULES)
class Change:
    """A wish that ``changes`` take effect for all at one step boundary."""

    changes: dict[str, float]
    why: str = ""
    kind: Literal["change"] = "change"


@dataclass(frozen=True, config=_RULES)
class Beat:
    """This worker lives: ``doing`` that since ``since_s`` seconds, in step ``step``, with ``size_bytes`` in flight.

    Of the coordinator: it lives.
    """

    step: Count = 0
    doing: Doing = "starting"
    since_s: Seconds = 0.0
    size_bytes: Count = 0
    kind: Literal["beat"] = "beat"


@dataclass(frozen=True, config=_RULES)
class Publish:
    """An address of this worker, for the members of a version to find. ``key`` begins with the version's number and a
    slash; ``value`` is base64."""

    key: Annotated[str, Field(pattern=r"^[0-9]{1,18}/", max_length=KEY_LIMIT)]
    value: Annotated[str, Field(max_length=VALUE_LIMIT)]
    kind: Literal["publish"] = "publish"


@dataclass(frozen=True, config=_RULES)
class Left:
    """This worker has left at the boundary of a version that does not have it."""

    kind: Literal["left"] = "left"


@dataclass(frozen=True, config=_RULES)
class Done:
    """This worker's training function has ended well. It stays to serve others until ``Bye``."""

    kind: Literal["done"] = "done"


@dataclass(frozen=True, config=_RULES)
class Welcome:
    """The token was right. ``joins``: training goes on already, so be warm before you are ``Ready``.

    Who has heard nothing for ``silence_s`` and ten beats is cut off, and ends itself.
    """

    joins: bool
    beat_s: Seconds
    silence_s: Seconds = 30.0
    kind: Literal["welcome"] = "welcome"


@dataclass(frozen=True, config=_RULES)
class InstallView:
    """A new version; sent to every connected worker, members or not."""

    version: View
    kind: Literal["proclaim"] = "proclaim"


@dataclass(frozen=True, config=_RULES)
class Confirmed:
    """The joiner that reads this is a member of ``version`` for good."""

    version: int
    kind: Literal["confirmed"] = "confirmed"


@dataclass(frozen=True, config=_RULES)
class Bye:
    """The run is over, or goes on without this worker: end."""

    kind: Literal["bye"] = "bye"


@dataclass(frozen=True, config=_RULES)
class Answer:
    """To a client: whether its request was taken, and a sentence about it."""

    taken: bool
    detail: str
    members: list[int] = field(default_factory=list)
    kind: Literal["answer"] = "answer"


Message = Annotated[
    Hello
    | Ready
    | Running
    | Broken
    | Noticed
    | Replace
    | Resize
    | Change
    | Beat
    | Publish
    | Left
    | Done
    | Welcome
    | InstallView
    | Confirmed
    | Bye
    | Answer,
    Field(discriminator="kind"),
]
_ADAPTER: TypeAdapter[Message] = TypeAdapter(Message)


def encode(message: Message) -> bytes:
    """One line of JSON, with its line end."""
    return json.dumps(_ADAPTER.dump_python(message), separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message in ``line``. Raises ``pydantic.ValidationError`` (a ``ValueError``) where it is none."""
    return _ADAPTER.validate_json(line, strict=True)
