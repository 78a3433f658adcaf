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
    """A model begins with tensors of another model.

    Attributes:
        source: The folder or file that they are from.
        sha256: Its digest.
        taken: How many tensors were taken.
        fresh: Names of this model that keep their initial values, and why.
        unused: How many of the source's tensors were not taken.
        begins: The SHA-256 of all that the model has then; "" where it was not computed.
        worker_seconds: The worker-seconds of the source's training; None: no journal beside it tells.
    """

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
    """A trial has taken another model's weights, by itself or because its study was begun so."""

    trial: Number
    told: StartedFrom
    kind: Literal["trial_began"] = "trial_began"
