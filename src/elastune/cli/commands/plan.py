"""``elastune plan``: how to split a cluster, before anything is launched on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from elastune.cli import options, parse
from elastune.cli.clusters import ClusterOptions
from elastune.cli.flatten import flatten
from elastune.cli.output import OK, print_json
from elastune.cli.setup import use_data
from elastune.core.mesh import Mesh

if TYPE_CHECKING:
    from elastune.plan.search_time import Stopping


@flatten
def plan(
    file: options.File,
    nodes: Annotated[int, typer.Option(help="How many like nodes there are.")],
    where: ClusterOptions,
    gpus_per_node: Annotated[int, typer.Option(help="Workers that a node has room for.")] = 1,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of a worker: 24GiB. [default: its share of this machine's]")
    ] = None,
    deadline: Annotated[str | None, typer.Option(metavar="TIME", help="Until all is tuned: 8h.")] = None,
    price: options.Price = 1.0,
    runs: Annotated[int, typer.Option(help="Trainings that the search needs, one after another.")] = 128,
    crowding: Annotated[
        float | None,
        typer.Option(
            help="More trainings that each further one at once costs, by --runs. [default: as simulated studies]"
        ),
    ] = None,
    variation: Annotated[
        float | None,
        typer.Option(help="Coefficient of variation of trainings' lengths. [default: as simulated studies]"),
    ] = None,
    generations: Annotated[
        bool, typer.Option("--generations", help="The search waits for all of a round, as a genetic one does.")
    ] = False,
    sampler: Annotated[
        str,
        typer.Option(metavar="NAME", help="What proposes: random, grid, genetic (as in tune); others count as TPE."),
    ] = "auto",
    stopping: Annotated[str, typer.Option(metavar="NAME", help="What ends trainings early: none or asha.")] = "none",
    mesh: Annotated[
        str | None, typer.Option(metavar="AXIS=N,...", help="Look at this mesh of a training alone.")
    ] = None,
    link: Annotated[str, typer.Option(metavar="SPEED", help="Between nodes, declared: 25Gbit/s.")] = "10Gbit/s",
    noise_scale: Annotated[
        float | None, typer.Option(help="Of the gradient, in samples. [default: measured in a few first steps here]")
    ] = None,
    calibrate: Annotated[str, typer.Option(metavar="TIME", help="For short runs here: 60s.")] = "60s",
    top: Annotated[int, typer.Option(help="How many plans are shown.")] = 5,
    measure: Annotated[
        int, typer.Option(metavar="K", help="Run the K best plans that have room on this machine, or on --cluster.")
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Keep the plan and the runs that are measured, for report, and --from."),
    ] = None,
    from_: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="FOLDER", help="Of earlier runs: those of FILE on like hardware need no probe."),
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
    from elastune.frontier.cluster_planning import PlanRequest, plan_cluster
    from elastune.frontier.machine_probes import NodeLink
    from elastune.frontier.plan_record import keep_plan
    from elastune.plan.cluster_plan import PlanBounds
    from elastune.plan.divisions import Nodes
    from elastune.report.plan_story import plan_lines

    cluster = Nodes(nodes, gpus_per_node)
    bounds = PlanBounds(
        None if memory is None else parse.size(memory, "--memory"),
        None if deadline is None else parse.duration(deadline, "--deadline"),
        price,
    )
    use_data(data)
    request = PlanRequest(
        program=_program(file),
        nodes=cluster,
        bounds=bounds,
        runs=runs,
        link=NodeLink(parse.seconds_per_byte(link)),
        calibrate_s=parse.duration(calibrate, "--calibrate"),
        config=parse.settings(set_ or []),
        seed=seed,
        noise_scale=noise_scale,
        crowding=crowding,
        variation=variation,
        generations=generations,
        sampler=sampler,
        stopping=cast("Stopping", stopping),
        mesh=None if mesh is None else Mesh.parse(mesh),
        shown=top,
        measured=measure,
        cluster=None if where.local else where.request(),
        out=out,
        earlier=tuple(from_ or ()),
    )
    made = keep_plan(request, plan_cluster(request))
    if json:
        print_json({"kind": "plan", **made.found})
    else:
        print("\n".join(plan_lines(made)))
    return OK


def _program(file: Any) -> Any:
    from elastune.core.run import Program

    return Program(file)
