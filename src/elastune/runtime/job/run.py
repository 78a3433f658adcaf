"""Run one job to its end: open its journal, start its workers, supervise them, report how it ended.

``run_job`` uses everything else in this file. ``journal_in`` opens the journal of an output folder, and removes it
again if the command is refused. ``JobSupervisor`` turns the events of a running job into records and an outcome.
``ShutdownControl`` ends a job early: after an interrupt, or before its machine is taken away. ``run_here`` is the
other entry point: one worker of a run that torchrun, srun or mpirun started.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from elastune.core.clock import Clock, SystemClock
from elastune.core.cost import UNKNOWN
from elastune.core.errors import UserError
from elastune.core.journal.files import JournalWriter, check_unwritten, read
from elastune.core.journal.records import (
    ChangesAccepted,
    HostsHeld,
    Proved,
    Record,
    RunFailed,
    RunFinished,
    RunStarted,
    StudyStarted,
    WarmStarted,
)
from elastune.core.run import CommandLine, Config, Place, RunSpec
from elastune.runtime.clusters.base import Cluster, ElasticHandle, Exited, Handle, LocalFiles, RunFiles, how_it_ended
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.fault_injection import Injector
from elastune.runtime.job.interrupts import Interrupts, note_end
from elastune.runtime.job.output import CLAIMED, check_out
from elastune.runtime.job.resumption import (
    accepted_changes,
    adopted,
    check_resumed,
    find_surviving_workers,
    with_source,
)
from elastune.runtime.placement import assign, devices, on_this_host
from elastune.runtime.preemption import DEFAULT_S, Notice, NoticeSource
from elastune.train.data.sample_log import records_of
from elastune.train.machine import cores, processor, software

Observe = Callable[[Record], None]

GRACE_S = 1.0  # after the first failure, for the failures of the other workers
EXIT_S = 10.0  # after the result: the workers only have to exit
MARGIN = 0.1  # share of a notice's time that is kept for ending the workers and for the journal
_OPENINGS = (RunStarted, StudyStarted, WarmStarted)  # journaled before anything runs
# What a worker reports when ANOTHER worker went away: never the cause of a failure.
_ECHOES = (
    "gloo",
    "nccl",
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "timed out",
    "storeerror",
    "tcpstore",
)


class JobFailed(Exception):
    """A job ended without a result.

    Attributes:
        failure: The record of the failure.
        noticed: Whether a notice had come that its machine will be taken away.
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
    command: CommandLine | None = None,
) -> RunFinished:
    """Run ``spec`` on ``cluster``, and write its journal in ``spec.out``.

    The first Ctrl-C or SIGTERM asks for a checkpoint and a stop at the next step; the second ends the workers. SIGUSR1
    and ``notices`` ask for a stop too, and the result records that cause.

    Workers that have outlived their controller are taken over before the program is imported and checked. Their run
    was checked when it began, and without a controller they cannot survive a loss.

    Args:
        spec: The run.
        cluster: Where it runs; None: worker processes on this machine.
        observe: Called with every record.
        notices: Sources of notices that a machine will be taken away.
        injector: Injects faults that the run has to survive.
        command: The command line of the run, for the journal.

    Returns:
        The last record of the run.

    Raises:
        JobFailed: The run ended without a result.
        UserError: A check failed before a worker was started.
    """
    surviving = None if cluster is None else find_surviving_workers(spec)
    changed = accepted_changes(spec) if surviving is None else None
    spec = with_source(spec)
    defaults = _check(spec) if surviving is None else {}
    check_resumed(spec)
    with journal_in(spec.out, spec.resume) as journal, Interrupts() as interrupts, ExitStack() as stack:

        def keep(record: Record) -> None:
            journal.write(record, durable=isinstance(record, (RunFinished, RunFailed)))
            if injector is not None:
                injector.observe(record)
            if observe is not None:
                observe(record)

        handle = None if cluster is None or surviving is None else adopted(spec, surviving, cluster)
        if handle is None:
            if surviving is not None:
                defaults = _check(spec)
            files = LocalFiles() if cluster is None else cluster.files
            for record in _opening(spec, defaults, files, command, changed):
                keep(record)
        used_cluster = cluster or stack.enter_context(LocalCluster(capacity=spec.most_workers))
        handle = handle or used_cluster.start(spec)
        # Also after an error here: the caller's cluster lives on, but this run must end.
        stack.callback(handle.kill)
        supervisor = JobSupervisor(handle)
        shutdown = ShutdownControl(supervisor, interrupts, notices)
        held: HostsHeld | None = None
        while supervisor.outcome is None:
            if (current := _held(used_cluster, handle, whole=cluster is not None)) != held:
                held = current
                keep(held)
            used_cluster.wait(0.5 if injector is None else injector.wait_s())
            for record in supervisor.pump():
                keep(record)
            if injector is not None and isinstance(handle, ElasticHandle) and not supervisor.finished:
                for fault in injector.act(handle):
                    keep(fault)
            shutdown.look()
            journal.settle()
        keep(supervisor.outcome)
    if isinstance(supervisor.outcome, RunFailed):
        raise JobFailed(supervisor.outcome, noticed=shutdown.notice is not None)
    return supervisor.outcome


def run_here(
    spec: RunSpec, place: Place, observe: Observe | None = None, command: CommandLine | None = None
) -> RunFinished | RunFailed:
    """Run one worker of a run that another program has launched (torchrun, srun, mpirun), in this process.

    Rank 0 writes the journal; every other rank prints its failure to stderr. Meanwhile SIGTERM asks for a stop, if this
    is the main thread. Afterwards the process groups are released, and settings of torch are as they were.

    Args:
        spec: The run.
        place: The rank of this worker among all workers.
        observe: Rank 0 calls it with every record.
        command: The command line of the run, for the journal.

    Returns:
        How the run ended for this worker. Of a good end, metrics and weights are those of all workers.

    Raises:
        UserError: A check failed before the training.
        KeyboardInterrupt: Ctrl-C; the failure is in the journal.
    """
    from elastune.train.worker import torch_settings_kept, work

    stop = threading.Event()
    ends: list[RunFinished | RunFailed] = []

    def asked(number: int, _: FrameType | None) -> None:
        note_end(number)
        stop.set()

    for plan in (spec.sync, *(plan for _, plan in spec.sync_schedule.changes)):
        plan.check_quorum(elastic=False)
    changed, spec = accepted_changes(spec), with_source(spec)
    defaults = _check(spec)
    check_resumed(spec)
    with _on_sigterm(asked), torch_settings_kept(), ExitStack() as stack:
        journal = stack.enter_context(journal_in(spec.out, spec.resume)) if place.rank == 0 else None

        def keep(record: Record) -> None:
            if isinstance(record, (RunFinished, RunFailed)):
                ends.append(record)
            if journal is None:
                print_failure(record)
                return
            journal.write(record)
            if observe is not None:
                observe(record)

        if journal is not None:
            workers = {UNKNOWN: place.world}
            for record in [*_opening(spec, defaults, LocalFiles(), command, changed), HostsHeld(workers, workers)]:
                keep(record)
        work(spec, place, keep, stop.is_set)
    return ends[-1]


@contextmanager
def _on_sigterm(asked: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call ``asked`` at SIGTERM while the block runs. Only the main thread can set that up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, asked)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def print_failure(record: Record) -> None:
    """Print the failure of a worker without a controller to stderr. Ignores all other records."""
    if isinstance(record, RunFailed):
        print(f"elastune: worker {record.rank}, {record.reason}: {record.detail}", file=sys.stderr, flush=True)


def on_device(place: Place, device: str, env: Mapping[str, str]) -> Place:
    """Return ``place`` with a device of its node. ``env`` holds the launcher's count of workers on the node, if any."""
    available = devices() if device != "cpu" else ("cpu",)
    assigned = assign(device, place.local_rank, available)
    neighbours = on_this_host(env) or place.world
    return replace(place, device=assigned, own_device=assigned == "cpu" or neighbours <= len(available))


class JobSupervisor:
    """Follows one job until all of its workers have ended.

    After the first failure the other workers get ``GRACE_S`` to report their failures too, then they are ended: the
    outcome names the failure that caused the others.

    Args:
        handle: The running job.
        timeout_s: The time limit of the whole job; None: no limit.
        clock: The clock; the system's by default.
        ran_s: How long the job has run already, under an earlier controller.

    Attributes:
        outcome: How the job ended; None while workers are alive.
    """

    def __init__(
        self, handle: Handle, *, timeout_s: float | None = None, clock: Clock | None = None, ran_s: float = 0.0
    ) -> None:
        self.handle = handle
        self.outcome: RunFinished | RunFailed | None = None
        self._clock = clock or SystemClock()
        self._deadline = None if timeout_s is None else self._clock.now() + timeout_s - ran_s
        self._timeout_s = timeout_s
        self._finished: RunFinished | None = None
        self._failures: list[RunFailed] = []
        self._ended_by_us: list[RunFailed] = []
        self._kill_at: float | None = None
        self._stopped_for: Literal["requested", "notice"] = "requested"

    @property
    def finished(self) -> bool:
        """Whether the job has its result: its workers only have to exit."""
        return self._finished is not None

    def stop(self, why: Literal["requested", "notice"] = "requested") -> None:
        """Ask the workers to save a checkpoint and to stop; the outcome will record ``why``."""
        self._stopped_for = why
        self.handle.stop()

    def pump(self) -> list[Record]:
        """Process the events since the last call. Returns the records for the journal. Never blocks."""
        records: list[Record] = []
        for event in self.handle.poll():
            if isinstance(event, Exited):
                self._exited(event)
            elif isinstance(event.record, RunFinished):
                self._finished = event.record
                self._kill_at = self._clock.now() + EXIT_S
            elif isinstance(event.record, RunFailed):
                self._fail(event.record)
            else:
                records.append(event.record)
        self._keep_time()
        if self.handle.alive == 0 and self.outcome is None:
            self.outcome = self._judge()
        return records

    def end(self, why: str, reason: Literal["worker_lost", "interrupted"] = "worker_lost") -> None:
        """End the workers now; the outcome records ``why``, unless the job has failed or finished already."""
        if not self._failures:
            self._failures.append(RunFailed(reason, why, 0))
        self._kill()

    def _kill(self) -> None:
        self._kill_at = float("inf")
        self.handle.kill()

    def _exited(self, event: Exited) -> None:
        if event.code != 0 and not any(f.rank == event.rank for f in self._failures):
            detail = f"worker {event.rank} {how_it_ended(event.code, event.log)}"
            lost = RunFailed("worker_lost", detail, event.rank, event.code, event.log)
            if event.code == -9 and self._kill_at == float("inf"):
                self._ended_by_us.append(lost)
            else:
                self._fail(lost)
        elif event.code != 0 and event.log:
            self._failures = [
                replace(f, exit_code=event.code, log=event.log) if f.rank == event.rank else f for f in self._failures
            ]

    def _fail(self, failure: RunFailed) -> None:
        self._failures.append(failure)
        if self._kill_at is None and self._finished is None:
            self._kill_at = self._clock.now() + GRACE_S

    def _keep_time(self) -> None:
        now = self._clock.now()
        if self._deadline is not None and now >= self._deadline and not (self._finished or self._failures):
            self._failures.append(RunFailed("timeout", f"still running after {self._timeout_s:g} s", 0))
            self._deadline, self._kill_at = None, now
        if self._kill_at is not None and now >= self._kill_at:
            self._kill()

    def _judge(self) -> RunFinished | RunFailed:
        """The ``RunFinished`` record if there is one; else the first failure that another failure did not cause."""
        if self._finished is not None:
            stopped = self._finished.stopped == "requested"
            return replace(self._finished, stopped=self._stopped_for) if stopped else self._finished
        failures = self._failures or self._ended_by_us
        if not failures:
            return RunFailed("worker_lost", "all workers ended without a result", 0)
        causes = [f for f in failures if not (f.reason == "exception" and _is_echo(f.detail))]
        return (causes or failures)[0]


def _is_echo(detail: str) -> bool:
    """Whether a worker failed only because another worker went away."""
    return any(word in detail.lower() for word in _ECHOES)


class ShutdownControl:
    """Stops or ends a job after an interrupt, or after a notice that its machine will be taken away.

    The first interrupt, or a notice, asks for a checkpoint and a stop. The second interrupt ends the workers. They are
    also ended shortly before the time of the notice is over: the run can then continue elsewhere from its last
    checkpoint.

    Args:
        watch: Follows the job.
        interrupts: Counts the interrupts of this process.
        notices: Sources of notices.
        clock: The clock; the system's by default.

    Attributes:
        notice: The notice that stopped the job; None without.
    """

    def __init__(
        self,
        watch: JobSupervisor,
        interrupts: Interrupts,
        notices: Sequence[NoticeSource] = (),
        clock: Clock | None = None,
    ) -> None:
        self.notice: Notice | None = None
        self._watch = watch
        self._interrupts = interrupts
        self._notices = notices
        self._clock = clock or SystemClock()
        self._handled = 0  # interrupts
        self._deadline = float("inf")

    def look(self) -> None:
        """Process the interrupts and notices since the last call."""
        if self._interrupts.count > self._handled:
            self._handled = self._interrupts.count
            if self._handled == 1:
                self._watch.stop()
            else:
                self._watch.end("ended by a second interrupt", "interrupted")
        if self.notice is None:
            self.notice = self._next_notice()
            if self.notice is not None:
                self._deadline = self._clock.now() + self.notice.seconds * (1 - MARGIN)
                self._watch.stop("notice")
        elif self._clock.now() > self._deadline:
            self._deadline = float("inf")
            if not self._watch.finished:
                self._watch.end(f"no step ended within the {self.notice.seconds:g} s of the notice: {self.notice.why}")

    def _next_notice(self) -> Notice | None:
        if self._interrupts.noticed:
            return Notice(DEFAULT_S, "SIGUSR1")
        return next((notice for source in self._notices if (notice := source.poll()) is not None), None)


def check_free(out: Path, resume: bool) -> None:
    """Check, before a cluster is opened, that ``journal_in`` could open ``out``. Writes nothing.

    Raises:
        UserError: ``out`` holds other results, or another controller is using it.
    """
    check_unwritten(check_out(out, resume))


@contextmanager
def journal_in(out: Path, resume: bool, wall: Callable[[], float] = time.time) -> Iterator[JournalWriter]:
    """Open the journal of ``out``, and create the folder if needed.

    If the command is refused or interrupted before anything has run, a new journal and the folders created for it are
    removed again.

    Args:
        out: The output folder.
        resume: Whether to continue the journal that is there.
        wall: The wall clock, for the times of the entries.

    Raises:
        UserError: As ``check_out`` raises it; or the folder cannot be written, or the old journal has a bad line.
    """
    path = check_out(out, resume)
    created = [folder for folder in (out, *out.parents) if not folder.exists() or folder.absolute() in CLAIMED]
    is_new = not path.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("--out must be a folder that can be written", error, "use another --out") from None
    with JournalWriter(path, wall=wall) as journal:  # holds the lock: no other controller writes to this folder
        if not is_new:
            read(path)  # a bad line raises now, and not in the report at the end
        try:
            yield journal
        except (UserError, KeyboardInterrupt):  # perhaps before any worker has started
            if is_new and journal.in_place and all(isinstance(entry.record, _OPENINGS) for entry in read(path)):
                _remove_journal(path, created)
            raise


def _remove_journal(path: Path, created: list[Path]) -> None:
    """Remove the journal at ``path`` and the folders ``created`` for it, which are ordered from the innermost."""
    if created:
        shutil.rmtree(created[0], ignore_errors=True)
    for file in (path, path.with_name(f"{path.name}.lock")):
        file.unlink(missing_ok=True)
    for folder in created[1:]:
        with suppress(OSError):  # another command has written results there meanwhile
            folder.rmdir()


def _check(spec: RunSpec) -> Config:
    """The program's own config, after all checks."""
    from elastune.runtime.job.validation import check_run  # late: it imports torch

    return check_run(spec)


def _opening(
    spec: RunSpec, defaults: Config, files: RunFiles, command: CommandLine | None, changed: ChangesAccepted | None
) -> list[Record]:
    """The first records of a run's journal: its start, its accepted changes, and the samples trained before a resume.

    Damaged checkpoints are set aside. Raises ``UserError``, and leaves them, where no checkpoint is whole.
    """
    saved, damaged = _saved(spec, files)
    started = RunStarted(
        program=str(spec.program.path),
        data=spec.program.data_text,
        config=dict(spec.config),
        seed=spec.seed,
        execution=spec.execution.to_json(),
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
        arguments=list(spec.program.arguments),
        defaults=dict(defaults),
    )
    accepted: list[Record] = [replace(changed, step=saved[-1])] if changed is not None and saved else []
    if spec.checked:
        accepted.append(Proved("checked"))
    # An earlier controller may have been frozen while its workers saved checkpoints: its journal lacks these samples.
    return [started, *accepted, *(records_of(files.spans(spec.out, saved[-1])) if saved else [])]


def _saved(spec: RunSpec, files: RunFiles) -> tuple[list[int], list[str]]:
    """The steps of the checkpoints from which a run can continue, and the faults of damaged ones."""
    if not spec.resume:
        return [], []
    damaged = files.damaged(spec.out)
    whole = [step for step in files.checkpoints(spec.out) if step not in damaged]
    if damaged and not whole:
        fix = "restore it, or begin again in another --out"
        raise UserError("of a run's checkpoints one must be whole", next(iter(damaged.values())), fix)
    files.set_aside(spec.out, damaged)
    return whole, list(damaged.values())


def _held(cluster: Cluster, handle: Handle, *, whole: bool) -> HostsHeld:
    """The room that the run uses and the room that is paid for: of the ``whole`` cluster, or only the used room."""
    workers = dict(cluster.held(handle))
    return HostsHeld(workers, dict(cluster.rooms) if whole else workers)


def machine_context() -> dict[str, Any]:
    """Cores, processor, memory and versions, for the journal."""
    return {"cores": cores(), "processor": processor(), "memory_gib": _memory_gib(), **software()}


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
