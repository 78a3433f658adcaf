"""``elastune run``: train a program once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from elastune.cli import options
from elastune.cli.clusters import ClusterOptions
from elastune.cli.flatten import flatten
from elastune.cli.groups import Execution, FaultOptions, Folders, Notices, Training
from elastune.cli.output import FAILED, INTERRUPTED, OK, TRY_AGAIN, WRONG, print_error, print_result
from elastune.cli.setup import choose_workers
from elastune.core.divergence import Divergence
from elastune.core.errors import UserError
from elastune.core.run import Adapt, Elastic, Place, Program, RunSpec

if TYPE_CHECKING:
    from elastune.cli.chaos import Faults, Verdict
    from elastune.cli.progress import Progress, RunTracker
    from elastune.cluster.base import Cluster
    from elastune.cluster.notices import NoticeSource
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
    workers: options.Workers = None,
    max_steps: Annotated[int | None, typer.Option(help="End after this many steps.")] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Checkpoint every N steps too, not only each epoch; 0: never.")
    ] = None,
    from_dcp: options.FromDcp = None,
    policy: options.Policies = None,
    monitor: options.Monitors = None,
    tensorboard: options.TensorBoard = False,
    heartbeat: options.Heartbeat = "5s",
    collective_timeout: options.CollectiveTimeout = "30m",
) -> int:
    """Train FILE.

    Under torchrun, srun or mpirun this process is one of the workers that they started, and workers do not change.
    Policies are elastune's, a plug-in's, or classes of FILE that inherit from elastune.Policy; with several, all are
    asked.

    --json: {kind: "run", sha256, metrics, seconds, steps, samples, workers, mode, mechanism, mesh (where one was
    asked for), num_slots, seed, config, stopped, step_s, wait_s, changes (how often the workers changed),
    median_pause_s, longest_pause_s, steps_discarded, memory: [{rank, parameters, gradients, optimizer, copies,
    activations, peak}] (bytes, measured in one step), out},
    with policies or monitors also adapt: {policies, decisions (how many were applied), disagreed, refused, failed
    (calls that raised), not_measured: {monitor: why}, noise_scale, noise_scale_error, batch_size, lr (all four as
    measured last)},
    with --chaos also chaos: {faults: {kind: count}, steps_lost, ledger, undisturbed_sha256, equal, ...}. sha256 is that
    of weights, buffers and optimizer state; seconds are those of training. A run that fails prints {kind: "run",
    failed: {reason, detail, rank, exit_code, wanted_bytes (where memory ran out)}, out} and exits with 1. SIGUSR1, a
    notice: a checkpoint, exit code 75.
    """
    from elastune.cluster.static import from_environment

    place = from_environment(os.environ)
    chosen = faults.choose(execution.mode, place)
    if where.place().port is not None and place is not None:
        rule = "workers of torchrun, srun or mpirun are where those started them"
        raise UserError(rule, f"--cluster {where.cluster}", "leave it out, or start the command by itself")
    begin, elastic = choose_workers(workers, heartbeat, collective_timeout, execution.chosen_mesh)
    if place is not None:
        begin = _static_workers(workers, place, folders.out)
        elastic = Elastic(collective_timeout_s=elastic.collective_timeout_s)
    _at_least("--epochs", training.epochs, 1)
    _at_least("--max-steps", max_steps, 1)
    _at_least("--checkpoint-every", checkpoint_every, 0)
    sources = notices.sources()
    spec = RunSpec(
        program=Program(file),
        out=folders.choose(file, "run"),
        config=training.config,
        seed=training.seed,
        means=execution.means(begin, most_workers=elastic.high),
        epochs=training.epochs,
        max_steps=max_steps,
        checkpoint_every_steps=checkpoint_every,
        resume=folders.resume,
        from_dcp=_dcp(from_dcp),
        elastic=elastic,
        adapt=Adapt(tuple(policy or ()), tuple(monitor or ())),
        divergence=Divergence(training.factor),
    )
    if place is not None:
        return _run_static(spec, place, folders.json, tensorboard)
    changes = workers is not None and ":" in workers
    with where.hosts(elastic.low if changes else spec.means.workers) or nullcontext() as cluster:
        if cluster is not None and changes and execution.mesh is None:
            begin = min(elastic.high or begin, cluster.free)
            spec = replace(spec, means=execution.means(begin, most_workers=elastic.high))
        return _run_local(spec, folders.json, chosen, sources, tensorboard, cluster)


def _run_local(
    spec: RunSpec,
    as_json: bool,
    faults: Faults,
    notices: list[NoticeSource],
    tensorboard: bool,
    cluster: Cluster | None,
) -> int:
    from elastune.cli.progress import Progress
    from elastune.job.run import JobFailed, run_job

    tracker = _tracker(spec)
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
    code = _tell(spec.out, as_json, faults.verdict(spec, injector))
    return TRY_AGAIN if noticed else code


def _run_static(spec: RunSpec, place: Place, as_json: bool, tensorboard: bool) -> NoReturn:
    """Be one worker; rank 0 also shows progress and tells the result. Ends the process: see ``comm.group.join``."""
    from elastune.cli.progress import Progress
    from elastune.job.run import on_device, run_here

    place = on_device(place, spec.means.device, os.environ)
    if place.rank != 0:
        code = run_here(spec, place)
    else:
        with Progress(_tracker(spec)) as progress, _observing(spec, progress, tensorboard) as observe:
            run_here(spec, place, observe)
        code = _tell(spec.out, as_json)
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


def _tracker(spec: RunSpec) -> RunTracker:
    from elastune.cli.progress import RunTracker
    from elastune.train.program.load import load_as_guest

    epochs = spec.epochs or {**load_as_guest(spec.program).config, **spec.config}.get("epochs")
    return RunTracker(epochs if isinstance(epochs, int) else None, spec.max_steps)


def _tell(out: Path, as_json: bool, chaos: Verdict | None = None) -> int:
    from elastune.cli.results import result_of

    result = replace(result_of(out), tables=())  # decisions: progress has told of each
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


def _static_workers(workers: str | None, place: Place, out: Path | None) -> int:
    if workers not in (None, str(place.world)):
        raise UserError("the launcher has started the workers", f"--workers {workers}", f"it started {place.world}")
    if out is None:
        raise UserError("workers of a launcher need one folder", "no --out", "give --out, the same for all")
    return place.world


def _dcp(folder: Path | None) -> Path | None:
    if folder is not None and not (folder / ".metadata").is_file():
        rule = "--from-dcp names a checkpoint of torch.distributed.checkpoint"
        raise UserError(rule, folder, "name the folder that has its .metadata")
    return folder


def _at_least(option: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise UserError(f"{option} must be at least {low}", value, "leave it out or raise it")
