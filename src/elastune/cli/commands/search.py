"""``elastune tune`` and ``elastune frontier``: search the settings of a program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from elastune.cli import options
from elastune.cli.commands.dashboard import page_beside
from elastune.cli.groups import CommandOptions, FastExecution, LogOptions, OutputOptions, WorkerExecution, flatten
from elastune.cli.output import OK, print_error, print_result, stopped_code
from elastune.core.errors import UserError
from elastune.core.run import CommandLine
from elastune.runtime.logger import check_loggers, logging_to
from elastune.tuning.study.request import frontier_request, study_request
from elastune.tuning.study.settings import FrontierSettings, StudySettings


@flatten
def tune(
    settings: StudySettings,
    execution_options: FastExecution,
    command_options: CommandOptions,
    output: OutputOptions,
    logging: LogOptions,
    command: CommandLine,
    file: options.FileOrCommand = None,
    arguments: options.Arguments = None,
    dry_run: options.DryRun = False,
    dashboard: options.Dashboard = False,
) -> int:
    """Search a program's settings for the best trade-offs.

    FILE defines space(trial), which says what can be chosen, and the objectives. Each trial is one training. The result
    is the front: the trials that no other trial beats in every objective.

    These names in what space(trial) returns decide how a trial is run: workers, mode, mechanism, mesh, copies,
    virtual_tensor, schedule, zero_stage, offload, compress, micro_batch, policy ("none", or as --policy of elastune
    run). These decide how its workers agree: sync (with learners, every and what else the strategy takes) and
    sync_schedule. All other names are settings of the program. A trial whose choices do not go together is infeasible,
    with the reason, and is not run.

    Without a preference (see elastune report --pick) it names up to three trials with a command each: the fastest
    within 1 % of the best, which is the pick; the best; and the cheapest within 5 % of the best, or that fulfils
    --until.
    """
    from elastune.cli.dry_run import of_study, print_dry_run
    from elastune.cli.progress import Progress, StudyTracker, earlier_entries
    from elastune.tuning.study.resume import journaled_slots
    from elastune.tuning.study.run import checked as checked_study
    from elastune.tuning.study.run import tune as run_study

    logging.begin()
    loggers = check_loggers(settings.log)
    cluster, file = settings.request(print_error), command_options.source(file)
    out = output.choose(settings.out, file, "tune", resume=settings.resume)
    low, high = settings.trial_workers or (None, None)
    low = None if execution_options.mesh is not None else low
    execution = execution_options.execution(low, high, settings.learners, local=settings.local)
    if settings.resume and "num_slots" not in execution_options.chosen:
        execution = replace(execution, num_slots=journaled_slots(out) or execution.num_slots)
    program = command_options.program() or output.program(file, arguments, out, resume=settings.resume)
    request = study_request(settings, program, out, execution, command)
    if dry_run:
        plan = checked_study(request, cluster=cluster).plan
        return print_dry_run(of_study(plan, str(settings.cluster)), as_json=output.json)
    before = earlier_entries(out, request.resume)
    progress = Progress(StudyTracker(request.trials, request.budget_s, before))
    with page_beside(out, dashboard), logging_to(loggers, out, progress.say), progress:
        run_study(request, cluster=cluster, observe=progress.observe)
    return print_study(out, output.json)


@flatten
def frontier(
    settings: FrontierSettings,
    execution_options: WorkerExecution,
    command_options: CommandOptions,
    output: OutputOptions,
    logging: LogOptions,
    command: CommandLine,
    file: options.FileOrCommand = None,
    arguments: options.Arguments = None,
    dry_run: options.DryRun = False,
    dashboard: options.Dashboard = False,
) -> int:
    """Find how far training scales before accuracy suffers.

    Answers for each number of workers: does quality hold, how long does a training take, and what does it cost? And
    which settings win accuracy back?

    The row of N workers tells of trainings as N workers do them, with N slots; they run on fewer workers where the row
    says emulated. In fast mode N workers train, however few cores there are. A mesh has the mechanism of --mechanism
    or, without it, the least that the mesh needs. Meshes that cut a batch into equally many parts share their trainings
    and differ in time.

    space(trial) may choose workers, mesh, mechanism, topology, mode, micro_batch, compress, sync and policy, as in
    elastune tune. Rows then say with which of these they were trained, and numbers of workers that you did not ask
    about get rows of their own. Each --policy gets a row for each number of workers.

    With --throughput, short runs time other threads, mechanisms, routes, bucket sizes and micro-batches. Rows use those
    whose short runs end sooner with the same bits.

    --budget is for all of it: short runs, the trainings of the naive rule, the search (at least 40 % of it), and
    confirming what was found with fresh seeds. The first steps tell what there is time for. What is shortened or left
    out is said. Where the search would get less than 40 %, the command ends with exit code 2 and the budget that it
    needs; with --short it goes on without a search. --budget auto takes as long as all of it needs.
    """
    from elastune.cli.dry_run import of_frontier, print_dry_run
    from elastune.cli.progress import Progress, StudyTracker, earlier_entries
    from elastune.tuning.frontier.find_frontier import checked
    from elastune.tuning.frontier.find_frontier import frontier as find_frontier

    logging.begin()
    loggers = check_loggers(settings.log)
    cluster, file = settings.request(print_error), command_options.source(file)
    out = output.choose(settings.out, file, "frontier", resume=settings.resume)
    execution = execution_options.on(None, local=settings.local)
    program = command_options.program() or output.program(file, arguments, out, resume=settings.resume)
    request = frontier_request(settings, program, out, execution, command)
    if dry_run:
        plan = checked(request, cluster)[0]
        return print_dry_run(of_frontier(plan, str(settings.cluster)), as_json=output.json)
    before = earlier_entries(out, request.resume)
    progress = Progress(StudyTracker(None, request.budget_s, before))
    with page_beside(out, dashboard), logging_to(loggers, out, progress.say), progress:
        find_frontier(request, cluster=cluster, observe=progress.observe)
    return print_study(out, output.json)


def print_study(out: Path, as_json: bool, **more: object) -> int:
    """Write the report, then print the result and ``more``. The result is printed also if the report fails."""
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
        return stopped_code()
    return OK
