"""Trials of earlier controllers, by their numbers in a study's journal."""

from __future__ import annotations

from collections.abc import Iterable

from elastune.journal.entry import Entry
from elastune.journal.records import ChangesAccepted, ProposalAsked, TrialStarted


def first_new(entries: Iterable[Entry]) -> int:
    """Return the number of the first trial that is not in the journal."""
    told = (entry.record for entry in entries)
    return max((each.trial for each in told if isinstance(each, TrialStarted | ProposalAsked)), default=-1) + 1


def first_comparable(entries: Iterable[Entry]) -> int:
    """Return the number of the first trial since the last change that was accepted; 0 where there was none."""
    told = (entry.record for entry in entries)
    return max((each.first_trial for each in told if isinstance(each, ChangesAccepted)), default=0)
