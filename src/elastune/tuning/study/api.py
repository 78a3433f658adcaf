"""The functions ``elastune.run`` and ``elastune.tune``: what the command line offers, for Python programs."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from elastune.core.clock import SystemClock
from elastune.core.communication import Topology
from elastune.core.cost import ON_DEMAND, Prices
from elastune.core.divergence import FACTOR, Divergence, check_factor
from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import RunFinished
from elastune.core.journal.spending import RunMoney, money
from elastune.core.mesh_choice import least_slots
from elastune.core.run import Adapt, Config, Elastic, ExecutionSettings, Program, RunSpec
from elastune.core.sync_plan import SyncChoice, SyncPlan
from elastune.runtime.clusters.base import Cluster
from elastune.runtime.clusters.kind import CapacityRequest, ClusterRequest, opened
from elastune.runtime.clusters.local import LocalKind
from elastune.runtime.clusters.registry import print_line, request_of
from elastune.runtime.job.output import JOURNAL, is_url, mirrored, next_folder
from elastune.runtime.job.resumption import accepted_changes, check_resumed, execution_at_start, may_adopt
from elastune.runtime.job.run import check_free, on_device, print_failure, run_here, run_job
from elastune.runtime.job.validation import check_adapt, spot_watch
from elastune.runtime.placement import from_environment
from elastune.runtime.spot import prices_of
from elastune.train.preflight import examined_meanwhile
from elastune.train.program.load import end_import, load_as_guest
from elastune.train.program.space import Space
from elastune.tuning.study.budget import with_prices
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.results import Study
from elastune.tuning.study.run import tune as run_study

Train = Callable[[Any], None]
LONGEST_S = 366 * 24 * 3600.0  # of ``grace_s``


@dataclass(frozen=True, kw_only=True)
class RunResult(RunFinished):
    """The last record of a run, and what the run has cost.

    Attributes:
        money: The cost, in units of the prices; None without prices.
    """

    money: RunMoney | None = None

    @classmethod
    def of(cls, finished: RunFinished, money: RunMoney | None) -> RunResult:
        """Join the last record ``finished`` and the cost ``money``."""
        return cls(**{field.name: getattr(finished, field.name) for field in fields(finished)}, money=money)


def program_of(train: Train) -> Program:
    """Return the file and the name by which workers import ``train``.

    Its arguments are those of this process if the file is its script. The function does not return to a file that is
    imported for a training: see ``end_import``.

    Raises:
        UserError: For a function that no file defines at its top level.
    """
    end_import()
    file = inspect.getsourcefile(train) if inspect.isfunction(train) else None
    name = getattr(train, "__qualname__", str(train))
    if file is None or not Path(file).is_file() or "." in name or name == "<lambda>":
        fix = "write it as a plain 'def' at the top level of a .py file"
        raise UserError("workers must be able to import the training function", name, fix)
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    is_script = main is not None and Path(main).resolve() == Path(file).resolve()
    return Program(Path(file), name, arguments=tuple(sys.argv[1:]) if is_script else ())


def run(
    train: Train,
    config: Config | None = None,
    *,
    workers: int | None = None,
    seed: int = RunSpec.seed,
    out: str | Path | None = None,
    execution: ExecutionSettings | None = None,
    sync: str = SyncPlan.strategy,
    sync_schedule: str = "",
    topology: str | None = None,
    epochs: int | None = None,
    policies: Sequence[str] = (),
    monitors: Sequence[str] = (),
    divergence: float | None = FACTOR,
    resume: bool = False,
    accept_changes: bool = False,
    cluster: Cluster | str | None = None,
    grace_s: float = Elastic.grace_s,
    price_per_worker_hour: float | None = None,
    prices: str | Path | None = None,
) -> RunResult:
    """Train once: run ``train(session)`` on several worker processes, and return the result.

    Call this function below ``if __name__ == "__main__":``, because every worker imports the file. Under torchrun or
    srun this process is one of the workers that they started. The process then ends inside this call when its work is
    done, and ``out`` must be one folder for all workers.

    Args:
        train: A plain function at the top level of a file.
        config: Settings that replace those of the program's own ``config``.
        workers: Number of worker processes; None: ``execution.workers``. The run has as many slots, or those of
            ``execution`` where these are more.
        seed: The seed of everything random.
        out: The folder of the results, or, as text, a URL that fsspec can open; None: the next free folder.
        execution: Execution settings, such as mode, mechanism and device.
        sync: The training strategy, such as "local:learners=8,every=16" (docs/sync.md).
        sync_schedule: Changes of the strategy at given steps, such as
            "1000=local:learners=8,every=16; 5000=allreduce".
        topology: The routes of the workers' sums, instead of those of ``execution``, such as "tree" or
            "parents=[0,0,1,0]" (docs/topologies.md).
        epochs: Replaces the number of epochs that the program passes to ``session.epochs``.
        policies: Policies as on the command line, such as ``["gns:max_batch=2048"]``. A policy class that the file of
            ``train`` defines has its class name.
        monitors: Monitors as on the command line, such as ``["noise_scale:every=10"]``.
        divergence: The run fails once its training loss is this many times the loss at its start (see
            ``core.divergence``); None: once the loss is not finite.
        resume: Continue the run that is in ``out``.
        accept_changes: With ``resume``: go on although the program or the data have changed. The journal records the
            changes.
        cluster: As in ``tune``.
        grace_s: As in ``tune``.
        price_per_worker_hour: What one worker-hour costs.
        prices: A file with the prices of hosts by their kind (docs/spot.md), instead of ``price_per_worker_hour``.

    Returns:
        The last record of the run: its metrics, training time in seconds, and more. With a price, ``money`` is the cost
        of the run; without one it is None.

    Raises:
        UserError: For a wrong request.
        JobFailed: For a run that ended without a result.

    Example:
        >>> elastune.run(train, {"lr": 0.1}, workers=4).metrics
    """
    program, known_prices = program_of(train), resolve_prices(price_per_worker_hour, prices, cluster)
    place = from_environment(os.environ)
    base = execution or ExecutionSettings()
    if topology is not None:
        base = replace(base, topology=Topology.parse(topology))
    count = place.world if place is not None else base.workers if workers is None else workers
    strategy = SyncChoice.parse(sync, sync_schedule)
    slots = least_slots(replace(base, workers=count), count)
    slots = strategy.slots(slots) if execution is None else slots
    cluster_request, elastic = resolve_cluster(cluster, grace_s), Elastic(grace_s=grace_s)
    if place is not None and (out is None or is_url(str(out))):
        raise UserError("workers of a launcher need one folder", out or "no out", "give out=..., the same for all")
    with results_folder(out, program, "run", resume=resume) as folder:
        first_execution = execution_at_start(folder) if resume and execution is None and base.mode == "exact" else None
        spec = RunSpec(
            program=program,
            out=folder,
            config=dict(config or {}),
            seed=seed,
            execution=replace(
                base, workers=count, num_slots=slots if first_execution is None else first_execution.num_slots
            ),
            sync=strategy.sync,
            sync_schedule=strategy.schedule,
            epochs=epochs,
            resume=resume,
            accept_changes=accept_changes,
            elastic=elastic if place is None else Elastic(),
            adapt=Adapt(tuple(policies), tuple(monitors)),
            divergence=Divergence(check_factor(divergence)),
        )
        adopts = may_adopt(spec)
        if not adopts:
            accepted_changes(spec)
        if longer := check_resumed(spec):
            print_line(f"the run is to be longer than it was begun for: {longer}")
        with nullcontext() if adopts or place is not None else examined_meanwhile(spec):
            loaded = load_as_guest(program, seed)
            check_adapt(spec.adapt, loaded, spec)
            spot = spot_watch(spec, loaded)
        if place is not None:
            code = run_here(spec, on_device(place, spec.execution.device, os.environ), print_failure)
            sys.stdout.flush()
            os._exit(code)  # see comm.group.join
        check_free(folder, resume)
        room = CapacityRequest(folder, count, spec.most_workers, grace_s=grace_s, adopts=adopts, spot=spot)
        with opened(cluster_request, room) as opened_cluster:
            finished = run_job(spec, cluster=opened_cluster)
        return RunResult.of(finished, None if known_prices is None else money(read(folder / JOURNAL), known_prices))


def tune(
    train: Train,
    space: Space,
    *,
    objectives: Mapping[str, str],
    workers: int = StudyRequest.workers,
    trial_workers: tuple[int, int] | None = None,
    allocation: str = StudyRequest.allocation,
    trials: int | None = None,
    budget_s: float | None = None,
    worker_hours: float | None = None,
    until: str | Sequence[str] = (),
    patience: int | None = None,
    target: str | None = None,
    stopping: str = StudyRequest.stopping,
    warm_start: Sequence[str | Path] = (),
    constraints: Sequence[str] = (),
    sampler: str = StudyRequest.sampler,
    config: Config | None = None,
    seed: int = StudyRequest.seed,
    divergence: float | None = StudyRequest.divergence,
    out: str | Path | None = None,
    price_per_worker_hour: float = StudyRequest.price_per_worker_hour,
    prices: str | Path | None = None,
    resume: bool = False,
    accept_changes: bool = False,
    cluster: Cluster | str | None = None,
    grace_s: float = StudyRequest.grace_s,
    sync: str = SyncPlan.strategy,
    sync_schedule: str = "",
    keep: str = StudyRequest.keep,
    keep_bytes: int | None = None,
    plan: str | Path | None = None,
    monitors: Sequence[str] = (),
) -> Study:
    """Search ``space`` for the best trade-offs among several ``objectives``.

    ``space(trial)`` is a define-by-run function as in Optuna: it returns a dict of settings. Some names are reserved:

    - workers, mode, mechanism, mesh, copies, virtual_tensor, schedule, zero_stage, offload, compress, micro_batch and
      policy are execution settings;
    - sync (with learners, every, ...) and sync_schedule set the training strategy.

    A trial whose execution settings do not fit together is infeasible: it does not run, and the study records the
    reason. At least one of ``trials``, ``budget_s``, ``worker_hours`` and ``patience`` must bound the search, or the
    sampler "grid", which ends with its last configuration.

    Args:
        train: A plain function at the top level of a file, ``train(session)``.
        space: The search space.
        objectives: Metric names, each with "max" or "min".
        workers: Number of workers of all trials together.
        trial_workers: (low, high): move workers among the running trials; each trial has from low to high of them,
            and ``high`` slots.
        allocation: How workers are distributed among trials: "short_first", under which the longest trials wait, or
            "steepest" (docs/studies.md).
        trials: Number of trials after which the search ends.
        budget_s: Wall time of the search, in seconds.
        worker_hours: Worker-hours that all trials together may use.
        until: One comparison or several, such as "accuracy >= 0.98": the search ends once one trial has reached all.
        patience: The search ends after this many trials in a row without a better one (in a genetic search:
            generations).
        target: A comparison, such as "accuracy >= 0.97". ``seconds_to_target`` may then be an objective.
        stopping: Early stopping: "asha" pauses trials that are unlikely to reach the front; see ``--stopping``.
        warm_start: Folders of earlier studies. Their best settings are tried first. Results from the same context count
            for the search.
        constraints: Such as "workers * micro_batch == 4096" or "accuracy >= 0.9", in addition to the ``constraints`` in
            the file of ``train``.
        sampler: "auto", "random", "grid", "tpe", "gp", "nsga2", "nsga3", "genetic" or "cmaes".
        config: Settings that replace those of the program's own ``config``; values of ``space`` replace both.
        seed: The seed of everything random.
        divergence: A trial ends as infeasible once its loss is this many times the loss at its start; None: once its
            loss is not finite.
        out: The folder of the results; None: the next free folder. A text may be a URL that fsspec can open: results
            are copied to it, and ``resume`` copies them back.
        price_per_worker_hour: The price of a worker-hour, for the objective ``cost``.
        prices: A file with the prices of hosts by their kind (docs/spot.md), for the objective ``cost``. A host of
            unknown kind counts as an on-demand host.
        resume: Continue the study that is in ``out``.
        accept_changes: With ``resume``: go on although the program, its space or the data have changed. Front and pick
            then consider only later trials.
        cluster: Where trials run, as ``--cluster`` names it (docs/clusters.md), such as
            "hosts:7070,token_file=token,interface=eth0"; None: on this machine.
        grace_s: Seconds for which trials go on if this process dies. The same call with ``resume`` adopts them.
        sync: The training strategy unless ``space`` sets it, as in ``run``.
        sync_schedule: Changes of the strategy, as in ``run``.
        keep: Which trials' weights and predictions stay on the disk, such as "all" or "front+last:3" (see
            ``tune.study.retention``). Ensembles need them.
        keep_bytes: The most bytes of the disk for ``keep``.
        plan: The folder of a plan of this program. No trial gets more workers than are useful by the plan. Until steps
            are measured, the plan also decides how workers are distributed.
        monitors: Monitors of every trial, such as ``["noise_scale"]``, as in ``run``.

    Returns:
        The study: its trials, their front, and what to pick.

    Raises:
        UserError: For a wrong request.

    Example:
        >>> study = elastune.tune(train, space, objectives={"accuracy": "max", "seconds": "min"}, workers=8, trials=50)
        >>> study.front()
        >>> study.pick(accuracy=0.98).command
    """
    program, cluster_request, strategy = (
        program_of(train),
        resolve_cluster(cluster, grace_s),
        SyncChoice.parse(sync, sync_schedule),
    )
    request = StudyRequest(
        program=program,
        out=Path(),
        objectives=dict(objectives),
        constraints=tuple(constraints),
        sampler=sampler,
        trials=trials,
        budget_s=budget_s,
        worker_hours=worker_hours,
        until=(until,) if isinstance(until, str) else tuple(until),
        patience=patience,
        target=target,
        stopping=stopping,
        warm_start=tuple(Path(folder) for folder in warm_start),
        workers=workers,
        trial_workers=trial_workers,
        allocation=allocation,
        execution=replace(StudyRequest.execution, num_slots=strategy.slots(StudyRequest.execution.num_slots)),
        sync=strategy,
        config=dict(config or {}),
        seed=seed,
        divergence=divergence,
        price_per_worker_hour=price_per_worker_hour,
        grace_s=grace_s,
        keep=keep,
        keep_bytes=keep_bytes,
        plan=None if plan is None else Path(plan),
        monitors=tuple(monitors),
        resume=resume,
        accept_changes=accept_changes,
    )
    request = with_prices(request, resolve_prices(None, prices, cluster), SystemClock())
    with results_folder(out, program, "tune", resume=resume) as folder:
        return run_study(replace(request, out=folder), space=space, cluster=cluster_request)


def resolve_prices(price: float | None, file: str | Path | None, cluster: Cluster | str | None) -> Prices | None:
    """Return the prices of worker-hours; None without a price and a file.

    Raises:
        UserError: For a wrong price or file.
    """
    kinds_known = cluster.varies if isinstance(cluster, Cluster) else cluster not in (None, LocalKind.name)
    return prices_of(price, None if file is None else Path(file), ON_DEMAND, any_kind=kinds_known)


def resolve_cluster(cluster: Cluster | str | None, grace_s: float) -> Cluster | ClusterRequest | None:
    """Return the cluster of the workers, or the request for one that is opened later.

    Raises:
        UserError: For a ``grace_s`` that is out of range, or that the given cluster does not support.
    """
    if not 0 <= grace_s <= LONGEST_S:  # nor NaN
        raise UserError("grace_s must be from 0 to a year, in seconds", grace_s, "such as 60.0")
    if grace_s and isinstance(cluster, Cluster):
        fix = 'name it, such as cluster="hosts:7070,token_file=token"'
        raise UserError("with grace_s a cluster must be one that this call opens", type(cluster).__name__, fix)
    return request_of("local" if cluster is None else cluster)


@contextmanager
def results_folder(out: str | Path | None, program: Program, command: str, *, resume: bool) -> Iterator[Path]:
    """Yield the folder for results. When the block ends, the results are in ``out``, also if that is a URL."""
    if out is None:
        if resume:
            raise UserError("resume needs to know what to go on with", "no out", "give out=... of the earlier call")
        yield next_folder(program.path, command)
    else:
        with mirrored(str(out), resume, print_line) as folder:
            yield folder
