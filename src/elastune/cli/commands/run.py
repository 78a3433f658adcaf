"""``elastune run``: train a program once."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from elastune.cli import options, parse
from elastune.cli.clusters import ClusterOptions
from elastune.cli.flatten import flatten
from elastune.cli.groups import (
    Adapting,
    Agreeing,
    Course,
    Execution,
    FaultOptions,
    Folders,
    Notices,
    RunPrices,
    Training,
)
from elastune.cli.output import FAILED, INTERRUPTED, OK, TRY_AGAIN, WRONG, print_error, print_result
from elastune.cli.setup import choose_workers
from elastune.cli.start import Beginning
from elastune.core.cost import Prices
from elastune.core.divergence import Divergence
from elastune.core.errors import UserError
from elastune.core.run import Elastic, Place, RunSpec
from elastune.job.mirror import is_url

if TYPE_CHECKING:
    from elastune.cli.chaos import Faults, Verdict
    from elastune.cli.progress import Progress, RunTracker
    from elastune.cluster.base import Cluster
    from elastune.cluster.notices import NoticeSource
    from elastune.cluster.spot_watch import SpotWatch
    from elastune.job.run import Observe
    from elastune.journal.records import Record, RunFailed


@flatten
def run(
    file: options.File,
    training: Training,
    execution: Execution,
    folders: Folders,
    faults: FaultOptions,
    notices: Notices,
    where: ClusterOptions,
    course: Course,
    adapting: Adapting,
    money: RunPrices,
    agreeing: Agreeing,
    beginning: Beginning,
    workers: options.Workers = None,
    tensorboard: options.TensorBoard = False,
    heartbeat: options.Heartbeat = f"{Elastic.heartbeat_s:g}s",
    grace: options.Grace = None,
) -> int:
    """Train a program once, on one or more workers.

    Under torchrun, srun or mpirun this process is one of the workers that they started, and the number of workers does
    not change.

    A policy is one of elastune's, one of a plug-in, or a class of FILE that inherits from elastune.Policy. With several
    policies, all are asked.

    Exit code 1: the run failed. Exit code 75: the machine is about to be taken away, as SIGUSR1 or another notice said;
    the run has written a checkpoint.

    --json: {kind: "run", sha256 (of weights, buffers and optimizer state), metrics, seconds (of training), steps,
    samples, workers, mode, mechanism, mesh (where one was asked for), num_slots, sync, sync_changes: [{step, strategy
    or topology, why}], seed, config, stopped, stop_why, step_s, wait_s, changes (how often the workers changed),
    median_pause_s, longest_pause_s, steps_discarded, rounds_short (rounds that ended without a learner),
    samples_left_out (with these learners), memory: [{rank, parameters, gradients, optimizer, copies, activations,
    peak}] (bytes, measured in one step), compress, sent_bytes (of all workers' collectives, in an average step), out}.

    With policies or monitors also adapt: {policies, decisions (how many were applied), disagreed, refused, failed
    (calls that raised), not_measured: {monitor: why}, noise_scale, noise_scale_error, batch_size, lr (all four as
    measured last)}.

    With --accept-changes also changes_accepted: what has changed, from which step on.

    With --chaos also chaos: {faults: {kind: count}, steps_lost, ledger, undisturbed_sha256, equal, ...}. With --price
    or --prices also money, as elastune report tells it.

    A run that fails prints {kind: "run", failed: {reason, detail, rank, exit_code, wanted_bytes (where memory ran
    out)}, out}.
    """
    from elastune.cluster.kinds.kind import RoomWanted, opened
    from elastune.cluster.static import from_environment
    from elastune.job.adoption import may_adopt
    from elastune.job.changes import accepted_changes
    from elastune.job.output_journal import check_free
    from elastune.train.examine_apart import examined_meanwhile

    place = from_environment(os.environ)
    chosen = faults.choose(execution.mode, place)
    asked = where.request()
    if place is not None and not where.local:
        rule = "workers of torchrun, srun or mpirun are where those started them"
        raise UserError(rule, f"--cluster {where.cluster}", "leave it out, or start the command by itself")
    begin, elastic = choose_workers(workers, heartbeat, execution.collective_timeout_s, execution.chosen_mesh)
    elastic = replace(elastic, grace_s=parse.grace(grace))
    if place is not None:
        begin = _static_workers(workers, place, folders.out)
        elastic = Elastic(collective_timeout_s=elastic.collective_timeout_s)
    sources, prices, learners = notices.sources(), money.read(local=where.local), agreeing.learners
    spec = RunSpec(
        program=folders.program(file),
        out=folders.choose(file, "run"),
        config=training.config,
        seed=training.seed,
        means=execution.means(begin, elastic.high, learners),
        epochs=training.epochs,
        resume=folders.resume,
        accept_changes=folders.accept_changes,
        elastic=elastic,
        adapt=adapting.adapt,
        divergence=Divergence(training.factor),
    )
    spec = replace(agreeing.of(course.of(spec)), start_from=beginning.choose())
    if spec.start_from is not None and spec.from_dcp is not None:
        raise UserError("a run begins with one source of weights", "--start-from and --from-dcp", "leave out one")
    spot = _spot(spec) if spec.adapt.policies else None
    if place is not None:
        if spot is not None:
            raise UserError("the policy spot chooses among hosts", "workers of a launcher", "use --cluster hosts:PORT")
        return _run_static(spec, place, folders.json, tensorboard, prices)
    changes = workers is not None and ":" in workers
    check_free(spec.out, spec.resume)
    adopts, least = may_adopt(spec), elastic.low if changes else spec.means.workers
    if not adopts:
        accepted_changes(spec)
    with nullcontext() if adopts else examined_meanwhile(spec):
        tracker = _tracker(spec, adopts=adopts)  # before agents come: loading torch can take longer than they wait
    room = RoomWanted(spec.out, least, spec.most_workers, grace_s=elastic.grace_s, adopts=adopts, spot=spot)
    with opened(asked, room) as cluster:
        if cluster is not None and changes and execution.mesh is None and cluster.free:
            begin = min(elastic.high or begin, cluster.free)
            spec = replace(spec, means=execution.means(begin, elastic.high, learners))
        return _run_local(spec, tracker, folders.json, chosen, sources, tensorboard, cluster, prices)


def _spot(spec: RunSpec) -> SpotWatch | None:
    from elastune.job.spot import spot_watch
    from elastune.train.program.load import load_as_guest

    return spot_watch(spec, load_as_guest(spec.program))


def _run_local(
    spec: RunSpec,
    tracker: RunTracker,
    as_json: bool,
    faults: Faults,
    notices: list[NoticeSource],
    tensorboard: bool,
    cluster: Cluster | None,
    prices: Prices | None,
) -> int:
    from elastune.cli.progress import Progress
    from elastune.job.run import JobFailed, run_job

    injector = faults.injector(spec, tracker.epochs)
    noticed = False
    with Progress(tracker) as progress, _observing(spec, progress, tensorboard) as observe:
        try:
            run_job(spec, cluster=cluster, observe=observe, notices=notices, injector=injector)
        except JobFailed as failed:  # the journal tells of it, too
            noticed = failed.noticed
        finally:
            for source in notices:
                source.close()
    code = _tell(spec.out, as_json, faults.verdict(spec, injector), prices)
    return TRY_AGAIN if noticed else code


def _run_static(spec: RunSpec, place: Place, as_json: bool, tensorboard: bool, prices: Prices | None) -> NoReturn:
    """Be one worker; rank 0 also shows progress and tells the result. Ends the process: see ``comm.group.join``."""
    from elastune.cli.progress import Progress
    from elastune.job.run import on_device, run_here

    place = on_device(place, spec.means.device, os.environ)
    if place.rank != 0:
        code = run_here(spec, place)
    else:
        with Progress(_tracker(spec)) as progress, _observing(spec, progress, tensorboard) as observe:
            run_here(spec, place, observe)
        code = _tell(spec.out, as_json, prices=prices)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def _observing(spec: RunSpec, progress: Progress, tensorboard: bool) -> Iterator[Observe]:
    """Who is told of every record: progress, and the event files where they are wanted."""
    if not tensorboard:
        yield progress.observe
        return
    from elastune.report.events import EventFiles

    with EventFiles(spec.out) as events:

        def observe(record: Record) -> None:
            progress.observe(record)
            events.hear(record)

        yield observe


def _tracker(spec: RunSpec, *, adopts: bool = False) -> RunTracker:
    """``adopts``: workers may wait to be taken over; they do not wait until the program, and torch, are loaded."""
    from elastune.cli.progress import RunTracker
    from elastune.train.program.load import load_as_guest

    own = {}
    if not adopts:
        importlib.import_module("torch")  # where it cannot be loaded that is not the program's fault
        from elastune.job.validate_means import check_means

        check_means(spec)
        own = load_as_guest(spec.program).config
    epochs = spec.epochs or {**own, **spec.config}.get("epochs")
    return RunTracker(epochs if isinstance(epochs, int) else None, spec.max_steps)


def _tell(out: Path, as_json: bool, chaos: Verdict | None = None, prices: Prices | None = None) -> int:
    from elastune.cli.results import result_of, with_money

    result = replace(result_of(out), tables=())  # decisions: progress has told of each
    if prices is not None:
        result = with_money(result, out, prices)
    failure = result.failure
    if chaos is not None:
        result = replace(result, data={**result.data, "chaos": chaos.data}, lines=(*result.lines, *chaos.lines))
    if failure is None or (as_json and failure.reason != "user_error"):
        print_result(result, as_json=as_json)
    if failure is not None:
        if chaos is not None and not as_json:
            print("\n".join(chaos.lines))
        return _explain(failure, out)
    if result.stopped in ("requested", "notice"):
        why = "stopped on request" if result.stopped == "requested" else "stopped: this machine will be taken away"
        print_error(f"{why}; go on with --resume --out {out}")
        return INTERRUPTED if result.stopped == "requested" else TRY_AGAIN
    return OK if result.stopped != "unfinished" and (chaos is None or chaos.good) else FAILED


def _explain(failure: RunFailed, out: Path) -> int:
    if failure.reason == "user_error":
        print_error(failure.detail)
        return WRONG
    log = out / "logs" / f"worker-{failure.rank}.log"
    where = f" (log: {log})" if log.exists() else ""
    print_error(f"the run failed on worker {failure.rank}, {failure.reason.replace('_', ' ')}: {failure.detail}{where}")
    return FAILED


def _static_workers(workers: str | None, place: Place, out: str | None) -> int:
    if workers not in (None, str(place.world)):
        raise UserError("the launcher has started the workers", f"--workers {workers}", f"it started {place.world}")
    if out is None or is_url(out):
        raise UserError("workers of a launcher need one folder", out or "no --out", "give --out, the same for all")
    return place.world
