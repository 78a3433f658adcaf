"""``elastune plan``: how to split a cluster, before anything is launched on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from elastune.cli import options, parse
from elastune.cli.flatten import flatten
from elastune.cli.groups import ClusterOptions
from elastune.cli.output import OK, print_json, print_lines
from elastune.cli.parse import use_data
from elastune.core.mesh import Mesh

if TYPE_CHECKING:
    from elastune.core.plan.search_time import Stopping


# --- options ---


@dataclass(frozen=True)
class PlannedCluster:
    """The cluster to plan for: its workers, their memory and price, and the deadline."""

    nodes: Annotated[int, typer.Option(help="Number of nodes, all alike.")]
    gpus_per_node: Annotated[int, typer.Option(help="Number of workers that each node has room for.")] = 1
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Memory of each worker, such as 24GiB. [default: its share of this machine's]"
        ),
    ] = None
    deadline: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time that the whole search may take, such as 8h.")
    ] = None
    price: options.Price = 1.0
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What each worker has: h200, h100, a100, a100-40gb, v100, l40s, l4, a10, t4 or cpu (one core). Times "
            "and memory are then assumed from its data sheet, and nothing is run here. [default: as this machine]",
        ),
    ] = None
    copies: Annotated[
        int,
        typer.Option(
            help="How many workers hold each part of divided state; memory is counted so. With 2 a lost worker costs "
            "no progress, as in elastune run where nothing is said."
        ),
    ] = 1
    link: Annotated[
        str,
        typer.Option(metavar="SPEED", help="Speed of the link between nodes, such as 25Gbit/s. It is not measured."),
    ] = "10Gbit/s"
    mesh: Annotated[
        str | None,
        typer.Option(metavar="AXIS=N,...", help="Judge only this mesh for a training, such as data=4,tensor=2."),
    ] = None

    def request(self) -> dict[str, Any]:
        """The fields of a ``PlanRequest`` that these options set."""
        from elastune.core.plan.cluster_plan import Nodes, PlanBounds
        from elastune.tuning.cluster_plan.probes import NodeLink

        memory, deadline = self.memory, self.deadline
        return {
            "nodes": Nodes(self.nodes, self.gpus_per_node),
            "bounds": PlanBounds(
                None if memory is None else parse.size(memory, "--memory"),
                None if deadline is None else parse.duration(deadline, "--deadline"),
                self.price,
            ),
            "link": NodeLink(parse.seconds_per_byte(self.link)),
            "mesh": None if self.mesh is None else Mesh.parse(self.mesh),
            "device": self.device,
            "copies": self.copies,
        }


@dataclass(frozen=True)
class PlannedSearch:
    """The search to plan for: its number of trainings, and their loss by running at once."""

    runs: Annotated[
        int, typer.Option(help="Number of trainings that the search would need if they ran one after another.")
    ] = 128
    crowding: Annotated[
        float | None,
        typer.Option(
            help="Extra trainings that each further training at once costs, as a share of --runs, such as 0.08: "
            "proposals that are made at once know less of one another. [default: from simulated studies]"
        ),
    ] = None
    variation: Annotated[
        float | None,
        typer.Option(help="Coefficient of variation of the trainings' lengths. [default: from simulated studies]"),
    ] = None
    generations: Annotated[
        bool,
        typer.Option("--generations", help="The search waits for all trainings of a round, as a genetic search does."),
    ] = False
    sampler: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Sampler of the search, as in tune: random, grid or genetic; others count as TPE."
        ),
    ] = "auto"
    stopping: Annotated[str, typer.Option(metavar="NAME", help="Early stopping of the search: none or asha.")] = "none"

    def request(self) -> dict[str, Any]:
        """The fields of a ``PlanRequest`` that these options set."""
        return {
            "runs": self.runs,
            "crowding": self.crowding,
            "variation": self.variation,
            "generations": self.generations,
            "sampler": self.sampler,
            "stopping": cast("Stopping", self.stopping),
        }


@dataclass(frozen=True)
class MeasurementOptions:
    """The measurements that a plan uses: new ones on this machine, or earlier ones."""

    noise_scale: Annotated[
        float | None,
        typer.Option(help="Gradient noise scale in samples. [default: measured here in a few first steps]"),
    ] = None
    calibrate: Annotated[
        str, typer.Option(metavar="TIME", help="Time for short runs on this machine, which calibrate the model.")
    ] = "60s"
    probe: Annotated[
        bool,
        typer.Option(
            "--probe",
            help="Calibrate by short runs on one node of --cluster, not on this machine. It needs --out, and --memory "
            "or --device.",
        ),
    ] = False
    measure: Annotated[
        int,
        typer.Option(
            metavar="K",
            help="Train 12 steps of each of the K best plans that have room on this machine, or on --cluster, and "
            "compare them with the prediction.",
        ),
    ] = 0
    from_: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            metavar="FOLDER",
            help="Folder of earlier runs. What they measured of FILE on like hardware is not probed again.",
        ),
    ] = None

    def request(self) -> dict[str, Any]:
        """The fields of a ``PlanRequest`` that these options set."""
        return {
            "noise_scale": self.noise_scale,
            "calibrate_s": parse.duration(self.calibrate, "--calibrate"),
            "probe": self.probe,
            "measured": self.measure,
            "earlier": tuple(self.from_ or ()),
        }


# --- elastune plan ---


@flatten
def plan(
    file: options.File,
    cluster: PlannedCluster,
    search: PlannedSearch,
    probing: MeasurementOptions,
    where: ClusterOptions,
    arguments: options.Arguments = None,
    top: Annotated[int, typer.Option(help="Number of plans to show.")] = 5,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder for the plan and the measured runs, which elastune report, explain and --from read. "
            "[default: nothing is kept]",
        ),
    ] = None,
    set_: options.Set = None,
    data: options.Data = None,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> int:
    """Plan how to split a cluster to tune a program.

    A plan says how many trainings run at once, and on which mesh (data x shard x tensor x pipeline) each of them
    trains. Each plan has its time, cost and memory. All times are modelled: nodes are taken to have this machine's
    workers, those of --device, or those that --probe measures on --cluster.

    One step of FILE is first rehearsed, without workers and without the memory that it takes. If no division has enough
    memory, that is the answer. Then a few short runs on this machine calibrate the model of a step, if this machine has
    the memory. Then every division of the cluster is judged. A plan keeps --deadline if the upper end of its interval
    of time keeps it: in nine cases of ten.

    The commands that are printed run as they are on --cluster. Without it those for several nodes have a placeholder.

    With --out the answer is kept in a journal, which elastune report and elastune explain read. See docs/planning.md.

    --json: {kind: "plan", plans: [{width, mesh, sharded, batch, micro, step_s, step_interval_s, seconds, interval_s,
    cost, cost_interval, memory_bytes, copied_bytes (with two holders of each part), most_parameters (bytes of those
    that would fit so), noise_ratio, limits: [part, share], workers, odds (of keeping --deadline), command (one training
    of it), search_command (the search; null for a FILE without space(trial) or objectives)}], command_notes (what is to
    be known of the first plan's commands), gains: {axis: factor of twice the workers}, reasons: {axis: why}, size:
    {...}, search: {...}, noise ("given", "measured", "unknown"), probed: {mesh and pass: seconds of a step}, refused:
    {axis: why}, memory (in words), worker_bytes (bound of a worker), beside_bytes (of its process beside that),
    constants: {name: seconds}, unmeasured (why nothing was run here), assumed (of --device), too_small (why one
    training cannot use all workers), lacks (what FILE needs to be searched), chosen (settings that its space chooses),
    measured: [{mesh, mechanism, batch, micro, step_s, step_interval_s, memory_bytes, measured_step_s,
    measured_memory_bytes, step_error, memory_error, within, failed}]}.
    """
    from elastune.core.run import Program
    from elastune.report.plan import plan_lines
    from elastune.tuning.cluster_plan.find_plan import PlanRequest, keep_plan, plan_cluster

    requests = {**cluster.request(), **search.request()}
    use_data(data)
    request = PlanRequest(
        program=Program(file, arguments=tuple(arguments or ())),
        **requests,
        **probing.request(),
        config=parse.settings(set_ or []),
        seed=seed,
        shown=top,
        cluster=where.request() if not where.local and (probing.probe or probing.measure) else None,
        cluster_words=where.words,
        out=out,
    )
    made = keep_plan(request, plan_cluster(request))
    if json:
        print_json({"kind": "plan", **made.answer})
    else:
        print_lines("\n".join(plan_lines(made)))
    return OK
