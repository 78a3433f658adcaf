"""``elastune report``, ``explain`` and ``export``: an output folder as tables, as a page, in words, as a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from elastune.cli import options
from elastune.cli.groups import flatten
from elastune.cli.output import FAILED, OK, print_error, print_json, print_lines, print_result
from elastune.core import notation
from elastune.core.errors import UserError
from elastune.core.formatting import count, plain
from elastune.core.notation import NAMED
from elastune.core.settings import PriceFileSettings
from elastune.runtime.job.output import JOURNAL
from elastune.runtime.logger import check_loggers, logging_to
from elastune.runtime.settings import read_prices
from elastune.tuning.study.settings import TargetSettings

# --- elastune report ---


@flatten
def report(
    out: Annotated[Path, typer.Argument(help="The output folder of a run, a study, a frontier or a plan.")],
    money: PriceFileSettings,
    goal: TargetSettings,
    ledger: Annotated[
        bool,
        typer.Option(
            "--ledger",
            help="For a run: only tell how often each sample was used. The exit code is 1 if any was not used once.",
        ),
    ] = False,
    log: Annotated[
        list[str] | None,
        typer.Option(
            metavar=NAMED, help="Also log what OUT holds to csv, tensorboard, mlflow or wandb. See docs/trackers.md."
        ),
    ] = None,
    pick: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER,...",
            help="For a study: take the best trial that reaches these targets, such as accuracy=0.98.",
        ),
    ] = None,
    weights: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=NUMBER,...",
            help="For a study: take the trial with the smallest weighted sum, such as seconds=1,accuracy=2.",
        ),
    ] = None,
    subset: Annotated[
        int | None,
        typer.Option(help="For a study: also choose this number of trials that together stand for the front."),
    ] = None,
    across_changes: options.AcrossChanges = False,
    json: options.Json = False,
) -> int:
    """Write an HTML report of the results in a folder.

    OUT holds a run, a study, a frontier or a plan, finished or not. The report is OUT/report.html, one self-contained
    file; PNGs lie beside it. The command also prints the results.

    If an ensemble or a soup of a study was written with --out, --pick and --weights may also name training_s and
    parameters. Then they choose among single trials, soups and ensembles. See docs/ensembles.md.
    """
    prices, loggers = read_prices(money), check_loggers(log or ())
    from elastune.core.journal.files import writer_of

    if loggers and writer_of(out / JOURNAL) is not None:
        rule = "what a command still writes is logged by that command"
        raise UserError(rule, out, "wait until it has ended, or begin it with --log")
    if ledger:
        return _ledger(out, json)
    from elastune.cli.results import PickOptions, result_of, with_money
    from elastune.report.page import write_report
    from elastune.tuning.search.constraint import parse_target

    targets, weighed = notation.numbers(pick or [], "--pick"), notation.numbers(weights or [], "--weights")
    pick_options = PickOptions(targets, weighed, subset, None if goal.target is None else parse_target(goal.target))
    result = result_of(out, pick_options, across_changes=across_changes)
    page = write_report(out, across_changes=across_changes)
    if prices is not None:
        result = with_money(result, out, prices)
    images = sorted(str(path) for path in out.glob("*.png"))
    print_result(result, as_json=json, report=str(page), images=images if json else None)
    return _log(loggers, out)


def _log(loggers: Sequence[str], out: Path) -> int:
    """Log what is journaled in ``out`` and not logged yet. Returns the exit code."""
    failures: list[str] = []
    with logging_to(loggers, out, failures.append):
        pass
    for line in failures:
        print_error(line)
    return FAILED if failures else OK


def _ledger(out: Path, as_json: bool) -> int:
    from elastune.core.journal.files import read
    from elastune.report.sample_ledger import ledger, lines

    sample_ledger = ledger(read(out / JOURNAL))
    if not sample_ledger.epochs:
        raise UserError("a ledger needs a run that has taken steps", out, "give the output folder of elastune run")
    if as_json:
        print_json({"kind": "ledger", **asdict(sample_ledger), "exact": sample_ledger.exact, "out": str(out)})
    else:
        print_lines("\n".join(lines(sample_ledger)))
    return OK if sample_ledger.exact else FAILED


# --- elastune explain ---


def explain(
    out: Annotated[
        Path, typer.Argument(help="The output folder of a study, a frontier, a run or a plan, finished or not.")
    ],
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="The --out folder of elastune plan: show the step times that it predicted beside the measured ones.",
        ),
    ] = None,
    across_changes: options.AcrossChanges = False,
    json: options.Json = False,
) -> int:
    """Explain in words what a study, frontier, run or plan found.

    Of a study: what it found and at what price, which parameters decided it, what was stopped or failed and why, where
    the time went, and what to try next.

    Of a frontier: its answer, and what each worker count reaches.

    Of a run: whether its batch was beyond the noise scale that it measured, what tensor left whole of the model, where
    a pipeline was cut, and what a worker's memory held, measured and modelled, and would hold otherwise.

    Of a plan: all that it says.

    If a plan (that of --plan, or the one that the study was begun with) or a frontier has predicted step times, they
    stand beside the measured ones.
    """
    from elastune.core.journal.files import read
    from elastune.core.journal.folds import compared_all
    from elastune.core.plan.step_time import last_plan
    from elastune.report.explain import Explanation, Part, explain_frontier, explain_run
    from elastune.report.explain import explain as explained
    from elastune.report.overviews import gather_run, gather_study
    from elastune.report.plan import plan_lines, serial_of
    from elastune.report.predicted_time import fitted_prediction, run_prediction, study_prediction
    from elastune.runtime.job.output import JOURNAL
    from elastune.tuning.study.results import Study
    from elastune.tuning.study.throughput import plan_if_readable, plan_in, predicted_in

    entries = read(out / JOURNAL)
    entries = compared_all(entries) if across_changes else entries
    study, run, plan_record = gather_study(entries), gather_run(entries), last_plan(entries)
    prediction, chosen_plan = predicted_in(entries), None if plan is None else plan_in(plan)
    lines: tuple[str, ...] = ()
    if plan_record is not None and study is None and run is None:
        explanation = Explanation((Part("The plan", tuple(line for line in plan_lines(plan_record) if line)),))
    elif study is not None and study.is_frontier:
        explanation, lines = explain_frontier(study), fitted_prediction(study.times)
    elif study is None and run is not None:
        explanation = explain_run(run, entries)
        lines = () if chosen_plan is None else (*run_prediction(chosen_plan, run), f"{serial_of(chosen_plan)}.")
    else:
        explanation = explained(Study.of(out, entries))
        program = "" if study is None else study.settings.get("program", "")
        if chosen_plan is None and prediction is not None:
            chosen_plan = plan_if_readable(prediction, program)
        if chosen_plan is not None and study is not None:
            lines = study_prediction(chosen_plan, program, entries)
        if prediction is not None:
            lines = (f"At most {count(prediction.most, 'worker')} a trial: {plain(prediction.why, 300)}.", *lines)
    if lines:
        explanation = replace(explanation, parts=(*explanation.parts, Part("Predicted and measured time", lines)))
    if json:
        print_json({"kind": "explanation", **asdict(explanation), "out": str(out)})
    else:
        print_lines(str(explanation))
    return OK


# --- elastune export ---


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
    search chose (params.NAME), all settings (config.NAME), execution, values of the objectives, metrics, and the
    reason. For pandas: elastune.Study.load(OUT).frame().

    Of a run: --dcp and --safetensors write its newest checkpoint.
    """
    if dcp is not None or safetensors is not None:
        from elastune.train.checkpoints.export import export_run

        if csv or json or optuna:
            raise UserError(
                "a study's tables and a run's weights are two exports", "both", "export one, then the other"
            )
        print_lines("\n".join(export_run(out, dcp, safetensors)))
        return OK
    from elastune.core.journal.files import atomic_write
    from elastune.report.export import to_csv, to_json, to_optuna
    from elastune.tuning.study.results import Study

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
        print_lines(f"{what:<7} {path} ({len(study.trials)} trials)")
    return OK
