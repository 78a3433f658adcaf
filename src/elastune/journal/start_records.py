"""What is recorded of a training that begins with another model's weights."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from elastune.journal.values import Count

_RULES = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_RULES)
class StartedFrom:
    """A model begins with ``taken`` of the tensors of ``source``, which has this ``sha256``. ``fresh``: names of this
    model that keep their initial values, and why; ``unused``: how many of the source's nothing here took."""

    source: str
    sha256: str
    taken: Count
    fresh: dict[str, str] = field(default_factory=dict)
    unused: Count = 0
    kind: Literal["started_from"] = "started_from"
