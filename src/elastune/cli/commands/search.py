"""``elastune tune`` and ``elastune frontier``: search a program's settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from elastune.cli import options, parse
from elastune.cli.flatten import flatten
from elastune.cli.groups import FastExecution, Folders, Search, Training, WorkerExecution, check_price
from elastune.cli.output import INTERRUPTED, OK, print_error, print_result
from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import Program


@flatten
def tune(
    file: options.File,
    search: Search,
    training: Training,
    execution: FastExecution,
    folders: Folders,
    workers: Annotated[int, typer.Option(help="Worker processes for all trials together.")] = 1,
    warm_start: options.WarmStart = None,
) -> int:
    """Search FILE's space(trial) for the best trade-offs among its objectives.

    What space(trial) returns as workers, mode, mechanism, mesh, copies, virtual_tensor, schedule, zero_stage, offload,
    micro_batch and policy ("none", or as --policy of run) is how a trial is run; the rest are the program's settings.
    Where these cannot be had together a trial is infeasible, with the reason, and not run.

    --json: {kind: "tune", objectives, trials: {state: count}, front: [{trial, values, metrics, config, means}],
    pick: {trial, reason, command, found_after_s} or null, seconds, reason (why it ended), out, report}.
    """
    from elastune.cli.progress import Progress, StudyTracker, told_before
    from elastune.study.run import tune as run_study

    out = folders.choose(file, "tune")
    low, high = search.bounds or (None, None)
    low = None if execution.mesh is not None else low
    means = execution.means(low, most_workers=high)
    request = search.request(file, out, workers, means, training, resume=folders.resume)
    request = replace(request, warm_start=tuple(warm_start or ()))
    before = told_before(out, request.resume)
    with Progress(StudyTracker(request.trials, request.budget_s, before)) as progress:
        run_study(request, observe=progress.observe)
    return tell_study(out, folders.json)


@flatten
def frontier(
    file: options.File,
    training: Training,
    execution: WorkerExecution,
    folders: Folders,
    workers: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Worker counts to ask about. [default: 1,2,4,8; beside --mesh none]"),
    ] = None,
    mesh: Annotated[
        list[str] | None,
        typer.Option(metavar="AXIS=N,...", help="A mesh to ask about, too, such as data=2,shard=2; may be repeated."),
    ] = None,
    target: Annotated[float | None, typer.Option(help="Quality that must be reached.")] = None,
    budget: options.Budget = "3m",
    quality: Annotated[
        str | None, typer.Option(help="The metric of the target. [default: the first objective]")
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(
            help="By how much quality may be worse than on the smallest count and still hold. [default: a hundredth of "
            "the metric's range, or a fiftieth of its value there]"
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Trainings of a cell of the table.")] = 3,
    constraint: options.Constraints = None,
    sampler: options.Sampler = "auto",
    stopping: options.Stopping = "none",
    trial_workers: options.TrialWorkers = None,
    price: options.Price = 1.0,
) -> int:
    """How far does FILE scale before accuracy pays, and which settings buy it back?

    What is told of N workers is trained as N workers train, with N slots, on fewer where the row says emulated. In fast
    mode N workers train it, however few cores there are. A mesh has the --mechanism or, without one, the least that it
    needs; those that cut a batch into as many parts share their trainings and differ in time.

    --json: {kind: "frontier", quality, direction, target, price_per_worker_hour, rows: [{role, workers, mechanism,
    mesh, batch_size, lr, lr_rule, quality, quality_label, ci: [low, high], verdict ("holds", "not shown", "falls"),
    loss, loss_bound, margin, pairs, test_samples, seconds, seconds_label, seconds_factor, throughput, cost,
    time_to_target_s, time_to_target_ci, reached, on_front, noise_scale, noise_scale_error, num_slots, ...}], pick (a
    row's number or null), answer, reasons: [{weight, text}], command, command_trial, command_metrics and command_note
    (the training of the pick's row that the command repeats, what it reports, and that in words), model_errors
    (predicted over measured), hypervolume_naive, hypervolume_tuned, hypervolume_note, seconds, reason, out, report}.
    """
    from elastune.cli.progress import Progress, StudyTracker, told_before
    from elastune.frontier.crews import COUNTS
    from elastune.frontier.phases import frontier as find_frontier
    from elastune.study.request import FrontierRequest

    meshes = tuple(Mesh.parse(text) for text in mesh or ())
    counts = () if workers is None else parse.worker_counts(workers)
    bounds = None if trial_workers is None else parse.worker_bounds(trial_workers, "--trial-workers")
    request = FrontierRequest(
        program=Program(file),
        out=folders.choose(file, "frontier"),
        workers=counts if counts or meshes else COUNTS,
        meshes=meshes,
        budget_s=parse.duration(budget or ""),
        target=target,
        quality=quality,
        margin=margin,
        seeds=seeds,
        means=execution.of_one(),
        config=training.config,
        constraints=tuple(constraint or ()),
        sampler=sampler,
        stopping=stopping,
        trial_workers=bounds,
        epochs=training.epochs,
        seed=training.seed,
        divergence=training.factor,
        price_per_worker_hour=check_price(price),
        resume=folders.resume,
    )
    before = told_before(request.out, request.resume)
    with Progress(StudyTracker(None, request.budget_s, before)) as progress:
        find_frontier(request, observe=progress.observe)
    return tell_study(request.out, folders.json)


def tell_study(out: Path, as_json: bool, **more: object) -> int:
    """Draw the report, print the result and ``more`` about it. A report that cannot be written costs no result."""
    from elastune.cli.results import result_of
    from elastune.report.page import write_report

    page = None
    try:
        page = str(write_report(out))
    except UserError as error:
        print_error(f"no report was written: {error}")
    result = result_of(out)
    print_result(result, as_json=as_json, **more, report=page)
    if result.stopped == "interrupted":
        print_error(f"interrupted; go on with --resume --out {out}")
        return INTERRUPTED
    return OK
