"""Whose weights may be averaged: models that began with the same ones, as the study's journal tells."""

from __future__ import annotations

from collections.abc import Sequence

from elastune.core.errors import UserError
from elastune.journal.entry import Entry
from elastune.journal.records import StudyStarted
from elastune.journal.trials import TrialTable


def ancestor(table: TrialTable, entries: Sequence[Entry], trials: Sequence[int]) -> str:
    """What all of ``trials`` began with, in words.

    Models that were trained from initial values of their own lie in valleys of their own: between them is a ridge, and
    the mean of their weights is worth nothing (Frankle et al. 2020; Wortsman et al. 2022).

    Raises:
        UserError: Where they have no common ancestor in the journal.
    """
    roots = {trial: _root(table, trial) for trial in trials}
    firsts = sorted(set(roots.values()))
    if len(firsts) == 1:
        return f"trial {firsts[0]}"
    begun = next((e.record.settings.get("start_from") for e in entries if isinstance(e.record, StudyStarted)), None)
    if isinstance(begun, dict) and begun.get("sha256"):
        return f"{begun.get('source')} ({str(begun['sha256'])[:12]})"
    rule = "weights are averaged where training began with the same ones"
    found = f"trials {', '.join(map(str, firsts[:6]))} began with initial values of their own"
    raise UserError(rule, found, "tune with --start-from, or --stopping pbt; or take elastune ensemble")


def _root(table: TrialTable, trial: int) -> int:
    """The first of its line: who has no parent, or one of which the journal does not tell."""
    seen = {trial}
    while trial in table.trials and (parent := table.trials[trial].started.parent) is not None and parent not in seen:
        seen.add(parent)
        trial = parent
    return trial
