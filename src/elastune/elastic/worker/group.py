"""The workers that train together, as one of them sees them: who they are now, and what to do when that changes.

All members execute the same sequence of collective operations: a step's reduction, or a gather. One is *completed* at
a worker once its whole result is there, and no worker completes the next before all have contributed to this one, so
members differ by one operation at most. When a group breaks, the survivors meet in the next version's and compare: who
lacks the newest completed operation gets its result from one that has it; if nobody has, it is done again.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastune.comm.group import Group, GroupBroken
from elastune.core.errors import UserError

Rows = list[list[float]]


class Rewind(BaseException):
    """Back to the newest snapshot, or to the start: the training function is to be called anew."""


class Leave(BaseException):
    """This worker is no member any more."""


class WorkerGroup:
    """Workers that stay as they are: one alone, or those that torchrun or srun started. A lost one ends the run."""

    elastic = False
    begins_again = False  # all state was lost: the run goes on from its newest checkpoint, or from the start

    def __init__(self, group: Group) -> None:
        self.group = group
        self.live = True
        self.discarded = 0  # steps begun and not completed, since the last that was
        self.last_step: tuple[int, float] | None = None  # the newest completed step's version, and when it was

    @property
    def worker(self) -> int:
        """This worker's number, whatever its rank is."""
        return self.group.rank

    @property
    def version(self) -> int:
        """The number of the version that this worker is a member of; 0 where there are none."""
        return 0

    @property
    def members(self) -> tuple[int, ...]:
        """The members' numbers, by rank."""
        return tuple(range(self.group.size))

    @property
    def planned(self) -> bool:
        """Whether this version came about at an agreed boundary."""
        return True

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self.group.rank

    @property
    def size(self) -> int:
        """How many workers there are."""
        return self.group.size

    @property
    def broken(self) -> bool:
        """Whether this version is over, so that what is under way can be given up."""
        return False

    def begin_step(self) -> float:
        """1.0 where this worker has heard of a version to come; travels with the step's reduction."""
        return 0.0

    def end_step(self, heard: float, contributors: int, *, served: bool) -> None:
        """A step is completed; ``heard`` is the sum of what ``begin_step`` said at the ``contributors``.

        ``served``: by another worker's result (``recover``).
        """

    def boundary(self) -> None:
        """At a step boundary: become the version that was agreed on, if one was."""

    def gather(self, values: Sequence[float]) -> Rows:
        """Every worker's ``values``, by rank, on every worker."""
        return self.group.gather_floats(values)

    def recover(self, error: GroupBroken) -> bool:
        """The group is broken. True where the operation at hand was completed with another worker's result."""
        raise error

    def restart(self, error: GroupBroken) -> None:
        """The group broke in what cannot be done again by itself: the survivors begin again."""
        raise error

    def resize(self, workers: int) -> None:
        """Ask for so many workers."""
        rule = "workers can change only where elastune starts them"
        raise UserError(rule, "workers of another launcher", "use elastune run --workers LOW:HIGH")

    def replace(self, rank: int) -> None:
        """Ask for another worker in place of the one of ``rank``, which goes on until that one is there."""
        self.resize(self.size)

    def finish(self) -> None:
        """This worker's training function has ended well; returns once no other one needs anything of it."""

    def recover_step(self, error: GroupBroken) -> bool:
        """As ``recover``, where the operation at hand is a step's reduction."""
        return self.recover(error)

    def admit(self) -> None:
        """Become a member with everybody's state, if this worker is none yet."""

    def say(self, doing: str, step: int, size_bytes: int = 0) -> None:
        """What this worker is about to do, for whoever wonders why it takes so long."""
