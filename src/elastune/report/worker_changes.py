"""How a run's workers changed, what was done to the run, and what that cost: gathered from its journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from elastune.core.formatting import count, duration, plain, whole
from elastune.core.journal.records import (
    Entry,
    FaultInjected,
    LearnerLeftOut,
    Record,
    Regrouped,
    StateLost,
    StragglerDetected,
    WorkerGone,
)
from elastune.report.lines import accepted_lines
from elastune.report.sample_ledger import left_out
from elastune.report.tables import Table


@dataclass(frozen=True)
class Changes:
    """The regroupings of a run (the last attempt's last), the workers that went, the faults that were injected."""

    regroupings: tuple[Regrouped, ...] = ()
    gone: tuple[WorkerGone, ...] = ()
    faults: tuple[tuple[str, int], ...] = ()
    stragglers: tuple[str, ...] = ()
    lost: tuple[StateLost, ...] = ()
    left_out: tuple[LearnerLeftOut, ...] = ()
    accepted: tuple[str, ...] = ()
    """Changes of the program or the data that the run went on with, a line for each time."""

    @property
    def short_rounds(self) -> int:
        """Rounds that ended without some learner."""
        return len({each.first_step for each in self.left_out})

    @property
    def samples_left_out(self) -> int:
        """Samples of learners that a round has ended without."""
        return sum(each.samples for each in self.left_out)

    @property
    def median_pause_s(self) -> float | None:
        """Half of the regroupings cost at most this."""
        return median(r.pause_s for r in self.regroupings) if self.regroupings else None

    @property
    def longest_pause_s(self) -> float | None:
        """The longest that training stood still for a regrouping."""
        return max((r.pause_s for r in self.regroupings), default=None)

    @property
    def discarded(self) -> int:
        """Steps that had been begun and were done again."""
        return sum(r.discarded for r in self.regroupings)


def gather_changes(entries: Iterable[Entry]) -> Changes:
    """What the journal of a run tells of its workers."""
    entries = list(entries)
    records: list[Record] = [entry.record for entry in entries]
    faults = Counter(record.fault for record in records if isinstance(record, FaultInjected))
    return Changes(
        accepted=accepted_lines(entries),
        regroupings=tuple(record for record in records if isinstance(record, Regrouped)),
        gone=tuple(record for record in records if isinstance(record, WorkerGone)),
        faults=tuple(faults.items()),
        stragglers=tuple(record.line for record in records if isinstance(record, StragglerDetected)),
        lost=tuple(record for record in records if isinstance(record, StateLost)),
        left_out=left_out(entries),
    )


def changes_line(changes: Changes) -> str:
    """``4 changes of workers, pauses 12 ms median, 71 ms at most, 1 step done again``; empty without any.

    Where rounds ended without some learner, that too: ``; 1 round without a learner that was lost or late (32 samples
    left out)``; and where state was lost: ``; state lost after step 8 (body.weight, ...), ...``.
    """
    if not changes.regroupings:
        return lost_state_line(changes)
    pauses = f"pauses {duration(changes.median_pause_s)} median, {duration(changes.longest_pause_s)} at most"
    changed = count(len(changes.regroupings), "change")
    told = f"{changed} of workers, {pauses}, {count(changes.discarded, 'step')} done again"
    return "; ".join(filter(None, [told, short_line(changes), lost_state_line(changes)]))


def short_line(changes: Changes) -> str:
    """How many rounds ended without some learner; empty where none did."""
    if not changes.left_out:
        return ""
    samples = count(changes.samples_left_out, "sample")
    return f"{count(changes.short_rounds, 'round')} without a learner that was lost or late ({samples} left out)"


def lost_state_line(changes: Changes) -> str:
    """When all holders of some state had gone, and of which tensors; empty where that never was."""
    if not changes.lost:
        return ""
    told = [
        f"step {whole(lost.step)} ({', '.join(plain(name, 40) for name in lost.names[:2])}, ...)"
        for lost in changes.lost
    ]
    return f"state lost after {', '.join(told)}, all its holders at once: on from the newest checkpoint"


def changes_table(changes: Changes) -> Table:
    """One line a regrouping."""
    rows = tuple(
        (
            str(r.version),
            whole(r.step),
            f"{len(r.members)} ({r.mesh})" if r.mesh else str(len(r.members)),
            ", ".join(map(str, r.members)),
            "planned" if r.planned else "after a loss",
            duration(r.pause_s),
            whole(r.discarded),
        )
        for r in changes.regroupings
    )
    header = ("version", "first step", "workers", "their numbers", "how", "pause", "steps done again")
    return Table(f"Changes of workers ({len(rows)})", header, rows, frozenset({0, 1, 2, 5, 6}))


def lost_workers_table(changes: Changes) -> Table:
    """One line a worker that went while the run went on."""
    rows = tuple((str(gone.worker), gone.how, plain(gone.why, 200)) for gone in changes.gone)
    return Table(f"Workers that went ({len(rows)})", ("worker", "how", "why"), rows, frozenset({0}))


def left_out_table(changes: Changes) -> Table:
    """One line a learner that a round has ended without."""
    why = {gone.worker: plain(gone.why, 200) for gone in changes.gone}
    rows = tuple(
        (
            f"{whole(left.first_step)} to {whole(left.last_step)}",
            str(left.learner),
            "unknown" if left.worker < 0 else str(left.worker),
            whole(left.samples),
            why.get(left.worker, ""),
        )
        for left in changes.left_out
    )
    header = ("steps", "learner", "its worker", "samples left out", "why")
    return Table(f"Learners that a round ended without ({len(rows)})", header, rows, frozenset({0, 1, 2, 3}))


def worker_steps(workers: int, changes: Changes, steps: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """How many workers there were from which step on, ``steps`` last: x and y of a figure of steps."""
    points = [(0.0, float(workers)), *((float(r.step), float(len(r.members))) for r in changes.regroupings)]
    points.append((float(max(steps, points[-1][0])), points[-1][1]))
    return tuple(x for x, _ in points), tuple(y for _, y in points)
