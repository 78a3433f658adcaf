"""The program of ``elastic.py`` under policies that have workers replaced."""

from __future__ import annotations

from elastic import config, train  # noqa: F401
from elastune import Policy


class Replacing(Policy):
    """Asks once for another worker in place of that of ``rank``."""

    def __init__(self, rank: int = 1, at: int = 3) -> None:
        self.rank, self.at = rank, at

    def after_step(self, run) -> None:
        if run.step == self.at:
            run.replace(self.rank)
