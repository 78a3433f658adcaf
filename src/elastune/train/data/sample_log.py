"""Which samples were used: the records that the sample ledger adds up, and the same in short for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import takewhile
from typing import Any, ClassVar

from elastune.core.journal.records import LearnerLeftOut, Record, StepsCompleted
from elastune.core.run import Position

SampleSpans = list[list[int]]
"""What all steps so far have used, in as few pieces as possible (about one an epoch). Of each piece: the epoch, its
first and last place, the epoch's length, the first and last step. Checkpoints hold it, since a controller may be lost
with the records.

In front of these are pieces of seven numbers: places that no step used, since the learner that is the seventh of them
was left out of these steps."""


def add_steps(spans: SampleSpans, at: Position, steps: int, size: int, length: int) -> None:
    """Add ``steps`` that began at ``at`` and used ``size`` samples of an epoch that will use ``length``."""
    if spans:
        epoch, _, stop, known, _, last = spans[-1]
        if (epoch, stop, known, last) == (at.epoch, at.offset, length, at.step):
            spans[-1][2], spans[-1][5] = stop + size, last + steps
            return
    spans.append([at.epoch, at.offset, at.offset + size, length, at.step + 1, at.step + steps])


def add_left_out(spans: SampleSpans, left: LearnerLeftOut, length: int) -> None:
    """Add what ``left`` tells, of an epoch that will use ``length``; its steps are added beside."""
    for start, stop in left.places:
        spans.insert(0, [left.epoch, start, stop, length, left.first_step, left.last_step, left.learner])


def newest_left_out(spans: SampleSpans, step: int) -> int:
    """How many learners the round ended without whose last step was ``step``, the newest one that counts."""
    return len({learner for *_, last, learner in takewhile(lambda piece: len(piece) == 7, spans) if last == step})


def shorten_epoch(spans: SampleSpans, length: int) -> None:
    """The newest epoch ends sooner than was thought, at ``length``."""
    if spans:
        spans[-1][3] = length


def records_of(spans: SampleSpans) -> list[StepsCompleted | LearnerLeftOut]:
    """The records that ``spans`` stand for, whichever worker sent them."""
    found: list[StepsCompleted | LearnerLeftOut] = []
    left: dict[tuple[int, int], LearnerLeftOut] = {}
    for epoch, start, stop, length, first_step, last_step, *learner in spans:
        if not learner:
            found.append(StepsCompleted(-1, 0, 0, epoch, start, stop, length, first_step, last_step))
            continue
        empty = LearnerLeftOut(learner[0], -1, 0, epoch, first_step, last_step, [])
        known = left.setdefault((first_step, learner[0]), empty)
        known.places.insert(0, (start, stop))
    return [*left.values(), *found]


class SampleLog:
    """Joins the steps that one worker completed under one view to records, and sends them.

    A part of a run's state: who takes over a worker's state claims what that worker had not told yet, for it may be
    lost with nobody else left who knows of those steps. Said twice is said once (``report.tables.sample_ledger``).
    """

    name: ClassVar[str] = "claims"

    def __init__(self, worker: int, send: Callable[[Record], None]) -> None:
        self._worker = worker
        self._send = send
        self._open: StepsCompleted | None = None  # as it began; by now it goes on to:
        self._stop = self._last = 0

    def add(self, at: Position, steps: int, size: int, length: int, view: int, workers: int) -> None:
        """Add ``steps`` that began at ``at`` and used ``size`` samples of an epoch that will use ``length``."""
        known, last = self._open, at.step + steps
        if (
            known is not None
            and (known.version, known.epoch, known.length) == (view, at.epoch, length)
            and (self._stop, self._last) == (at.offset, at.step)
        ):
            self._stop, self._last = at.offset + size, last
            return
        self.flush()
        self._stop, self._last = at.offset + size, last
        self._open = StepsCompleted(
            worker=self._worker,
            version=view,
            workers=workers,
            epoch=at.epoch,
            start=at.offset,
            stop=at.offset + size,
            length=length,
            first_step=at.step + 1,
            last_step=last,
        )

    def leave_out(
        self, at: Position, steps: int, left_out: Mapping[int, Sequence[range]], workers: Mapping[int, int], view: int
    ) -> list[LearnerLeftOut]:
        """Say that ``steps`` that began at ``at`` were taken without learners and their places.

        Args:
            left_out: By learner, the places of its samples.
            workers: Who had each of them.
            view: By which the others have met.
        """
        told = [
            LearnerLeftOut(
                learner=learner,
                worker=workers.get(learner, -1),
                version=view,
                epoch=at.epoch,
                first_step=at.step + 1,
                last_step=at.step + steps,
                places=[(each.start, each.stop) for each in places],
            )
            for learner, places in left_out.items()
        ]
        for record in told:
            self._send(record)
        return told

    def shorten_epoch(self, length: int) -> None:
        """The epoch ends sooner than was thought, at ``length``."""
        if self._open is not None:
            self._open = replace(self._open, length=length)

    def flush(self) -> None:
        """Send the steps that were not sent yet."""
        known, self._open = self._reached, None
        if known is not None:
            self._send(known)

    @property
    def _reached(self) -> StepsCompleted | None:
        known = self._open
        return None if known is None else replace(known, stop=self._stop, last_step=self._last)

    def state_dict(self) -> dict[str, Any]:
        known = self._reached
        return {"open": None if known is None else asdict(known)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        known = state["open"]
        self._open = None if known is None else StepsCompleted(**{**known, "worker": self._worker})
        if self._open is not None:
            self._stop, self._last = self._open.stop, self._open.last_step
