"""``elastune tune`` and ``elastune frontier``: search a program's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from elastune.cli import options, parse
from elastune.cli.output import INTERRUPTED, OK, print_error, print_result
from elastune.cli.setup import check_price, choose_means, choose_out, use_data
from elastune.core.errors import UserError
from elastune.core.run import DEFAULT_SLOTS, Program


def tune(
    file: options.File,
    objective: options.Objectives = None,
    constraint: options.Constraints = None,
    sampler: options.Sampler = "auto",
    trials: Annotated[int | None, typer.Option(help="Trials to run.")] = None,
    budget: options.Budget = None,
    worker_hours: options.WorkerHours = None,
    stopping: options.Stopping = "none",
    warm_start: options.WarmStart = None,
    workers: Annotated[int, typer.Option(help="Worker processes for all trials together.")] = 1,
    trial_workers: options.TrialWorkers = None,
    set_: options.Set = None,
    epochs: options.Epochs = None,
    seed: options.Seed = 0,
    mode: options.Mode = "fast",
    slots: options.Slots = None,
    micro_batch: options.MicroBatch = None,
    precision: options.Precision = "fp32",
    threads: options.Threads = 1,
    device: options.Device = "auto",
    price: options.Price = 1.0,
    trial_timeout: Annotated[str | None, typer.Option(metavar="TIME", help="Time of one trial at most.")] = None,
    data: options.Data = None,
    out: options.Out = None,
    resume: options.Resume = False,
    json: options.Json = False,
) -> int:
    """Search FILE's space(trial) for the best trade-offs among its objectives.

    What space(trial) returns as workers, mode, mechanism, micro_batch and policy ("none", or as --policy of run) is how
    a trial is run; the rest are the program's settings.

    --json: {kind: "tune", objectives, trials: {state: count}, front: [{trial, values, metrics, config, means}],
    pick: {trial, reason, command, found_after_s} or null, seconds, reason (why it ended), out, report}.
    """
    from elastune.cli.progress import Progress, StudyTracker
    from elastune.search.space.objective import parse_objectives
    from elastune.study.request import StudyRequest
    from elastune.study.run import tune as run_study

    use_data(data)
    budget_s = None if budget is None else parse.duration(budget)
    bounds = None if trial_workers is None else parse.worker_bounds(trial_workers, "--trial-workers")
    request = StudyRequest(
        program=Program(file),
        out=choose_out(out, file, "tune", resume),
        objectives={o.name: o.direction for o in parse_objectives(objective)} if objective else {},
        constraints=tuple(constraint or ()),
        sampler=sampler,
        trials=trials,
        budget_s=budget_s,
        worker_hours=worker_hours,
        stopping=stopping,
        warm_start=tuple(warm_start or ()),
        workers=workers,
        trial_workers=bounds,
        means=choose_means(
            1 if bounds is None else bounds[0],
            most_workers=None if bounds is None else bounds[1],
            mode=mode,
            slots=slots,
            micro_batch=micro_batch,
            precision=precision,
            threads=threads,
            device=device,
        ),
        config=parse.settings(set_ or []),
        epochs=epochs,
        seed=seed,
        price_per_worker_hour=check_price(price),
        trial_timeout_s=None if trial_timeout is None else parse.duration(trial_timeout, "--trial-timeout"),
        resume=resume,
    )
    with Progress(StudyTracker(trials, budget_s)) as progress:
        run_study(request, observe=progress.observe)
    return tell_study(request.out, json)


def frontier(
    file: options.File,
    workers: Annotated[str, typer.Option(metavar="N,N,...", help="Worker counts to ask about.")] = "1,2,4,8",
    target: Annotated[float | None, typer.Option(help="Quality that must be reached.")] = None,
    budget: options.Budget = "3m",
    quality: Annotated[
        str | None, typer.Option(help="The metric of the target. [default: the first objective]")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Trainings of a cell of the table.")] = 3,
    constraint: options.Constraints = None,
    sampler: options.Sampler = "auto",
    set_: options.Set = None,
    epochs: options.Epochs = None,
    seed: options.Seed = 0,
    mode: options.Mode = "fast",
    slots: options.Slots = None,
    micro_batch: options.MicroBatch = None,
    precision: options.Precision = "fp32",
    threads: options.Threads = 1,
    device: options.Device = "auto",
    price: options.Price = 1.0,
    data: options.Data = None,
    out: options.Out = None,
    resume: options.Resume = False,
    json: options.Json = False,
) -> int:
    """How far does FILE scale before accuracy pays, and which settings buy it back?

    --json: {kind: "frontier", quality, direction, target, price_per_worker_hour, rows: [{role, workers,
    batch_size, lr, lr_rule, quality, ci, seconds, seconds_label, cost, time_to_target_s, on_front, noise_scale,
    noise_scale_error, ...}], pick (a row's number or null), answer, command, support, supported_workers (by the noise
    scale of the pick, else of the first row), hypervolume_naive, hypervolume_tuned, seconds, reason, out, report}.
    """
    from elastune.cli.progress import Progress, StudyTracker
    from elastune.frontier.phases import frontier as find_frontier
    from elastune.study.request import FrontierRequest

    use_data(data)
    counts = parse.worker_counts(workers)
    budget_s = parse.duration(budget or "")
    request = FrontierRequest(
        program=Program(file),
        out=choose_out(out, file, "frontier", resume),
        workers=counts,
        budget_s=budget_s,
        target=target,
        quality=quality,
        seeds=seeds,
        means=choose_means(
            1,
            mode=mode,
            slots=max(DEFAULT_SLOTS, *counts) if slots is None else slots,
            micro_batch=micro_batch,
            precision=precision,
            threads=threads,
            device=device,
        ),
        config=parse.settings(set_ or []),
        constraints=tuple(constraint or ()),
        sampler=sampler,
        epochs=epochs,
        seed=seed,
        price_per_worker_hour=check_price(price),
        resume=resume,
    )
    with Progress(StudyTracker(None, budget_s)) as progress:
        find_frontier(request, observe=progress.observe)
    return tell_study(request.out, json)


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
