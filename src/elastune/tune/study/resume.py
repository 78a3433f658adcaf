"""Resume a study: compare the request, the program and the space with the journal, before anything is written.

A different setting is an error. A changed program or space is refused too, or accepted by ``--accept-changes``
and then recorded.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import Entry, StudyStarted, TrialFinished, TrialPaused, TrialReported
from elastune.core.run import Program
from elastune.core.sync_plan import SyncChoice
from elastune.runtime.job.output import check_out
from elastune.runtime.job.resumption import refuse_unless
from elastune.train.program.source import differences
from elastune.train.program.space import Sample, Space, corners, from_json, probe, to_json

# [resumption] Going on with a study: what is asked for is compared with its journal before anything starts or is written.

_WORDS = {"sync_schedule": "--sync-schedule", "num_slots": "--slots", "virtual_tensor": "--virtual-tensor"}
_OPTIONS = ("seed", "epochs", "sampler", "target", "stopping", "prices", "sync", "mode", "precision", "compress")
_WORDS |= {name: f"--{name}" for name in _OPTIONS} | {"price_per_worker_hour": "--price", "threads": "--threads"}
_WARM = "warm-start another study of it with --warm-start"


def journaled_slots(out: Path) -> int | None:
    """Return the slots that the trials of the study in ``out`` have; None where there is no study.

    Raises:
        UserError: For a bad journal.
    """
    path = check_out(out, resume=True)
    entries = read(path) if path.exists() else []
    started = next((entry.record for entry in entries if isinstance(entry.record, StudyStarted)), None)
    return None if started is None else started.settings.get("execution", {}).get("num_slots")


def changed_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[UserError]:
    """Yield what differs of two studies' settings, as their journals hold them, and would change a study's result.

    Bounds, workers, and the rules by which a study ends, what it keeps and how it is judged may differ.
    """
    tune, simulated = now["kind"] == "tune", {True: "simulated", False: "trained"}
    for name in ("kind", "program", "objectives", "constraints"):
        yield from _of(name, then.get(name), now[name])
    for name in ("seed", "epochs", "prices"):
        yield from _of(name, then.get(name), now[name])
    old, new = then.get("config") or {}, now["config"]
    for name in sorted({*old, *new}):
        yield from _of(f"setting {name}", old.get(name, "not set"), new.get(name, "not set"))
    unsaid = {**SyncChoice().to_json(), "stopping": "none", "sampler": now.get("sampler")}
    unsaid |= {"target": None, "price_per_worker_hour": now.get("price_per_worker_hour")} if tune else {}
    for name, value in unsaid.items():
        if name != "price_per_worker_hour" or now["prices"] is None:
            yield from _of(name, then.get(name, value), now.get(name, value))
    old, new = then.get("start_from"), now.get("start_from")
    if (old and {**old, "source": ""}) != (new and {**new, "source": ""}):  # they may have been moved
        yield from _of("weights", old and old["source"], f"other ones, {new['source']}" if new else None)
    yield from _of_means(then.get("execution", {}), now.get("execution", {}))
    was, wanted = (simulated[bool(told.get("simulated"))] for told in (then, now))
    if was != wanted:
        yield UserError(f"a study goes on with {wanted} trials only", f"{was} ones there", "use another --out")


def _of_means(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[UserError]:
    yield from _of("compress", then.get("compress"), now.get("compress"))
    if not (then and now):
        return
    exact = now.get("mode") == "exact"
    for name in ("mode", "num_slots", "precision", "virtual_tensor", *(["threads"] if exact else [])):
        if then.get(name) is not None and now.get(name) is not None:
            yield from _of(name, then[name], now[name])


def _of(name: str, old: Any, new: Any) -> Iterator[UserError]:
    if json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True):
        return
    begun, asked = (_short(value) for value in (old, new))
    unsaid = old in (None, "", [], (), {})
    fix = "leave it out" if unsaid else f"use {begun}"
    if name in _WORDS:
        fix = f"leave out {_WORDS[name]}" if unsaid else f"use {_WORDS[name]} {shlex.quote(begun)}"
    elif name in ("objectives", "constraints") and not unsaid:
        told = [f"{key}:{value}" for key, value in old.items()] if isinstance(old, Mapping) else list(old)
        fix = f"use {shlex.join(word for each in told for word in (f'--{name[:-1]}', each))}"
    elif name.startswith("setting "):
        setting = name.removeprefix("setting ")
        fix = f"leave out --set {setting}" if old == "not set" else f"use --set {shlex.quote(f'{setting}={begun}')}"
    more = f", or {_WARM}" if name == "sampler" else ", or another --out for another study"
    yield UserError(f"a study resumes with the {name} it was begun with", f"{asked}, begun with {begun}", fix + more)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) and value else json.dumps(None if value == "" else value)
    return "none" if text == "null" else text if len(text) <= 80 else f"{text[:80]}..."


# [changes] What has changed in a program or its space since a study was begun: refused, or accepted and told.

PROBED = 64  # configurations that are looked at
LONGEST = 120  # characters of a range in a message
_RESULTS = (TrialReported, TrialPaused, TrialFinished)
SpaceSummary = dict[str, dict[str, Any]]
"""``ranges``: the distributions of each parameter; ``returns``: digests of what the space returns, by name."""


def summarize_space(space: Space, seed: int) -> SpaceSummary:
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


def _seen(samples: Sequence[Sample]) -> SpaceSummary:
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
    """Return in what two spaces differ, as ``summarize_space`` tells of them; nothing where either is not known."""
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
