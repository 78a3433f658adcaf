"""What happens to a run's workers, and what has to be done about it: the language of the membership machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from elastune.elastic.protocol.view import View

_RULES = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
Number = Annotated[int, Field(ge=0)]

# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, config=_RULES)
class Connected:
    """``worker``'s process has come. It is no member yet."""

    worker: Number


@dataclass(frozen=True, config=_RULES)
class Ready:
    """``worker`` is warm and waits."""

    worker: Number


@dataclass(frozen=True, config=_RULES)
class Running:
    """``worker`` holds its state under ``version``, whose first step is ``step``."""

    worker: Number
    version: Number
    step: Number


@dataclass(frozen=True, config=_RULES)
class Broken:
    """A collective of ``version`` failed at ``worker``."""

    worker: Number
    version: Number
    why: str = ""


@dataclass(frozen=True, config=_RULES)
class Noticed:
    """``worker`` will be taken away: it has to leave."""

    worker: Number
    why: str = ""


@dataclass(frozen=True, config=_RULES)
class ReplaceAsked:
    """Somebody wants another worker in place of ``worker``, a member, which goes on until that one is there."""

    worker: Number


@dataclass(frozen=True, config=_RULES)
class Left:
    """``worker`` left at the boundary of a version without it."""

    worker: Number


@dataclass(frozen=True, config=_RULES)
class Lost:
    """``worker`` is dead, frozen or cut off; or could not be started."""

    worker: Number
    why: str = ""


@dataclass(frozen=True, config=_RULES)
class Done:
    """``worker``'s training function has ended well. May be said again by one that was rewound after it."""

    worker: Number


@dataclass(frozen=True, config=_RULES)
class ResizeAsked:
    """Somebody wants ``workers`` workers."""

    workers: Number


@dataclass(frozen=True, config=_RULES)
class ChangeAsked:
    """Somebody wants parameters to take these values at one step boundary."""

    changes: dict[str, float]


@dataclass(frozen=True, config=_RULES)
class CapacityChanged:
    """``free`` more workers could be started now."""

    free: Number


Event = (
    Connected
    | Ready
    | Running
    | Broken
    | Noticed
    | ReplaceAsked
    | Left
    | Lost
    | Done
    | ResizeAsked
    | ChangeAsked
    | CapacityChanged
)

# -- instructions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InstallView:
    """Tell every connected worker of ``version``."""

    version: View


@dataclass(frozen=True)
class Confirm:
    """Tell ``worker``, a joiner, that it is a member of ``version`` for good."""

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
    """End ``worker`` by force: it counts as lost, or is not needed any more."""

    worker: int
    why: str


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

# -- events as JSON ---------------------------------------------------------------------------------------------------

_KINDS: dict[str, type[Any]] = {
    "connected": Connected,
    "ready": Ready,
    "running": Running,
    "broken": Broken,
    "noticed": Noticed,
    "replace_asked": ReplaceAsked,
    "left": Left,
    "lost": Lost,
    "done": Done,
    "resize_asked": ResizeAsked,
    "change_asked": ChangeAsked,
    "capacity_changed": CapacityChanged,
}
_KIND_OF = {kind: name for name, kind in _KINDS.items()}


def encode_event(event: Event) -> dict[str, Any]:
    """``event`` as what JSON can hold."""
    return {"event": _KIND_OF[type(event)], **asdict(event)}


def decode_event(fields: dict[str, Any]) -> Event:
    """The event that ``encode_event`` made ``fields`` of. Raises ``ValueError`` where there is none."""
    name = fields.get("event") if isinstance(fields, dict) else None
    if not isinstance(name, str) or name not in _KINDS:
        raise ValueError(f"no event: {fields!r:.200}")
    event: Event = _KINDS[name](**{str(key): value for key, value in fields.items() if key != "event"})
    return event
