"""What is recorded of what a run holds and is to take: hosts that are paid for, steps that are planned."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from elastune.journal.values import Count

_RULES = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_RULES)
class StepsPlanned:
    """The run will have taken ``steps`` steps in all when its epochs are over, if its batch stays as it is."""

    steps: Count
    kind: Literal["steps_planned"] = "steps_planned"


@dataclass(frozen=True, config=_RULES)
class HostsHeld:
    """What is paid for from now on, by the kind of host ("" where hosts do not tell theirs): ``workers`` of the run,
    those that are starting included, and ``room`` for workers on all hosts that it may use, theirs included."""

    workers: dict[str, Count]
    room: dict[str, Count]
    kind: Literal["hosts_held"] = "hosts_held"
