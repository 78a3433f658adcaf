"""How a run's workers changed, which faults were injected, and what the changes cost: gathered from its journal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import get_args

from elastune.core.formatting import count, duration, plain, whole
from elastune.core.journal.records import (
    ChangePart,
    ChangeTimed,
    Entry,
    FaultInjected,
    LearnerLeftOut,
    Record,
    Regrouped,
    Restarted,
    StateLost,
    StepsVerified,
    StragglerDetected,
    VerificationEnded,
    WorkerGone,
    WorkerWrong,
)
from elastune.report.lines import accepted_lines, restart_line
from elastune.report.sample_ledger import left_out
from elastune.report.tables import Table


@dataclass(frozen=True)
class Changes:
    """How the workers of a run changed.

    Attributes:
        regroupings: Every change of the group of workers, over all attempts.
        restarts: Every time that no worker was left and the run went on from a checkpoint.
        gone: The workers that left or were lost.
        faults: Injected faults and their number.
        stragglers: A line for each slow worker that was detected.
        lost: State whose holders were all lost at once.
        verification: What slots that were computed twice have shown.
        left_out: Learners that a round ended without.
        timed: For each change the clock of the worker that it cost most.
    """

    regroupings: tuple[Regrouped, ...] = ()
    restarts: tuple[Restarted, ...] = ()
    gone: tuple[WorkerGone, ...] = ()
    faults: tuple[tuple[str, int], ...] = ()
    stragglers: tuple[str, ...] = ()
    lost: tuple[StateLost, ...] = ()
    verification: tuple[WorkerWrong | VerificationEnded | StepsVerified, ...] = ()
    left_out: tuple[LearnerLeftOut, ...] = ()
    timed: tuple[ChangeTimed, ...] = ()
    accepted: tuple[str, ...] = ()
    """Changes of the program or the data that the run went on with, a line for each time."""

    @property
    def short_rounds(self) -> int:
        """The number of rounds that ended without some learner."""
        return len({each.first_step for each in self.left_out})

    @property
    def samples_left_out(self) -> int:
        """The number of samples of learners that a round ended without."""
        return sum(each.samples for each in self.left_out)

    @property
    def number(self) -> int:
        """The number of regroupings and restarts."""
        return len(self.regroupings) + len(self.restarts)

    @property
    def pauses_s(self) -> tuple[float, ...]:
        """The pauses of training for regroupings, and for restarts where they are known."""
        return (*(r.pause_s for r in self.regroupings), *(r.pause_s for r in self.restarts if r.pause_s > 0))

    @property
    def median_pause_s(self) -> float | None:
        """The median of ``pauses_s``; None without any."""
        return median(self.pauses_s) if self.pauses_s else None

    @property
    def longest_pause_s(self) -> float | None:
        """The longest of ``pauses_s``; None without any."""
        return max(self.pauses_s, default=None)

    @property
    def discarded(self) -> int:
        """The number of steps that were done again."""
        return sum(r.discarded for r in self.regroupings) + sum(r.repeated for r in self.restarts)


def gather_changes(entries: Iterable[Entry]) -> Changes:
    """Gather how the workers of a run changed from its journal."""
    entries = list(entries)
    records: list[Record] = [entry.record for entry in entries]
    faults = Counter(record.fault for record in records if isinstance(record, FaultInjected))
    return Changes(
        accepted=accepted_lines(entries),
        regroupings=tuple(record for record in records if isinstance(record, Regrouped)),
        restarts=tuple(record for record in records if isinstance(record, Restarted)),
        gone=tuple(record for record in records if isinstance(record, WorkerGone)),
        faults=tuple(faults.items()),
        stragglers=tuple(record.line for record in records if isinstance(record, StragglerDetected)),
        lost=tuple(record for record in records if isinstance(record, StateLost)),
        verification=tuple(r for r in records if isinstance(r, WorkerWrong | VerificationEnded | StepsVerified)),
        left_out=left_out(entries),
        timed=_slowest(record for record in records if isinstance(record, ChangeTimed)),
    )


def _slowest(timed: Iterable[ChangeTimed]) -> tuple[ChangeTimed, ...]:
    """The longest record of each change, in order; a view's number comes again after a restart, its step does not."""
    longest: dict[tuple[int, int], ChangeTimed] = {}
    for each in timed:
        key = each.version, each.step
        if key not in longest or sum(longest[key].parts_ms.values()) < sum(each.parts_ms.values()):
            longest[key] = each
    return tuple(longest.values())


def changes_line(changes: Changes) -> str:
    """``4 changes of workers, pauses 12 ms median, 71 ms at most, 1 step done again``; empty without any.

    If rounds ended without some learner, the line goes on with ``; 1 round without a learner that was lost or late (32
    samples left out)``; if state was lost, with ``; state lost after step 8 (body.weight, ...), ...``.
    """
    if not changes.number:
        return lost_state_line(changes)
    pauses = f"pauses {duration(changes.median_pause_s)} median, {duration(changes.longest_pause_s)} at most"
    changed = count(changes.number, "change")
    regrouped = f"{changed} of workers, {pauses}, {count(changes.discarded, 'step')} done again"
    restarts = "; ".join(restart_line(restart) for restart in changes.restarts)
    return "; ".join(filter(None, [regrouped, restarts, short_line(changes), lost_state_line(changes)]))


def short_line(changes: Changes) -> str:
    """How many rounds ended without some learner; empty if none did."""
    if not changes.left_out:
        return ""
    samples = count(changes.samples_left_out, "sample")
    return f"{count(changes.short_rounds, 'round')} without a learner that was lost or late ({samples} left out)"


def lost_state_line(changes: Changes) -> str:
    """The steps at which all holders of some state were lost, with its tensors; empty if that never happened."""
    if not changes.lost:
        return ""
    losses = [
        f"step {whole(lost.step)} ({', '.join(plain(name, 40) for name in lost.names[:2])}, ...)"
        for lost in changes.lost
    ]
    return f"state lost after {', '.join(losses)}, all its holders at once: on from the newest checkpoint"


def changes_table(changes: Changes) -> Table:
    """One row for each regrouping, then one for each restart."""
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
    rows += tuple(
        ("–", whole(r.step + 1), "–", "–", "restart, all were lost", duration(r.pause_s), whole(r.repeated))
        for r in changes.restarts
    )
    header = ("version", "first step", "workers", "their numbers", "how", "pause", "steps done again")
    return Table(f"Changes of workers ({len(rows)})", header, rows, frozenset({0, 1, 2, 5, 6}))


def change_parts_table(changes: Changes) -> Table:
    """One row for each change: what its slowest worker did from its last step before it to the sum of its next one."""
    parts = tuple(part for part in get_args(ChangePart) if any(part in each.parts_ms for each in changes.timed))
    rows = tuple(
        (
            str(each.version),
            whole(each.step),
            str(each.worker),
            *(duration(each.parts_ms.get(part, 0.0) / 1000) for part in parts),
        )
        for each in changes.timed
    )
    header = ("version", "first step", "slowest worker", *parts)
    title = f"Parts of each change, up to the first step's sum ({len(rows)})"
    return Table(title, header, rows, frozenset(range(len(header))))


def change_lines(changes: Changes) -> tuple[str, ...]:
    """A sentence for planned changes and one for losses: the median of each part that took a millisecond or more."""
    planned = {(each.version, each.step): each.planned for each in changes.regroupings}
    lines = []
    for kind, is_planned in (("Planned changes", True), ("Changes after a loss", False)):
        timed = [each for each in changes.timed if planned.get((each.version, each.step)) is is_planned]
        if timed:
            medians = {
                part: median(each.parts_ms.get(part, 0.0) for each in timed) / 1000 for part in get_args(ChangePart)
            }
            parts = ", ".join(f"{part} {duration(value)}" for part, value in medians.items() if value >= 0.001)
            lines.append(
                f"{kind} ({len(timed)}): from the last step before to the sum of the next one, by the slowest worker's "
                f"clock, medians: {parts or 'under 1 ms'}."
            )
    return tuple(lines)


def lost_workers_table(changes: Changes) -> Table:
    """One row for each worker that left or was lost while the run went on."""
    rows = tuple((str(gone.worker), gone.how, plain(gone.why, 200)) for gone in changes.gone)
    return Table(f"Workers that went ({len(rows)})", ("worker", "how", "why"), rows, frozenset({0}))


def left_out_table(changes: Changes) -> Table:
    """One row for each learner that a round ended without."""
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
    """The number of workers over steps, as x and y of a stair. ``steps``: the last step."""
    points = [(0.0, float(workers)), *((float(r.step), float(len(r.members))) for r in changes.regroupings)]
    points.append((float(max(steps, points[-1][0])), points[-1][1]))
    return tuple(x for x, _ in points), tuple(y for _, y in points)
