"""How many steps a run is to take: told whenever that has changed, for controllers that have a deadline to meet.

What asks for more steps than there are is told here, too: rounds of learners that are longer than a pass, and changes
of strategy that the schedule has after the last step.
"""

from __future__ import annotations

from collections.abc import Callable

from elastune.core.errors import UserError
from elastune.core.run import Position
from elastune.core.sync_plan import SyncPlan
from elastune.core.sync_schedule import SyncSchedule
from elastune.journal.records import ChangesUnreached, Record, RoundsCut, StepsPlanned
from elastune.train.data.source import StepSource

NO_CHANGES = SyncSchedule()


class PlannedSteps:
    """What was told of it last; ``send`` takes records for the journal. ``schedule``: the run's, of strategies."""

    def __init__(self, send: Callable[[Record], None], schedule: SyncSchedule = NO_CHANGES) -> None:
        self._send = send
        self._schedule = schedule
        self._unreached = NO_CHANGES
        self._told: int | None = None
        self._cut: RoundsCut | None = None

    def tell(self, source: StepSource, at: Position, size: int, epochs: int, sync: SyncPlan) -> None:
        """Of the run that goes on so; see ``steps_planned``. ``sync``: how its workers agree from here on.

        Raises:
            UserError: Before the first step, where a round, now or by the schedule, would be longer than training.
        """
        steps = steps_planned(source, at, size, epochs)
        if steps is not None and steps != self._told:
            self._told = steps
            self._send(StepsPlanned(steps))
            self._tell_unreached(steps)
        a_pass = -(-source.length(0, size) // size)
        if at.step == 0 and steps is not None:
            for plan in (sync, *(later for begins, later in self._schedule.changes if begins < steps)):
                _refuse_longer(plan, steps, a_pass)
        if not sync.in_rounds or not a_pass or sync.every <= a_pass:
            return
        cut = RoundsCut(str(sync), a_pass)
        if cut != self._cut:
            self._cut = cut
            self._send(cut)

    def over(self, steps: int) -> None:
        """The run has come to its own end after so many."""
        self._tell_unreached(steps)

    def _tell_unreached(self, steps: int) -> None:
        late = self._schedule.beyond(steps)
        if late != self._unreached:
            self._unreached = late
            if late.changes:
                self._send(ChangesUnreached(str(late), steps))


def _refuse_longer(plan: SyncPlan, steps: int, a_pass: int) -> None:
    if plan.in_rounds and plan.every > steps:
        fix = f"use every={a_pass} or less: a round ends with a pass over the data, of {a_pass} steps"
        raise UserError("a round must not be longer than training", f"{plan}, {steps} steps", fix)


def ignore(record: Record) -> None:
    """Of who has nothing to tell: a worker that warms up."""


def steps_planned(source: StepSource, at: Position, size: int, epochs: int) -> int | None:
    """Steps of a whole run that is ``at`` that position of ``source``, takes batches of ``size`` and has so many
    ``epochs``; None where nobody knows how many samples or epochs there are."""
    whole, to_use = source.length(0, size), source.length(at.offset, size)
    if not whole or epochs <= at.epoch:
        return None
    batches = -((at.offset - to_use) // size) + (epochs - at.epoch - 1) * -(-whole // size)
    return at.step + source.turns * batches - at.turn
