"""The form of all messages: frozen dataclasses with a ``kind``, one line of JSON each, checked when they are read.

Every connection has this form: workers and their coordinator (``elastic.wire.messages``), agents and their controller
(``runtime.agents.messages``), and the files of agents (``runtime.agents.transfer_messages``).

Reading is strict. No number comes from a string, no typed number is NaN or infinite, and no field is unknown. Text is
written as UTF-8, because paths and logs in other scripts would grow threefold as escapes. Half a surrogate pair, as in
some file names and error messages, becomes "?": no JSON reader would take it.
"""

from __future__ import annotations

import json
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]
RULES = ConfigDict(extra="forbid", allow_inf_nan=False)
Class = TypeVar("Class", bound=type)
M = TypeVar("M")


@dataclass_transform(frozen_default=True, field_specifiers=(field, Field))
def message(cls: Class) -> Class:
    """Make ``cls`` a message, or a part of one: a frozen dataclass whose fields are checked.

    A message has a field ``kind`` with its class's name in small letters, by which a reader knows its class.

    Example:
        >>> @message
        ... class Stopped:
        ...     step: Count
        ...     kind: Literal["stopped"] = "stopped"
    """
    made: Class = dataclass(frozen=True, config=RULES)(cls)  # type: ignore[assignment]
    return made


class MessageCodec(Generic[M]):
    """Writes messages as lines of JSON, and reads them.

    Args:
        messages: The union of all messages that one side may send.

    Example:
        >>> codec: MessageCodec[Stopped | Started] = MessageCodec(Stopped | Started)
        >>> codec.decode(codec.encode(Stopped(3)))
        Stopped(step=3, kind='stopped')
    """

    def __init__(self, messages: Any) -> None:
        self._adapter: TypeAdapter[M] = TypeAdapter(Annotated[messages, Field(discriminator="kind")])

    def encode(self, message: M) -> bytes:
        """Return ``message`` as one line, with its line end.

        Raises:
            TypeError: If a run's configuration holds a value that JSON cannot hold.
        """
        fields = self._adapter.dump_python(message)
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False, default=_path_as_text)
        return text.encode("utf-8", "replace") + b"\n"

    def decode(self, line: bytes) -> M:
        """Return the message in ``line``.

        Raises:
            ValueError: If ``line`` is not one of the messages (a ``pydantic.ValidationError``).
        """
        return self._adapter.validate_json(line, strict=True)


def _path_as_text(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} is not JSON")
