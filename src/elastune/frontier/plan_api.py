"""From a user's training function to a plan of a cluster: ``elastune.find_plan``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from elastune.cluster.base import Cluster
from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import Config
from elastune.frontier.cluster_planning import PlanFound, PlanRequest, plan_cluster
from elastune.frontier.machine_probes import NodeLink
from elastune.frontier.plan_record import keep_plan
from elastune.plan.cluster_plan import PlanBounds
from elastune.plan.divisions import Nodes
from elastune.plan.search_time import Stopping
from elastune.study.api import Train, cluster_asked, program_of

BITS = 8  # of a byte


def find_plan(
    train: Train,
    *,
    nodes: int,
    workers_per_node: int = 1,
    memory_bytes: float | None = None,
    deadline_s: float | None = None,
    price_per_worker_hour: float = 1.0,
    runs: int = 128,
    crowding: float | None = None,
    variation: float | None = None,
    generations: bool = False,
    sampler: str = "auto",
    stopping: Stopping = "none",
    mesh: str | None = None,
    link_gbit_s: float = 10.0,
    noise_scale: float | None = None,
    calibrate_s: float = 60.0,
    top: int = 5,
    measure: int = 0,
    cluster: Cluster | str | None = None,
    out: str | Path | None = None,
    earlier: Sequence[str | Path] = (),
    config: Config | None = None,
    seed: int = 0,
) -> PlanFound:
    """How should a cluster be split to tune ``train``? As ``elastune plan`` (docs/planning.md).

    One step is rehearsed without workers, short runs on this machine calibrate the step model, and every division of
    the cluster is judged. All times of plans are modelled.

    Args:
        train: A plain function of a file, ``train(session)``.
        nodes: How many like nodes there are.
        workers_per_node: That a node has room for.
        memory_bytes: Of a worker; None: its share of this machine's.
        deadline_s: Until all is tuned: the cheapest plans that keep it are found, instead of the fastest.
        price_per_worker_hour: What costs are told in.
        runs: Trainings that the search needs, one after another.
        crowding: More trainings that each further one at once costs, relative to ``runs``; None: as simulated studies.
        variation: The coefficient of variation of trainings' lengths; None: as simulated studies had.
        generations: Whether the search waits for all of a round before it goes on.
        sampler: What proposes, as ``elastune.tune`` names it: "random" loses nothing by trainings at once, a genetic
            search that waits for its generations nothing within one; any other is taken for TPE.
        stopping: What ends trainings early: "none" or "asha".
        mesh: The only one of a training that is looked at, such as "data=4,tensor=2"; None: all.
        link_gbit_s: Between nodes, declared.
        noise_scale: Of the gradient, in samples; None: measured in a few first steps here.
        calibrate_s: For short runs on this machine.
        top: How many plans are told.
        measure: How many of the best are run here: ``found.measured`` has what was predicted and what was measured.
        cluster: Where those run, as ``--cluster`` names it; None: on this machine. It needs ``out``.
        out: A folder, not there yet, that keeps the plan and the runs that are measured.
        earlier: Folders of earlier runs: those of ``train`` on like hardware need no probe.
        config: Over the program's own settings.
        seed: Of everything random.

    Returns:
        The plans, the best first, what was measured for them, and what the program is made of.

    Raises:
        UserError: For a request that is wrong, a program that fails, memory that nothing fits, and a deadline that no
            plan keeps.

    Example:
        found = elastune.find_plan(train, nodes=16, workers_per_node=8, memory_bytes=24 * 2**30)
        print(found.plans[0].mesh, found.plans[0].interval_s)
    """
    if not 0 < link_gbit_s < float("inf"):
        raise UserError("link_gbit_s must be a number above 0", link_gbit_s, "such as 10.0")
    request = PlanRequest(
        program=program_of(train),
        nodes=Nodes(nodes, workers_per_node),
        bounds=PlanBounds(memory_bytes, deadline_s, price_per_worker_hour),
        runs=runs,
        link=NodeLink(BITS / (link_gbit_s * 1e9)),
        calibrate_s=calibrate_s,
        config=dict(config or {}),
        seed=seed,
        noise_scale=noise_scale,
        crowding=crowding,
        variation=variation,
        generations=generations,
        sampler=sampler,
        stopping=stopping,
        mesh=None if mesh is None else Mesh.parse(mesh),
        shown=top,
        measured=measure,
        cluster=None if cluster is None else cluster_asked(cluster, 0.0),
        out=None if out is None else Path(out),
        earlier=tuple(Path(each) for each in earlier),
    )
    found = plan_cluster(request)
    keep_plan(request, found)
    return found
