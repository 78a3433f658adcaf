"""One agreed composition of a run."""

from __future__ import annotations

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from elastune.core.mesh import Mesh


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
    members: tuple[int, ...]
    scheduled: bool = False
    joiners: tuple[int, ...] = ()
    initial: bool = False
    mesh: str = ""
    hosts: tuple[str, ...] = ()
    leavers: tuple[int, ...] = ()

    @property
    def grid(self) -> Mesh:
        """``mesh``, read."""
        return Mesh.parse(self.mesh) if self.mesh else Mesh(data=len(self.members))

    def rank_of(self, worker: int) -> int:
        """The rank of ``worker``. Raises ``ValueError`` where it is no member."""
        return self.members.index(worker)
