"""``elastune ensemble``: several trials of a study as one model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastune.cli import options
from elastune.cli.clusters import ClusterOptions
from elastune.cli.flatten import flatten
from elastune.cli.output import INTERRUPTED, OK, print_json, say
from elastune.cli.varying import Varying

if TYPE_CHECKING:
    from elastune.reuse.ensemble import Ensemble


@flatten
def ensemble(
    study: Annotated[Path, typer.Argument(help="The output folder of a study that was run with --keep.")],
    varying: Varying,
    where: ClusterOptions,
    members: Annotated[int, typer.Option(help="Most different models in the ensemble.")] = 8,
    objective: Annotated[
        str | None,
        typer.Option(
            help="Score to choose by. Of classes: accuracy, log_loss, brier; of values: mse, rmse, mae, r2. "
            "[default: accuracy or mse]"
        ),
    ] = None,
    inference_budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIMES",
            help="Most parameters of all members together, as a multiple of the best trial's: 4x. No time is "
            "measured. [default: no limit]",
        ),
    ] = None,
    data: Annotated[str, typer.Option(help="Name of the predictions to choose by.")] = "validation",
    test: Annotated[str, typer.Option(help="Name of the predictions that judge the choice afterwards.")] = "test",
    method: Annotated[
        str,
        typer.Option(help="How to choose members and weights: greedy (with replacement, bagged), stacking or uniform."),
    ] = "greedy",
    seed: Annotated[int, typer.Option(help="Seed of the greedy method's bags, and of sampled contributions.")] = 0,
    by: Annotated[
        str | None,
        typer.Option(
            metavar="SETTING",
            help="Also tell contributions for each value of this setting. [default: the first setting of --vary]",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the ensemble to this safetensors file.")
    ] = None,
    json: options.Json = False,
) -> int:
    """Choose trials of a study whose mean prediction is best.

    The command tells what each member contributes. It reads predictions that the trials' program recorded with
    session.predictions, or that elastune predict stored. Predictions under a name that begins with "test" are read once
    all is chosen. See docs/ensembles.md.

    With --out the ensemble is written to FILE and recorded in the study's journal, and elastune report STUDY shows it
    among single trials and soups. In Python, elastune.load_ensemble(FILE, build) makes a module of the file.

    With --vary inputs=temperature,pressure+humidity, the command first trains the trials that STUDY lacks: the best
    settings with each value, in parallel, as trials of STUDY. If the setting is a list, its values name the program's
    views of its data.

    --json: {kind: "ensemble", study, task: {kind, says, width}, method, data, rows, objective, direction, candidates,
    members: [{trial, weight, alone, parameters, worker_seconds, contribution: {left_out, shapley, shapley_error},
    config}], score, single, best_single, inference, diversity: {disagreement, error_correlation}, uncertainty:
    {aleatoric, epistemic, unit}, test: {data, rows, ensemble, best_single} or null, singles: [{trial, score,
    parameters}] of all candidates, by, settings: [{value, trials, contribution}], file}.
    """
    from elastune.reuse.ensemble import check_choice, parse_times
    from elastune.reuse.ensemble import ensemble as choose
    from elastune.reuse.ensemble_file import save_ensemble
    from elastune.reuse.record import check_recordable, record_asset
    from elastune.reuse.weights import check_file

    budget = None if inference_budget is None else parse_times(inference_budget)
    check_choice(members, objective, budget, data, test, method, seed)
    if out is not None:
        check_file(out)
    if out is not None or varying.vary is not None:
        check_recordable(study)
    if not varying.train(study, where):
        return INTERRUPTED
    found = choose(
        study,
        members=members,
        objective=objective,
        inference_budget=budget,
        data=data,
        test=test,
        method=method,
        seed=seed,
        by=by or next(iter(varying.values(varying.vary or [])), None),
    )
    file = None if out is None else str(save_ensemble(found, out))
    if out is not None:
        record_asset(found, out)
    if json:
        print_json({"kind": "ensemble", **found.to_json(), "file": file})
    else:
        _print(found)
        if file is not None:
            say(f"file    {file}")
    return OK


def _print(found: Ensemble) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{len(found.members)} of {found.candidates} trials, by {found.objective} on {found.data}")
    for name in ("trial", "weight", "alone", "left out", "Shapley", "parameters", "worker-seconds"):
        table.add_column(name, justify="right")
    for one in found.members:
        told = one.contribution
        error = f" ± {told.shapley_error:.2g}" if told.shapley_error else ""
        table.add_row(
            str(one.trial),
            f"{one.weight:.3f}",
            f"{one.alone:.4f}",
            f"{told.left_out:+.4f}",
            f"{told.shapley:+.4f}{error}",
            f"{one.parameters:,}",
            f"{one.worker_seconds:.1f}",
        )
    Console(width=None).print(table)
    for each in found.settings:
        trials, worth = ", ".join(map(str, each.trials)), each.contribution
        error = f" ± {worth.shapley_error:.2g}" if worth.shapley_error else ""
        words = f"left out {worth.left_out:+.4f}, Shapley {worth.shapley:+.4f}{error}"
        say(f"{found.by} {each.value}: {words}; trials {trials}")
    best = f"best single trial ({found.single})"
    say(f"{found.data}: {found.objective} {found.score:.4f}, {best} {found.best_single:.4f}; both were chosen by it")
    if found.test is None:
        print("test: not every member has predictions on data that no choice has seen")
    else:
        told_by = f"{found.test.ensemble:.4f}, {best} {found.test.best_single:.4f}"
        say(f"{found.test.data}: {found.objective} {told_by}; {found.test.rows} rows, read after the choice")
    print(f"inference: {found.inference:.2f} times the parameters of trial {found.single}")
    apart = found.diversity
    if apart.disagreement is not None:
        alike = "not defined" if apart.error_correlation is None else f"{apart.error_correlation:.3f}"
        print(f"members: disagreement {apart.disagreement:.3f}, correlation of errors {alike}")
    doubt = found.uncertainty
    print(f"uncertainty: aleatoric {doubt.aleatoric:.4g}, epistemic {doubt.epistemic:.4g} {doubt.unit}")
