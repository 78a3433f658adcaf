"""The function ``elastune.find_frontier``: the main job, for Python programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from elastune.cluster.base import Cluster
from elastune.core.clock import SystemClock
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
    budget_s: float | None = 180.0,
    short: bool = False,
    target: float | None = None,
    quality: str | None = None,
    margin: float | None = None,
    seeds: int = FrontierRequest.seeds,
    config: Config | None = None,
    means: Means | None = None,
    policies: Sequence[str] = (),
    throughput: bool = False,
    constraints: Sequence[str] = (),
    sampler: str = FrontierRequest.sampler,
    stopping: str = FrontierRequest.stopping,
    trial_workers: tuple[int, int] | None = None,
    epochs: int | None = None,
    seed: int = FrontierRequest.seed,
    divergence: float | None = FrontierRequest.divergence,
    out: str | Path | None = None,
    price_per_worker_hour: float = FrontierRequest.price_per_worker_hour,
    prices: str | Path | None = None,
    resume: bool = False,
    accept_changes: bool = False,
    cluster: Cluster | str | None = None,
    grace_s: float = FrontierRequest.grace_s,
) -> FrontierFound:
    """Find how far ``train`` scales before accuracy pays, and which settings buy it back.

    This is ``elastune frontier`` as a function. The file of ``train`` must also define ``space(trial)``,
    ``objectives``, and a ``config`` with ``lr`` and ``batch_size``.

    Args:
        train: A plain function at the top level of a file, ``train(session)``.
        workers: Worker counts to ask about, ascending; 1, 2, 4 and 8 where neither ``workers`` nor ``meshes`` are
            given.
        meshes: Meshes to ask about as well, such as "data=2,shard=2".
        budget_s: Seconds for all phases, of which at least two fifths are for the search; None: as long as all of them
            take, by the first steps.
        short: In a budget that is too small for a search, do the rest, and say that the search was left out.
        target: The quality that must be reached.
        quality: The objective that ``target`` is about; None: the first.
        margin: By how much quality may be worse than on the smallest worker count and still hold.
        seeds: Trainings of each cell of the table, at least 2.
        config: Settings that replace those of the program's own ``config``.
        means: Mode, mechanism and device of all trainings, where the space does not choose them.
        policies: Policies to train and compare beside static settings, such as "gns:max_batch=1024".
        throughput: Look, by short runs, for system parameters that give the same bits in less time.
        epochs: Replaces the number of epochs that the program asks of ``session.epochs``.
        out: A folder, or, as text, a URL that fsspec can open.
        cluster: Where trainings run and step times are measured, as ``--cluster`` names it, such as
            "hosts:7070,token_file=token"; None: this machine. Times for more workers than it has cores are modelled.
        prices: A file with the prices of hosts by their kind (docs/spot.md), instead of ``price_per_worker_hour``.
        grace_s: Seconds that trainings go on without this process, should it die. The same call with ``resume`` takes
            them over.
        constraints, sampler, stopping, trial_workers, seed, divergence, price_per_worker_hour, resume,
            accept_changes: As in ``tune``.

    Returns:
        The rows of the table, the front among them, and ``found.answer``: which row to take
        (``found.rows[found.pick]``), what its settings and what its workers buy, and ``found.command``.

    Raises:
        UserError: For a wrong request, for a program that fails with its own settings, and for a budget that is too
            small, once the first steps were measured; the fix names the budget that it needs.

    Example:
        >>> found = elastune.find_frontier(train, workers=(1, 2, 4), target=0.95, budget_s=90)
        >>> print(found.answer.sentence, found.command)
    """
    asked = cluster_asked(cluster, grace_s)
    request = FrontierRequest(
        program=program_of(train),
        out=Path(),
        workers=tuple(workers) if workers is not None else () if meshes else COUNTS,
        meshes=tuple(mesh if isinstance(mesh, Mesh) else Mesh.parse(mesh) for mesh in meshes),
        budget_s=budget_s,
        short=short,
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
        price_per_worker_hour=price_per_worker_hour,
        grace_s=grace_s,
        resume=resume,
        accept_changes=accept_changes,
    )
    request = priced(request, prices_asked(None, prices, cluster), SystemClock())
    with results_folder(out, request.program, "frontier", resume=resume) as folder:
        return frontier(replace(request, out=folder), cluster=asked)
