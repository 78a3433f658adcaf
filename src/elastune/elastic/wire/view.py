"""A view: one agreed composition of a run, its short form as JSON, and the addresses that its members publish.

A view goes to every worker, so with thousands of workers its length counts twice. Neighbouring ranks that are alike
are written once: the worker numbers 0 to 8,191 are one pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import groupby
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from elastune.core.mesh import Mesh
from elastune.elastic.wire.transport import ProtocolError, message

KEPT_VIEWS = 2  # members publish addresses for the two newest views
LIMIT_BYTES = 1 << 23
MOST_MEMBERS = 1 << 20  # a longer list is no view


def to_ranges(numbers: tuple[int, ...]) -> list[tuple[int, int]]:
    """Each range of consecutive numbers, as its first number and its length."""
    runs = (list(run) for _, run in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]))
    return [(run[0][1], len(run)) for run in runs]


def from_ranges(pairs: Any) -> Any:
    """The argument of ``to_ranges`` that has this result. Raises ``ValueError`` if there is none."""
    if isinstance(pairs, tuple):
        return pairs
    return tuple(number for first, count in _pairs(pairs, int) for number in range(first, first + count))


def to_runs(names: tuple[str, ...]) -> list[tuple[str, int]]:
    """Each name, and how often it stands before the next name."""
    return [(name, len(list(run))) for name, run in groupby(names)]


def from_runs(pairs: Any) -> Any:
    """The argument of ``to_runs`` that has this result. Raises ``ValueError`` if there is none."""
    return (
        pairs if isinstance(pairs, tuple) else tuple(name for name, count in _pairs(pairs, str) for _ in range(count))
    )


def _pairs(pairs: Any, kind: type) -> list[tuple[Any, int]]:
    """Check that ``pairs`` are pairs of a ``kind`` and a count, not too many in all."""
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ValueError("pairs of what stands there and how often")
    if any(type(value) is not kind or type(count) is not int or count < 1 for value, count in pairs):
        raise ValueError(f"pairs of {kind.__name__} and a number above 0")
    if sum(count for _, count in pairs) > MOST_MEMBERS:
        raise ValueError(f"more than {MOST_MEMBERS} members")
    return [(value, count) for value, count in pairs]


Workers = Annotated[tuple[int, ...], BeforeValidator(from_ranges), PlainSerializer(to_ranges)]
Hosts = Annotated[tuple[str, ...], BeforeValidator(from_runs), PlainSerializer(to_runs)]


@message
class View:
    """One agreed composition of a run: its members, and how they continue from the view before.

    A scheduled view takes effect at one step boundary, which its members agree on in the reduction of a step; until
    then the view before it goes on. Any other view takes effect at once: the view before it is broken, and a step that
    the view before had not completed is discarded.

    Attributes:
        number: Views are counted from 1.
        members: The numbers of the workers, by rank.
        scheduled: Whether the view is scheduled.
        joiners: The members that hold no state yet. Only a scheduled view has joiners.
        initial: No worker holds state: all members begin at the newest checkpoint, or at the start.
        mesh: The mesh of the members, as ``Mesh.parse`` reads it; "" if each has a whole replica.
        hosts: The host of each member, by rank; empty if all run on one host.
        leavers: Workers that leave with a scheduled view, and first send the pieces of state that only they may hold.
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
        """The mesh of the members."""
        return Mesh.parse(self.mesh) if self.mesh else Mesh(data=len(self.members))

    @cached_property
    def ranks(self) -> Mapping[int, int]:
        """The rank of each member, by the worker's number."""
        return {number: rank for rank, number in enumerate(self.members)}


class RendezvousStore:
    """What the members of a view publish for each other: the addresses of the view's group.

    A key begins with the number of its view and a slash: ``7/0/2``. Only the two newest views are held.
    """

    def __init__(self) -> None:
        self._views: dict[int, dict[str, str]] = {}
        self._newest = 0
        self._size_bytes = 0

    def begin(self, view: int) -> None:
        """Make ``view`` the newest one, and forget the views that are older than the one before it."""
        self._newest = max(self._newest, view)
        for old in [number for number in self._views if number <= self._newest - KEPT_VIEWS]:
            self._size_bytes -= sum(len(key) + len(value) for key, value in self._views.pop(old).items())

    def put(self, key: str, value: str) -> bool:
        """Hold ``value`` under ``key``. Returns False for a view that is forgotten.

        Raises ``ProtocolError`` for a view that does not exist yet, and if the values get too large.
        """
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
        """The value under ``key``."""
        return self._views.get(int(key.partition("/")[0]), {}).get(key)

    def items(self) -> list[tuple[str, str]]:
        """All keys and values, oldest view first."""
        return [item for number in sorted(self._views) for item in self._views[number].items()]
