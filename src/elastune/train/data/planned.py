"""How many steps a run is to take: told whenever that has changed, for controllers that have a deadline to meet."""

from __future__ import annotations

from collections.abc import Callable

from elastune.core.run import Position
from elastune.journal.records import Record, StepsPlanned
from elastune.train.data.source import StepSource


class PlannedSteps:
    """What was told of it last; ``send`` takes records for the journal."""

    def __init__(self, send: Callable[[Record], None]) -> None:
        self._send = send
        self._told: int | None = None

    def tell(self, source: StepSource, at: Position, size: int, epochs: int) -> None:
        """Of the run that goes on so; see ``steps_planned``."""
        steps = steps_planned(source, at, size, epochs)
        if steps is not None and steps != self._told:
            self._told = steps
            self._send(StepsPlanned(steps))


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
