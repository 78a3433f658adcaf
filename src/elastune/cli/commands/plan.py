"""``elastune plan``: how to split a cluster, before anything is launched on it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastune.cli import options, parse
from elastune.cli.flatten import flatten
from elastune.cli.output import OK, print_json
from elastune.cli.setup import use_data
from elastune.core.text import byte_count, cost, count, duration, number

if TYPE_CHECKING:
    from elastune.frontier.cluster_planning import PlanFound
    from elastune.frontier.measured_plans import MeasuredPlan
    from elastune.plan.cluster_plan import ClusterPlan


@flatten
def plan(
    file: options.File,
    nodes: Annotated[int, typer.Option(help="How many like nodes there are.")],
    gpus_per_node: Annotated[int, typer.Option(help="Workers that a node has room for.")] = 1,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of a worker: 24GiB. [default: its share of this machine's]")
    ] = None,
    deadline: Annotated[str | None, typer.Option(metavar="TIME", help="Until all is tuned: 8h.")] = None,
    price: options.Price = 1.0,
    runs: Annotated[int, typer.Option(help="Trainings that the search needs, one after another.")] = 128,
    crowding: Annotated[
        float, typer.Option(help="More trainings that each further one at once costs, relative to --runs: declared.")
    ] = 0.0,
    link: Annotated[str, typer.Option(metavar="SPEED", help="Between nodes, declared: 25Gbit/s.")] = "10Gbit/s",
    noise_scale: Annotated[
        float | None, typer.Option(help="Of the gradient, in samples. [default: measured in a few first steps here]")
    ] = None,
    calibrate: Annotated[str, typer.Option(metavar="TIME", help="For short runs here: 60s.")] = "60s",
    top: Annotated[int, typer.Option(help="How many plans are shown.")] = 5,
    measure: Annotated[
        int, typer.Option(metavar="K", help="Run the K best plans whose trainings have room on this machine.")
    ] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep the runs that are measured, for --from of later plans.")
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

    One step of FILE is rehearsed without memory and without workers; a few short runs on this machine calibrate the
    step model; every division of the cluster is then judged. All times are modelled: nodes are taken to have this
    machine's workers.

    --json: {kind: "plan", plans: [{width, mesh, sharded, batch, micro, step_s, step_interval_s, seconds, interval_s,
    cost, memory_bytes, noise_ratio, limits: [part, share], workers}], gains: {axis: factor of twice the workers},
    size: {...}, search: {...}, noise ("told", "measured", "unknown"), probed: {mesh and pass: seconds of a step},
    refused: {axis: why}, memory: in words, worker_bytes: bound of a worker,
    beside_bytes: of its process beside that, unmeasured: why nothing was run here, measured:
    [{mesh, mechanism, batch, micro, step_s, step_interval_s,
    memory_bytes, measured_step_s, measured_memory_bytes, step_error, memory_error, within, failed}]}.
    """
    from elastune.frontier.cluster_planning import PlanRequest, plan_cluster
    from elastune.frontier.machine_probes import NodeLink
    from elastune.plan.cluster_plan import PlanBounds
    from elastune.plan.divisions import Nodes

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
        shown=top,
        measured=measure,
        out=out,
        earlier=tuple(from_ or ()),
    )
    found = plan_cluster(request)
    if json:
        print_json({"kind": "plan", **_plain(found)})
    else:
        print("\n".join(_lines(found, price)))
    return OK


def _program(file: Any) -> Any:
    from elastune.core.run import Program

    return Program(file)


def _plain(found: PlanFound) -> dict[str, Any]:
    plans = [{**asdict(each), "mesh": str(each.mesh), "workers": each.workers} for each in found.plans]
    rows = [
        {
            **asdict(each),
            "mesh": str(each.mesh),
            "step_error": each.step_error,
            "memory_error": each.memory_error,
            "within": each.within,
        }
        for each in found.measured
    ]
    return {**asdict(found), "plans": plans, "measured": rows}


def _lines(found: PlanFound, price: float) -> list[str]:
    size, search = found.size, found.search
    noise = {
        "told": f"{number(search.noise_scale, 3)} samples, as told",
        "measured": f"{number(search.noise_scale, 3)} samples, measured in the first steps here: it grows later",
        "unknown": "not known (no batch is taken to save steps): --noise-scale",
    }[found.noise]
    lines = [
        f"program: {byte_count(size.parameter_bytes)} of parameters, {size.flops / 1e6:,.1f} MFLOP a sample, needs "
        f"{byte_count(round(size.pass_bytes))} a sample in a pass; {count(search.runs, 'training')} of "
        f"{search.steps:,.0f} steps at batch {search.base_batch}; noise scale {noise}",
        f"measured here: {'; '.join(f'{what}: {duration(step_s)}' for what, step_s in found.probed.items())}"
        if found.probed
        else f"nothing was run here: {found.unmeasured}. Times are those of any machine, within factors of 4 and 8",
        *(f"left out: {axis}, it does not run here: {why}" for axis, why in found.refused.items()),
        f"memory (modelled): {found.memory}; {_beside(found)}; counted with one holder of each part (--copies 1): "
        "elastic runs have two where nothing else is said, and hold more",
        "",
        *(_line(place, each, price) for place, each in enumerate(found.plans, 1)),
        "",
    ]
    if found.gains:
        ordered = sorted(found.gains.items(), key=lambda each: -each[1])
        names = {"width": "trainings at once"}
        told = ", ".join(f"{names.get(axis, axis)} {number(gain, 3)} x" for axis, gain in ordered)
        lines.append(f"twice the workers would make plan 1 faster by (modelled): {told}")
    if found.measured:
        lines += ["", "measured here, one training of each alone:", *(_measured(each) for each in found.measured)]
    return lines


def _beside(found: PlanFound) -> str:
    if found.unmeasured:
        return "what a process takes beside is not known"
    return f"that is without {byte_count(round(found.beside_bytes))} which its process takes beside, measured here"


def _measured(of: MeasuredPlan) -> str:
    low, high = of.step_interval_s
    said = f"{of.mesh} ({of.mechanism}), batch {of.batch}, {of.micro} a pass: step {duration(of.step_s)} predicted"
    if of.measured_step_s is None:
        return f"{said}; not measured: {of.failed}"
    within = "in" if of.within else "outside"
    told = f"{said}, {duration(of.measured_step_s)} measured, error {of.step_error:+.1%} ({within} its interval, "
    told += f"{duration(low)} to {duration(high)}); memory {byte_count(round(of.memory_bytes))} predicted"
    if of.measured_memory_bytes is None:
        return f"{told}, not measured"
    return f"{told}, {byte_count(round(of.measured_memory_bytes))} measured, error {of.memory_error:+.1%}"


def _line(place: int, of: ClusterPlan, price: float) -> str:
    low, high = of.interval_s
    state = ", sharded" if of.sharded else ""
    noise = "" if of.noise_ratio == float("inf") else f", {number(of.noise_ratio, 2)} x the noise scale"
    part, share = of.limits
    return (
        f"{place}. {count(of.width, 'training')} at once x {of.mesh}{state} = {count(of.workers, 'worker')}: tuned in "
        f"{duration(of.seconds)} ({duration(low)} to {duration(high)}, modelled, 80 %), {cost(of.cost, price)}; batch "
        f"{of.batch}{noise}, {of.micro} a pass; step {duration(of.step_s)}, {share:.0%} of it {part}; "
        f"{byte_count(round(of.memory_bytes))} a worker"
    )
