"""``elastune report``: what an output folder holds, on the terminal and as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from elastune.cli import options
from elastune.cli.output import OK, print_result


def report(
    out: Annotated[Path, typer.Argument(help="The output folder of a run, a study or a frontier.")],
    json: options.Json = False,
) -> int:
    """Write OUT/report.html, one self-contained file, and PNGs; tell what OUT's journal holds, finished or not.

    --json: the object that the command which filled OUT prints, and {report, images}. Of a run that has no result yet:
    {kind, unfinished: true, ...}.
    """
    from elastune.cli.results import result_of
    from elastune.report.page import write_report

    result = result_of(out)
    page = write_report(out)
    images = sorted(str(path) for path in out.glob("*.png"))
    print_result(result, as_json=json, report=str(page), images=images if json else None)
    return OK
