"""What the membership machine wants done: some of it by the coordinator, some by the controller."""

from __future__ import annotations

from dataclasses import dataclass

from elastune.elastic.protocol.messages import InstallView


@dataclass(frozen=True)
class Confirm:
    """Tell ``worker``, a joiner, that it is a member of view ``version`` for good."""

    worker: int
    version: int


@dataclass(frozen=True)
class Release:
    """Tell ``worker``, a member until now, that the others go on without it: it may end (and may have ended)."""

    worker: int


@dataclass(frozen=True)
class Start:
    """Start these new workers (numbers never used before)."""

    workers: tuple[int, ...]


@dataclass(frozen=True)
class End:
    """End ``worker`` by force. ``lost``: it counts as lost; else it is not needed any more."""

    worker: int
    why: str
    lost: bool = False


@dataclass(frozen=True)
class Dismiss:
    """The run is over: every worker may end."""


@dataclass(frozen=True)
class GiveUp:
    """The run cannot go on."""

    why: str


@dataclass(frozen=True)
class StopRun:
    """Too few members would remain: let the run write a checkpoint and end."""

    why: str


Instruction = InstallView | Confirm | Release | Start | End | Dismiss | GiveUp | StopRun
