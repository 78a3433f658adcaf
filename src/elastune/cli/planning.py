"""Options of a plan: the cluster that is to be split, the search that it is for, and what is measured for it here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from elastune.cli import options, parse
from elastune.core.mesh import Mesh

if TYPE_CHECKING:
    from elastune.plan.search_time import Stopping


@dataclass(frozen=True)
class PlannedCluster:
    """How many workers there are, what they hold and cost, and until when."""

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
        """What a ``PlanRequest`` has of it."""
        from elastune.frontier.machine_probes import NodeLink
        from elastune.plan.cluster_plan import PlanBounds
        from elastune.plan.divisions import Nodes

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
    """How many trainings a search needs, and what they lose by running at once."""

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
        """What a ``PlanRequest`` has of it."""
        return {
            "runs": self.runs,
            "crowding": self.crowding,
            "variation": self.variation,
            "generations": self.generations,
            "sampler": self.sampler,
            "stopping": cast("Stopping", self.stopping),
        }


@dataclass(frozen=True)
class Probing:
    """What is measured here, or was before."""

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
        """What a ``PlanRequest`` has of it."""
        return {
            "noise_scale": self.noise_scale,
            "calibrate_s": parse.duration(self.calibrate, "--calibrate"),
            "probe": self.probe,
            "measured": self.measure,
            "earlier": tuple(self.from_ or ()),
        }
