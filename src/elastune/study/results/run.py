"""The result of a run, for the program that called it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from elastune.journal.money import RunMoney
from elastune.journal.records import RunFinished


@dataclass(frozen=True, kw_only=True)
class RunResult(RunFinished):
    """The last record of a run, and what the run has cost.

    Attributes:
        money: The cost, in units of the prices; None where no prices were given.
    """

    money: RunMoney | None = None

    @classmethod
    def of(cls, finished: RunFinished, money: RunMoney | None) -> RunResult:
        """Join the last record ``finished`` and the cost ``money``."""
        return cls(**{field.name: getattr(finished, field.name) for field in fields(finished)}, money=money)
