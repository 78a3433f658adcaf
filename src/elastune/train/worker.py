"""A worker's life: join the group, run the user's training function, report how it ended.

``work`` is the whole life, ``Worker`` the part between joining and leaving. The functions after them set up the device
and recognise errors of memory that ran out.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from elastune.adapt.policies.library.registry import build
from elastune.core.errors import Diverged, UserError
from elastune.core.formatting import byte_count
from elastune.core.journal import logs
from elastune.core.journal.records import LONGEST_DETAIL, Reason, Record, RunFailed, RunFinished
from elastune.core.run import Config, ExecutionSettings, Place, RunSpec
from elastune.elastic.wire.transport import host_name
from elastune.elastic.worker.client import CoordinatorClient
from elastune.elastic.worker.elastic_group import LONG_S, ElasticWorkerGroup
from elastune.elastic.worker.group import (
    Leave,
    RanksLost,
    Rewind,
    StaticWatch,
    WorkerGroup,
    WorkersDiverged,
    connection_lost,
)
from elastune.elastic.worker.recovery import Packed
from elastune.parallel.comm.group import GroupBroken
from elastune.parallel.comm.network_probe import measure_link
from elastune.parallel.comm.process_exit import end_without_main_thread
from elastune.parallel.comm.process_groups import GroupFactory, factory_for, rendezvous_store, static_groups
from elastune.train.checkpoints.tree import fingerprint
from elastune.train.compiling import leave_passes, too_many_shapes
from elastune.train.models import untracked_scaler
from elastune.train.program.errors import ProgramLine, cause_of, text_of, trace_of
from elastune.train.program.load import LoadedProgram, load, merge
from elastune.train.program.source import check_unedited
from elastune.train.progress import memory_of_workers, steps_of_workers
from elastune.train.proof.first_step import FirstStep
from elastune.train.proof.recorder import recorder_of
from elastune.train.session import Session
from elastune.train.step import StopTraining, WarmedUp
from elastune.train.training_state import END

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
LONGEST_S = 1800.0  # of a collective, torch's own limit on gloo
NOTICE_S = 30.0  # what a signal usually gives
_UNORDERED = re.compile(r"(\S+) does not have a deterministic implementation")
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_WANTED = re.compile(
    r"(?:tried to allocate|unable to allocate) ([0-9]{1,20}(?:\.[0-9]{1,6})?) ?(bytes|[KMGT]iB)", re.IGNORECASE
)
"""In the errors of torch's allocators on CPU and CUDA, and of numpy's."""
_SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory", "std::bad_alloc", "unable to mmap")


def launched(spec: RunSpec, place: Place, client: CoordinatorClient) -> int:
    """The entry point of a worker that elastune started: its records go to its coordinator."""
    return work(spec, place, client.report, client.stop_requested, client)


def work(
    spec: RunSpec,
    place: Place,
    send: Callable[[Record], None],
    stop_requested: Callable[[], bool],
    client: CoordinatorClient | None = None,
) -> int:
    """Run ``spec`` as the worker at ``place``; every outcome is sent as a record. Returns the process's exit code.

    With a ``client`` the run is elastic, and every member sends its reports and ``RunFinished``. Without one the
    workers meet at ``place.rendezvous`` and stay, and the process goes on when they have parted. Every worker sends
    ``RunFinished``, and rank 0 the reports. A worker that fails sends ``RunFailed``.
    """

    process = os.getpid()

    def failed(reason: Reason, error: BaseException) -> int:
        text = reason in ("user_error", "diverged", "timeout", "worker_lost") and text_of(error)
        detail = text or cause_of(error, str(spec.program.path.resolve()))
        wanted = wanted_bytes(error) if reason == "out_of_memory" else None
        detail = memory_detail(wanted, " ".join(detail[:LONGEST_DETAIL].split()))
        # To the log's own file: the program may have closed or replaced what Python calls stderr.
        with suppress(OSError):
            os.write(2, f"{detail if text else trace_of(error)}\n".encode(errors="backslashreplace"))
        if os.getpid() == process:  # else in a child that the program forked: its end is not the end of this run
            send(RunFailed(reason=reason, detail=detail, rank=place.rank, wanted_bytes=wanted))
        return EXIT_USER_ERROR if reason == "user_error" else EXIT_FAILED

    try:
        device = set_up_device(spec.execution, place)
        program = load(spec.program, spec.seed, spec.config)
        check_unedited(spec.program, spec.source)
        worker = Worker(spec, device, program, merge(program.config, spec.config), send, stop_requested)
        if client is not None:
            client.doing("starting", 0)
            worker.come_and_go(client, _factory(spec, place))
        else:
            longest_s = max(LONGEST_S, 2 * spec.elastic.collective_timeout_s)  # the watch must find it first
            with static_groups(place, spec.execution.first_mesh, longest_s) as comms:
                workers = WorkerGroup(comms.everyone, comms)
                worker.stay(workers, lambda why: end_without_main_thread(failed(why.stall.reason, why)))
    except UserError as error:
        return failed("user_error", error)
    except Diverged as error:
        return failed("diverged", error)
    except WorkersDiverged as error:
        return failed(error.stall.reason, error)
    except RanksLost as error:
        return failed("worker_lost", error)
    except BaseException as error:
        if (refusal := unordered_kernel(error) or untracked_scaler(error) or too_many_shapes(error)) is not None:
            return failed("user_error", refusal)
        code = failed("out_of_memory" if lacks_memory(error) else "exception", error)
        if client is None and isinstance(error, KeyboardInterrupt):  # Ctrl-C: it came to this process itself
            raise
        return code
    finally:
        if client is None and os.getpid() != process:  # a child that the program forked has no part in what follows
            os._exit(EXIT_FAILED)
    return 0


class Worker:
    """One worker's part in a run, from its first session to its last.

    ``stay`` trains in a group that never changes, ``come_and_go`` in an elastic run. A worker that is sent back to a
    snapshot runs the training function again, with a new session.
    """

    def __init__(
        self,
        spec: RunSpec,
        device: torch.device,
        program: LoadedProgram,
        config: Config,
        send: Callable[[Record], None],
        stop_requested: Callable[[], bool],
    ) -> None:
        self._spec = spec
        self._device = device
        self._program = program
        self._config = config
        self._send = send
        self._stop_requested = stop_requested
        self._where = ProgramLine(spec.program.path)

    def stay(self, workers: WorkerGroup, on_stuck: Callable[[WorkersDiverged], None]) -> None:
        """Train with workers that stay as they are. ``on_stuck``: see ``StaticWatch``."""
        workers.where = self._where
        session = self._session(workers)
        try:
            self._stay(session, workers, on_stuck)
        finally:
            session.state.abandon()

    def _stay(self, session: Session, workers: WorkerGroup, on_stuck: Callable[[WorkersDiverged], None]) -> None:
        if workers.size == 1:
            self._train(session, workers)
            return
        watch = StaticWatch(workers, rendezvous_store(), self._spec.elastic.collective_timeout_s, on_stuck)
        try:
            self._train(session, workers)
            workers.set_activity("done", session.step)
        except Exception as error:
            if not isinstance(error, GroupBroken) and not connection_lost(error):
                watch.fail(cause_of(error))
                raise
            if (difference := watch.stall) is None:
                raise watch.explain(error) from error
            raise WorkersDiverged(difference) from None
        finally:
            watch.end()

    def _train(self, session: Session, workers: WorkerGroup) -> None:
        with suppress(StopTraining):
            self._program.train(session)
        self._finish(session, workers)

    def _may_meet_in_rounds(self) -> bool:
        """Whether the run has learners or may get some, by its spec.

        In ``fast`` mode only sums of learners are added in canonical order.
        """
        spec = self._spec
        policies = [build(text, self._program.policies).policy for text in spec.adapt.policies]
        by_policy = any(each.strategies(spec.execution.num_slots, spec.most_workers) for each in policies)
        return by_policy or spec.sync_schedule.learners(spec.sync) > 1

    def come_and_go(self, member: CoordinatorClient, factory: GroupFactory) -> None:
        """Train with workers that change. Returns when the run is over, or this worker has left it."""
        for number in (
            signal.SIGTERM,
            signal.SIGUSR1,
        ):  # the machine will take this process away: the worker leaves before
            signal.signal(number, lambda number, _: member.noticed(NOTICE_S, signal.Signals(number).name))
        execution = self._spec.execution
        climbs = execution.mechanism == "replicated" and (execution.mode == "exact" or self._may_meet_in_rounds())
        workers = ElasticWorkerGroup(member, factory, climbs=climbs)
        workers.where = self._where
        warm_up, begins = member.joins, not member.joins
        snapshot: Packed | None = None
        while True:
            session = self._session(workers, snapshot, warm_up)
            workers.owner = session.state
            try:
                if begins:
                    workers.join()
                if workers.awaiting_first_view:
                    workers.start()
                with suppress(StopTraining):
                    self._program.train(session)
                if warm_up:  # the program has no training pass to stop in
                    raise WarmedUp
                workers.join()
                self._finish(session, workers)
                workers.finish()
                return
            except WarmedUp:
                warm_up = False
            except Rewind:
                leave_passes()
                begins = False
                from_start = workers.awaiting_first_view or workers.restart_from_checkpoint
                snapshot = None if from_start else session.state.newest
            except Leave:
                return
            finally:
                session.flush()
                session.state.abandon()

    def _session(self, workers: WorkerGroup, snapshot: Packed | None = None, warm_up: bool = False) -> Session:
        session = Session(
            self._spec,
            workers,
            self._device,
            config=self._config,
            send=self._send,
            stop_requested=self._stop_requested,
            snapshot=snapshot,
            warm_up=warm_up,
            policies=self._program.policies,
        )
        logs.describe(step=lambda: session.step, rank=lambda: workers.rank)
        path = self._spec.program.path
        session.state.recorder = recorder_of(os.environ, path)
        session.state.first_step = FirstStep(path) if self._spec.proves else None
        return session

    def _finish(self, session: Session, workers: WorkerGroup) -> None:
        """Compare the weights of all workers, gather times and memory, and send ``RunFinished``."""
        session.finish()
        seconds, trained = session.seconds, session.trained
        session.flush()
        session.state.average_buffers()
        if trained is not None:
            digest = trained.fingerprint(workers)
            times, memory_row = session.progress.times, session.progress.memory.row()
            averages, sent = times.averages(), trained.sync.sent_bytes / max(1, times.count)
            rows = workers.gather([sent, *averages, *memory_row], "times of steps, memory and bytes")
            sent_bytes = sum(row.pop(0) for row in rows)
            worker_steps = steps_of_workers([row[: len(averages)] for row in rows])
            memory = memory_of_workers([row[len(averages) :] for row in rows])
        else:
            digest, worker_steps, memory, sent_bytes = fingerprint({}), [], [], 0.0
            workers.gather([], END)
        hosts = max(1, len(set(workers.comms.hosts)))
        if self._spec.measure_link and workers.size > 1:
            with suppress(GroupBroken):  # a worker was lost just now: the measurement is not worth a recovery
                link = measure_link(workers.group, hosts)
                if workers.rank == 0:
                    self._send(link)
        step_s, wait_s = session.progress.times.medians()
        self._send(
            RunFinished(
                sha256=digest,
                workers=workers.size,
                steps=session.step,
                samples=session.samples,
                epoch=session.epoch,
                seconds=seconds,
                metrics=session.metrics,
                evaluated_on=session.progress.evaluated_on,
                step_s=step_s,
                wait_s=wait_s,
                worker_steps=worker_steps,
                memory=memory,
                grad_bytes=trained.gradient_bytes if trained is not None else 0,
                stop_why=session.progress.stop_why,
                stopped=session.stopped,  # type: ignore[arg-type]
                hosts=hosts,
                sent_bytes=sent_bytes,
                signals={name: (signal.value, signal.error) for name, signal in session.signals.items()},
                context=session.context,
            )
        )


def _factory(spec: RunSpec, place: Place) -> GroupFactory:
    """The factory of this worker's process groups; all workers of a run must choose the same."""
    # With more workers than GPUs, now or later, some share a GPU; all share a GPU that the user has named.
    enough = spec.execution.device in ("auto", "cuda") and spec.most_workers <= torch.cuda.device_count()
    own_device = place.own_device and enough
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return factory_for(place.device, own_device=own_device, interface=interface, timeout_s=LONG_S)


# --- the device ---


def set_up_device(execution: ExecutionSettings, place: Place) -> torch.device:
    """The device at ``place``, for this process.

    On a GPU ``exact`` mode lets torch use deterministic kernels only; an operation without one fails
    (``unordered_kernel``). A warning would not do: under torch's ``warn_only`` attention in fp32 adds in any order.
    TF32 stays as torch or the program sets it: it rounds more, and equally on every worker.

    Raises:
        UserError: Where this process cannot use the device.
    """
    torch.set_num_threads(execution.threads)
    device = torch.device(place.device)
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic only with this
        try:
            torch.cuda.set_device(device)
        except (AssertionError, AttributeError, RuntimeError) as error:  # the first two: of a torch without CUDA
            why = f"{device} of host {host_name()}: {text_of(error).partition(chr(10))[0]}"
            fix = "look at nvidia-smi there, or use --device cpu"
            raise UserError("a worker must be able to use the device that it was given", why, fix) from None
        if execution.mode == "exact":
            torch.backends.cudnn.benchmark = False  # it picks the kernel that is fastest just now
            torch.use_deterministic_algorithms(True)
            # It helps only a program that reads memory before it writes it, and costs a write of each new tensor.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return device


@contextmanager
def torch_settings_kept() -> Iterator[None]:
    """Put back what ``set_up_device`` sets in torch, for a caller that goes on in the same process."""
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = benchmark
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def unordered_kernel(error: BaseException) -> UserError | None:
    """The error for an operation that ``exact`` mode cannot do on a GPU, where ``error`` comes from one; else None."""
    match = _UNORDERED.search(text_of(error)) if isinstance(error, RuntimeError) else None
    if match is None:
        return None
    rule = "exact mode on a GPU needs operations that add in one order"
    return UserError(rule, match[1], "use another operation, or --mode fast")


# --- memory that ran out ---


def lacks_memory(error: BaseException) -> bool:
    """Whether ``error``, or an error that caused it, is of memory that ran out."""
    for each in _chain(error):
        if isinstance(each, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(each, Exception) and any(sign in text_of(each).lower() for sign in _SIGNS):
            return True
    return False


def wanted_bytes(error: BaseException) -> int | None:
    """The bytes of the allocation that failed; None where the error does not have them."""
    for each in _chain(error):
        if match := _WANTED.search(text_of(each)):
            return round(float(match[1]) * _UNITS[match[2].lower()])
    return None


def memory_detail(wanted: int | None, detail: str) -> str:
    """``detail`` of an error of memory that ran out, with the ``wanted`` bytes in front."""
    return detail if wanted is None else f"wanted {byte_count(wanted)} more ({wanted:,} bytes); {detail}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """``error``, the error that caused it, and so on."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        yield cause
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
