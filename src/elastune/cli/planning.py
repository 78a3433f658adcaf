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

    nodes: Annotated[int, typer.Option(help="How many like nodes there are.")]
    gpus_per_node: Annotated[int, typer.Option(help="Workers that a node has room for.")] = 1
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of a worker: 24GiB. [default: its share of this machine's]")
    ] = None
    deadline: Annotated[str | None, typer.Option(metavar="TIME", help="Until all is tuned: 8h.")] = None
    price: options.Price = 1.0
    link: Annotated[str, typer.Option(metavar="SPEED", help="Between nodes, declared: 25Gbit/s.")] = "10Gbit/s"
    mesh: Annotated[str | None, typer.Option(metavar="AXIS=N,...", help="Look at this mesh of a training alone.")] = (
        None
    )

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
        }


@dataclass(frozen=True)
class PlannedSearch:
    """How many trainings a search needs, and what they lose by running at once."""

    runs: Annotated[int, typer.Option(help="Trainings that the search needs, one after another.")] = 128
    crowding: Annotated[
        float | None,
        typer.Option(
            help="More trainings that each further one at once costs, by --runs. [default: as simulated studies]"
        ),
    ] = None
    variation: Annotated[
        float | None,
        typer.Option(help="Coefficient of variation of trainings' lengths. [default: as simulated studies]"),
    ] = None
    generations: Annotated[
        bool, typer.Option("--generations", help="The search waits for all of a round, as a genetic one does.")
    ] = False
    sampler: Annotated[
        str,
        typer.Option(metavar="NAME", help="What proposes: random, grid, genetic (as in tune); others count as TPE."),
    ] = "auto"
    stopping: Annotated[str, typer.Option(metavar="NAME", help="What ends trainings early: none or asha.")] = "none"

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
        float | None, typer.Option(help="Of the gradient, in samples. [default: measured in a few first steps here]")
    ] = None
    calibrate: Annotated[str, typer.Option(metavar="TIME", help="For short runs here: 60s.")] = "60s"
    measure: Annotated[
        int, typer.Option(metavar="K", help="Run the K best plans that have room on this machine, or on --cluster.")
    ] = 0
    from_: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="FOLDER", help="Of earlier runs: those of FILE on like hardware need no probe."),
    ] = None

    def request(self) -> dict[str, Any]:
        """What a ``PlanRequest`` has of it."""
        return {
            "noise_scale": self.noise_scale,
            "calibrate_s": parse.duration(self.calibrate, "--calibrate"),
            "measured": self.measure,
            "earlier": tuple(self.from_ or ()),
        }
