"""The contents of ``report.html``: which figures, tables and notes a run, study, frontier or plan has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastune.core.divergence import FACTOR
from elastune.core.errors import UserError
from elastune.core.formatting import count, duration, flat, plain
from elastune.core.journal.files import read
from elastune.core.journal.folds import compared_all
from elastune.core.journal.records import Entry, FrontierFound, PlanMade, RunStarted, StudyStarted
from elastune.core.plan.step_time import last_plan
from elastune.report import sample_ledger
from elastune.report.adaptation import (
    Adaptation,
    SyncHistory,
    adaptation_figure,
    adaptation_line,
    batch_line,
    decisions_table,
    failures_table,
    gather_adaptation,
    gather_sync,
    sync_table,
)
from elastune.report.document import Glance, Note, Page, Section, few_words, write
from elastune.report.explain import Part, explain
from elastune.report.frontier import (
    answer_table,
    frontier_table,
    pareto_figure,
    reasons_table,
    settings_table,
    tradeoff_figure,
    volumes_table,
)
from elastune.report.glance import front_short_table, frontier_glance, run_glance, study_glance
from elastune.report.lines import accepted_lines, verification_line
from elastune.report.overviews import RunOverview, StudyOverview, TrialOverview, front_trials, gather_run, gather_study
from elastune.report.plan import plan_page
from elastune.report.sample_ledger import Ledger, ledger
from elastune.report.study import (
    assets_table,
    choices_table,
    curves_figure,
    failed_trials_table,
    front_figure,
    front_over_time,
    front_table,
    history_figure,
    importance_figure,
    importance_table,
    tasks_table,
    trials_table,
    workers_by_trial,
    workers_figure,
)
from elastune.report.tables import (
    Table,
    context_table,
    divided_lines,
    memory_table,
    reports_table,
    run_table,
    times_table,
    worker_steps_table,
)
from elastune.report.worker_changes import (
    Changes,
    change_parts_table,
    changes_line,
    changes_table,
    gather_changes,
    left_out_table,
    lost_workers_table,
)
from elastune.tuning.search.objective import valued
from elastune.tuning.study.results import Picked, Study
from elastune.tuning.study.run_command import program_path, run_command, training_command_of
from elastune.tuning.study.trials import task_of

JOURNAL = "journal.jsonl"
MOST_STRAGGLERS = 10
DIGESTS = ("source", "space")
"""Entries of a study's settings that hold digests, with which a resumed study is compared. The page omits them."""


def write_report(out: Path, *, across_changes: bool = False) -> Path:
    """Write the report of the run, study, frontier or plan in ``out/journal.jsonl``.

    A journal without an end gives a report that shows the work as unfinished.

    Args:
        out: The folder of the journal. The report is written beside the journal.
        across_changes: Whether fronts include trials from before an accepted change of the program, space or data.

    Returns:
        The path of ``report.html``.

    Raises:
        UserError: If the journal is missing, a line of it is no record, or nothing was started in it.
    """
    entries = read(Path(out) / JOURNAL)
    entries = compared_all(entries) if across_changes else entries
    return _writer(entries, Path(out))(entries, Path(out))


def write_run_report(entries: Sequence[Entry], out_dir: Path, *, images: bool = True) -> Path:
    """Write the report of the run in ``entries``; return its path. ``images``: also its figures as PNG files."""
    run = gather_run(entries)
    if run is None:
        raise _nothing("run", out_dir)
    adaptation = gather_adaptation(entries)
    page = run_page(run, gather_changes(entries), ledger(entries), adaptation, gather_sync(entries))
    return write(page, out_dir, images=images)


def write_study_report(entries: Sequence[Entry], out_dir: Path) -> Path:
    """Write the report of the study in ``entries``; return its path."""
    study = gather_study(entries)
    if study is None:
        raise _nothing("study", out_dir)
    results = Study.of(out_dir, entries) if study.objectives else None
    return write(study_page(study, results), out_dir)


def write_frontier_report(entries: Sequence[Entry], out_dir: Path) -> Path:
    """Write the report of the frontier in ``entries``; return its path."""
    study = gather_study(entries)
    if study is None:
        raise _nothing("frontier", out_dir)
    return write(frontier_page(study), out_dir)


def write_plan_report(entries: Sequence[Entry], out_dir: Path) -> Path:
    """Write the report of the newest cluster plan in ``entries``; return its path."""
    made = last_plan(entries)
    if made is None:
        raise _nothing("plan", out_dir)
    return write(plan_page(made), out_dir)


def run_page(
    run: RunOverview,
    changes: Changes | None = None,
    seen: Ledger | None = None,
    adaptation: Adaptation | None = None,
    history: SyncHistory | None = None,
) -> Page:
    """The page of one run.

    Args:
        run: The run.
        changes: How its workers changed.
        seen: The ledger of its samples.
        adaptation: What its monitors measured and its policies decided.
        history: Its sync strategies and topologies over time.
    """
    changes, adaptation, history = changes or Changes(), adaptation or Adaptation(), history or SyncHistory()
    name = Path(plain(run.started.program)).name
    workers = run.started.execution.get("workers", 1)
    adapt_options = {"policy": list(adaptation.policies), "monitor": list(adaptation.monitors)}
    on = count(workers, "worker") if isinstance(workers, int) else "its workers"
    end = run.finished
    if end:
        answer, state = "", "finished"
    elif run.failed:
        answer = f"{name} failed on {on}: {plain(run.failed.detail, 160)}"
        state = f"failed: {run.failed.reason.replace('_', ' ')}, worker {run.failed.rank}"
    else:
        steps = run.reports[-1].step if run.reports else 0
        answer = f"{name} on {on}: {count(steps, 'step')} reported so far."
        state = "unfinished: it runs on, or was ended from outside"
    sections = [Section("The run", (run_table(run),)), *_adapting_sections(adaptation)]
    sync = sync_table(history)
    sections += [Section(sync.title, (sync,))] if sync.rows else []
    sections += _changes_sections(changes, seen)
    by_worker = worker_steps_table(run)
    if len(by_worker.rows) > 1:
        sections.append(Section(by_worker.title, (by_worker,)))
    layers = divided_lines(run.divided)
    sections += [Section("Divided layers", tuple(Note(line) for line in layers))] if layers else []
    memory = memory_table(run)
    if memory.rows:
        sections.append(Section(memory.title, (memory,)))
    reports = reports_table(run)
    if reports.rows:
        sections.append(Section(reports.title, (reports,)))
    if run.failed and run.failed.log:
        sections.append(Section("The worker's log", (Note(run.failed.log, log=True),), open=True))
    sections.append(Section("How it was measured", _how(run.started.context)))
    adapted = adaptation_figure(run, adaptation, history) if adaptation.any or history.any else None
    workers_alone = None if adapted else workers_figure(run, changes)
    figures = (adapted, curves_figure(run, () if adapted else adaptation.measured), workers_alone)
    started = run.started
    return Page(
        kind="run",
        glance=run_glance(run, name),
        answer=answer,
        state=state,
        ended=end is not None,
        figures=tuple(figure for figure in figures if figure),
        sections=tuple(sections),
        command=run_command(
            started.program,
            started.config,
            {**started.execution, **adapt_options},
            started.seed,
            started.epochs,
            data=started.data,
            arguments=started.arguments,
        ),
        command_note="These settings again:",
    )


def _adapting_sections(adaptation: Adaptation) -> list[Section]:
    """One section with the decisions and the failed calls of policies; none if the run did not adapt."""
    both = (decisions_table(adaptation), failures_table(adaptation))
    summary = adaptation_line(adaptation)
    texts = (f"{summary[:1].upper()}{summary[1:]}." if summary else "", batch_line(adaptation))
    notes = tuple(Note(text) for text in texts if text)
    parts: tuple[Table | Note, ...] = (*notes, *(table for table in both if table.rows))
    return [Section("How it adapted", parts)] if parts else []


def _changes_sections(changes: Changes, seen: Ledger | None) -> list[Section]:
    """How the workers changed, and the ledger of samples, where the journal holds them."""
    sections = _accepted_sections(changes.accepted)
    faults = ", ".join(f"{n} x {plain(fault, 40)}" for fault, n in changes.faults)
    notes = [Note(text) for text in (changes_line(changes), faults and f"Faults injected: {faults}.") if text]
    notes += [Note(f"Verification: {verification_line(record)}.") for record in changes.verification]
    notes += [Note(plain(line, 400)) for line in changes.stragglers[:MOST_STRAGGLERS]]
    if notes:
        sections.append(Section("Changes of workers", tuple(notes)))
    tables = changes_table(changes), change_parts_table(changes), lost_workers_table(changes), left_out_table(changes)
    for table in tables:
        if table.rows:
            sections.append(Section(table.title, (table,)))
    if seen is not None and seen.epochs:
        parts = tuple(Note(line) for line in sample_ledger.lines(seen))
        sections.append(Section("Ledger of samples", parts, open=not seen.exact))
    return sections


def _accepted_sections(lines: Sequence[str]) -> list[Section]:
    """One section with the accepted changes; none without any."""
    return (
        [Section("Accepted changes", tuple(Note(f"{each[:1].upper()}{each[1:]}.") for each in lines))] if lines else []
    )


def study_page(study: StudyOverview, results: Study | None = None) -> Page:
    """The page of a study.

    With ``results``, which is the same study as its users get it, the page also has the pick and the explanation.
    """
    best = front_trials(study)
    if results is not None and results.tasks:
        return _tasks_page(study, results)
    choices = () if results is None or results.no_choice_reason() else results.choices()
    pick = choices[0].trial.number if choices else None
    figures = [front_figure(study, best, pick), history_figure(study)]
    front_rows = front_table(study, best, choices)
    sections = [Section(f"{front_rows.title}, with all settings", (front_rows,))]
    glance = study_glance(study, results, choices, front_short_table(study, best, choices))
    if results is None:
        top = _top(study, best)
        command, note = _trial_command(study, top), f"Trains the best trial by {_first(study)} again:"
        answer = _study_answer(study, top, len(best))
    else:
        command, note = "", ""
        answer = _choice_answer(study, results, choices, len(best))
        if choices:
            caveat = f" ({choices[0].caveat})" if choices[0].caveat else ""
            command, note = choices[0].command, f"Trains the pick, trial {pick}, again{caveat}:"
            named = choices_table(results, choices)
            sections.insert(0, Section(named.title, (named,)))
        explanation = explain(results)
        figures += [front_over_time(results), workers_by_trial(results)]
        figures.append(importance_figure(explanation.importance))
        sections.append(
            Section("In words", tuple(Note(text) for part in explanation.parts for text in _paragraphs(part)))
        )
        sections += [Section("What can be used", (assets_table(results.assets),))] if results.assets else []
        weighed = tuple(importance_table(each) for each in explanation.importance if each.parameters)
        sections += [Section("What decides the objectives", weighed)] if weighed else []
    return Page(
        kind="study",
        glance=glance,
        answer=answer,
        state=_study_state(study),
        ended=study.finished is not None,
        figures=tuple(figure for figure in figures if figure),
        sections=(*sections, *_study_sections(study)),
        command=command,
        command_note=note,
    )


def _tasks_page(study: StudyOverview, results: Study) -> Page:
    """The page of a study whose trials have different tasks. Such a study has no pick."""
    table = tasks_table(results)
    done = {task_of(trial.config) for trial in results.complete}
    parts = f"{len(done)} of {count(len(results.tasks), 'part')} of a tree of classes are trained"
    return Page(
        kind="study",
        glance=Glance(few_words(parts)),
        answer="Each part is a task of its own, so none is picked.",
        state=_study_state(study),
        ended=study.finished is not None,
        figures=tuple(figure for figure in (workers_by_trial(results),) if figure),
        sections=(Section(table.title, (table,), open=True), *_study_sections(study)),
    )


def frontier_page(study: StudyOverview) -> Page:
    """The page of a frontier; until the frontier has its answer, a page of its trials."""
    frontier = study.frontier
    if frontier is None:
        page = study_page(study)
        words = "No frontier yet: it was not finished." if study.finished is None else "No frontier was found."
        sections = page.sections if study.objectives else page.sections[1:]
        glance = replace(page.glance, title=words.rstrip("."), tiles=())
        return replace(page, kind="frontier", glance=glance, answer=f"{words} {page.answer}", sections=sections)
    history, note = history_figure(study), plain(frontier.answer.command_note, 600)
    figures = [tradeoff_figure(frontier), pareto_figure(frontier)] if frontier.rows else []
    covered = volumes_table(frontier)
    earned = answer_table(frontier)
    why = [Section(earned.title, (earned,))] if earned.rows else []
    why += [Section("Why", (reasons_table(frontier),))] if frontier.reasons else []
    return Page(
        kind="frontier",
        glance=frontier_glance(frontier, study),
        answer=plain(frontier.answer.sentence, 1000),
        state=_study_state(study),
        ended=study.finished is not None,
        figures=tuple(figures + ([history] if history else [])),
        sections=(
            *why,
            Section("The frontier, with all columns", (frontier_table(frontier),)),
            Section(covered.title, (covered,)),
            Section("Settings of the rows", (settings_table(frontier),)),
            *_study_sections(study, frontier),
        ),
        command=plain(frontier.command, 4000),
        command_note=f"Trains the pick{', ' if note else ''}{note}:",
    )


def _study_sections(study: StudyOverview, frontier: FrontierFound | None = None) -> list[Section]:
    sections = [Section("How it was measured", _how(study.started.context, study, frontier))]
    sections = [*_accepted_sections(accepted_lines(study.accepted)), *sections]
    failures = failed_trials_table(study)
    if failures.rows:
        sections.insert(0, Section(failures.title, (failures,)))
    trials = trials_table(study)
    return [*sections, Section(trials.title, (trials,))]


def _how(
    context: Mapping[str, Any], study: StudyOverview | None = None, frontier: FrontierFound | None = None
) -> tuple[Table | Note, ...]:
    """Words on the method, the request, the step-time model and the machine."""
    parts: list[Table | Note] = []
    if frontier and frontier.rows:
        parts.append(Note(_method(frontier)))
    if study and study.times:
        parts.append(times_table(study.times))
    if study:
        settings = {name: value for name, value in study.settings.items() if name not in DIGESTS}
        request = flat({**settings, "program": program_path(study.settings.get("program", "–"))})
        parts.append(Table("The request", ("asked for", "value"), tuple(request.items())))
    if context:
        parts.append(context_table(context))
    return tuple(parts) or (Note("The journal holds no context."),)


def _method(frontier: FrontierFound) -> str:
    quality = plain(frontier.quality, 40)
    held_out = all(row.held_out for row in frontier.rows)
    data = "data that the search never saw" if held_out else "validation data where marked, else data held out"
    seeds = sorted({row.seeds for row in frontier.rows})
    spread = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    modelled = [row.workers for row in frontier.rows if row.seconds_label == "modelled"]
    emulated = sorted({row.workers for row in frontier.rows if row.quality_label == "emulated"})
    words = (
        f"{quality} is the mean over {spread} seeds on {data}, with its 95 % confidence interval within its bounds: of "
        "the spread over seeds and, where the program reports how many samples it measures, of the test set's error. "
    )
    if frontier.target is not None:
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


def _paragraphs(part: Part) -> list[str]:
    """A part of an explanation as paragraphs; the first begins with its title."""
    lines = [plain(line, 600) for line in part.lines]
    return [f"{part.title}: {lines[0]}", *lines[1:]]


def _study_answer(study: StudyOverview, top: TrialOverview | None, on_front: int) -> str:
    ended = f"{count(len(study.ended), 'trial')} ended"
    if top is None:
        return f"No trial has a result; {ended}."
    name = _first(study)
    reached = ", ".join(f"{plain(key, 40)} {valued(key, top.value(key), study.price)}" for key in study.objectives)
    front = f" {count(on_front, 'point')} on the front." if len(study.objectives) > 1 else ""
    return f"Best {name}: trial {top.trial} with {reached}; {ended}.{front}"


def _choice_answer(study: StudyOverview, results: Study, choices: Sequence[Picked], on_front: int) -> str:
    """The headline: the pick, whose command stands below it."""
    ended = f"{count(len(study.ended), 'trial')} ended"
    if not choices:
        why = results.no_choice_reason()
        return f"No trial has a result; {ended}." if not results.complete else f"No pick: {plain(why, 300)}; {ended}."
    values = choices[0].trial.values
    reached = ", ".join(f"{plain(key, 40)} {valued(key, values[key], study.price)}" for key in study.objectives)
    front = f" {count(on_front, 'point')} on the front." if len(study.objectives) > 1 else ""
    return f"Trial {choices[0].trial.number}, {choices[0].reason}: {reached}; {ended}.{front}"


def _study_state(study: StudyOverview) -> str:
    if study.finished is None:
        return f"unfinished: {count(len(study.ended), 'trial')} ended so far"
    return f"finished after {duration(study.finished.seconds)}: {plain(study.finished.reason)}"


def _top(study: StudyOverview, best: Sequence[int]) -> TrialOverview | None:
    """The trial of the front that is best in the first objective."""
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
        study.settings.get("arguments", ()),
        training_command_of(study.settings),
    )


def _first(study: StudyOverview) -> str:
    return plain(next(iter(study.objectives), "the first objective"), 40)


def _writer(entries: Sequence[Entry], out: Path) -> Callable[[Sequence[Entry], Path], Path]:
    """The function that writes the report, chosen by the first record that starts something."""
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
