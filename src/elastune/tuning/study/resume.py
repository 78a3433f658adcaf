"""Resume a study: compare the request, the program and the space with the journal, before anything is written.

A different setting is an error. A changed program or space is refused too, or accepted by ``--accept-changes``
and then recorded. The file also says which trials of an earlier controller go on with their workers.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from elastune.core.command import TrainingCommand
from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.folds import TrialSummary, TrialTable
from elastune.core.journal.records import (
    AFTERWARDS,
    Adopted,
    ChangesAccepted,
    DataContext,
    Entry,
    ProposalAsked,
    Record,
    Regrouped,
    StudyStarted,
    TrialAdopted,
    TrialFinished,
    TrialPaused,
    TrialRegrouped,
    TrialReported,
    TrialResumed,
    TrialStarted,
)
from elastune.core.run import Program, RunSpec
from elastune.core.sync_plan import SyncChoice
from elastune.runtime.clusters.base import SurvivingRun
from elastune.runtime.job.output import check_out
from elastune.runtime.job.pool import SurvivingJob
from elastune.runtime.job.resumption import refuse_unless
from elastune.train.program.source import differences
from elastune.train.program.space import Sample, Space, corners, from_json, probe, to_json

_WORDS = {"sync_schedule": "--sync-schedule", "num_slots": "--slots", "virtual_tensor": "--virtual-tensor"}
_OPTIONS = ("seed", "epochs", "sampler", "target", "stopping", "prices", "sync", "mode", "precision", "compress")
_WORDS |= {name: f"--{name}" for name in _OPTIONS} | {"price_per_worker_hour": "--price", "threads": "--threads"}
_WARM = "warm-start another study of it with --warm-start"
PROBED = 64  # random configurations of a space that are compared
LONGEST = 120  # characters of a range in an error text
_RESULTS = (TrialReported, TrialPaused, TrialFinished)
SpaceSummary = dict[str, dict[str, Any]]
"""``ranges``: the distributions of each parameter; ``returns``: digests of the returned values, by name."""

# --- settings ---


def journaled_slots(out: Path) -> int | None:
    """Return the slots of trials of the study in ``out``; None without a study.

    Raises:
        UserError: For a bad journal.
    """
    path = check_out(out, resume=True)
    entries = read(path) if path.exists() else []
    started = next((entry.record for entry in entries if isinstance(entry.record, StudyStarted)), None)
    return None if started is None else started.settings.get("execution", {}).get("num_slots")


def changed_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[UserError]:
    """Yield an error for each difference between two studies' settings that would change a result.

    Budgets, workers, stop rules and retention may differ. ``then`` and ``now`` are settings as a journal holds them.
    """
    tune, simulated = now["kind"] == "tune", {True: "simulated", False: "trained"}
    for name in ("kind", "program", "objectives", "constraints"):
        yield from _difference(name, then.get(name), now[name])
    yield from _difference("arguments", then.get("arguments", []), now.get("arguments", []))
    yield from _difference("command", _command_of(then), _command_of(now))
    for name in ("seed", "epochs", "prices"):
        yield from _difference(name, then.get(name), now[name])
    old, new = then.get("config") or {}, now["config"]
    for name in sorted({*old, *new}):
        yield from _difference(f"setting {name}", old.get(name, "not set"), new.get(name, "not set"))
    defaults = {**SyncChoice().to_json(), "stopping": "none", "sampler": now.get("sampler")}
    defaults |= {"target": None, "price_per_worker_hour": now.get("price_per_worker_hour")} if tune else {}
    for name, value in defaults.items():
        if name != "price_per_worker_hour" or now["prices"] is None:
            yield from _difference(name, then.get(name, value), now.get(name, value))
    old, new = then.get("start_from"), now.get("start_from")
    if (old and {**old, "source": ""}) != (new and {**new, "source": ""}):  # they may have been moved
        yield from _difference("weights", old and old["source"], f"other ones, {new['source']}" if new else None)
    yield from _execution_differences(then.get("execution", {}), now.get("execution", {}))
    was, wanted = (simulated[bool(each.get("simulated"))] for each in (then, now))
    if was != wanted:
        yield UserError(f"a study goes on with {wanted} trials only", f"{was} ones there", "use another --out")


def _command_of(settings: Mapping[str, Any]) -> str:
    """The training command of a study, as ``--command`` and ``--metrics`` give it; "" without one."""
    if "training_command" not in settings:
        return ""
    command = TrainingCommand.from_json(settings["training_command"])
    return " ".join([shlex.join(command.words), *(f"--metrics {shlex.quote(each)}" for each in command.metrics)])


def _execution_differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[UserError]:
    yield from _difference("compress", then.get("compress"), now.get("compress"))
    if not (then and now):
        return
    exact = now.get("mode") == "exact"
    for name in ("mode", "num_slots", "precision", "virtual_tensor", *(["threads"] if exact else [])):
        if then.get(name) is not None and now.get(name) is not None:
            yield from _difference(name, then[name], now[name])


def _difference(name: str, old: Any, new: Any) -> Iterator[UserError]:
    if json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True):
        return
    first, requested = (_short(value) for value in (old, new))
    was_unset = old in (None, "", [], (), {})
    fix = "leave it out" if was_unset else f"use {first}"
    if name in _WORDS:
        fix = f"leave out {_WORDS[name]}" if was_unset else f"use {_WORDS[name]} {shlex.quote(first)}"
    elif name == "command":
        fix = f"use --command {shlex.quote(old)}" if old else "leave out --command"
    elif name == "arguments":
        fix = "leave out what stands behind FILE and --"
    elif name in ("objectives", "constraints") and not was_unset:
        texts = [f"{key}:{value}" for key, value in old.items()] if isinstance(old, Mapping) else list(old)
        fix = f"use {shlex.join(word for each in texts for word in (f'--{name[:-1]}', each))}"
    elif name.startswith("setting "):
        setting = name.removeprefix("setting ")
        fix = f"leave out --set {setting}" if old == "not set" else f"use --set {shlex.quote(f'{setting}={first}')}"
    alternative = f", or {_WARM}" if name == "sampler" else ", or another --out for another study"
    yield UserError(
        f"a study resumes with the {name} it was begun with", f"{requested}, begun with {first}", fix + alternative
    )


def _short(value: Any) -> str:
    text = value if isinstance(value, str) and value else json.dumps(None if value == "" else value)
    return "none" if text == "null" else text if len(text) <= 80 else f"{text[:80]}..."


# --- program and space ---


def summarize_space(space: Space, seed: int) -> SpaceSummary:
    """Return a summary of ``space`` for the journal, by which another space can be compared.

    Names whose values differ between two equal calls of the space are left out: they cannot be compared.
    """
    # twice, since the space may draw random numbers of its own
    first, again = (_summary([*corners(space, seed), *probe(space, PROBED, seed)]) for _ in range(2))
    return {
        kind: {name: each for name, each in values.items() if again[kind].get(name) == each}
        for kind, values in first.items()
    }


def _summary(samples: Sequence[Sample]) -> SpaceSummary:
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
    """Compare the program and the space of a resumed study with those in its journal.

    Args:
        settings: The present settings, as a journal holds them.
        entries: The journal.
        program: The program as it is now.
        accepted: Whether the user accepts changes.

    Returns:
        The changes, in words; none if no trial has reported yet.

    Raises:
        UserError: For changes that are not accepted. It names file and line, or the parameter.
    """
    records = [entry.record for entry in entries]
    earlier_settings = [record.settings for record in records if isinstance(record, StudyStarted)]
    if not earlier_settings or not any(isinstance(record, _RESULTS) for record in records):
        return []
    changes = differences(earlier_settings[-1].get("source", {}), program)
    changes += space_differences(earlier_settings[-1].get("space", {}), settings.get("space", {}))
    if changes:
        refuse_unless(accepted, changes, "a study")
    return changes


def space_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences of two spaces by their summaries, in words; none if either is unknown."""
    if not before or not now:
        return []
    ranges_before, ranges_now = before.get("ranges", {}), now.get("ranges", {})
    changes = [f"space: {name} is gone" for name in ranges_before if name not in ranges_now]
    changes += [f"space: {name} is new" for name in ranges_now if name not in ranges_before]
    changes += [
        f"space: {name} is {_words(ranges_now[name])}, was {_words(ranges_before[name])}"
        for name in ranges_before
        if name in ranges_now and ranges_now[name] != ranges_before[name]
    ]
    if changes:
        return changes
    returned_before, returned_now = before.get("returns", {}), now.get("returns", {})
    return [
        f"space: it returns another {name}"
        for name in sorted({*returned_before, *returned_now})
        if returned_before.get(name) != returned_now.get(name)
    ]


def _words(texts: Sequence[str]) -> str:
    try:
        ranges = [_range(each) for text in texts for each in from_json({"": text}).values()]
    except UserError:  # distributions of a later version of Optuna
        ranges = list(texts)
    return " or ".join(ranges)[:LONGEST]


def _range(distribution: BaseDistribution) -> str:
    match distribution:
        case CategoricalDistribution(choices=choices):
            return f"one of {', '.join(map(str, choices))}"
        case (
            FloatDistribution(low=low, high=high, log=log, step=step)
            | IntDistribution(low=low, high=high, log=log, step=step)
        ):
            steps = f" in steps of {step:g}" if step not in (None, 1) else ""
            return f"{low:g} to {high:g}{' (log)' if log else ''}{steps}"
    return str(distribution)


# --- trials of an earlier controller ---


def surviving_jobs(
    table: TrialTable,
    entries: Sequence[Entry],
    left: Callable[[TrialSummary], RunSpec | None],
    now: float,
    to_pause: Collection[int],
) -> dict[int, SurvivingJob]:
    """Return the running trials of an earlier controller whose workers may have survived it.

    The time without a controller counts as time of these trials, since their workers were busy.

    Args:
        table: All trials at the end of ``entries``.
        entries: The journal of the earlier controller.
        left: The run of a trial whose workers may have survived; None: they cannot have.
        now: The present time, in seconds since 1970.
        to_pause: Trials that must pause by their last reports.

    Returns:
        The jobs by trial, in the order in which the trials began.
    """
    jobs = {}
    for number in _by_beginning(entries, table.of("running")):
        life = table.trials[number]
        if (spec := left(life)) is not None:
            records = _run_records(entries, number)
            changed = any(isinstance(record, Regrouped | Adopted) for record in records)
            stop_at = life.last_at if number in to_pause else None
            run = SurvivingRun(spec, records, life.last_start_at, stop_at)
            jobs[number] = SurvivingJob(run, _used(life, now)[1] if changed else None)
    return jobs


def _by_beginning(entries: Iterable[Entry], numbers: Collection[int]) -> list[int]:
    """``numbers`` in the order in which the trials last started or resumed."""
    started: dict[int, None] = {}
    for record in (entry.record for entry in entries):
        if isinstance(record, TrialStarted | TrialResumed) and record.trial in numbers:
            started.pop(record.trial, None)
            started[record.trial] = None
    return list(started)


def cut_off(table: TrialTable, entries: Sequence[Entry], adopted: Collection[int]) -> list[TrialPaused]:
    """Return the missing pause records of trials that ran at the end of ``entries`` and were not ``adopted``."""
    pauses = []
    last_at = max((entry.at for entry in entries if not isinstance(entry.record, AFTERWARDS)), default=0.0)
    for number in table.of("running"):
        if number not in adopted:
            life = table.trials[number]
            seconds, worker_seconds = _used(life, last_at)
            pauses.append(
                TrialPaused(number, life.epoch, seconds, worker_seconds, "its controller ended", cut_off=True)
            )
    return pauses


def _used(life: TrialSummary, at: float) -> tuple[float, float]:
    """Seconds and worker-seconds that a trial had used at time ``at``, since it last started or resumed."""
    seconds = max(at - life.last_start_at, 0.0)
    total = (life.average or life.first_workers) * (life.seconds + seconds)
    return seconds, max(total - life.worker_seconds, 0.0)


def _run_records(entries: Iterable[Entry], trial: int) -> list[Record]:
    """The records of a trial's run in the study's journal, since the trial last started or resumed."""
    records: list[Record] = []
    for record in (entry.record for entry in entries):
        match record:
            case TrialStarted(trial=number) | TrialResumed(trial=number) if number == trial:
                records = []
            case TrialReported(trial=number, report=report) if number == trial:
                records.append(report)
            case TrialRegrouped(trial=number, change=change) if number == trial:
                records.append(change)
            case TrialAdopted(trial=number, adopted=adopted) if number == trial:
                records.append(adopted)
    return records


def next_trial_number(entries: Iterable[Entry]) -> int:
    """Return the number of the first trial that is not in the journal."""
    records = (entry.record for entry in entries)
    return max((each.trial for each in records if isinstance(each, TrialStarted | ProposalAsked)), default=-1) + 1


def first_comparable_trial(entries: Iterable[Entry]) -> int:
    """Return the number of the first trial since the last accepted change; 0 without a change."""
    records = (entry.record for entry in entries)
    return max((each.first_trial for each in records if isinstance(each, ChangesAccepted)), default=0)


def common_data(table: TrialTable) -> dict[str, Any] | None:
    """Return the training set that all trials since the last change had, in the form of ``RunSpec.data_seen``.

    None if there are fewer than two such trials, or if their settings decide the data.
    """
    runs = (life.finished.run for life in table.trials.values() if life.number >= table.since and life.finished)
    contexts = [run.context.data for run in runs if run is not None and run.context is not None]
    data_sets: list[DataContext] = [data for data in contexts if data.samples]
    return asdict(data_sets[0]) if len(data_sets) > 1 and all(data == data_sets[0] for data in data_sets) else None
