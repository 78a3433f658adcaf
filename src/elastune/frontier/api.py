"""From a user's training function to the main job: ``elastune.find_frontier``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from elastune.cluster.base import Cluster
from elastune.core.clock import SystemClock
from elastune.core.cost import check_price
from elastune.core.divergence import FACTOR
from elastune.core.mesh import Mesh
from elastune.core.run import Config, Means
from elastune.frontier.crews import COUNTS
from elastune.frontier.phases import frontier
from elastune.journal.records import FrontierFound
from elastune.study.api import Train, cluster_asked, prices_asked, program_of, results_folder
from elastune.study.metering import priced
from elastune.study.request import FrontierRequest


def find_frontier(
    train: Train,
    *,
    workers: Sequence[int] | None = None,
    meshes: Sequence[str | Mesh] = (),
    budget_s: float = 180.0,
    target: float | None = None,
    quality: str | None = None,
    margin: float | None = None,
    seeds: int = 3,
    config: Config | None = None,
    means: Means | None = None,
    policies: Sequence[str] = (),
    throughput: bool = False,
    constraints: Sequence[str] = (),
    sampler: str = "auto",
    stopping: str = "none",
    trial_workers: tuple[int, int] | None = None,
    epochs: int | None = None,
    seed: int = 0,
    divergence: float | None = FACTOR,
    out: str | Path | None = None,
    price_per_worker_hour: float = 1.0,
    prices: str | Path | None = None,
    resume: bool = False,
    cluster: Cluster | str | None = None,
    grace_s: float = 0.0,
) -> FrontierFound:
    """How far does ``train`` scale before accuracy pays, and which settings buy it back? As ``elastune frontier``.

    The file of ``train`` defines ``space(trial)``, ``objectives`` and ``config`` with ``lr`` and ``batch_size``, too.

    Args:
        train: A plain function of a file, ``train(session)``.
        workers: Worker counts to ask about, ascending; 1, 2, 4 and 8 where neither they nor ``meshes`` are given.
        meshes: Asked about beside them, such as "data=2,shard=2".
        budget_s: Seconds for all; the naive rule's trainings are always finished.
        target: Quality that must be reached.
        quality: The objective that ``target`` speaks of; the first by default.
        margin: By how much quality may be worse than on the smallest count and still hold.
        seeds: Trainings of a cell of the table, at least 2.
        means: Mode, mechanism and device of all trainings, where the space does not choose them.
        policies: Each is trained and compared beside static settings, such as "gns:max_batch=1024".
        throughput: Look, by short runs, for means that give the same bits sooner.
        out: A folder, or, as text, a URL that fsspec can open.
        cluster: Where trainings run and step times are measured, as ``--cluster`` names it, such as
            "hosts:7070,token_file=token"; by default this machine, beyond whose cores times are modelled.
        prices: A file of what hosts cost by their kind (docs/spot.md), instead of ``price_per_worker_hour``.
        grace_s: Should this process die, trainings go on for so long; the same call with ``resume`` takes them over.
        config, constraints, sampler, stopping, trial_workers, epochs, seed, divergence, resume: As in ``tune``.

    Returns:
        The rows of the table, the front among them, and which to take: ``found.rows[found.pick]``, ``found.command``.

    Raises:
        UserError: For a request that is wrong, or a program that fails with its own settings.

    Example:
        found = elastune.find_frontier(train, workers=(1, 2, 4), target=0.95, budget_s=90)
        print(found.answer, found.command)
    """
    asked = cluster_asked(cluster, grace_s)
    request = FrontierRequest(
        program=program_of(train),
        out=Path(),
        workers=tuple(workers) if workers is not None else () if meshes else COUNTS,
        meshes=tuple(mesh if isinstance(mesh, Mesh) else Mesh.parse(mesh) for mesh in meshes),
        budget_s=budget_s,
        target=target,
        quality=quality,
        margin=margin,
        seeds=seeds,
        means=means or Means(),
        policies=tuple(policies),
        throughput=throughput,
        config=dict(config or {}),
        constraints=tuple(constraints),
        sampler=sampler,
        stopping=stopping,
        trial_workers=trial_workers,
        epochs=epochs,
        seed=seed,
        divergence=divergence,
        price_per_worker_hour=check_price(price_per_worker_hour),
        grace_s=grace_s,
        resume=resume,
    )
    request = priced(request, prices_asked(None, prices, cluster), SystemClock())
    with results_folder(out, request.program, "frontier", resume=resume) as folder:
        return frontier(replace(request, out=folder), cluster=asked)
