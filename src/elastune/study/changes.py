"""What has changed in a program or its space since a study was begun: refused, or accepted and told."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from elastune.core.errors import UserError
from elastune.core.run import Program
from elastune.job.changes import refuse_unless
from elastune.journal.entry import Entry
from elastune.journal.records import StudyStarted, TrialFinished, TrialPaused, TrialReported
from elastune.search.space.space import Sample, Space, corners, from_json, probe, to_json
from elastune.train.program.source import differences

PROBED = 64  # configurations that are looked at
LONGEST = 120  # characters of a range in a message
_RESULTS = (TrialReported, TrialPaused, TrialFinished)

SpaceSeen = dict[str, dict[str, Any]]
"""``ranges``: the distributions of each parameter; ``returns``: digests of what the space returns, by name."""


def space_seen(space: Space, seed: int) -> SpaceSeen:
    """Return what tells ``space`` from another one, as a study's journal keeps it.

    Names whose values differ when the space is called again alike are left out: they cannot be compared.
    """
    first, again = (
        _seen([*corners(space, seed), *probe(space, PROBED, seed)]) for _ in range(2)
    )  # the space may draw random numbers of its own
    return {
        kind: {name: each for name, each in found.items() if again[kind].get(name) == each}
        for kind, found in first.items()
    }


def _seen(samples: Sequence[Sample]) -> SpaceSeen:
    ranges: dict[str, set[str]] = {}
    returns: dict[str, list[str]] = {}
    for sample in samples:
        for name, text in to_json(sample.distributions).items():
            ranges.setdefault(name, set()).add(text)
        for name, value in sample.values.items():
            returns.setdefault(name, []).append(json.dumps(value, sort_keys=True))
    return {
        "ranges": {name: sorted(texts) for name, texts in sorted(ranges.items())},
        "returns": {name: hashlib.sha256("\n".join(v).encode()).hexdigest()[:8] for name, v in sorted(returns.items())},
    }


def study_changes(settings: Mapping[str, Any], entries: Sequence[Entry], program: Program, accepted: bool) -> list[str]:
    """Compare the program and the space of a study that is to go on with those in its journal.

    Args:
        settings: What it is asked now, as the journal keeps it.
        entries: The journal.
        program: The program as it is now.
        accepted: Whether it goes on with changes.

    Returns:
        What has changed, a text each; nothing where no trial has reported anything yet.

    Raises:
        UserError: For changes that are not accepted: names file and line, or the parameter.
    """
    records = [entry.record for entry in entries]
    begun = [record.settings for record in records if isinstance(record, StudyStarted)]
    if not begun or not any(isinstance(record, _RESULTS) for record in records):
        return []
    what = differences(begun[-1].get("source", {}), program)
    what += space_differences(begun[-1].get("space", {}), settings.get("space", {}))
    if what:
        refuse_unless(accepted, what, "a study")
    return what


def space_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return in what two spaces differ, as ``space_seen`` tells of them; nothing where either is not known."""
    if not before or not now:
        return []
    was, now_is = before.get("ranges", {}), now.get("ranges", {})
    found = [f"space: {name} is gone" for name in was if name not in now_is]
    found += [f"space: {name} is new" for name in now_is if name not in was]
    found += [
        f"space: {name} is {_words(now_is[name])}, was {_words(was[name])}"
        for name in was
        if name in now_is and now_is[name] != was[name]
    ]
    if found:
        return found
    one, other = before.get("returns", {}), now.get("returns", {})
    return [f"space: it returns another {name}" for name in sorted({*one, *other}) if one.get(name) != other.get(name)]


def _words(texts: Sequence[str]) -> str:
    try:
        told = [_range(each) for text in texts for each in from_json({"": text}).values()]
    except UserError:  # of a later version of Optuna
        told = list(texts)
    return " or ".join(told)[:LONGEST]


def _range(of: BaseDistribution) -> str:
    match of:
        case CategoricalDistribution(choices=choices):
            return f"one of {', '.join(map(str, choices))}"
        case (
            FloatDistribution(low=low, high=high, log=log, step=step)
            | IntDistribution(low=low, high=high, log=log, step=step)
        ):
            steps = f" in steps of {step:g}" if step not in (None, 1) else ""
            return f"{low:g} to {high:g}{' (log)' if log else ''}{steps}"
    return str(of)
