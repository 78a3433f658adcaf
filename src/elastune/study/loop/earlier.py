"""Trials of earlier controllers, by their numbers in a study's journal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from elastune.journal.entry import Entry
from elastune.journal.records import ChangesAccepted, DataContext, ProposalAsked, TrialStarted
from elastune.journal.trials import TrialTable


def first_new(entries: Iterable[Entry]) -> int:
    """Return the number of the first trial that is not in the journal."""
    told = (entry.record for entry in entries)
    return max((each.trial for each in told if isinstance(each, TrialStarted | ProposalAsked)), default=-1) + 1


def first_comparable(entries: Iterable[Entry]) -> int:
    """Return the number of the first trial since the last change that was accepted; 0 where there was none."""
    told = (entry.record for entry in entries)
    return max((each.first_trial for each in told if isinstance(each, ChangesAccepted)), default=0)


def data_of_all(table: TrialTable) -> dict[str, Any] | None:
    """Return the training set that all trials since the last change had, as a run's specification has it.

    None where there are fewer than two, or their settings decide what data they have.
    """
    told = (life.finished.run for life in table.trials.values() if life.number >= table.since and life.finished)
    found = [run.context.data for run in told if run is not None and run.context is not None]
    known: list[DataContext] = [data for data in found if data.samples]
    return asdict(known[0]) if len(known) > 1 and all(data == known[0] for data in known) else None
