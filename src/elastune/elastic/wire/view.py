"""A view: one agreed composition of a run, its short form as JSON, and the addresses that its members publish.

A view goes to every worker, so with thousands of workers its length counts twice. Neighbouring ranks that are alike
are written once: the worker numbers 0 to 8,191 are one pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import groupby
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, PlainSerializer
from pydantic.dataclasses import dataclass

from elastune.core.mesh import Mesh
from elastune.elastic.wire.transport import ProtocolError

# [view] One agreed composition of a run, and how it is JSON: what is alike in neighbouring ranks is said once.
#
# A view goes to every worker, so among thousands its length counts twice: the numbers 0 to 8,191 are one pair, and eight
# workers of one host are another. Nobody writes one by hand.

MOST_MEMBERS = 1 << 20  # of any view; what claims more is no view


def to_ranges(numbers: tuple[int, ...]) -> list[tuple[int, int]]:
    """The first of each run of numbers that follow one another, and how many those are."""
    runs = (list(run) for _, run in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]))
    return [(run[0][1], len(run)) for run in runs]


def from_ranges(told: Any) -> Any:
    """What ``to_ranges`` was given. Raises ``ValueError`` for anything else."""
    return (
        told
        if isinstance(told, tuple)
        else tuple(n for first, count in _pairs(told, int) for n in range(first, first + count))
    )


def to_runs(names: tuple[str, ...]) -> list[tuple[str, int]]:
    """Each name, and how often it stands there before the next one."""
    return [(name, len(list(run))) for name, run in groupby(names)]


def from_runs(told: Any) -> Any:
    """What ``to_runs`` was given. Raises ``ValueError`` for anything else."""
    return told if isinstance(told, tuple) else tuple(name for name, count in _pairs(told, str) for _ in range(count))


def _pairs(told: Any, kind: type) -> list[tuple[Any, int]]:
    """``told``, checked: pairs of a ``kind`` and a count, not too many in all."""
    if not isinstance(told, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in told):
        raise ValueError("pairs of what stands there and how often")
    if any(type(what) is not kind or type(count) is not int or count < 1 for what, count in told):
        raise ValueError(f"pairs of {kind.__name__} and a number above 0")
    if sum(count for _, count in told) > MOST_MEMBERS:
        raise ValueError(f"more than {MOST_MEMBERS} members")
    return [(what, count) for what, count in told]


Workers = Annotated[tuple[int, ...], BeforeValidator(from_ranges), PlainSerializer(to_ranges)]
Hosts = Annotated[tuple[str, ...], BeforeValidator(from_runs), PlainSerializer(to_runs)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class View:
    """The ``number``-th composition of a run: its ``members`` (worker numbers) in the order of their ranks.

    A scheduled view takes effect at one step boundary, which its members agree on in the reduction of a step; until
    then the one before it goes on. Any other takes effect at once (it is immediate): the one before it is broken, and a
    step that it had not completed is discarded. ``joiners`` are members that hold no state yet; only scheduled views
    have them. ``initial``: nobody holds state, so all members begin at the newest checkpoint, or at the beginning.

    ``mesh``: how they stand, as ``Mesh.parse`` reads it; "" where each carries a replica of its own. ``hosts``: where
    each of them runs, by rank; empty where that is one machine. ``leavers``: workers that leave with a scheduled view
    and hand over, first, what they alone may hold.
    """

    number: int
    members: Workers
    scheduled: bool = False
    joiners: Workers = ()
    initial: bool = False
    mesh: str = ""
    hosts: Hosts = ()
    leavers: Workers = ()

    @property
    def grid(self) -> Mesh:
        """``mesh``, read."""
        return Mesh.parse(self.mesh) if self.mesh else Mesh(data=len(self.members))

    @cached_property
    def ranks(self) -> Mapping[int, int]:
        """The rank of each member, by its number."""
        return {number: rank for rank, number in enumerate(self.members)}


# [rendezvous] What members of a view publish for each other: the addresses of its group, for the two newest views.

KEPT_VIEWS = 2
LIMIT_BYTES = 1 << 23


class RendezvousStore:
    """Values by key. A key begins with the number of its view and a slash: ``7/0/2``."""

    def __init__(self) -> None:
        self._views: dict[int, dict[str, str]] = {}
        self._newest = 0
        self._size_bytes = 0

    def begin(self, view: int) -> None:
        """``view`` is the newest now; what is older than the one before it is forgotten."""
        self._newest = max(self._newest, view)
        for old in [number for number in self._views if number <= self._newest - KEPT_VIEWS]:
            self._size_bytes -= sum(len(key) + len(value) for key, value in self._views.pop(old).items())

    def put(self, key: str, value: str) -> bool:
        """Keep it; False for a view that is forgotten. Raises ``ProtocolError`` for one to come, or for too much."""
        view = int(key.partition("/")[0])
        if view <= self._newest - KEPT_VIEWS:
            return False
        values = self._views.get(view, {})
        size = self._size_bytes + len(key) + len(value) - (len(key) + len(values[key]) if key in values else 0)
        if view > self._newest or size > LIMIT_BYTES:
            raise ProtocolError(f"it published {key!r} under view {self._newest}, {size} bytes in all")
        self._views.setdefault(view, {})[key] = value
        self._size_bytes = size
        return True

    def get(self, key: str) -> str | None:
        """What is kept under ``key``."""
        return self._views.get(int(key.partition("/")[0]), {}).get(key)

    def items(self) -> list[tuple[str, str]]:
        """All that is kept, oldest view first."""
        return [item for number in sorted(self._views) for item in self._views[number].items()]
