"""Which models may be averaged: those that began with the same weights, as the study's journal tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastune.core.errors import UserError
from elastune.journal.entry import Entry
from elastune.journal.records import StudyStarted
from elastune.journal.trials import TrialTable


def ancestor(table: TrialTable, entries: Sequence[Entry], trials: Sequence[int]) -> str:
    """Return what all of ``trials`` began with, in words.

    Models that were trained from initial values of their own are in valleys of their own. Between them is a ridge, and
    the mean of their weights is worth nothing (Frankle et al. 2020; Wortsman et al. 2022).

    Raises:
        UserError: Where they have no common ancestor in the journal, or each had parts that began fresh.
    """
    firsts = sorted({_root(table, trial) for trial in trials})
    if len(firsts) == 1:
        return f"trial {firsts[0]}"
    begun = next((e.record.settings.get("start_from") for e in entries if isinstance(e.record, StudyStarted)), None)
    found = {trial: _beginning(table, trial, begun if isinstance(begun, dict) else {}) for trial in firsts}
    first = found[firsts[0]]
    if first.weights and all(one.weights == first.weights for one in found.values()):
        return first.source
    rule, which = "weights are averaged where training began with the same ones", ", ".join(map(str, firsts[:6]))
    if first.source and all(one.source == first.source for one in found.values()):
        fresh = next(iter(first.fresh), "what is fresh")
        value = f"trials {which} took what fits of {first.source}, and began with {fresh} of their own"
        fix = "train that first, and tune with --start-from what comes of it; or take elastune ensemble"
        raise UserError(rule, value, fix)
    value = f"trials {which} began with initial values of their own"
    raise UserError(rule, value, "tune with --start-from, or --stopping pbt; or take elastune ensemble")


@dataclass(frozen=True)
class _Beginning:
    """``weights``: a digest of all that a trial began with; "" where the journal cannot tell. ``source``: what of it
    had been trained, in words; ``fresh``: what had not."""

    weights: str = ""
    source: str = ""
    fresh: tuple[str, ...] = ()


def _beginning(table: TrialTable, trial: int, settings: Mapping[str, Any]) -> _Beginning:
    told = table.trials[trial].begun if trial in table.trials else ()
    if told:
        source = ", ".join(f"{one.source} ({one.sha256[:12]})" for one in told)
        known = all(one.begins for one in told)
        fresh = tuple(name for one in told for name in one.fresh)
        return _Beginning(" ".join(one.begins for one in told) if known else "", source, fresh)
    digest = str(settings.get("sha256") or "")
    if not digest:
        return _Beginning()
    fresh = tuple(map(str, settings.get("fresh") or ()))  # of a study from before trials told it
    return _Beginning("" if fresh else digest, f"{settings.get('source')} ({digest[:12]})", fresh)


def _root(table: TrialTable, trial: int) -> int:
    """The first of its line: who has no parent, or one of which the journal does not tell."""
    seen = {trial}
    while trial in table.trials and (parent := table.trials[trial].started.parent) is not None and parent not in seen:
        seen.add(parent)
        trial = parent
    return trial
