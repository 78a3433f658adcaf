"""After a loss workers go on at once, everybody to everybody; the levels by which sums climb form a little later."""

from __future__ import annotations

from collections.abc import Callable

from elastune.comm.comms import drop_all
from elastune.comm.group import Group
from elastune.comm.preparing import Preparing

BEGIN_AFTER, TAKEN_AFTER = 1, 4  # operations: what goes without levels costs bytes, no bits


class LateLevels:
    """The groups that ``form`` makes, on a thread of its own; ``completed`` operations lie behind all workers.

    They begin to form once the operation that the loss has broken is done again, and not beside it. All take them up at
    the same step boundary, and wait for them there.
    """

    def __init__(self, completed: int, form: Callable[[], tuple[Group, ...]]) -> None:
        self._completed, self._form = completed, form
        self._preparing: Preparing[tuple[Group, ...]] | None = None

    def due(self, completed: int) -> bool:
        """At a step boundary with so many operations behind all: whether they are to be taken up."""
        if self._preparing is None and completed >= self._completed + BEGIN_AFTER:
            self._preparing = Preparing(self._form, drop_all)
        return completed >= self._completed + TAKEN_AFTER

    def result(self) -> tuple[Group, ...]:
        """The groups, once they are ``due``; waits for them. Raises ``GroupBroken``."""
        assert self._preparing is not None
        return self._preparing.result()

    def discard(self) -> None:
        """They are not wanted any more."""
        if self._preparing is not None:
            self._preparing.discard()
