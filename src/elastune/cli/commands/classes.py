"""``elastune classes``: groups of classes, learnt from what a trained model confuses."""

from __future__ import annotations

import json as json_text
from pathlib import Path
from typing import Annotated

import typer

from elastune.cli import options
from elastune.cli.output import OK, print_json, say


def classes(
    study: Annotated[Path, typer.Argument(help="The output folder of a study that was run with --keep.")],
    groups: Annotated[
        str,
        typer.Option(
            metavar="N,N,...",
            help="Number of groups, such as 3. For a deeper tree the number on each level, such as 2,5.",
        ),
    ],
    data: Annotated[str, typer.Option(help="Name of the predictions to look at.")] = "validation",
    trial: Annotated[
        int | None,
        typer.Option(help="Number of the trial whose predictions are looked at. [default: the most accurate]"),
    ] = None,
    json: options.Json = False,
) -> int:
    """Group the classes that a trained model confuses.

    Classes that the model often takes for one another come into one group. The command prints the groups as a setting,
    --set tree=..., for trainings of each group. See docs/transfer.md.

    --json: {kind: "classes", tree: [[class, ...], ...] (of a deeper one groups in place of classes), trial, data,
    between, within}; between: the mean probability that a sample is taken for one of another group, within: for another
    class of its own.
    """
    from elastune.cli.commands.predict import whole_numbers
    from elastune.reuse.learn_classes import learn_classes

    levels = whole_numbers(groups, "groups are counted by whole numbers", "such as --groups 3, or 2,5")
    found = learn_classes(study, levels, data=data, trial=trial)
    if json:
        print_json({"kind": "classes", **found.to_json()})
        return OK
    shares = f"{found.between:.3f} between groups, {found.within:.3f} within"
    say(f"confused by trial {found.trial} on {found.data}: {shares}")
    say(f"--set tree='{json_text.dumps(found.tree.to_json(), separators=(',', ':'))}'")
    return OK
