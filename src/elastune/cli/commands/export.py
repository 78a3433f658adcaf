"""``elastune export``: a study's trials for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from elastune.cli.output import OK, say
from elastune.core.errors import UserError


def export(
    out: Annotated[
        Path, typer.Argument(help="The output folder of a study or, for --dcp and --safetensors, of a run.")
    ],
    csv: Annotated[Path | None, typer.Option("--csv", help="Write a table to this file, one line a trial.")] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write {kind, objectives, trials: [...]} to this file.")
    ] = None,
    optuna: Annotated[
        Path | None, typer.Option("--optuna", help="Write a file that optuna-dashboard FILE opens.")
    ] = None,
    dcp: Annotated[
        Path | None,
        typer.Option(
            "--dcp",
            help="Write a torch.distributed.checkpoint folder of weights and optimizer, as get_state_dict names them.",
        ),
    ] = None,
    safetensors: Annotated[
        Path | None, typer.Option("--safetensors", help="Write the weights alone to this one file.")
    ] = None,
) -> int:
    """Export a study's trials, or a run's weights, to files.

    Of a study: --csv, --json and --optuna write all trials, also those without a result and the paused ones. Of each
    trial: number, state, phase, seed, parent, epochs, seconds, worker_seconds, started_at, ended_at (UTC), what the
    search chose (params.NAME), all settings (config.NAME), means, values of the objectives, metrics, and the reason.
    For pandas: elastune.Study.load(OUT).frame().

    Of a run: --dcp and --safetensors write its newest checkpoint.
    """
    if dcp is not None or safetensors is not None:
        from elastune.train.checkpoints.export import export_run

        if csv or json or optuna:
            raise UserError(
                "a study's tables and a run's weights are two exports", "both", "export one, then the other"
            )
        say("\n".join(export_run(out, dcp, safetensors)))
        return OK
    from elastune.journal.atomic import atomic_write
    from elastune.report.export import to_csv, to_json
    from elastune.report.export_optuna import to_optuna
    from elastune.study.results.study import Study

    wanted = [(what, path) for what, path in (("csv", csv), ("json", json), ("optuna", optuna)) if path is not None]
    if not wanted:
        raise UserError(
            "an export needs a file",
            "none",
            "use --csv FILE, --json FILE or --optuna FILE; of a run --dcp DIR or --safetensors FILE",
        )
    if len({path.resolve() for _, path in wanted}) < len(wanted):
        raise UserError("two exports need two files", wanted[0][1], "name another one")
    for _, path in wanted:
        if path.exists() and path.resolve().parent == out.resolve():
            raise UserError("an export must not replace a file of the study", path, "name another one")
    study = Study.load(out)
    made = {
        "csv": lambda: to_csv(study).encode(),
        "json": lambda: to_json(study).encode(),
        "optuna": lambda: to_optuna(out),
    }
    contents = [made[what]() for what, _ in wanted]  # all, before one is written
    for (what, path), content in zip(wanted, contents, strict=True):
        atomic_write(path, content)
        say(f"{what:<7} {path} ({len(study.trials)} trials)")
    return OK
