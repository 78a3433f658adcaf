"""Resuming a run: its request is compared with its journal before anything starts or is written.

A program that has changed since the run began is refused, or accepted and journaled. Workers that have outlived their
controller are adopted.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from elastune.core.errors import UserError
from elastune.core.formatting import count
from elastune.core.journal.files import read
from elastune.core.journal.records import (
    ChangesAccepted,
    Checkpointed,
    Entry,
    Record,
    Reported,
    RunFinished,
    RunStarted,
    StudyStarted,
)
from elastune.core.mesh_choice import MeshChoice
from elastune.core.run import LENGTHS, Config, ExecutionSettings, Position, RunSpec, changed_settings, grown, number
from elastune.elastic.wire.contact import CONTACT_NAME, left_behind
from elastune.runtime.clusters.base import Cluster, Handle, SurvivingRun
from elastune.runtime.job.output import JOURNAL, check_out
from elastune.train.program.source import differences, source_of

_GOES_ON = ("--resume", "--accept-changes")  # of a script's own command line, for ``elastune.run``
_FIX_ARGUMENTS = "leave out what stands behind FILE and --"
FIX = "undo that, or add --accept-changes to go on with it"
_MARKS = b'"checkpointed"', b'"run_started"'  # a journal without both has no run to resume


def with_source(spec: RunSpec) -> RunSpec:
    """Return ``spec`` with the source of its program, as it is now."""
    return replace(spec, source=source_of(spec.program))


def accepted_changes(spec: RunSpec) -> ChangesAccepted | None:
    """Compare the program of ``spec``, a run to resume, with the program of the run in its folder.

    Returns:
        The accepted changes; None if nothing has changed, or the run has no checkpoint.

    Raises:
        UserError: For changes that are not accepted. It names file, line and part.
    """
    path = spec.out / JOURNAL
    if not spec.resume or not path.is_file():
        return None
    text = path.read_bytes()
    if not all(mark in text for mark in _MARKS):
        return None
    records = [entry.record for entry in read(path)]
    started = [record for record in records if isinstance(record, RunStarted)]
    saved = [record.step for record in records if isinstance(record, Checkpointed)]
    changes = differences(started[-1].source, spec.program) if started and saved else []
    if not changes:
        return None
    refuse_unless(spec.accept_changes, changes, "a run")
    return ChangesAccepted(changes, saved[-1], _epochs(records, saved[-1]))


def refuse_unless(accepted: bool, changes: Sequence[str], noun: str, fix: str = FIX) -> None:
    """Raise ``UserError`` for changes that were not accepted. ``noun``: "a run" or "a study"."""
    if not accepted:
        raise UserError(f"{noun} goes on with the program that it was begun with", "; ".join(changes), fix)


def _epochs(records: Sequence[Record], step: int) -> int:
    """How many epochs were completed after ``step``, according to the reports."""
    reports = [record for record in records if isinstance(record, Reported) and record.step <= step]
    return reports[-1].epoch if reports else 0


@dataclass(frozen=True)
class RunHistory:
    """The settings of a run, as its journal records them.

    Attributes:
        first: Its first start.
        last: Its last start or resumption.
        planned: The number of epochs that the last start planned; None: unknown.
        saved: The steps of its newest checkpoint; 0: it has none.
    """

    first: RunStarted
    last: RunStarted
    planned: int | None = None
    saved: int = 0

    def settings(self, defaults: Config) -> Config:
        """Return the settings of the run. ``defaults``: the settings in the program."""
        longer = {name: value for name, value in self.last.config.items() if name in LENGTHS}
        return {**defaults, **self.first.config, **longer}


def history_in(entries: Sequence[Entry], path: Path) -> RunHistory | None:
    """Return the history of the run in the journal at ``path``; None if it has no ``entries``.

    Raises:
        UserError: If it is the journal of a study or frontier.
    """
    started = [entry.record for entry in entries if isinstance(entry.record, RunStarted)]
    of_study = any(entry.record.kind == "study_started" for entry in entries)
    if entries and (of_study or not started):
        contents = "the journal of a study" if of_study else f"a journal that begins with {entries[0].record.kind}"
        fix = "use another --out, or the command that the folder is of"
        raise UserError("a run goes on in the folder of a run", f"{path.parent} has {contents}", fix)
    if not started:
        return None
    reported = [entry.record.epochs for entry in entries if isinstance(entry.record, Reported) and entry.record.epochs]
    saved = [entry.record.step for entry in entries if isinstance(entry.record, Checkpointed)]
    planned = started[-1].epochs or (reported[-1] if reported else None)
    return RunHistory(started[0], started[-1], planned, saved[-1] if saved else 0)


def execution_at_start(out: Path) -> ExecutionSettings | None:
    """Return the execution settings with which the run in ``out`` began; None if the folder has no run.

    Raises:
        UserError: For a folder of a study or frontier, and for a bad journal.
    """
    history = _history(out)
    return None if history is None else ExecutionSettings.from_json(history.first.execution)


def with_recorded(
    execution: ExecutionSettings, recorded: ExecutionSettings | None, chosen: Collection[str]
) -> ExecutionSettings:
    """Return ``execution`` with the settings that show in a resumed run's result, unless they are ``chosen`` anew.

    Args:
        execution: The execution settings.
        recorded: Those with which the run began; None: it is no resumed run.
        chosen: The names of the settings that the user has given.
    """
    if recorded is None or execution.mode != "exact":
        return execution
    kept = {"num_slots": recorded.num_slots}
    if execution.parts.tensor and recorded.parts.tensor:
        kept["virtual_tensor"] = recorded.virtual_tensor
    return execution.with_values({name: value for name, value in kept.items() if name not in chosen})


def arguments_at_start(out: Path) -> tuple[str, ...]:
    """Return the arguments of the program with which the run or study in ``out`` began; empty without one.

    Raises:
        UserError: For a bad journal.
    """
    path = check_out(out, resume=True)
    for entry in read(path) if path.exists() else ():
        if isinstance(entry.record, RunStarted):
            return tuple(entry.record.arguments)
        if isinstance(entry.record, StudyStarted):
            return tuple(entry.record.settings.get("arguments", ()))
    return ()


def check_resumed(spec: RunSpec) -> str:
    """Refuse to resume a run under settings that would change its result. Writes nothing.

    More epochs or steps are a longer training of the same run. Workers, mesh, mechanism, device, cluster and all other
    settings that do not show in the result, or only in its rounding, may differ.

    Args:
        spec: The run as the user requests it.

    Returns:
        What happens to a learning-rate schedule if the run takes longer; "" for nothing.

    Raises:
        UserError: For a setting that differs: it has both values and the fix. Also for a folder of a study or frontier,
            and for a schedule that cannot take longer.

    Example:
        >>> check_resumed(replace(spec, resume=True, epochs=4))
        'CosineAnnealingLR was built for 8 steps; beyond, its rate rises again'
    """
    history = _history(spec.out) if spec.resume else None
    if history is None:
        return ""
    config: Config = {}
    dropped = spec.epochs is None and history.last.epochs is not None
    if dropped or any(dict(spec.config) != start.config for start in (history.first, history.last)):
        from elastune.train.program.load import load_as_guest  # loads the program, and so torch

        config = load_as_guest(spec.program, spec.seed).config
    for error in _differences(history, spec, config):
        raise error
    if history.first.command is None:
        _check_parsed(history.first, spec)
    return _schedules(history, spec, config)


def _history(out: Path) -> RunHistory | None:
    path = check_out(out, resume=True)
    return history_in(read(path), path) if path.exists() else None


def _differences(history: RunHistory, spec: RunSpec, defaults: Config) -> Iterator[UserError]:
    """Yield the errors of ``spec``, the most important first."""
    first, then, now = history.first, ExecutionSettings.from_json(history.first.execution), spec.execution
    exact = now.mode == "exact"
    settings = [
        ("mode", "--mode", then.mode, now.mode, True),
        ("seed", "--seed", first.seed, spec.seed, True),
        ("slots", "--slots", then.num_slots, now.num_slots, exact),
        ("threads", "--threads", then.threads, now.threads, exact),
        ("precision", "--precision", then.precision, now.precision, True),
        ("compress", "--compress", then.compress, now.compress, True),
        ("sync", "--sync", first.sync, str(spec.sync), True),
        ("sync_schedule", "--sync-schedule", first.sync_schedule, str(spec.sync_schedule), True),
    ]
    for name, option, old, new, shows in settings:
        if shows and old != new:
            yield _differs(
                name, old, new, f"leave out {option}" if old in (None, "") else f"use {option} {shlex.quote(str(old))}"
            )
    arguments = list(spec.program.arguments)
    if first.command is not None and first.arguments != arguments:  # those of a Python script may say to resume
        old, new = (shlex.join(words) or None for words in (first.arguments, arguments))
        yield _differs("arguments of its program", old, new, _FIX_ARGUMENTS)
    parts = MeshChoice.of(now).most_parts(spec.most_workers)
    if exact and parts > then.num_slots:
        rule = "a run keeps the slots it was begun with, and has one for every worker"
        fix = f"use --workers {then.num_slots}" + (" or fewer" if then.num_slots > 1 else "")
        fix += f", or begin a run with --workers 1:{parts} or --slots {parts}"
        yield UserError(rule, f"{count(then.num_slots, 'slot')}, {count(parts, 'worker')}", fix)
    yield from _of_config(history, spec, defaults)
    yield from _of_policies(history, spec)
    yield from _of_beginning(first, spec)
    yield from _of_length(history, spec, defaults)


def _check_parsed(first: RunStarted, spec: RunSpec) -> None:
    """Refuse other values of a Python script's own arguments. Its words may differ: they may say to resume."""
    old, new = ([each for each in words if each not in _GOES_ON] for words in (first.arguments, spec.program.arguments))
    if old == new:
        return
    from elastune.train.program.load import load_as_guest  # loads the program, and so torch

    try:
        then = load_as_guest(replace(spec.program, arguments=tuple(first.arguments)), spec.seed).config
    except UserError:  # its parser no longer takes them
        words = shlex.join(old) or None, shlex.join(new) or None
        raise _differs("arguments of its program", words[0], words[1], "give the script the earlier ones") from None
    now = load_as_guest(spec.program, spec.seed).config
    for name in changed_settings(then, now):
        if name not in spec.config:
            fix = f"start the script with {name}={_short(then.get(name))}"
            raise _differs(f"setting {name}", then.get(name, "not set"), now.get(name, "not set"), fix)


def _differs(name: str, old: object, new: object, fix: str) -> UserError:
    rule = f"a run resumes with the {name} it was begun with"
    return UserError(rule, f"{_short(new)}, begun with {_short(old)}", f"{fix}, or another --out for another training")


def _short(value: object) -> str:
    text = value if isinstance(value, str) and value else json.dumps(value or None if value == "" else value)
    return "none" if text == "null" else text if len(text) <= 80 else f"{text[:80]}..."


def _of_config(history: RunHistory, spec: RunSpec, defaults: Config) -> Iterator[UserError]:
    then, now = history.settings(defaults), {**defaults, **spec.config}
    for name in changed_settings(then, now):
        old, new = (config.get(name, "not set") for config in (then, now))
        requested = {**history.first.config, **history.last.config}
        if name in LENGTHS and name in then and name in now:
            rule = f"a run goes on for at least as many {name} as it was begun for"
            yield UserError(rule, f"{_short(new)}, begun for {_short(old)}", f"use --set {name}={_short(old)} or more")
        fix = f"use --set {shlex.quote(f'{name}={_short(old)}')}" if name in requested else f"leave out --set {name}"
        yield _differs(f"setting {name}", old, new, fix)


def _of_policies(history: RunHistory, spec: RunSpec) -> Iterator[UserError]:
    """Policies may have other options when a run is resumed, so that a user can correct an option."""
    old, new = ([_name(text) for text in texts] for texts in (_policies(history.first), spec.adapt.policies))
    if sorted(old) != sorted(new):
        options = " ".join(f"--policy {shlex.quote(text)}" for text in _policies(history.last))
        fix = f"use {options}" if old else "leave out --policy"
        yield _differs("policies", ", ".join(old) or None, ", ".join(new) or None, fix)


def _policies(started: RunStarted) -> list[str]:
    return started.adapt.get("policies", [])


def _name(text: str) -> str:
    return text.partition(":")[0].strip()


def _of_beginning(first: RunStarted, spec: RunSpec) -> Iterator[UserError]:
    """The initial weights are in the run's checkpoints, so the user need not name them again."""
    recorded = first.start_from
    requested = None if spec.start_from is None else {**spec.start_from.to_json(), "sha256": ""}
    if requested is not None and requested != (recorded and {**recorded, "sha256": ""}):
        old = recorded["source"] if recorded else None
        fix = f"use --start-from {old}" if recorded else "leave out --start-from"
        yield _differs("weights", old, str(spec.start_from and spec.start_from.source), fix)
    if spec.from_dcp is not None and str(spec.from_dcp) != first.from_dcp:
        fix = f"use --from-dcp {first.from_dcp}" if first.from_dcp else "leave out --from-dcp"
        yield _differs("weights", first.from_dcp, str(spec.from_dcp), fix)


def _of_length(history: RunHistory, spec: RunSpec, defaults: Config) -> Iterator[UserError]:
    rule, last = "a run goes on for at least as many epochs as it was begun for", history.last.epochs
    settled = {**defaults, **spec.config}.get("epochs")
    if spec.epochs is not None and history.planned is not None and spec.epochs < history.planned:
        fix = f"use --epochs {history.planned} or more, or end it earlier with --max-steps"
        yield UserError(rule, f"{spec.epochs}, begun for {history.planned}", fix)
    if spec.epochs is None and last is not None and not (isinstance(settled, int) and settled >= last):
        yield UserError(rule, f"no --epochs, begun for {last}", f"use --epochs {last} or more")
    if spec.max_steps is not None and spec.max_steps < history.saved:
        fix = f"use --max-steps {history.saved} or more, or begin again in another --out"
        yield UserError("a run goes on from its newest checkpoint", f"--max-steps {spec.max_steps}", fix)


def _schedules(history: RunHistory, spec: RunSpec, defaults: Config) -> str:
    """Describe what schedules do in a longer training. Raises ``UserError`` for a schedule that cannot take longer."""
    before, after = history.planned, spec.epochs
    then, now = history.settings(defaults), {**defaults, **spec.config}
    passes = [name for name in grown(then, now) if name != "max_steps"]
    if after is None and history.last.epochs is not None and defaults:
        after = int(number(now, "epochs"))  # more than before: fewer are refused above
    elif after is None and passes:
        before, after = (int(number(settings, passes[0])) for settings in (then, now))
    if after is None or (before is not None and after <= before):
        return ""
    from elastune.train.checkpoints.checkpoint import schedules  # imports torch
    from elastune.train.schedules import ended_by, ends_of

    lines: list[str] = []
    at, states = schedules(spec.out / "checkpoints") or (Position(), [])
    for state in states:
        epoch = at.epoch + (0.5 if at.offset else 0.0)
        for end in ended_by(ends_of(state), int(state.get("last_epoch", 0)), epoch, before, after):
            if not end.beyond:
                fix = f"begin another run with its weights: --start-from {spec.out} and another --out"
                rule = f"a run with {end.kind} goes on for no longer than that was built for"
                raise UserError(rule, f"{after} epochs; it was built for {end.built_for} steps", fix)
            lines.append(str(end))
    return "; ".join(dict.fromkeys(lines))


@dataclass(frozen=True)
class SurvivingWorkers:
    """A run whose workers may train without a controller.

    Attributes:
        started: Its last start.
        kept: The records of its journal since then.
    """

    started: RunStarted
    kept: list[Record]


def may_adopt(spec: RunSpec) -> bool:
    """Whether ``find_surviving_workers`` returns a run."""
    return find_surviving_workers(spec) is not None


def find_surviving_workers(spec: RunSpec) -> SurvivingWorkers | None:
    """Return the run in ``spec.out`` if its workers may have outlived its controller, else None.

    Raises:
        UserError: If it differs from ``spec``: adopting its workers would not do what the user requests.
    """
    if not spec.resume or left_behind(spec.out) is None:
        return None
    surviving = _current(spec.out)
    if surviving is None:
        return None
    started = surviving.started
    for noun, then, now in (
        ("program", started.program, str(spec.program.path)),
        ("settings (--set)", started.config, dict(spec.config)),
        ("--seed", started.seed, spec.seed),
        ("--epochs", started.epochs, spec.epochs),
        ("arguments", started.command and started.arguments, started.command and list(spec.program.arguments)),
        ("--sync", started.sync, str(spec.sync)),
        ("--sync-schedule", started.sync_schedule, str(spec.sync_schedule)),
        ("policies and monitors", started.adapt, spec.adapt.to_json()),
    ):
        if then != now:
            rule = f"workers of this run may still train: it goes on with the same {noun}"
            fix = f"repeat the earlier value, or remove {spec.out / CONTACT_NAME} once no worker is left"
            raise UserError(rule, f"{now}, after {then}", fix)
    if changed := differences(started.source, spec.program):
        rule = "workers of this run may still train: it goes on with the program that they have loaded"
        fix = f"undo the edit, or remove {spec.out / CONTACT_NAME} once no worker is left and add --accept-changes"
        raise UserError(rule, "; ".join(changed), fix)
    return surviving


def adopted(spec: RunSpec, survivors: SurvivingWorkers, cluster: Cluster) -> Handle | None:
    """Adopt the workers of ``spec``'s run on ``cluster``. Return its handle; None if no worker connects."""
    execution = ExecutionSettings.from_json(survivors.started.execution)
    return cluster.adopt([SurvivingRun(replace(spec, execution=execution), survivors.kept)])[0]


def _current(out: Path) -> SurvivingWorkers | None:
    """Return the run in ``out``; None if it has ended, or never began."""
    path = out / JOURNAL
    records = [entry.record for entry in read(path)] if path.exists() else []
    starts = [at for at, record in enumerate(records) if isinstance(record, RunStarted)]
    if not starts:
        return None
    started, kept = records[starts[-1]], records[starts[-1] + 1 :]
    assert isinstance(started, RunStarted)
    return None if any(isinstance(record, RunFinished) for record in kept) else SurvivingWorkers(started, kept)
