"""How long the workers of a host that are ready wait for those that are not, so that all join by one view."""

from __future__ import annotations

from elastune.elastic.coordinator.membership import Membership
from elastune.elastic.coordinator.places import keeps_company

LIMIT_S = 2.0


class Company:
    """Asked from time to time."""

    def __init__(self) -> None:
        self._since: float | None = None

    def waited_enough(self, state: Membership, now: float) -> bool:
        """Whether somebody has waited for ``LIMIT_S``; said once."""
        if not keeps_company(state):
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since >= LIMIT_S:
            self._since = None
            return True
        return False
