"""``elastune explain``: a study or a frontier in words."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from elastune.cli import options
from elastune.cli.output import OK, print_json


def explain(
    out: Annotated[Path, typer.Argument(help="The output folder of a study or a frontier, finished or not.")],
    json: options.Json = False,
) -> int:
    """Say what the study in OUT found and at what price, which parameters decided it, what was stopped or failed and
    why, where the time went, and what to try next; of a frontier, its answer and what each worker count reaches.

    --json: {kind: "explanation", parts: [{title, lines}], importance: [{objective, trials, parameters: [{name, share,
    trials}], why_not}], out}; the shares of an objective sum to 1.
    """
    from elastune.job.output_dir import JOURNAL
    from elastune.journal.reader import read
    from elastune.report.explain import explain as explained
    from elastune.report.explain_frontier import explain_frontier
    from elastune.report.gather import gather_study
    from elastune.study.results.study import Study

    entries = read(out / JOURNAL)
    story = gather_study(entries)
    frontier = story if story is not None and story.is_frontier else None
    found = explained(Study.of(out, entries)) if frontier is None else explain_frontier(frontier)
    if json:
        print_json({"kind": "explanation", **asdict(found), "out": str(out)})
    else:
        print(found)
    return OK
