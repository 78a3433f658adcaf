"""``elastune export``: a study's trials for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from elastune.cli.output import OK
from elastune.core.errors import UserError


def export(
    out: Annotated[Path, typer.Argument(help="The output folder of a study.")],
    csv: Annotated[Path | None, typer.Option("--csv", help="Write a table, one line a trial.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write {kind, objectives, trials: [...]}.")] = None,
) -> int:
    """Write all trials of the study in OUT, those without a result and the paused ones too.

    Of each: number, state, phase, seed, parent, epochs, seconds, worker_seconds, started_at, ended_at (UTC), what the
    search chose (params.NAME), all settings (config.NAME), means, values of the objectives, metrics, and the reason.
    For pandas: elastune.Study.load(OUT).frame().
    """
    from elastune.report.export import to_csv, to_json
    from elastune.study.results.study import Study

    if csv is None and json is None:
        raise UserError("an export needs a file", "none", "use --csv FILE or --json FILE")
    if csv is not None and json is not None and csv.resolve() == json.resolve():
        raise UserError("two exports need two files", csv, "name another one")
    for path in (csv, json):
        if path is not None and path.exists() and path.resolve().parent == out.resolve():
            raise UserError("an export must not replace a file of the study", path, "name another one")
    study = Study.load(out)
    for what, path, text in (("csv", csv, to_csv), ("json", json, to_json)):
        if path is not None:
            path.write_bytes(text(study).encode())
            print(f"{what:<7} {path} ({len(study.trials)} trials)")
    return OK
