"""The options of the command line alone that several commands share. All others are settings (``core/fields.py``)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

OUTPUT = "Output and checks"
"""The panel of help of options that change no result."""
File = Annotated[Path, typer.Argument(help="The program: a Python file that defines train(session).")]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- ARGUMENT", help="Arguments of the program's own, which it finds in sys.argv."),
]
AcrossChanges = Annotated[
    bool,
    typer.Option(
        "--across-changes",
        help="Of a study: compare trials that began before an accepted change of the program, its space or the data "
        "with those after it.",
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON object on stdout, and everything else on stderr. docs/commands.md lists its fields.",
        rich_help_panel=OUTPUT,
    ),
]
Dashboard = Annotated[
    bool,
    typer.Option(
        "--dashboard",
        help="Show the work in a browser while it goes on: the command prints the address (see elastune dashboard).",
        rich_help_panel=OUTPUT,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check all that can be checked without a worker, print what would be started, and end. No results are "
        "written.",
        rich_help_panel=OUTPUT,
    ),
]
Data = Annotated[
    Path | None, typer.Option(help="Folder of the data sets, instead of $ELASTUNE_DATA.", rich_help_panel=OUTPUT)
]
TensorBoard = Annotated[
    bool,
    typer.Option(
        "--tensorboard", help="Write event files for TensorBoard into OUT/tensorboard.", rich_help_panel=OUTPUT
    ),
]
