"""``elastune transfer``: which kept model to begin a new task with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastune.cli import options
from elastune.cli.output import OK, print_json, say

if TYPE_CHECKING:
    from elastune.reuse.transfer import SourceRanking


def transfer(
    studies: Annotated[list[Path], typer.Argument(help="Output folders of earlier studies that were run with --keep.")],
    data: Annotated[str, typer.Option(help="Name under which elastune predict stored features of the new task.")],
    measured: Annotated[
        list[Path] | None,
        typer.Option(help="Output folder of a study that was begun with one of these trials. May be repeated."),
    ] = None,
    json: options.Json = False,
) -> int:
    """Rank kept trials as starting points for a new task.

    The rank says how well the features of a trial would serve the new task. Nothing is trained: the score is LogME.

    First store features of the new task: elastune predict STUDY --program FILE --data NAME, where predict of FILE
    returns features of the new task's samples, and its targets.

    With --measured the ranking is compared with what trainings have reached since (Kendall's tau). See
    docs/transfer.md.

    --json: {kind: "transfer", data, rows, sources: [{study, trial, score, width, start_from, measured}], tau}.
    """
    from elastune.reuse.transfer import rank_sources

    found = rank_sources(studies, data, measured=measured or [])
    if json:
        print_json({"kind": "transfer", **found.to_json()})
    else:
        _print(found)
    return OK


def _print(found: SourceRanking) -> None:
    from rich.console import Console
    from rich.table import Table

    tried = any(one.measured is not None for one in found.sources)
    table = Table(
        title=f"{len(found.sources)} sources, by LogME of their features of {found.rows} samples of {found.data}"
    )
    for name in ("study", "trial", "LogME", "width", *(["measured"] if tried else [])):
        table.add_column(name, justify="left" if name == "study" else "right", overflow="fold")
    for one in found.sources:
        measured = "–" if one.measured is None else f"{one.measured:.4g}"
        told = (str(one.study), str(one.trial), f"{one.score:.4f}", str(one.width))
        table.add_row(*told, *([measured] if tried else []))
    Console(width=None).print(table)
    if tried:
        tau = "not known: it takes two that differ" if found.tau is None else f"{found.tau:+.2f}"
        print(f"Kendall's tau of estimate and measurement: {tau}")
    say(f"begin with: --start-from {found.sources[0].start_from}")
