"""``elastune predict``: what a study's kept trials say of data sets, asked after the search."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from elastune.cli import options
from elastune.cli.output import OK, print_json, say

Program = Annotated[
    Path | None,
    typer.Option(
        "--program",
        metavar="FILE",
        help="Python file that defines build and predict. [default: the study's program, if it is unchanged]",
    ),
]
Trials = Annotated[
    str | None,
    typer.Option("--trials", metavar="N,N,...", help="Numbers of kept trials to use, such as 1,4,7. [default: all]"),
]


def predict(
    study: Annotated[Path, typer.Argument(help="The output folder of a study that was run with --keep.")],
    data: Annotated[
        list[str] | None,
        typer.Option(help="Name of a data set, as predict knows it. May be repeated. [default: validation and test]"),
    ] = None,
    trials: Trials = None,
    program: Program = None,
    again: Annotated[bool, typer.Option("--again", help="Predict again where there are predictions already.")] = False,
    json: options.Json = False,
) -> int:
    """Store what a study's kept trials predict on data sets.

    elastune ensemble, transfer and classes read these predictions.

    The program defines build(config), which returns the model, and predict(model, name), which returns the outputs and
    targets of all samples of a data set, or None for a name that it does not know. See docs/ensembles.md.

    --json: {kind: "predictions", study, predictions: [{trial, data, rows, reason}]}; rows 0: the reason says why.
    """
    from elastune.reuse.predict import predict as ask

    told = ask(study, data or ["validation", "test"], trials=numbers_of(trials), program=program, again=again)
    if json:
        found = [one.to_json() for one in told]
        print_json({"kind": "predictions", "study": str(study), "predictions": found})
        return OK
    for one in told:
        say(f"trial {one.trial}: {one.data}: {f'{one.rows} rows' if one.rows else one.reason}")
    return OK


def numbers_of(text: str | None) -> list[int] | None:
    """The trials that "1,4,7" says. Raises ``UserError``."""
    if text is None:
        return None
    return whole_numbers(text, "trials are named by their numbers", "such as --trials 1,4,7")


def whole_numbers(text: str, rule: str, fix: str) -> list[int]:
    """Those of "2,5". Raises ``UserError`` of ``rule`` and ``fix``."""
    from elastune.core.errors import UserError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in parts):
        raise UserError(rule, repr(text)[:60], fix)
    return [int(part) for part in parts]
