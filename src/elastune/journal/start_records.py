"""What is recorded of a training that begins with another model's weights."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from elastune.journal.values import Count, Number

_RULES = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_RULES)
class StartedFrom:
    """A model begins with ``taken`` of the tensors of ``source``, which has this ``sha256``. ``fresh``: names of this
    model that keep their initial values, and why; ``unused``: how many of the source's nothing here took. ``begins``:
    the SHA-256 of all that the model has then ("": nobody looked); ``worker_seconds``: of the training that the source
    is of (None: no journal beside it tells)."""

    source: str
    sha256: str
    taken: Count
    fresh: dict[str, str] = field(default_factory=dict)
    unused: Count = 0
    begins: str = ""
    worker_seconds: float | None = None
    kind: Literal["started_from"] = "started_from"


@dataclass(frozen=True, config=_RULES)
class TrialBegan:
    """A trial has taken another model's weights, by itself or since its study was begun so."""

    trial: Number
    told: StartedFrom
    kind: Literal["trial_began"] = "trial_began"
