"""``elastune soup``: the mean of trials' weights as one model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastune.cli import options
from elastune.cli.commands.predict import Program, Trials, numbers_of
from elastune.cli.output import OK, print_json, say

if TYPE_CHECKING:
    from elastune.reuse.soup_study import StudySoup


def soup(
    study: Annotated[Path, typer.Argument(help="The output folder of a study that was run with --keep.")],
    how: Annotated[
        str, typer.Option(help="greedy (add each trial that does no harm) or uniform (all trials).")
    ] = "greedy",
    objective: Annotated[
        str | None,
        typer.Option(
            help="Score to choose by. Of classes: accuracy, log_loss, brier; of values: mse, rmse, mae, r2. "
            "[default: accuracy or mse]"
        ),
    ] = None,
    data: Annotated[str, typer.Option(help="Name of the data set to choose by.")] = "validation",
    test: Annotated[str, typer.Option(help="Name of the data set that judges the choice afterwards.")] = "test",
    statistics: Annotated[
        str, typer.Option(help="Name of the data set from which BatchNorm's statistics are estimated anew.")
    ] = "train",
    trials: Trials = None,
    program: Program = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the weights to this safetensors file, which --start-from reads."),
    ] = None,
    json: options.Json = False,
) -> int:
    """Average the weights of several trials into one model.

    The model answers at the price of one. Only trials that began with the same weights can be averaged; others are
    refused, with the reason. The program defines build(config) and predict(model, name), as for elastune predict. It is
    asked about --test once all is chosen. See docs/ensembles.md.

    With --out the soup is also recorded in the study's journal, and elastune report shows it.

    --json: {kind: "soup", study, how, data, objective, direction, trials, ancestor, score, singles: [{trial, score}],
    parameters, single, test: {data, rows, soup, best_single} or null, file}.
    """
    from elastune.reuse.record import check_recordable, record_asset
    from elastune.reuse.soup_study import soup_of_study
    from elastune.reuse.weights import check_file

    if out is not None:
        check_file(out)
        check_recordable(study)
    found = soup_of_study(
        study,
        how=how,
        objective=objective,
        data=data,
        test=test,
        statistics=statistics,
        trials=numbers_of(trials),
        program=program,
    )
    file = None if out is None else str(found.soup.save(out))
    if out is not None:
        record_asset(found, out)
    if json:
        print_json({"kind": "soup", **found.to_json(), "file": file})
    else:
        _print(found)
        if file is not None:
            say(f"file    {file}")
    return OK


def _print(found: StudySoup) -> None:
    made, best = found.soup, f"best single trial ({found.single})"
    names, alone = ", ".join(map(str, made.trials)), made.singles[found.single]
    counts = f"{len(made.trials)} of {len(made.singles)} trials"
    say(f"{found.how} soup of {counts}: {names}; all began with {made.ancestor}")
    say(f"{found.data}: {found.objective} {made.score:.4f}, {best} {alone:.4f}; both were chosen by it")
    if found.test is None:
        print("test: the program knows no such data")
    else:
        told = f"{found.test.soup:.4f}, {best} {found.test.best_single:.4f}"
        say(f"{found.test.data}: {found.objective} {told}; {found.test.rows} rows, read after the choice")
