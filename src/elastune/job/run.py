"""Run one job to its end: start its workers, keep its journal, tell how it ended."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from elastune.cluster.base import Cluster, ElasticHandle, Handle
from elastune.cluster.devices import assign, devices
from elastune.cluster.local import LocalCluster
from elastune.cluster.notices import NoticeSource
from elastune.cluster.run_files import LocalFiles, RunFiles
from elastune.cluster.static import on_this_host
from elastune.core.command import CommandGiven
from elastune.core.cost import UNTOLD
from elastune.core.errors import UserError
from elastune.core.run import Place, RunSpec
from elastune.job.adoption import adopted, left_over
from elastune.job.changes import accepted_changes, with_source
from elastune.job.fault_injection import Injector
from elastune.job.machine import machine_context
from elastune.job.output_journal import journal_in
from elastune.job.resumption import check_resumed
from elastune.job.shutdown import ShutdownControl
from elastune.job.signals import Interrupts
from elastune.job.supervisor import JobSupervisor
from elastune.journal.records import ChangesAccepted, HostsHeld, Record, RunFailed, RunFinished, RunStarted
from elastune.train.data.sample_log import records_of

Observe = Callable[[Record], None]


class JobFailed(Exception):
    """A job ended without a result.

    Attributes:
        failure: Why it failed.
        noticed: Its machine is being taken away.
    """

    def __init__(self, failure: RunFailed, noticed: bool = False) -> None:
        super().__init__(failure.detail)
        self.failure = failure
        self.noticed = noticed


def run_job(
    spec: RunSpec,
    *,
    cluster: Cluster | None = None,
    observe: Observe | None = None,
    notices: Sequence[NoticeSource] = (),
    injector: Injector | None = None,
    command: CommandGiven | None = None,
) -> RunFinished:
    """Run ``spec`` on ``cluster``, and keep its journal in ``spec.out``.

    The first Ctrl-C or SIGTERM asks for a checkpoint and an end at the next step; the second ends the workers. SIGUSR1
    and ``notices`` ask for the same, and the result says so. Workers that have outlived their controller are taken over
    before anything is imported: their run was checked when it began, and while they have no controller they cannot
    survive a loss.

    Args:
        spec: The run.
        cluster: Where it runs; None: worker processes on this machine.
        observe: Called with every record.
        notices: Sources of notices that a machine will be taken away.
        injector: Faults to survive.
        command: The command line that asks for it.

    Returns:
        The last record of the run.

    Raises:
        JobFailed: For a run that ended without a result.
        UserError: For what can be known to be wrong before a worker starts.
    """
    found = None if cluster is None else left_over(spec)
    changed = accepted_changes(spec) if found is None else None
    spec = with_source(spec)
    if found is None:
        _check(spec)
    check_resumed(spec)
    with journal_in(spec.out, spec.resume) as journal, Interrupts() as interrupts, ExitStack() as stack:

        def keep(record: Record) -> None:
            journal.write(record, durable=isinstance(record, (RunFinished, RunFailed)))
            if injector is not None:
                injector.hear(record)
            if observe is not None:
                observe(record)

        handle = None if cluster is None or found is None else adopted(spec, found, cluster)
        if handle is None:
            if found is not None:
                _check(spec)
            for record in _opening(spec, LocalFiles() if cluster is None else cluster.files, command, changed):
                keep(record)
        place = cluster or stack.enter_context(LocalCluster(capacity=spec.most_workers))
        handle = handle or place.start(spec)
        # Whatever happens here: a cluster that is not ours lives on, its run must not.
        stack.callback(handle.kill)
        watch = JobSupervisor(handle)
        ending = ShutdownControl(watch, interrupts, notices)
        paid: HostsHeld | None = None
        while watch.outcome is None:
            if (now := _held(place, handle, whole=cluster is not None)) != paid:
                paid = now
                keep(now)
            place.wait(0.5 if injector is None else injector.wait_s())
            for record in watch.pump():
                keep(record)
            if injector is not None and isinstance(handle, ElasticHandle) and not watch.finished:
                for fault in injector.act(handle):
                    keep(fault)
            ending.look()
            journal.settle()
        keep(watch.outcome)
    if isinstance(watch.outcome, RunFailed):
        raise JobFailed(watch.outcome, noticed=ending.notice is not None)
    return watch.outcome


def _held(place: Cluster, handle: Handle, *, whole: bool) -> HostsHeld:
    """What is paid for: the ``whole`` cluster, or no more than the run's own workers."""
    workers = dict(place.held(handle))
    return HostsHeld(workers, dict(place.rooms) if whole else workers)


def run_here(spec: RunSpec, place: Place, observe: Observe | None = None, command: CommandGiven | None = None) -> int:
    """Be one worker of a run that another program launched (torchrun, srun, mpirun). Returns an exit code.

    Rank 0 keeps the journal, with the ``command`` that asks for the run, and calls ``observe``; every other rank prints
    why it failed.
    """
    from elastune.train.work import work

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    for plan in (spec.sync, *(plan for _, plan in spec.sync_schedule.changes)):
        plan.check_quorum(elastic=False)
    changed, spec = accepted_changes(spec), with_source(spec)
    _check(spec)
    check_resumed(spec)
    if place.rank != 0:
        return work(spec, place, print_failure, stop.is_set)
    with journal_in(spec.out, spec.resume) as journal:

        def keep(record: Record) -> None:
            journal.write(record)
            if observe is not None:
                observe(record)

        workers = {UNTOLD: place.world}
        for record in [*_opening(spec, LocalFiles(), command, changed), HostsHeld(workers, workers)]:
            keep(record)
        return work(spec, place, keep, stop.is_set)


def _check(spec: RunSpec) -> None:
    from elastune.job.validate_run import check_run  # here: it brings torch

    check_run(spec)


def on_device(place: Place, device: str, env: Mapping[str, str]) -> Place:
    """Return ``place`` with its device among those of its node; ``env`` tells how many workers share the node."""
    available = devices() if device != "cpu" else ("cpu",)
    here = assign(device, place.local_rank, available)
    neighbours = on_this_host(env) or place.world
    return replace(place, device=here, own_device=here == "cpu" or neighbours <= len(available))


def print_failure(record: Record) -> None:
    """Print to stderr why a worker failed that no controller listens to."""
    if isinstance(record, RunFailed):
        print(f"elastune: worker {record.rank}, {record.reason}: {record.detail}", file=sys.stderr, flush=True)


def _opening(
    spec: RunSpec, files: RunFiles, command: CommandGiven | None, changed: ChangesAccepted | None
) -> list[Record]:
    """What a journal begins with: where the run goes on, what has changed, and what had been done up to there.

    Checkpoints that are not whole are set aside. Raises ``UserError``, and leaves them, where there is no other.
    """
    saved, damaged = _saved(spec, files)
    started = RunStarted(
        program=str(spec.program.path),
        data=spec.program.told_data,
        config=dict(spec.config),
        seed=spec.seed,
        means=spec.means.to_json(),
        context=machine_context(),
        epochs=spec.epochs,
        resumed_step=saved[-1] if saved else None,
        adapt=spec.adapt.to_json(),
        sync=str(spec.sync),
        sync_schedule=str(spec.sync_schedule),
        damaged=damaged,
        max_steps=spec.max_steps,
        start_from=None if spec.start_from is None else spec.start_from.to_json(),
        from_dcp=None if spec.from_dcp is None else str(spec.from_dcp),
        command=command,
        source=spec.source,
    )
    accepted = [replace(changed, step=saved[-1])] if changed is not None and saved else []
    # Workers may have trained on and saved while the controller before this one was frozen: its journal lacks that.
    return [started, *accepted, *(records_of(files.spans(spec.out, saved[-1])) if saved else [])]


def _saved(spec: RunSpec, files: RunFiles) -> tuple[list[int], list[str]]:
    """The steps of the checkpoints that a run can go on from, and what is wrong with newer ones."""
    if not spec.resume:
        return [], []
    damaged = files.damaged(spec.out)
    whole = [step for step in files.checkpoints(spec.out) if step not in damaged]
    if damaged and not whole:
        fix = "restore it, or begin again in another --out"
        raise UserError("of a run's checkpoints one must be whole", next(iter(damaged.values())), fix)
    files.set_aside(spec.out, damaged)
    return whole, list(damaged.values())
