"""The workers that a coordinator knows by number: who may come, who has gone for good, and why one leaves."""

from __future__ import annotations

from collections.abc import Iterable

from elastune.elastic.protocol.messages import Event, Left, Noticed, ReplaceAsked, ReshapeAsked, ResizeAsked
from elastune.journal.records import Checkpointed, Record, Reported


class Roll:
    """Begins with ``workers``, the first ones."""

    def __init__(self, workers: Iterable[int]) -> None:
        self._known = set(workers)
        self._gone: set[int] = set()
        self._reasons: dict[int, str] = {}
        self._resized = ""
        self._reached = -1

    def add(self, workers: Iterable[int]) -> None:
        """These were started."""
        self._known.update(workers)

    def strike(self, worker: int) -> None:
        """It has gone for good: whatever it says is late."""
        self._gone.add(worker)

    def expects(self, worker: int) -> bool:
        """Whether ``worker`` was started and has not gone."""
        return worker in self._known and worker not in self._gone

    def note(self, worker: int | None, event: Event) -> None:
        """Remember what ``event`` says of anybody's leaving."""
        match event:
            case Left() if worker is not None:
                self.strike(worker)
            case Noticed(why=why) if worker is not None:
                self._reasons[worker] = why
            case ReplaceAsked() if worker is not None:
                self._reasons[worker] = "another was to take its place"
            case ResizeAsked(workers=workers, why=why):
                self._resized = why or f"a resize to {workers} workers"
            case ReshapeAsked(mesh=mesh, why=why):
                self._resized = why or f"a reshape to {mesh}"

    def why_left(self, worker: int) -> str:
        """Why ``worker`` was to leave, as it was asked for: what it was given notice by, or the newest resize."""
        return self._reasons.get(worker, self._resized)

    def further(self, record: Record) -> int | None:
        """The step that ``record``, a checkpoint or a report, tells of, if it is further than any before."""
        if not isinstance(record, Checkpointed | Reported) or record.step <= self._reached:
            return None
        self._reached = record.step
        return record.step
