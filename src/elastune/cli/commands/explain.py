"""``elastune explain``: a study, a frontier or a run in words."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from elastune.cli import options
from elastune.cli.output import OK, print_json


def explain(
    out: Annotated[Path, typer.Argument(help="The output folder of a study, a frontier or a run, finished or not.")],
    json: options.Json = False,
) -> int:
    """Say what the study in OUT found and at what price, which parameters decided it, what was stopped or failed and
    why, where the time went, and what to try next; of a frontier, its answer and what each worker count reaches; of a
    run, where a pipeline was cut, and what a worker's memory held, measured and modelled, and would hold otherwise.

    --json: {kind: "explanation", parts: [{title, lines}], importance: [{objective, trials, parameters: [{name, share,
    trials}], why_not}], worker_time: {front, complete, paused, infeasible, unfinished, resizing, waiting}, out}; the
    shares of an objective sum to 1, and so do those of a study's worker-seconds.
    """
    from elastune.job.output_dir import JOURNAL
    from elastune.journal.reader import read
    from elastune.report.explain import explain as explained
    from elastune.report.explain_frontier import explain_frontier
    from elastune.report.explain_run import explain_run
    from elastune.report.gather import gather_run, gather_study
    from elastune.study.results.study import Study

    entries = read(out / JOURNAL)
    story, run = gather_study(entries), gather_run(entries)
    if story is not None and story.is_frontier:
        found = explain_frontier(story)
    elif story is None and run is not None:
        found = explain_run(run, entries)
    else:
        found = explained(Study.of(out, entries))
    if json:
        print_json({"kind": "explanation", **asdict(found), "out": str(out)})
    else:
        print(found)
    return OK
