"""Trials that ran when their controller died: they go on with workers that have outlived it, or wait to be resumed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from elastune.cluster.base import LeftRun
from elastune.job.pool import LeftJob
from elastune.journal.entry import Entry
from elastune.journal.records import (
    AFTERWARDS,
    Adopted,
    Record,
    Regrouped,
    TrialAdopted,
    TrialPaused,
    TrialRegrouped,
    TrialReported,
    TrialResumed,
    TrialStarted,
)
from elastune.journal.trials import TrialLife, TrialTable
from elastune.study.loop.experiment import Experiment


def left_jobs(
    table: TrialTable, entries: Sequence[Entry], experiment: Experiment, now: float, to_pause: Collection[int]
) -> dict[int, LeftJob]:
    """Of the trials that ran at the end of ``entries``, those whose workers may train on at ``now``, since the epoch.

    That time counts as theirs: their workers were busy. In the order in which they began. ``to_pause``: those that were
    to pause by what they reported last.
    """
    found = {}
    for number in _by_beginning(entries, table.of("running")):
        life = table.trials[number]
        if (spec := experiment.left(life)) is not None:
            kept = _kept(entries, number)
            changed = any(isinstance(record, Regrouped | Adopted) for record in kept)
            stop_at = life.last_at if number in to_pause else None
            run = LeftRun(spec, kept, life.begun_at, stop_at)
            found[number] = LeftJob(run, _used(life, now)[1] if changed else None)
    return found


def _by_beginning(entries: Iterable[Entry], numbers: Collection[int]) -> list[int]:
    """``numbers`` in the order in which they were started or resumed last."""
    begun: dict[int, None] = {}
    for record in (entry.record for entry in entries):
        if isinstance(record, TrialStarted | TrialResumed) and record.trial in numbers:
            begun.pop(record.trial, None)
            begun[record.trial] = None
    return list(begun)


def cut_off(table: TrialTable, entries: Sequence[Entry], adopted: Collection[int]) -> list[TrialPaused]:
    """The ends, that nobody recorded, of the trials that ran at the end of ``entries`` and were not ``adopted``."""
    found = []
    last_at = max((entry.at for entry in entries if not isinstance(entry.record, AFTERWARDS)), default=0.0)
    for number in table.of("running"):
        if number not in adopted:
            life = table.trials[number]
            seconds, worker_seconds = _used(life, last_at)
            found.append(TrialPaused(number, life.epoch, seconds, worker_seconds, "its controller ended", cut_off=True))
    return found


def _used(life: TrialLife, at: float) -> tuple[float, float]:
    """How long a trial had run ``at`` this time, since it was started or resumed last, and with how many workers."""
    seconds = max(at - life.begun_at, 0.0)
    whole = (life.average or life.first_workers) * (life.seconds + seconds)
    return seconds, max(whole - life.worker_seconds, 0.0)


def _kept(entries: Iterable[Entry], trial: int) -> list[Record]:
    """What its run has told since it was started or resumed last, as far as a study's journal has it."""
    found: list[Record] = []
    for record in (entry.record for entry in entries):
        match record:
            case TrialStarted(trial=number) | TrialResumed(trial=number) if number == trial:
                found = []
            case TrialReported(trial=number, report=told) if number == trial:
                found.append(told)
            case TrialRegrouped(trial=number, change=change) if number == trial:
                found.append(change)
            case TrialAdopted(trial=number, found=adopted) if number == trial:
                found.append(adopted)
    return found
