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
from elastune.core.run import Adapt, Config, Elastic, ExecutionSettings, Program, RunSpec
from elastune.core.sync_plan import SyncChoice, SyncPlan
from elastune.runtime.clusters.base import Cluster
from elastune.runtime.clusters.kind import CapacityRequest, ClusterRequest, opened
from elastune.runtime.clusters.local import LocalKind
from elastune.runtime.clusters.registry import request_of, say
from elastune.runtime.job.output import JOURNAL, is_url, mirrored, next_folder
from elastune.runtime.job.resumption import accepted_changes, begun_means, check_resumed, may_adopt
from elastune.runtime.job.run import check_free, on_device, print_failure, run_here, run_job
from elastune.runtime.job.validation import check_adapt, spot_watch
from elastune.runtime.placement import from_environment
from elastune.runtime.spot import prices_of
from elastune.train.preflight import examined_meanwhile
from elastune.train.program.load import load_as_guest
from elastune.train.program.space import Space
from elastune.tune.study.budget import with_prices
from elastune.tune.study.request import StudyRequest
from elastune.tune.study.results import Study
from elastune.tune.study.run import tune as run_study

# [run] The result of a run, for the program that called it.


@dataclass(frozen=True, kw_only=True)
class RunResult(RunFinished):
    """The last record of a run, and what the run has cost.

    Attributes:
        money: The cost, in units of the prices; None where no prices were given.
    """

    money: RunMoney | None = None

    @classmethod
    def of(cls, finished: RunFinished, money: RunMoney | None) -> RunResult:
        """Join the last record ``finished`` and the cost ``money``."""
        return cls(**{field.name: getattr(finished, field.name) for field in fields(finished)}, money=money)


# [api] The functions ``elastune.run`` and ``elastune.tune``: what the command line offers, for Python programs.

Train = Callable[[Any], None]
LONGEST_S = 366 * 24 * 3600.0


def program_of(train: Train) -> Program:
    """Return where workers find ``train``: its file and its name.

    Raises:
        UserError: For a function that no file defines at its top level.
    """
    file = inspect.getsourcefile(train) if inspect.isfunction(train) else None
    name = getattr(train, "__qualname__", str(train))
    if file is None or not Path(file).is_file() or "." in name or name == "<lambda>":
        fix = "write it as a plain 'def' at the top level of a .py file"
        raise UserError("workers must be able to import the training function", name, fix)
    return Program(Path(file), name)


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
        workers: Number of worker processes; None: ``means.workers``.
        seed: The seed of everything random.
        out: The folder of the results, or, as text, a URL that fsspec can open; None: the next free folder.
        means: System parameters, such as mode, mechanism and device.
        sync: How workers agree, such as "local:learners=8,every=16" (docs/sync.md).
        sync_schedule: How workers agree from given steps on, such as
            "1000=local:learners=8,every=16; 5000=allreduce".
        topology: The routes of the workers' sums, instead of those of ``execution``, such as "tree" or "parents=[0,0,1,0]"
            (docs/topologies.md).
        epochs: Replaces the number of epochs that the program asks of ``session.epochs``.
        policies: Policies as on the command line, such as ``["gns:max_batch=2048"]``. A policy class that the file of
            ``train`` defines has its class name.
        monitors: Monitors as on the command line, such as ``["noise_scale:every=10"]``.
        divergence: The run fails once its training loss is this many times the loss at its start (see
            ``core.divergence``); None: once the loss is not finite.
        resume: Continue the run that is in ``out``.
        accept_changes: With ``resume``: go on though the program or the data have changed; the journal says what.
        cluster, grace_s: As in ``tune``.
        price_per_worker_hour: What one worker-hour costs.
        prices: A file with the prices of hosts by their kind (docs/spot.md), instead of ``price_per_worker_hour``.

    Returns:
        The last record of the run: its metrics, training time in seconds, and more. With a price its ``money`` says
        what the run has cost; without one ``money`` is None.

    Raises:
        UserError: For a wrong request.
        JobFailed: For a run that ended without a result.

    Example:
        >>> elastune.run(train, {"lr": 0.1}, workers=4).metrics
    """
    program, paid = program_of(train), resolve_prices(price_per_worker_hour, prices, cluster)
    place = from_environment(os.environ)
    base = execution or ExecutionSettings()
    if topology is not None:
        base = replace(base, topology=Topology.parse(topology))
    count = place.world if place is not None else base.workers if workers is None else workers
    agreed = SyncChoice.parse(sync, sync_schedule)
    slots = max(base.num_slots, count)
    slots = agreed.slots(slots) if execution is None else slots
    asked, elastic = resolve_cluster(cluster, grace_s), Elastic(grace_s=grace_s)
    if place is not None and (out is None or is_url(str(out))):
        raise UserError("workers of a launcher need one folder", out or "no out", "give out=..., the same for all")
    with results_folder(out, program, "run", resume=resume) as folder:
        begun = begun_means(folder) if resume and execution is None and base.mode == "exact" else None
        spec = RunSpec(
            program=program,
            out=folder,
            config=dict(config or {}),
            seed=seed,
            execution=replace(base, workers=count, num_slots=slots if begun is None else begun.num_slots),
            sync=agreed.sync,
            sync_schedule=agreed.schedule,
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
        if beyond := check_resumed(spec):
            say(f"the run is to be longer than it was begun for: {beyond}")
        with nullcontext() if adopts or place is not None else examined_meanwhile(spec):
            loaded = load_as_guest(program)
            check_adapt(spec.adapt, loaded, spec)
            spot = spot_watch(spec, loaded)
        if place is not None:
            code = run_here(spec, on_device(place, spec.execution.device, os.environ), print_failure)
            sys.stdout.flush()
            os._exit(code)  # see comm.group.join
        check_free(folder, resume)
        room = CapacityRequest(folder, count, spec.most_workers, grace_s=grace_s, adopts=adopts, spot=spot)
        with opened(asked, room) as found:
            finished = run_job(spec, cluster=found)
        return RunResult.of(finished, None if paid is None else money(read(folder / JOURNAL), paid))


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
      policy set system parameters;
    - sync (with learners, every, ...) and sync_schedule set how workers agree.

    A trial whose system parameters do not go together is infeasible: it does not run, and the study keeps the reason.
    At least one of ``trials``, ``budget_s``, ``worker_hours`` and ``patience`` must bound the search, or the sampler
    "grid", which ends with its last configuration.

    Args:
        train: A plain function at the top level of a file, ``train(session)``.
        space: The search space.
        objectives: Metric names, each with "max" or "min".
        workers: Number of workers of all trials together.
        trial_workers: (low, high): move workers among the running trials; each trial has from low to high of them.
        allocation: How ``trial_workers`` are shared: "short_first", under which the longest trials wait, or "steepest"
            (docs/studies.md).
        trials: Number of trials after which the search ends.
        budget_s: Wall time of the search, in seconds.
        worker_hours: Worker-hours that all trials together may use.
        until: One comparison or several, such as "accuracy >= 0.98": the search ends once one trial has reached all.
        patience: The search ends after this many trials in a row without a better one (in a genetic search:
            generations).
        target: A comparison, such as "accuracy >= 0.97". ``seconds_to_target`` may then be an objective.
        stopping: Early stopping: "asha" pauses trials that do not promise to be on the front; see ``--stopping``.
        warm_start: Folders of earlier studies. Their best settings are tried first; what they measured in the same
            context counts for the search.
        constraints: Such as "workers * micro_batch == 4096" or "accuracy >= 0.9", beside those that the file of
            ``train`` has as ``constraints``.
        sampler: "auto", "random", "grid", "tpe", "gp", "nsga2", "nsga3", "genetic" or "cmaes".
        config: Settings that replace those of the program's own ``config``; values of ``space`` replace both.
        seed: The seed of everything random.
        divergence: A trial ends as infeasible once its loss is this many times the loss at its start; None: once its
            loss is not finite.
        out: The folder of the results; None: the next free folder. Given as text, it may be a URL that fsspec can
            open: results are copied there, and ``resume`` brings them back.
        price_per_worker_hour: The price by which the objective ``cost`` is counted.
        prices: A file with the prices of hosts by their kind (docs/spot.md), for the objective ``cost``. A host that
            does not tell its kind counts as an on-demand host.
        resume: Continue the study that is in ``out``.
        accept_changes: With ``resume``: go on though the program, its space or the data have changed. Front and pick
            are then of the trials since.
        cluster: Where trials run, as ``--cluster`` names it (docs/clusters.md), such as
            "hosts:7070,token_file=token,interface=eth0"; None: on this machine.
        grace_s: Seconds that trials go on without this process, should it die. The same call with ``resume`` takes
            them over.
        sync, sync_schedule: How workers agree where ``space`` does not say it, as in ``run``.
        keep: Which trials' weights and predictions stay on the disk, such as "all" or "front+last:3" (see
            ``study.loop.retention``). Ensembles are made of them.
        keep_bytes: The most bytes of the disk for ``keep``.
        plan: The folder of a plan of this program. No trial gets more workers than the plan says are of use. The plan
            also decides how ``trial_workers`` are shared until steps are measured.
        monitors: What every trial measures, such as ``["noise_scale"]``, as in ``run``.

    Returns:
        The study: its trials, their front, and what to pick.

    Raises:
        UserError: For a wrong request.

    Example:
        >>> study = elastune.tune(train, space, objectives={"accuracy": "max", "seconds": "min"}, workers=8, trials=50)
        >>> study.front()
        >>> study.pick(accuracy=0.98).command
    """
    program, asked, agreed = program_of(train), resolve_cluster(cluster, grace_s), SyncChoice.parse(sync, sync_schedule)
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
        execution=replace(StudyRequest.execution, num_slots=agreed.slots(StudyRequest.execution.num_slots)),
        sync=agreed,
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
        return run_study(replace(request, out=folder), space=space, cluster=asked)


def resolve_prices(price: float | None, file: str | Path | None, cluster: Cluster | str | None) -> Prices | None:
    """Return what a worker-hour costs; None where neither a price nor a file was given.

    Raises:
        UserError: For a wrong price or file.
    """
    told = cluster.varies if isinstance(cluster, Cluster) else cluster not in (None, LocalKind.name)
    return prices_of(price, None if file is None else Path(file), ON_DEMAND, told=told)


def resolve_cluster(cluster: Cluster | str | None, grace_s: float) -> Cluster | ClusterRequest | None:
    """Return where workers run; they are to outlive this process by ``grace_s`` seconds.

    Raises:
        UserError: For a ``grace_s`` that is out of range, or that the given cluster cannot have.
    """
    if not 0 <= grace_s <= LONGEST_S:  # nor NaN
        raise UserError("grace_s must be from 0 to a year, in seconds", grace_s, "such as 60.0")
    if grace_s and isinstance(cluster, Cluster):
        fix = 'name it, such as cluster="hosts:7070,token_file=token"'
        raise UserError("with grace_s a cluster must be one that this call opens", type(cluster).__name__, fix)
    return request_of("local" if cluster is None else cluster)


@contextmanager
def results_folder(out: str | Path | None, program: Program, command: str, *, resume: bool) -> Iterator[Path]:
    """Yield the folder to write results into. When the block ends, the results are where ``out`` says."""
    if out is None:
        if resume:
            raise UserError("resume needs to know what to go on with", "no out", "give out=... of the earlier call")
        yield next_folder(program.path, command)
    else:
        with mirrored(str(out), resume, say) as folder:
            yield folder
