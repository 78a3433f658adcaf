"""``elastune plan``: how to split a cluster, before anything is launched on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from elastune.cli import options, parse
from elastune.cli.clusters import ClusterOptions
from elastune.cli.flatten import flatten
from elastune.cli.output import OK, print_json
from elastune.cli.planning import PlannedCluster, PlannedSearch, Probing
from elastune.cli.setup import use_data


@flatten
def plan(
    file: options.File,
    cluster: PlannedCluster,
    search: PlannedSearch,
    probing: Probing,
    where: ClusterOptions,
    top: Annotated[int, typer.Option(help="How many plans are shown.")] = 5,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Keep the plan and the runs that are measured, for report, and --from."),
    ] = None,
    set_: options.Set = None,
    data: options.Data = None,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> int:
    """How should a cluster be split to tune FILE: trainings at once x data x shard x tensor x pipeline?

    One step of FILE is rehearsed without memory and without workers: where nothing holds it, that is the answer. A few
    short runs on this machine calibrate the step model, where this machine holds it; every division of the cluster is
    then judged. All times are modelled: nodes are taken to have this machine's workers. --deadline is kept where the
    upper end of a time's interval is: in nine cases of ten.

    --json: {kind: "plan", plans: [{width, mesh, sharded, batch, micro, step_s, step_interval_s, seconds, interval_s,
    cost, cost_interval, memory_bytes, most_parameters (bytes of those that would fit so), noise_ratio, limits: [part,
    share], workers, odds (of keeping --deadline), command (one training of it), search_command (the search, of a FILE
    with space(trial))}], gains: {axis: factor of twice the workers}, reasons: {axis: why}, size: {...}, search: {...},
    noise ("told", "measured", "unknown"), probed: {mesh and pass: seconds of a step}, refused: {axis: why}, memory: in
    words, worker_bytes: bound of a worker, beside_bytes: of its process beside that, constants: {name: seconds},
    unmeasured: why nothing was run here, measured: [{mesh, mechanism, batch, micro, step_s, step_interval_s,
    memory_bytes, measured_step_s, measured_memory_bytes, step_error, memory_error, within, failed}]}. --out keeps all
    of it in a journal: elastune report and explain read it.
    """
    from elastune.core.run import Program
    from elastune.frontier.cluster_planning import PlanRequest, plan_cluster
    from elastune.frontier.plan_record import keep_plan
    from elastune.report.plan_story import plan_lines

    asked = {**cluster.request(), **search.request()}
    use_data(data)
    request = PlanRequest(
        program=Program(file),
        **asked,
        **probing.request(),
        config=parse.settings(set_ or []),
        seed=seed,
        shown=top,
        cluster=None if where.local else where.request(),
        out=out,
    )
    made = keep_plan(request, plan_cluster(request))
    if json:
        print_json({"kind": "plan", **made.found})
    else:
        print("\n".join(plan_lines(made)))
    return OK
