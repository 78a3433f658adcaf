"""``elastune join``: models of parts of a problem as one, beside a study that was trained for all of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastune.cli import options, parse
from elastune.cli.commands.predict import Program
from elastune.cli.output import OK, print_json, say
from elastune.core.errors import UserError

if TYPE_CHECKING:
    from elastune.reuse.class_tree import ClassTree
    from elastune.reuse.composed import ComposedModel


def join(
    studies: Annotated[
        list[Path],
        typer.Argument(help="Output folders of the gate's study and of its parts' studies, or of one study."),
    ],
    front: Annotated[
        Path,
        typer.Option(
            metavar="STUDY",
            help="Output folder of a study of the whole problem. The model is compared with its trials.",
        ),
    ],
    tree: Annotated[
        str | None,
        typer.Option(
            metavar="LISTS", help="The groups of classes as nested lists of class numbers: '[[0,2],[1]]', or deeper."
        ),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            help="Score to judge by. Of classes: accuracy, log_loss, brier; of values: mse, rmse, mae, r2. "
            "[default: accuracy or mse]"
        ),
    ] = None,
    data: Annotated[str, typer.Option(help="Name of the data set to judge by.")] = "validation",
    test: Annotated[str, typer.Option(help="Name of the data set for a test that nothing is chosen by.")] = "test",
    program: Program = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the model to this safetensors file.")] = None,
    json: options.Json = False,
) -> int:
    """Join trials of parts of a problem into one model.

    The best kept trials of STUDIES are joined, and the model is judged as the trials of the study --front are, which
    was trained for the whole problem.

    With --tree, STUDIES are the study of the gate and the studies of the parts, or the one study of elastune tree.
    Without --tree, STUDIES is one study whose program trains a head over stacked parts.

    The program of the last of STUDIES has build(config), and that of --front has predict(model, name), as for elastune
    predict. With --out the model is also recorded in the journal of --front, and elastune report shows it there. See
    docs/transfer.md.

    --json: {kind: "composed", study, form ("joined" or "stacked"), method, made_of: [{study, trial}], data, objective,
    direction, score, parameters, singles: [{trial, score}], test: {data, rows, model, best_single} or null, file}.
    """
    from elastune.reuse.composed import composed_of, judge_model
    from elastune.reuse.composed_file import save_composed
    from elastune.reuse.record import check_recordable, record_asset
    from elastune.reuse.weights import check_file

    if out is not None:
        check_file(out)
        check_recordable(front)
    model = composed_of(studies, None if tree is None else parse_tree(tree))
    found = judge_model(model, front, objective=objective, data=data, test=test, program=program)
    file = None if out is None else str(save_composed(found.model, out))
    if out is not None:
        record_asset(found, out)
    if json:
        print_json({"kind": "composed", **found.to_json(), "file": file})
    else:
        _print(found)
        if file is not None:
            say(f"file    {file}")
    return OK


def parse_tree(text: str) -> ClassTree:
    """What "[[0,2],[1]]" says. Raises ``UserError``."""
    from elastune.reuse.class_tree import class_tree

    found: Any = parse.value("tree", text)
    if not isinstance(found, list):
        raise UserError("--tree is a list of groups of classes", repr(text)[:80], "such as --tree '[[0,2],[1]]'")
    return class_tree(found)


def _print(found: ComposedModel) -> None:
    parts = ", ".join(f"{one.study.name} {one.trial}" for one in found.made_of)
    say(f"{found.form} ({found.method}) of {len(found.made_of)} trials: {parts}")
    singles = sorted(found.singles, key=lambda one: one.score, reverse=found.direction == "max")
    best = f", best single trial ({singles[0].trial}) of {found.study} {singles[0].score:.4f}" if singles else ""
    say(f"{found.data}: {found.objective} {found.score:.4f}{best}")
    if found.test is None:
        print("test: the program knows no such data")
    else:
        alone = "" if found.test.best_single is None else f", that trial {found.test.best_single:.4f}"
        say(f"{found.test.data}: {found.objective} {found.test.model:.4f}{alone}; {found.test.rows} rows")
    print(f"inference: {found.parameters:,} parameters")
