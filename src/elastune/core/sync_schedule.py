"""When a run changes how its workers agree: "1000=local:learners=8,every=16; 5000=allreduce"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from elastune.core.errors import UserError
from elastune.core.sync_plan import SyncPlan

MOST_STEP = 10**12
_EXAMPLE = 'such as "1000=local:learners=8,every=16; 5000=allreduce"'


@dataclass(frozen=True)
class SyncSchedule:
    """Strategies by the step after which each takes the place of the one before it.

    Args:
        changes: Steps, ascending, and the strategy from there on.

    Raises:
        UserError: For steps that do not ascend.

    Example:
        >>> SyncSchedule.parse("1000=local:learners=8,every=16").due(1200)
        (1000, SyncPlan(strategy='local', learners=8, every=16, ...))
    """

    changes: tuple[tuple[int, SyncPlan], ...] = ()

    def __post_init__(self) -> None:
        steps = [step for step, _ in self.changes]
        if steps != sorted(set(steps)) or not all(1 <= step <= MOST_STEP for step in steps):
            rule = "the steps of a schedule of strategies ascend, from 1 on"
            raise UserError(rule, ", ".join(map(str, steps)), _EXAMPLE)

    @classmethod
    def parse(cls, text: str) -> SyncSchedule:
        """What ``str`` gives, or a user writes. Raises ``UserError``."""
        is_text = isinstance(text, str)
        if not is_text:
            raise UserError("a schedule of strategies is a text", repr(text)[:100], _EXAMPLE)
        found = []
        for entry in filter(None, (part.strip() for part in text.split(";"))):
            step, equals, plan = entry.partition("=")
            if not equals or not re.fullmatch("[0-9]{1,12}", step.strip()):
                raise UserError("a schedule of strategies is made of STEP=STRATEGY, with ; between", entry, _EXAMPLE)
            found.append((int(step), SyncPlan.parse(plan)))
        return cls(tuple(found))

    def __str__(self) -> str:
        return "; ".join(f"{step}={plan}" for step, plan in self.changes)

    def due(self, step: int) -> tuple[int, SyncPlan] | None:
        """The newest change after ``step`` steps, and since when; None before the first."""
        return next((change for change in reversed(self.changes) if change[0] <= step), None)

    def next_after(self, step: int) -> int | None:
        """The step of the next change, which a round must not pass."""
        return next((at for at, _ in self.changes if at > step), None)

    def beyond(self, steps: int) -> SyncSchedule:
        """Its changes that a run of so many ``steps`` does not come to: nothing changes after its last step."""
        return SyncSchedule(tuple(change for change in self.changes if change[0] >= steps))

    def learners(self, first: SyncPlan) -> int:
        """Of what the slots must be a multiple, beginning with ``first``."""
        return math.lcm(first.learners, *(plan.learners for _, plan in self.changes))
