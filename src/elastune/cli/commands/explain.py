"""``elastune explain``: a study in words."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from elastune.cli import options
from elastune.cli.output import OK, print_json


def explain(
    out: Annotated[Path, typer.Argument(help="The output folder of a study, finished or not.")],
    json: options.Json = False,
) -> int:
    """Say what the study in OUT found and at what price, which parameters decided it, what was stopped or failed and
    why, where the time went, and what to try next.

    --json: {kind: "explanation", parts: [{title, lines}], importance: [{objective, trials, parameters: [{name, share,
    trials}], why_not}], out}; the shares of an objective sum to 1.
    """
    from elastune.report.explain import explain as explained
    from elastune.study.results.study import Study

    found = explained(Study.load(out))
    if json:
        print_json({"kind": "explanation", **asdict(found), "out": str(out)})
    else:
        print(found)
    return OK
