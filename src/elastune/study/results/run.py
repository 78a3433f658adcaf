"""What a run came to, for the program that called it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from elastune.journal.money import RunMoney
from elastune.journal.records import RunFinished


@dataclass(frozen=True, kw_only=True)
class RunResult(RunFinished):
    """The last record of a run, and the ``money`` that it has cost, in units of the prices; None without prices."""

    money: RunMoney | None = None

    @classmethod
    def of(cls, finished: RunFinished, money: RunMoney | None) -> RunResult:
        """``finished`` and ``money``."""
        return cls(**{field.name: getattr(finished, field.name) for field in fields(finished)}, money=money)
