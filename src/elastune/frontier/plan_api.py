"""The function ``elastune.find_plan``: how to split a cluster, for Python programs."""

from __future__ import annotations

import shlex
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
    device: str | None = None,
    probe: bool = False,
    copies: int = 1,
    out: str | Path | None = None,
    earlier: Sequence[str | Path] = (),
    config: Config | None = None,
    seed: int = 0,
) -> PlanFound:
    """Find how to split a cluster to tune ``train``.

    This is ``elastune plan`` (docs/planning.md) as a function. It rehearses one step without workers, calibrates the
    step model by short runs on this machine, and judges every division of the cluster. All times of plans are modelled.

    Args:
        train: A plain function at the top level of a file, ``train(session)``.
        nodes: Number of equal nodes.
        workers_per_node: Number of workers that fit on a node.
        memory_bytes: Memory of one worker, in bytes; None: its share of this machine's memory.
        deadline_s: Seconds until the search must be done. With it, the cheapest plans that keep it are found; without
            it, the fastest plans.
        price_per_worker_hour: The unit of all costs.
        runs: Trainings that the search needs, if they run one after another.
        crowding: How many more trainings each further training at once costs, relative to ``runs``; None: as in
            simulated studies.
        variation: The coefficient of variation of the trainings' lengths; None: as in simulated studies.
        generations: Whether the search waits for all trainings of a round before it goes on.
        sampler: The sampler of the search, as ``elastune.tune`` names it. "random" loses nothing by trainings at once;
            a genetic search that waits for its generations loses nothing within one; any other counts as TPE.
        stopping: What ends trainings early: "none" or "asha".
        mesh: Look at no other mesh of a training than this one, such as "data=4,tensor=2"; None: all meshes.
        link_gbit_s: Declared bandwidth between nodes, in Gbit/s.
        noise_scale: The gradient's noise scale, in samples; None: measured here in a few first steps.
        calibrate_s: Seconds for short runs on this machine.
        top: Number of plans to return.
        measure: How many of the best plans to run. ``found.measured`` then has predicted and measured figures.
        cluster: The cluster that the plan is for, as ``--cluster`` names it. It stands in the commands, and ``probe``
            and ``measure`` run there, which needs ``out``. None: they run on this machine.
        device: What each worker has, such as "h100": times and memory are then assumed from its data sheet.
        probe: Calibrate by short runs on a node of ``cluster``, not on this machine.
        copies: Workers that hold each part of divided state, as ``--copies``. Memory is counted with as many.
        out: A new folder that keeps the plan and the measured runs.
        earlier: Folders of earlier runs: those of ``train`` on equal hardware need no probe.
        config: Settings that replace those of the program's own ``config``.
        seed: The seed of everything random.

    Returns:
        The plans, the best first; what was measured for them; and what the program is made of.

    Raises:
        UserError: For a wrong request, a program that fails, memory that nothing fits, and a deadline that no plan
            keeps.

    Example:
        >>> found = elastune.find_plan(train, nodes=16, workers_per_node=8, memory_bytes=24 * 2**30)
        >>> print(found.plans[0].mesh, found.plans[0].interval_s)
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
        cluster_words=f"--cluster {shlex.quote(cluster)}" if isinstance(cluster, str) else "",
        device=device,
        probe=probe,
        copies=copies,
        out=None if out is None else Path(out),
        earlier=tuple(Path(each) for each in earlier),
    )
    found = plan_cluster(request)
    keep_plan(request, found)
    return found
