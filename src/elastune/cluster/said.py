"""Which records of a run are news: all members tell what concerns the run, and some tell it again after an adoption."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from elastune.journal.records import (
    ChangesUnreached,
    Decided,
    LearnerLeftOut,
    NotMeasured,
    PolicyFailed,
    Record,
    Reported,
    Restarted,
    RoundsCut,
    StepsPlanned,
    SyncChanged,
    encode,
)


class Said:
    """What was said. ``kept``: records of this run that are in the journal, from a controller before this one.
    ``planned_steps``: of the whole run, as said last; None where nobody knows."""

    def __init__(self, kept: Iterable[Record] = ()) -> None:
        self._reported: set[tuple[int, int, int]] = set()
        self._decided: set[tuple[int, str, str]] = set()  # step, policy, and the hook of a failure
        self._lines: set[bytes] = set()
        self.planned_steps: int | None = None
        for record in kept:
            self.is_new(record)
            self._lines.add(encode(record))

    def is_kept(self, record: Record) -> bool:
        """Whether the controller before this one has kept ``record``, which is told again."""
        return encode(record) in self._lines

    def is_new(self, record: Record) -> bool:
        """Whether nobody has said ``record`` before."""
        match record:
            case Reported(epoch=epoch, step=step, nth=nth):
                return _first(self._reported, (epoch, step, nth))
            case Decided(policy=policy, step=step, outcome=outcome):
                return _first(self._decided, (step, policy, outcome))
            case PolicyFailed(policy=policy, step=step, hook=hook):
                return _first(self._decided, (step, policy, hook))
            case SyncChanged(step=step, sync=sync):
                return _first(self._decided, (step, "", sync))
            case RoundsCut(sync=sync, steps=steps):
                return _first(self._decided, (0, f"a pass of {steps}", sync))
            case ChangesUnreached(changes=changes, steps=steps):
                return _first(self._decided, (0, f"after {steps} steps", changes))
            case LearnerLeftOut(last_step=step, learner=learner, version=version):
                return _first(self._decided, (step, f"without learner {learner}", str(version)))
            case NotMeasured(monitor=monitor):
                return _first(self._decided, (0, monitor, ""))
            case StepsPlanned(steps=steps):
                before, self.planned_steps = self.planned_steps, steps
                return steps != before
            case Restarted(step=step):  # what was decided after it will be decided again
                self._decided = {key for key in self._decided if key[0] <= step}
        return True


def _first(known: set[Any], key: tuple[Any, ...]) -> bool:
    """Add ``key``; whether it was not there."""
    new = key not in known
    known.add(key)
    return new
