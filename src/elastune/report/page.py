"""The contents of ``report.html``: which figures, tables and notes a run, study, frontier or plan has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastune.core.divergence import FACTOR
from elastune.core.errors import UserError
from elastune.core.formatting import count, duration, flat, plain
from elastune.core.journal.files import read
from elastune.core.journal.records import Entry, FrontierFound, PlanMade, RunStarted, StudyStarted
from elastune.core.journal.trials import compared_all
from elastune.core.plan.step_time import last_plan
from elastune.report import adaptation as adapting
from elastune.report import adaptation as adapting_figure
from elastune.report import frontier as frontier_answer
from elastune.report import frontier as frontier_figures
from elastune.report import frontier as frontier_tables
from elastune.report import study as search_figures
from elastune.report import study as study_figures
from elastune.report import study as study_tables
from elastune.report import tables
from elastune.report.adaptation import Adaptation, SyncHistory, gather_sync, sync_table
from elastune.report.document import Note, Page, Section, write
from elastune.report.explain import Part, explain
from elastune.report.lines import accepted_lines
from elastune.report.overviews import RunOverview, StudyOverview, TrialOverview, front_trials, gather_run, gather_study
from elastune.report.plan import plan_page
from elastune.report.sample_ledger import Ledger, ledger
from elastune.report.sample_ledger import lines as ledger_lines
from elastune.report.tables import Table, divided_lines, memory_table
from elastune.report.worker_changes import (
    Changes,
    changes_line,
    changes_table,
    gather_changes,
    left_out_table,
    lost_workers_table,
)
from elastune.tune.search.objective import valued
from elastune.tune.study.results import Picked, Study
from elastune.tune.study.run_command import program_path, run_command
from elastune.tune.study.trials import task_of

JOURNAL = "journal.jsonl"
MOST_STRAGGLERS = 10
DIGESTS = ("source", "space")  # of a study's request, by which a resume is compared with it


def write_report(out: Path, *, across_changes: bool = False) -> Path:
    """The report of whatever ``out/journal.jsonl`` holds; the path of ``report.html``, written beside the journal.

    ``across_changes``: fronts are of trials from before accepted changes, too.

    A journal that has no end yet gives a report that says so. Raises ``UserError`` where there is no journal, a line of
    it is no record, or nothing was started in it.
    """
    entries = read(Path(out) / JOURNAL)
    entries = compared_all(entries) if across_changes else entries
    return _writer(entries, Path(out))(entries, Path(out))


def write_run_report(entries: Sequence[Entry], out_dir: Path) -> Path:
    """The report of the run in ``entries``."""
    run = gather_run(entries)
    if run is None:
        raise _nothing("run", out_dir)
    adaptation = adapting.gather_adaptation(entries)
    return write(run_page(run, gather_changes(entries), ledger(entries), adaptation, gather_sync(entries)), out_dir)


def write_study_report(entries: Sequence[Entry], out_dir: Path) -> Path:
    """The report of the study in ``entries``."""
    study = gather_study(entries)
    if study is None:
        raise _nothing("study", out_dir)
    found = Study.of(out_dir, entries) if study.objectives else None
    return write(study_page(study, found), out_dir)


def write_frontier_report(entries: Sequence[Entry], out_dir: Path) -> Path:
    """The report of the frontier in ``entries``."""
    study = gather_study(entries)
    if study is None:
        raise _nothing("frontier", out_dir)
    return write(frontier_page(study), out_dir)


def write_plan_report(entries: Sequence[Entry], out_dir: Path) -> Path:
    """The report of the cluster's plan in ``entries``."""
    made = last_plan(entries)
    if made is None:
        raise _nothing("plan", out_dir)
    return write(plan_page(made), out_dir)


def run_page(
    run: RunOverview,
    changes: Changes | None = None,
    seen: Ledger | None = None,
    adaptation: Adaptation | None = None,
    story: SyncHistory | None = None,
) -> Page:
    """The page of one run; ``changes`` of its workers, its samples as ``seen``, its ``adaptation``, and the ``story``
    of how its workers agreed, where the journal tells of them."""
    changes, adaptation, story = changes or Changes(), adaptation or Adaptation(), story or SyncHistory()
    name = Path(plain(run.started.program)).name
    workers = run.started.execution.get("workers", 1)
    asked_to_adapt = {"policy": list(adaptation.policies), "monitor": list(adaptation.monitors)}
    on = count(workers, "worker") if isinstance(workers, int) else "its workers"
    end = run.finished
    if end:
        metrics = ", ".join(f"{plain(key, 40)} {valued(key, value)}" for key, value in end.metrics.items())
        after = f"in {duration(end.seconds)} and {count(end.steps, 'step')} on {count(end.workers, 'worker')}"
        answer, state = f"{name} reached {metrics or 'its end'} {after}.", "finished"
    elif run.failed:
        answer = f"{name} failed on {on}: {plain(run.failed.detail, 160)}"
        state = f"failed: {run.failed.reason.replace('_', ' ')}, worker {run.failed.rank}"
    else:
        steps = run.reports[-1].step if run.reports else 0
        answer = f"{name} on {on}: {count(steps, 'step')} reported so far."
        state = "unfinished: it runs on, or was ended from outside"
    sections = [Section("The run", (tables.run_table(run),)), *_adapting_sections(adaptation)]
    agreed = sync_table(story)
    sections += [Section(agreed.title, (agreed,))] if agreed.rows else []
    sections += _changes_sections(changes, seen)
    by_worker = tables.worker_steps_table(run)
    if len(by_worker.rows) > 1:
        sections.append(Section(by_worker.title, (by_worker,)))
    layers = divided_lines(run.divided)
    sections += [Section("Divided layers", tuple(Note(line) for line in layers))] if layers else []
    memory = memory_table(run)
    if memory.rows:
        sections.append(Section(memory.title, (memory,)))
    reports = tables.reports_table(run)
    if reports.rows:
        sections.append(Section(reports.title, (reports,), folded=True))
    if run.failed and run.failed.log:
        sections.append(Section("The worker's log", (Note(run.failed.log, log=True),)))
    sections.append(Section("How it was measured", _how(run.started.context)))
    adapted = adapting_figure.over_time(run, adaptation, story)
    workers_alone = None if adapted else study_figures.workers(run, changes)
    figures = (adapted, study_figures.curves(run), workers_alone)
    started = run.started
    return Page(
        kind="run",
        answer=answer,
        state=state,
        ended=end is not None,
        figures=tuple(figure for figure in figures if figure),
        sections=tuple(sections),
        command=run_command(
            started.program,
            started.config,
            {**started.execution, **asked_to_adapt},
            started.seed,
            started.epochs,
            data=started.data,
        ),
        command_note="These settings again:",
    )


def _adapting_sections(adaptation: Adaptation) -> list[Section]:
    """What was decided, and which policies failed, if any did."""
    found = (adapting.decisions_table(adaptation), adapting.failures_table(adaptation))
    summary = adapting.adaptation_line(adaptation)
    texts = (f"{summary[:1].upper()}{summary[1:]}." if summary else "", adapting.batch_line(adaptation))
    notes = tuple(Note(text) for text in texts if text)
    parts: tuple[Table | Note, ...] = (*notes, *(t for t in found if t.rows))
    return [Section("How it adapted", parts)] if parts else []


def _changes_sections(changes: Changes, seen: Ledger | None) -> list[Section]:
    """The story of the workers, if it is one."""
    sections = _accepted_sections(changes.accepted)
    told = [changes_line(changes), ", ".join(f"{n} x {plain(fault, 40)}" for fault, n in changes.faults)]
    notes = [Note(text) for text in (told[0], told[1] and f"Faults injected: {told[1]}.") if text]
    notes += [Note(plain(line, 400)) for line in changes.stragglers[:MOST_STRAGGLERS]]
    if notes:
        sections.append(Section("Changes of workers", tuple(notes)))
    for table in (changes_table(changes), lost_workers_table(changes), left_out_table(changes)):
        if table.rows:
            sections.append(Section(table.title, (table,), folded=True))
    if seen is not None and seen.epochs:
        parts = tuple(Note(line) for line in ledger_lines(seen))
        sections.append(Section("Ledger of samples", parts, folded=seen.exact))
    return sections


def _accepted_sections(lines: Sequence[str]) -> list[Section]:
    """What was trained otherwise than at the beginning."""
    return (
        [Section("Accepted changes", tuple(Note(f"{each[:1].upper()}{each[1:]}.") for each in lines))] if lines else []
    )


def study_page(study: StudyOverview, found: Study | None = None) -> Page:
    """The page of a study; with ``found``, the same study as its users get it, also what it comes to."""
    best = front_trials(study)
    if found is not None and found.tasks:
        return _tasks_page(study, found)
    choices = () if found is None or found.no_choice_reason() else found.choices()
    pick = choices[0].trial.number if choices else None
    figures = [study_figures.study_front(study, best, pick), study_figures.history(study)]
    front = study_tables.front_table(study, best, choices)
    sections = [Section(front.title, (front,))]
    if found is None:
        top = _top(study, best)
        command, note = _trial_command(study, top), f"Trains the best trial by {_first(study)} again:"
        answer = _study_answer(study, top, len(best))
    else:
        command, note = "", ""
        answer = _choice_answer(study, found, choices, len(best))
        if choices:
            caveat = f" ({choices[0].caveat})" if choices[0].caveat else ""
            command, note = choices[0].command, f"Trains the pick, trial {pick}, again{caveat}:"
            named = study_tables.choices_table(found, choices)
            sections.insert(0, Section(named.title, (named,)))
        told = explain(found)
        figures += [search_figures.front_over_time(found), search_figures.workers_by_trial(found)]
        figures.append(search_figures.importance(told.importance))
        sections.append(Section("In words", tuple(Note(text) for part in told.parts for text in _told(part))))
        sections += [Section("What can be used", (study_tables.assets_table(found.assets),))] if found.assets else []
        weighed = tuple(study_tables.importance_table(each) for each in told.importance if each.parameters)
        sections += [Section("What decides the objectives", weighed)] if weighed else []
    return Page(
        kind="study",
        answer=answer,
        state=_study_state(study),
        ended=study.finished is not None,
        figures=tuple(figure for figure in figures if figure),
        sections=(*sections, *_study_sections(study)),
        command=command,
        command_note=note,
    )


def _tasks_page(study: StudyOverview, found: Study) -> Page:
    """The page of a study whose trials have different tasks: none of them is picked."""
    table = study_tables.tasks_table(found)
    done = {task_of(trial.config) for trial in found.complete}
    parts = f"{len(done)} of {count(len(found.tasks), 'part')} of a tree of classes are trained"
    return Page(
        kind="study",
        answer=f"{parts}. Each is a task of its own, so none is picked.",
        state=_study_state(study),
        ended=study.finished is not None,
        figures=tuple(figure for figure in (search_figures.workers_by_trial(found),) if figure),
        sections=(Section(table.title, (table,)), *_study_sections(study)),
    )


def frontier_page(study: StudyOverview) -> Page:
    """The page of a frontier; without its answer yet, what there is."""
    found = study.found
    if found is None:
        page = study_page(study)
        words = "No frontier yet: it was not finished." if study.finished is None else "No frontier was found."
        sections = page.sections if study.objectives else page.sections[1:]
        return Page("frontier", f"{words} {page.answer}", page.state, page.ended, page.figures, sections, page.command)
    history = study_figures.history(study)
    figures = [frontier_figures.tradeoff(found), frontier_figures.front(found)] if found.rows else []
    covered = frontier_tables.volumes_table(found)
    earned = frontier_answer.answer_table(found)
    why = [Section(earned.title, (earned,))] if earned.rows else []
    why += [Section("Why", (frontier_tables.reasons_table(found),))] if found.reasons else []
    return Page(
        kind="frontier",
        answer=plain(found.answer.sentence, 1000),
        state=_study_state(study),
        ended=study.finished is not None,
        figures=tuple(figures + ([history] if history else [])),
        sections=(
            *why,
            Section("The frontier", (frontier_tables.frontier_table(found),)),
            Section(covered.title, (covered,)),
            Section("Settings of the rows", (frontier_tables.settings_table(found),)),
            *_study_sections(study, found),
        ),
        command=plain(found.command, 4000),
        command_note=f"Trains the pick, {plain(found.answer.command_note, 600)}:",
    )


def _study_sections(study: StudyOverview, found: FrontierFound | None = None) -> list[Section]:
    sections = [Section("How it was measured", _how(study.started.context, study, found))]
    sections = [*_accepted_sections(accepted_lines(study.accepted)), *sections]
    failures = study_tables.failures_table(study)
    if failures.rows:
        sections.insert(0, Section(failures.title, (failures,)))
    trials = study_tables.trials_table(study)
    return [*sections, Section(trials.title, (trials,), folded=True)]


def _how(
    context: Mapping[str, Any], study: StudyOverview | None = None, found: FrontierFound | None = None
) -> tuple[Table | Note, ...]:
    """Words on the method, the request, the step-time model and the machine."""
    parts: list[Table | Note] = []
    if found and found.rows:
        parts.append(Note(_method(found)))
    if study and study.times:
        parts.append(tables.times_table(study.times))
    if study:
        told = {name: value for name, value in study.settings.items() if name not in DIGESTS}
        asked = flat({**told, "program": program_path(study.settings.get("program", "–"))})
        parts.append(Table("The request", ("asked for", "value"), tuple(asked.items())))
    if context:
        parts.append(tables.context_table(context))
    return tuple(parts) or (Note("The journal holds no context."),)


def _method(found: FrontierFound) -> str:
    quality = plain(found.quality, 40)
    held_out = all(row.held_out for row in found.rows)
    data = "data that the search never saw" if held_out else "validation data where marked, else data held out"
    seeds = sorted({row.seeds for row in found.rows})
    spread = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    modelled = [row.workers for row in found.rows if row.seconds_label == "modelled"]
    emulated = sorted({row.workers for row in found.rows if row.quality_label == "emulated"})
    words = (
        f"{quality} is the mean over {spread} seeds on {data}, with its 95 % confidence interval within its bounds: of "
        "the spread over seeds and, where the program tells on how many samples it measures, of the test set's error. "
    )
    if found.target is not None:
        words += "The target counts as reached where the whole interval is at it. "
    else:
        words += (
            "It holds where a one-sided paired t-test over seeds (95 %, on the same test samples) shows that it is "
            "worse than on the smallest worker count with the program's own settings by less than the margin. "
        )
    words += "Each row is tested by itself: of twenty that do not hold, one may seem to. "
    if emulated:
        counts = ", ".join(map(str, emulated))
        words += f"Emulated ({counts} workers): fewer did their work, slot by slot, with the same result. "
    if modelled:
        counts = ", ".join(map(str, sorted(set(modelled))))
        return words + f"Times are measured here, or modelled where labelled so ({counts} workers): steps × step time."
    return words + "All times are measured here."


def _told(part: Part) -> list[str]:
    """A part of an explanation as paragraphs; the first begins with its title."""
    lines = [plain(line, 600) for line in part.lines]
    return [f"{part.title}: {lines[0]}", *lines[1:]]


def _study_answer(study: StudyOverview, top: TrialOverview | None, on_front: int) -> str:
    told = f"{count(len(study.ended), 'trial')} ended"
    if top is None:
        return f"No trial has a result; {told}."
    name = _first(study)
    reached = ", ".join(f"{plain(key, 40)} {valued(key, top.value(key), study.price)}" for key in study.objectives)
    front = f" {count(on_front, 'point')} on the front." if len(study.objectives) > 1 else ""
    return f"Best {name}: trial {top.trial} with {reached}; {told}.{front}"


def _choice_answer(study: StudyOverview, found: Study, choices: Sequence[Picked], on_front: int) -> str:
    """The headline: the pick, whose command stands below it."""
    told = f"{count(len(study.ended), 'trial')} ended"
    if not choices:
        why = found.no_choice_reason()
        return f"No trial has a result; {told}." if not found.complete else f"No pick: {plain(why, 300)}; {told}."
    values = choices[0].trial.values
    reached = ", ".join(f"{plain(key, 40)} {valued(key, values[key], study.price)}" for key in study.objectives)
    front = f" {count(on_front, 'point')} on the front." if len(study.objectives) > 1 else ""
    return f"Trial {choices[0].trial.number}, {choices[0].reason}: {reached}; {told}.{front}"


def _study_state(study: StudyOverview) -> str:
    if study.finished is None:
        return f"unfinished: {count(len(study.ended), 'trial')} ended so far"
    return f"finished after {duration(study.finished.seconds)}: {plain(study.finished.reason)}"


def _top(study: StudyOverview, best: Sequence[int]) -> TrialOverview | None:
    """Of the front, the trial that is best in the first objective."""
    on_front = [trial for trial in study.trials if trial.trial in set(best)]
    if not on_front:
        return None
    name = next(iter(study.objectives))
    sign = 1.0 if study.objectives[name] == "max" else -1.0
    return max(on_front, key=lambda trial: sign * (trial.value(name) or 0.0))


def _trial_command(study: StudyOverview, trial: TrialOverview | None) -> str:
    if trial is None:
        return ""
    epochs = study.settings.get("epochs")
    started = trial.started
    return run_command(
        study.settings.get("program", "PROGRAM"),
        started.config,
        started.execution,
        started.seed,
        epochs if isinstance(epochs, int) else None,
        study.settings.get("defaults"),
        study.settings.get("divergence", FACTOR),
        study.settings.get("data"),
    )


def _first(study: StudyOverview) -> str:
    return plain(next(iter(study.objectives), "the first objective"), 40)


def _writer(entries: Sequence[Entry], out: Path) -> Callable[[Sequence[Entry], Path], Path]:
    for entry in entries:
        if isinstance(entry.record, PlanMade):
            return write_plan_report
        if isinstance(entry.record, StudyStarted):
            frontier = entry.record.settings.get("kind") == "frontier"
            return write_frontier_report if frontier else write_study_report
        if isinstance(entry.record, RunStarted):
            return write_run_report
    raise _nothing("run or study", out)


def _nothing(what: str, out: Path) -> UserError:
    return UserError(f"a journal must hold the start of a {what}", out, "run one with this output folder first")
