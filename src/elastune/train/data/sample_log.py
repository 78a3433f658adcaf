"""Which samples were used: the records that the sample ledger adds up, and the same in short for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, ClassVar

from elastune.core.run import Position
from elastune.journal.records import Record, StepsCompleted

SampleSpans = list[list[int]]
"""What all steps so far have used, in as few pieces as possible (about one an epoch). Of each piece: the epoch, its
first and last place, the epoch's length, the first and last step. Checkpoints hold it, since a controller may be lost
with the records."""


def add_step(spans: SampleSpans, at: Position, size: int, length: int) -> None:
    """Add the step that began at ``at`` and used ``size`` samples of an epoch that will use ``length``."""
    if spans:
        epoch, _, stop, known, _, last = spans[-1]
        if (epoch, stop, known, last) == (at.epoch, at.offset, length, at.step):
            spans[-1][2], spans[-1][5] = stop + size, last + 1
            return
    spans.append([at.epoch, at.offset, at.offset + size, length, at.step + 1, at.step + 1])


def shorten_epoch(spans: SampleSpans, length: int) -> None:
    """The newest epoch ends sooner than was thought, at ``length``."""
    if spans:
        spans[-1][3] = length


def records_of(spans: SampleSpans) -> list[StepsCompleted]:
    """The records that ``spans`` stand for, whichever worker sent them."""
    return [
        StepsCompleted(-1, 0, 0, epoch, start, stop, length, first_step, last_step)
        for epoch, start, stop, length, first_step, last_step in spans
    ]


class SampleLog:
    """Joins the steps that one worker completed under one view to records, and sends them.

    A part of a run's state: who takes over a worker's state claims what that worker had not told yet, for it may be
    lost with nobody else left who knows of those steps. Said twice is said once (``report.tables.sample_ledger``).
    """

    name: ClassVar[str] = "claims"

    def __init__(self, worker: int, send: Callable[[Record], None]) -> None:
        self._worker = worker
        self._send = send
        self._open: StepsCompleted | None = None

    def step(self, at: Position, size: int, length: int, view: int, workers: int) -> None:
        """Add the step that began at ``at`` and used ``size`` samples of an epoch that will use ``length``."""
        known, number = self._open, at.step + 1
        if (
            known is not None
            and (known.version, known.epoch, known.length) == (view, at.epoch, length)
            and (known.stop, known.last_step) == (at.offset, at.step)
        ):
            self._open = replace(known, stop=at.offset + size, last_step=number)
            return
        self.flush()
        self._open = StepsCompleted(
            worker=self._worker,
            version=view,
            workers=workers,
            epoch=at.epoch,
            start=at.offset,
            stop=at.offset + size,
            length=length,
            first_step=number,
            last_step=number,
        )

    def shorten_epoch(self, length: int) -> None:
        """The epoch ends sooner than was thought, at ``length``."""
        if self._open is not None:
            self._open = replace(self._open, length=length)

    def flush(self) -> None:
        """Send the steps that were not sent yet."""
        known, self._open = self._open, None
        if known is not None:
            self._send(known)

    def state_dict(self) -> dict[str, Any]:
        return {"open": None if self._open is None else asdict(self._open)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        known = state["open"]
        self._open = None if known is None else StepsCompleted(**{**known, "worker": self._worker})
