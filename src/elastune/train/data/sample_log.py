"""Which samples were used: the records that the sample ledger adds up, and the same in short for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import takewhile
from typing import Any, ClassVar

from elastune.core.journal.records import LearnerLeftOut, Record, StepsCompleted
from elastune.core.run import Position

SampleSpans = list[list[int]]
"""The samples that all steps so far have used, in as few pieces as possible (about one for each epoch).

A piece holds the epoch, its first and last place, the epoch's length, the first and the last step. Checkpoints hold the
pieces, as a controller may be lost with the records. In front are pieces of seven numbers: places that no step used,
because the learner in the seventh number was left out of these steps."""


class SampleLog:
    """Joins the steps that one worker completed in one view to records of used samples, and sends them.

    It is a part of a run's state. A worker that takes over another one's state reports, in the other's name, the steps
    that the other had not reported yet: no other worker may know of them. Reported twice counts once
    (``report.sample_ledger``).
    """

    name: ClassVar[str] = "claims"

    def __init__(self, worker: int, send: Callable[[Record], None]) -> None:
        self._worker = worker
        self._send = send
        self._open: StepsCompleted | None = None  # the record as it began
        self._stop = self._last = 0  # its last place and its last step by now

    def add(self, at: Position, steps: int, size: int, length: int, view: int, workers: int) -> None:
        """Add ``steps`` that began at ``at`` and used ``size`` samples of an epoch that will use ``length``."""
        open_, last = self._open, at.step + steps
        if (
            open_ is not None
            and (open_.worker, open_.version, open_.epoch, open_.length) == (self._worker, view, at.epoch, length)
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
        """Report that ``steps`` that began at ``at`` were taken without some learners and their places.

        Args:
            at: The position before the steps.
            steps: How many steps the round had.
            left_out: The places of each such learner's samples.
            workers: The worker of each of these learners.
            view: The view in which the other workers met.
        """
        records = [
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
        for record in records:
            self._send(record)
        return records

    def shorten_epoch(self, length: int) -> None:
        """Set the length of the epoch, which ends sooner than was expected."""
        if self._open is not None:
            self._open = replace(self._open, length=length)

    def flush(self) -> None:
        """Send the steps that were not sent yet."""
        record, self._open = self._reached, None
        if record is not None:
            self._send(record)

    @property
    def _reached(self) -> StepsCompleted | None:
        open_ = self._open
        return None if open_ is None else replace(open_, stop=self._stop, last_step=self._last)

    def state_dict(self) -> dict[str, Any]:
        record = self._reached
        return {"open": None if record is None else asdict(record)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        fields = state["open"]
        self._open = None if fields is None else StepsCompleted(**fields)
        if self._open is not None:
            self._stop, self._last = self._open.stop, self._open.last_step


# --- the same in short, for checkpoints ---


def add_steps(spans: SampleSpans, at: Position, steps: int, size: int, length: int) -> None:
    """Add ``steps`` that began at ``at`` and used ``size`` samples of an epoch that will use ``length``."""
    if spans:
        epoch, _, stop, known_length, _, last = spans[-1]
        if (epoch, stop, known_length, last) == (at.epoch, at.offset, length, at.step):
            spans[-1][2], spans[-1][5] = stop + size, last + steps
            return
    spans.append([at.epoch, at.offset, at.offset + size, length, at.step + 1, at.step + steps])


def add_left_out(spans: SampleSpans, left: LearnerLeftOut, length: int) -> None:
    """Add the places in ``left``, of an epoch that will use ``length`` samples; its steps are added separately."""
    for start, stop in left.places:
        spans.insert(0, [left.epoch, start, stop, length, left.first_step, left.last_step, left.learner])


def newest_left_out(spans: SampleSpans, step: int) -> int:
    """How many learners were left out of the round whose last step was ``step``, the newest one."""
    return len({learner for *_, last, learner in takewhile(lambda piece: len(piece) == 7, spans) if last == step})


def shorten_epoch(spans: SampleSpans, length: int) -> None:
    """Set the length of the newest epoch, which ends sooner than was expected."""
    if spans:
        spans[-1][3] = length


def records_of(spans: SampleSpans) -> list[StepsCompleted | LearnerLeftOut]:
    """The records that ``spans`` stand for, without the workers that sent them."""
    records: list[StepsCompleted | LearnerLeftOut] = []
    left: dict[tuple[int, int], LearnerLeftOut] = {}
    for epoch, start, stop, length, first_step, last_step, *learner in spans:
        if not learner:
            records.append(StepsCompleted(-1, 0, 0, epoch, start, stop, length, first_step, last_step))
            continue
        empty = LearnerLeftOut(learner[0], -1, 0, epoch, first_step, last_step, [])
        record = left.setdefault((first_step, learner[0]), empty)
        record.places.insert(0, (start, stop))
    return [*left.values(), *records]
