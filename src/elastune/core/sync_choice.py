"""How the workers of a trial agree, as a space or a study chooses it: a strategy, and what takes its place later."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from elastune.core.errors import UserError
from elastune.core.sync_plan import SyncPlan
from elastune.core.sync_schedule import SyncSchedule

SYNC_NAMES = ("sync", "sync_schedule")
"""The system parameters that choose it."""

SETTING_NAMES = tuple(each.name for each in fields(SyncPlan)[1:])
"""What a strategy can be told. Beside ``sync`` they are parameters of their own: ``learners``, ``every``, ..."""

_EXAMPLES = dict(
    zip(SYNC_NAMES, ('such as "local:learners=8,every=16"', 'such as "1000=local:learners=8"'), strict=True)
)


@dataclass(frozen=True)
class SyncChoice:
    """A strategy to begin with, and by a schedule others.

    Example:
        >>> str(SyncChoice.of({"sync": "local", "learners": 8, "every": 16}).sync)
        'local:learners=8,every=16'
    """

    sync: SyncPlan = field(default_factory=SyncPlan)
    schedule: SyncSchedule = field(default_factory=SyncSchedule)

    @classmethod
    def parse(cls, sync: str, schedule: str) -> SyncChoice:
        """As ``--sync`` and ``--sync-schedule`` write them. Raises ``UserError``."""
        return cls(SyncPlan.parse(sync), SyncSchedule.parse(schedule))

    @classmethod
    def of(cls, values: Mapping[str, Any], own: Collection[str] = ()) -> SyncChoice:
        """What ``values`` of a space choose: all-reduce where they say nothing.

        Args:
            values: By name, among others. Settings of a strategy that are parameters of their own take the place of
                what its text says; those that are None are left out.
            own: Names that are the program's own settings, and so none of a strategy.

        Raises:
            UserError: For what is no strategy, and settings that it does not have.
        """
        texts = {
            "sync": "allreduce",
            "sync_schedule": "",
            **{name: values[name] for name in SYNC_NAMES if name in values},
        }
        for name, text in texts.items():
            if not isinstance(text, str):
                raise UserError(f"a trial's {name} must be a text", repr(text)[:100], _EXAMPLES[name])
        told = {name: values[name] for name in strategy_settings(values, own) if values[name] is not None}
        return cls(SyncPlan.parse(texts["sync"], **told), SyncSchedule.parse(texts["sync_schedule"]))

    def to_json(self) -> dict[str, str]:
        """As a journal holds it."""
        return {"sync": str(self.sync), "sync_schedule": str(self.schedule)}

    def numbers(self, own: Collection[str] = ()) -> dict[str, int]:
        """What constraints may speak of, but for names in ``own``, which are the program's."""
        found = {"learners": self.sync.learners, "every": self.sync.every}
        return {name: value for name, value in found.items() if name not in own}

    def slots(self, least: int) -> int:
        """The fewest slots, from ``least`` on, of which the learners of every strategy have as many each."""
        learners = self.schedule.learners(self.sync)
        return -(-least // learners) * learners


def chooses(values: Mapping[str, Any]) -> bool:
    """Whether ``values`` say how workers agree."""
    return any(name in values for name in SYNC_NAMES)


def strategy_settings(values: Mapping[str, Any], own: Collection[str]) -> list[str]:
    """Those of the names in ``values`` that are settings of a strategy: none where no strategy is chosen."""
    return [name for name in SETTING_NAMES if name in values and name not in own] if chooses(values) else []


def in_full(values: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """``values`` with how workers agree in full, where they choose it: the whole text, ``learners`` and ``every``.

    As they are where no such strategy can be, which refuses the trial. ``own``: the program's own settings.
    """
    if not chooses(values):
        return dict(values)
    try:
        choice = SyncChoice.of(values, own)
    except UserError:
        return dict(values)
    return {**values, **choice.to_json(), **choice.numbers(own)}
