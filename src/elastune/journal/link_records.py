"""What is recorded of the network of a run's workers, and of how their sums travel on it.

Times: every ``*_s`` is a duration.
"""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from elastune.journal.values import Count

_RULES = ConfigDict(extra="forbid")
BY_CHECKPOINT = "the checkpoint"
"""The ``cause`` of a topology that a resumed run has from its checkpoint."""


@dataclass(frozen=True, config=_RULES)
class LinkMeasured:
    """One all-reduce among ``workers`` on ``hosts`` takes about ``latency_s + bytes * seconds_per_byte``."""

    workers: Count
    latency_s: float
    seconds_per_byte: float
    hosts: Count = 1
    kind: Literal["link_measured"] = "link_measured"


@dataclass(frozen=True, config=_RULES)
class TopologyLaid:
    """After ``step`` steps and ``seconds`` of training the sums of ``workers`` began to travel by the routes of
    ``topology``; ``cause``: who asked for it, and where it could not be had what was asked for."""

    step: Count
    topology: str
    workers: Count
    cause: str
    seconds: float
    kind: Literal["topology_laid"] = "topology_laid"
