"""``elastune explain``: a study, a frontier or a run in words."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from elastune.cli import options
from elastune.cli.output import OK, print_json, say
from elastune.core.text import count, plain


def explain(
    out: Annotated[
        Path, typer.Argument(help="The output folder of a study, a frontier, a run or a plan, finished or not.")
    ],
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="The --out folder of elastune plan: show the step times that it predicted beside the measured ones.",
        ),
    ] = None,
    across_changes: options.AcrossChanges = False,
    json: options.Json = False,
) -> int:
    """Explain in words what a study, frontier, run or plan found.

    Of a study: what it found and at what price, which parameters decided it, what was stopped or failed and why, where
    the time went, and what to try next.

    Of a frontier: its answer, and what each worker count reaches.

    Of a run: whether its batch was beyond the noise scale that it measured, what tensor left whole of the model, where
    a pipeline was cut, and what a worker's memory held, measured and modelled, and would hold otherwise.

    Of a plan: all that it says.

    If a plan (that of --plan, or the one that the study was begun with) or a frontier has predicted step times, they
    stand beside the measured ones.

    --json: {kind: "explanation", parts: [{title, lines}], importance: [{objective, trials, parameters: [{name, share,
    trials}], why_not}], worker_time: {front, complete, paused, infeasible, unfinished, resizing, waiting}, out}; the
    shares of an objective sum to 1, and so do those of a study's worker-seconds.
    """
    from elastune.job.output_dir import JOURNAL
    from elastune.journal.reader import read
    from elastune.journal.trials import compared_all
    from elastune.plan.planned_steps import plan_told
    from elastune.report.explain import Explanation, Part
    from elastune.report.explain import explain as explained
    from elastune.report.explain_frontier import explain_frontier
    from elastune.report.explain_run import explain_run
    from elastune.report.gather import gather_run, gather_study
    from elastune.report.plan_story import plan_lines, serial_of
    from elastune.report.predicted_time import fitted_prediction, run_prediction, study_prediction
    from elastune.study.allocation.predicted import plan_in, plan_left, predicted_in
    from elastune.study.results.study import Study

    entries = read(out / JOURNAL)
    entries = compared_all(entries) if across_changes else entries
    story, run, own = gather_study(entries), gather_run(entries), plan_told(entries)
    told, made = predicted_in(entries), None if plan is None else plan_in(plan)
    lines: tuple[str, ...] = ()
    if own is not None and story is None and run is None:
        found = Explanation((Part("The plan", tuple(line for line in plan_lines(own) if line)),))
    elif story is not None and story.is_frontier:
        found, lines = explain_frontier(story), fitted_prediction(story.times)
    elif story is None and run is not None:
        found = explain_run(run, entries)
        lines = () if made is None else (*run_prediction(made, run), f"{serial_of(made)}.")
    else:
        found = explained(Study.of(out, entries))
        program = "" if story is None else story.settings.get("program", "")
        if made is None and told is not None:
            made = plan_left(told, program)
        if made is not None and story is not None:
            lines = study_prediction(made, program, entries)
        if told is not None:
            lines = (f"At most {count(told.most, 'worker')} a trial: {plain(told.why, 300)}.", *lines)
    if lines:
        found = replace(found, parts=(*found.parts, Part("Predicted and measured time", lines)))
    if json:
        print_json({"kind": "explanation", **asdict(found), "out": str(out)})
    else:
        say(str(found))
    return OK
