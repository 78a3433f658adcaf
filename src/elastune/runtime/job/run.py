"""Run one job to its end: open its journal, start its workers, supervise them, report how it ended.

``run_job`` is the whole story. ``journal_in`` opens the journal of an output folder; a command that is refused
leaves no trace of it. ``JobSupervisor`` turns events of a running job into records and an outcome. A job ends early
when somebody interrupts it or when its machine will be taken away (``ShutdownControl``). ``run_here`` is one worker
of a run that torchrun, srun or mpirun started.
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
from typing import Any, Literal

from elastune.core.clock import Clock, SystemClock
from elastune.core.cost import UNKNOWN
from elastune.core.errors import UserError
from elastune.core.journal.files import JournalWriter, check_unwritten, read
from elastune.core.journal.records import (
    ChangesAccepted,
    HostsHeld,
    Record,
    RunFailed,
    RunFinished,
    RunStarted,
    StudyStarted,
    WarmStarted,
)
from elastune.core.run import CommandLine, Place, RunSpec
from elastune.runtime.clusters.base import Cluster, ElasticHandle, Exited, Handle, LocalFiles, RunFiles, how_it_ended
from elastune.runtime.clusters.local import LocalCluster
from elastune.runtime.job.fault_injection import Injector
from elastune.runtime.job.interrupts import Interrupts
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

# What cannot be changed but matters: the machine and software a figure was measured on.


def machine_context() -> dict[str, Any]:
    """Cores, processor, memory and versions, for the journal."""
    return {"cores": cores(), "processor": processor(), "memory_gib": _memory_gib(), **software()}


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)


# The journal of an output folder: a command that is refused leaves no trace of it.

_OPENINGS = (RunStarted, StudyStarted, WarmStarted)  # what is journaled before anything runs


def check_free(out: Path, resume: bool) -> None:
    """Refuse what ``journal_in`` would, before a cluster is opened for it: another's results, and a controller that
    lives. Leaves nothing. Raises ``UserError``."""
    check_unwritten(check_out(out, resume))


@contextmanager
def journal_in(out: Path, resume: bool, wall: Callable[[], float] = time.time) -> Iterator[JournalWriter]:
    """The journal of ``out``, which is made if needed.

    What is refused before anything has run leaves no folder that was not there. Raises ``UserError`` as ``check_out``,
    and for a folder that cannot be written, or a journal to go on with that has a bad line.
    """
    path = check_out(out, resume)
    made = [folder for folder in (out, *out.parents) if not folder.exists() or folder.absolute() in CLAIMED]
    begins = not path.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError("--out must be a folder that can be written", error, "use another --out") from None
    with JournalWriter(path, wall=wall) as journal:  # from here on nobody else writes there
        if not begins:
            read(path)  # what could not be told at the end is refused now
        try:
            yield journal
        except (UserError, KeyboardInterrupt):  # while hosts were awaited
            if begins and journal.in_place and all(isinstance(entry.record, _OPENINGS) for entry in read(path)):
                _take_back(path, made)
            raise


def _take_back(path: Path, made: list[Path]) -> None:
    """Remove a journal that tells of nothing, and the folders that were ``made`` for it, the innermost first."""
    if made:
        shutil.rmtree(made[0], ignore_errors=True)
    for file in (path, path.with_name(f"{path.name}.lock")):
        file.unlink(missing_ok=True)
    for folder in made[1:]:
        with suppress(OSError):  # somebody else's results have come there meanwhile
            folder.rmdir()


# One running job as its driver sees it: events in, records and an outcome out.

GRACE_S = 1.0
EXIT_S = 10.0  # a finished run's workers have nothing left to do but to exit
# What a worker says when ANOTHER one went away: never the cause of a failure.
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


class JobSupervisor:
    """Follows a job until all of its workers are gone; ``outcome`` is then set.

    After the first failure the other workers get ``GRACE_S`` to say what they saw, then they are ended. ``timeout_s``
    bounds the whole job, which has run for ``ran_s`` already.
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
        """Whether the job has its result: its workers have only to exit."""
        return self._finished is not None

    def stop(self, why: Literal["requested", "notice"] = "requested") -> None:
        """Ask for a checkpoint and an end; the outcome will say ``why``."""
        self._stopped_for = why
        self.handle.stop()

    def pump(self) -> list[Record]:
        """Handle what happened; returns the records to keep. Never blocks."""
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
        """End the workers now; the outcome says ``why``, unless the job has failed or finished already."""
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
        """The finished record if nothing failed; else the failure that came first and is no echo of another."""
        if self._finished is not None:
            asked = self._finished.stopped == "requested"
            return replace(self._finished, stopped=self._stopped_for) if asked else self._finished
        failures = self._failures or self._ended_by_us
        if not failures:
            return RunFailed("worker_lost", "all workers ended without a result", 0)
        causes = [f for f in failures if not (f.reason == "exception" and _is_echo(f.detail))]
        return (causes or failures)[0]


def _is_echo(detail: str) -> bool:
    return any(word in detail.lower() for word in _ECHOES)


# What ends a job before its time: somebody's wish, or the news that its machine will be taken away.

MARGIN = 0.1  # of a notice's time, kept for ending by force and for the journal


class ShutdownControl:
    """Looks out for interrupts and notices, and stops or ends the job that ``watch`` follows.

    The first interrupt, and a notice, ask for a checkpoint; the second ends the workers, and so does the time that a
    notice gives when it is nearly over: what is on the disk by then is what can go on elsewhere.
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
        self._heard = 0
        self._deadline = float("inf")

    def look(self) -> None:
        """Act on what has happened since the last call."""
        if self._interrupts.count > self._heard:
            self._heard = self._interrupts.count
            if self._heard == 1:
                self._watch.stop()
            else:
                self._watch.end("ended by a second interrupt", "interrupted")
        if self.notice is None:
            self.notice = self._told()
            if self.notice is not None:
                self._deadline = self._clock.now() + self.notice.seconds * (1 - MARGIN)
                self._watch.stop("notice")
        elif self._clock.now() > self._deadline:
            self._deadline = float("inf")
            if not self._watch.finished:
                self._watch.end(f"no step ended within the {self.notice.seconds:g} s of the notice: {self.notice.why}")

    def _told(self) -> Notice | None:
        if self._interrupts.noticed:
            return Notice(DEFAULT_S, "SIGUSR1")
        return next((notice for source in self._notices if (notice := source.poll()) is not None), None)


# Run one job to its end: start its workers, keep its journal, tell how it ended.

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
    command: CommandLine | None = None,
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
    found = None if cluster is None else find_surviving_workers(spec)
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


def run_here(spec: RunSpec, place: Place, observe: Observe | None = None, command: CommandLine | None = None) -> int:
    """Be one worker of a run that another program launched (torchrun, srun, mpirun). Returns an exit code.

    Rank 0 keeps the journal, with the ``command`` that asks for the run, and calls ``observe``; every other rank prints
    why it failed.
    """
    from elastune.train.worker import work

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

        workers = {UNKNOWN: place.world}
        for record in [*_opening(spec, LocalFiles(), command, changed), HostsHeld(workers, workers)]:
            keep(record)
        return work(spec, place, keep, stop.is_set)


def _check(spec: RunSpec) -> None:
    from elastune.runtime.job.validation import check_run  # here: it brings torch

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
    spec: RunSpec, files: RunFiles, command: CommandLine | None, changed: ChangesAccepted | None
) -> list[Record]:
    """What a journal begins with: where the run goes on, what has changed, and what had been done up to there.

    Checkpoints that are not whole are set aside. Raises ``UserError``, and leaves them, where there is no other.
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
