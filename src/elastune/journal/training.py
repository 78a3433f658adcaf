"""What a model's training has taken in all: its own, and that of the weights that it began with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastune.core.errors import UserError
from elastune.journal.entry import Entry
from elastune.journal.money import paid_for
from elastune.journal.reader import read
from elastune.journal.records import RunStarted, StartedFrom, StudyStarted
from elastune.journal.trials import TrialTable, fold

_JOURNAL = "journal.jsonl"


@dataclass(frozen=True)
class Training:
    """``worker_seconds``, as far as journals tell. ``untold``: weights that were begun with, of which none tells."""

    worker_seconds: float
    untold: tuple[str, ...] = ()


def training_of(entries: Sequence[Entry], table: TrialTable, trials: Iterable[int]) -> Training:
    """That of ``trials`` of a study, of those that they descend from, and of what all these began with, each once.

    What else the study has tried is left out.
    """
    line: dict[int, None] = {}
    untold: dict[str, None] = {}
    for first in trials:
        trial: int | None = first
        while trial is not None and trial not in line:
            if trial not in table.trials:
                untold[f"trial {trial}"] = None
                break
            line[trial] = None
            trial = table.trials[trial].started.parent
    begun = [told for trial in line for told in table.trials[trial].begun]
    if line and not begun and (source := _begun_with(entries)):
        untold[source] = None  # a study from before trials told it
    before = _before(begun)
    own_s = sum(table.trials[trial].worker_seconds for trial in line)
    return Training(own_s + before.worker_seconds, (*untold, *before.untold))


def training_together(trials: Iterable[tuple[Path, int]]) -> Training:
    """That of trials of several studies, each in its folder, of those that they descend from, and of what all these
    began with: each once, however many began with it. Raises ``UserError`` where a study's journal cannot be read."""
    todo, seen = list(trials), set[tuple[Path, int]]()
    journals: dict[Path, tuple[list[Entry], TrialTable]] = {}
    sources: dict[str, StartedFrom] = {}
    untold: dict[str, None] = {}
    own_s = 0.0
    while todo:
        out, trial = todo.pop()
        out = out.resolve()
        if (out, trial) in seen:
            continue
        seen.add((out, trial))
        if out not in journals:
            entries = read(out / _JOURNAL)
            journals[out] = entries, fold(entries)
        entries, table = journals[out]
        if trial not in table.trials:
            untold[f"trial {trial} of {out}"] = None
            continue
        life = table.trials[trial]
        own_s += life.worker_seconds
        if life.started.parent is not None:
            todo.append((out, life.started.parent))
        elif not life.begun and (source := _begun_with(entries)):
            untold[source] = None
        for told in life.begun:
            if (place := _trial_there(told)) is not None:
                todo.append(place)
            else:
                sources[told.sha256] = told
    before = _before(sources.values())
    return Training(own_s + before.worker_seconds, (*untold, *before.untold))


def _trial_there(told: StartedFrom) -> tuple[Path, int] | None:
    """The study and the trial whose weights were begun with, where these are still what it has left."""
    folder = Path(told.source)
    if folder.parent.name != "trials" or not folder.name.isdecimal():
        return None
    try:
        kept = fold(read(folder.parents[1] / _JOURNAL)).artifacts.get(int(folder.name))
    except UserError:  # as in training_in
        return None
    return (folder.parents[1], int(folder.name)) if kept is not None and kept.seal == told.sha256 else None


def training_in(folder: Path) -> Training | None:
    """That of the weights in the folder of a run, or of a trial of a study; None where no journal there tells."""
    try:
        if (folder / _JOURNAL).is_file():
            entries = read(folder / _JOURNAL)
            if not any(isinstance(entry.record, RunStarted) for entry in entries):
                return None
            before = _before(entry.record for entry in entries if isinstance(entry.record, StartedFrom))
            own_s = sum(each.worker_seconds for each in paid_for(entries).workers)
            return Training(own_s + before.worker_seconds, before.untold)
        if folder.parent.name == "trials" and folder.name.isdecimal() and (folder.parents[1] / _JOURNAL).is_file():
            entries = read(folder.parents[1] / _JOURNAL)
            table, trial = fold(entries), int(folder.name)
            return training_of(entries, table, [trial]) if trial in table.trials else None
    except UserError:  # a journal that cannot be read tells nothing, and the weights are good all the same
        return None
    return None


def _before(begun: Iterable[StartedFrom]) -> Training:
    """That of all sources together, each once."""
    sources = {told.sha256: told for told in begun}.values()
    known = [told.worker_seconds for told in sources if told.worker_seconds is not None]
    return Training(sum(known), tuple(told.source for told in sources if told.worker_seconds is None))


def _begun_with(entries: Iterable[Entry]) -> str:
    begun = next((e.record.settings.get("start_from") for e in entries if isinstance(e.record, StudyStarted)), None)
    return str(begun.get("source")) if isinstance(begun, dict) else ""
