"""A worker's life: join the group, run the user's training function, report how it ended."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch

from elastune.adapt.policies.library.registry import build
from elastune.core.errors import Diverged, UserError
from elastune.core.formatting import byte_count
from elastune.core.journal.records import LONGEST_DETAIL, Reason, Record, RunFailed, RunFinished
from elastune.core.run import Config, ExecutionSettings, Place, RunSpec
from elastune.elastic.wire.transport import host_name
from elastune.elastic.worker.client import CoordinatorClient
from elastune.elastic.worker.elastic_group import LONG_S, ElasticWorkerGroup
from elastune.elastic.worker.group import Leave, Rewind, StaticWatch, WorkerGroup, WorkersDiverged
from elastune.elastic.worker.state_transfer import Packed
from elastune.parallel.comm.group import GroupBroken
from elastune.parallel.comm.network_probe import measure_link
from elastune.parallel.comm.process_groups import GroupFactory, factory_for, join, rendezvous_store, stand
from elastune.train.checkpoints.tree import fingerprint
from elastune.train.compiling import leave_passes, too_many_shapes
from elastune.train.program.errors import ProgramLine, cause_of, text_of, trace_of
from elastune.train.program.load import LoadedProgram, load, merge
from elastune.train.program.source import check_unedited
from elastune.train.progress import memory_of_workers, steps_of_workers
from elastune.train.session import Session
from elastune.train.step import StopTraining, WarmedUp
from elastune.train.tracked import untracked_scaler
from elastune.train.training_state import END

# [shortage] Whether an error says that memory ran out, and how much was wanted.

_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_WANTED = re.compile(
    r"(?:tried to allocate|unable to allocate) ([0-9]{1,20}(?:\.[0-9]{1,6})?) ?(bytes|[KMGT]iB)", re.IGNORECASE
)
"""torch's allocators on CPU and CUDA, and numpy's."""
_SIGNS = ("out of memory", "can't allocate memory", "cannot allocate memory", "std::bad_alloc", "unable to mmap")


def lacks_memory(error: BaseException) -> bool:
    """Whether ``error``, or what it was raised from, is one of memory that ran out."""
    for each in _chain(error):
        if isinstance(each, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(each, Exception) and any(sign in text_of(each).lower() for sign in _SIGNS):
            return True
    return False


def wanted_bytes(error: BaseException) -> int | None:
    """The bytes of the allocation that failed; None where the error does not tell."""
    for each in _chain(error):
        if found := _WANTED.search(text_of(each)):
            return round(float(found[1]) * _UNITS[found[2].lower()])
    return None


def told_of_memory(wanted: int | None, detail: str) -> str:
    """``detail`` of an error of memory that ran out, with what was wanted in front."""
    return detail if wanted is None else f"wanted {byte_count(wanted)} more ({wanted:,} bytes); {detail}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        yield found
        seen.append(found)
        found = found.__cause__ or found.__context__


# [device] The device that a worker computes on, set so that in ``exact`` mode a kernel gives the same bits each time.

_UNORDERED = re.compile(r"(\S+) does not have a deterministic implementation")


def set_up_device(execution: ExecutionSettings, place: Place) -> torch.device:
    """The device at ``place``, for this process.

    On a GPU ``exact`` mode lets torch use deterministic kernels only; what has none fails (``unordered_kernel``). A
    mere warning would not do: under torch's ``warn_only`` attention in fp32 adds in any order. TF32 stays as torch or
    the program sets it: it rounds more, and equally on every worker. Raises ``UserError`` where it cannot be used.
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
            # Only for those who read what nobody has written, at the price of a write more of each new tensor.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return device


def unordered_kernel(error: BaseException) -> UserError | None:
    """What to say of an operation that ``exact`` mode cannot do on a GPU, where ``error`` is of that."""
    found = _UNORDERED.search(text_of(error)) if isinstance(error, RuntimeError) else None
    if found is None:
        return None
    rule = "exact mode on a GPU needs operations that add in one order"
    return UserError(rule, found[1], "use another operation, or --mode fast")


# [work] A worker's life: take its place, run the user's training function, say how it ended.

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
LONGEST_S = 1800.0  # of a collective, as torch's own on gloo
NOTICE_S = 30.0  # what a signal usually gives
# What refers to a process group lives until the process ends (by os._exit): see comm.join.join.
_ALIVE: list[Session] = []


def launched(spec: RunSpec, place: Place, client: CoordinatorClient) -> int:
    """The entry point of a worker that elastune started: all that it says goes to its coordinator."""
    return work(spec, place, client.report, client.stop_requested, client)


def work(
    spec: RunSpec,
    place: Place,
    send: Callable[[Record], None],
    stop_requested: Callable[[], bool],
    client: CoordinatorClient | None = None,
) -> int:
    """Run ``spec`` as the worker at ``place``; every outcome is sent as a record. Returns the process's exit code.

    With a ``client`` the run is elastic, and every member sends its reports and ``RunFinished``; without one its
    workers meet at ``place.rendezvous`` and stay, and rank 0 sends them. Whichever worker fails sends ``RunFailed``.
    """

    own = os.getpid()

    def failed(reason: Reason, error: BaseException) -> int:
        told = reason in ("user_error", "diverged", "timeout") and text_of(error)
        detail = told or cause_of(error, str(spec.program.path.resolve()))
        wanted = wanted_bytes(error) if reason == "out_of_memory" else None
        detail = told_of_memory(wanted, " ".join(detail[:LONGEST_DETAIL].split()))
        # To the log's own file: the program may have closed or replaced what Python calls stderr.
        with suppress(OSError):
            os.write(2, f"{detail if told else trace_of(error)}\n".encode(errors="backslashreplace"))
        if os.getpid() == own:  # else: in a forked child of the program's, whose end says nothing of this run
            send(RunFailed(reason=reason, detail=detail, rank=place.rank, wanted_bytes=wanted))
        return EXIT_USER_ERROR if reason == "user_error" else EXIT_FAILED

    try:
        device = set_up_device(spec.execution, place)
        program = load(spec.program)
        check_unedited(spec.program, spec.source)
        one = Worker(spec, device, program, merge(program.config, spec.config), send, stop_requested)
        if client is not None:
            client.doing("starting", 0)
            one.come_and_go(client, _factory(spec, place))
        else:
            longest_s = max(LONGEST_S, 2 * spec.elastic.collective_timeout_s)  # the watch is to be heard first
            group = join(place, longest_s)
            workers = WorkerGroup(group, stand(group, place, spec.execution.first_mesh))
            one.stay(workers, lambda why: os._exit(failed(why.found.reason, why)))
    except UserError as error:
        return failed("user_error", error)
    except Diverged as error:
        return failed("diverged", error)
    except WorkersDiverged as error:
        return failed(error.found.reason, error)
    except BaseException as error:
        if (refused := unordered_kernel(error) or untracked_scaler(error) or too_many_shapes(error)) is not None:
            return failed("user_error", refused)
        code = failed("out_of_memory" if lacks_memory(error) else "exception", error)
        if client is None and isinstance(error, KeyboardInterrupt):  # Ctrl-C: it came to this process itself
            raise
        return code
    return 0


class Worker:
    """One worker's part in a run, from its first session to its last."""

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
        if workers.size == 1:
            self._train(session, workers)
            return
        _ALIVE.append(session)
        watch = StaticWatch(workers, rendezvous_store(), self._spec.elastic.collective_timeout_s, on_stuck)
        try:
            self._train(session, workers)
            workers.say("done", session.step)
        except GroupBroken:
            found = watch.found
            if found is None:
                raise
            raise WorkersDiverged(found) from None
        finally:
            watch.end()

    def _train(self, session: Session, workers: WorkerGroup) -> None:
        with suppress(StopTraining):
            self._program.train(session)
        self._finish(session, workers)

    def _may_meet_in_rounds(self) -> bool:
        """Whether the run has learners or may come to have some, by its spec. In ``fast`` mode theirs are the only
        sums in canonical order.
        """
        spec = self._spec
        policies = [build(text, self._program.policies).policy for text in spec.adapt.policies]
        seldom = any(each.strategies(spec.execution.num_slots, spec.most_workers) for each in policies)
        return seldom or spec.sync_schedule.learners(spec.sync) > 1

    def come_and_go(self, member: CoordinatorClient, factory: GroupFactory) -> None:
        """Train with workers that change. Returns when the run is over, or this worker has left it."""
        for number in (signal.SIGTERM, signal.SIGUSR1):  # this process will be taken away: it leaves before that
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

    def _session(self, workers: WorkerGroup, snapshot: Packed | None = None, warm_up: bool = False) -> Session:
        return Session(
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

    def _finish(self, session: Session, workers: WorkerGroup) -> None:
        session.finish()
        seconds, trained = session.seconds, session.trained
        session.flush()
        session.state.average_buffers()
        if trained is not None:
            digest = trained.fingerprint(workers)
            times, needed = session.progress.times, session.progress.memory.row()
            steps, sent = times.means(), trained.sync.sent_bytes / max(1, times.count)
            rows = workers.gather([sent, *steps, *needed], "times of steps, memory and bytes")
            sent_bytes = sum(row.pop(0) for row in rows)
            worker_steps = steps_of_workers([row[: len(steps)] for row in rows])
            memory = memory_of_workers([row[len(steps) :] for row in rows])
        else:
            digest, worker_steps, memory, sent_bytes = fingerprint({}), [], [], 0.0
            workers.gather([], END)
        hosts = max(1, len(set(workers.comms.hosts)))
        if self._spec.measure_link and workers.size > 1:
            with suppress(GroupBroken):  # somebody was lost just now: the measurement is not worth a recovery
                link = measure_link(workers.group, hosts)
                if workers.rank == 0:
                    self._send(link)
        if workers.rank != 0 and not workers.elastic:
            return
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
    """What this worker forms groups with; all workers of a run must come to the same."""
    # With more workers than GPUs, now or later, some share one; all share a GPU that the user has named.
    enough = spec.execution.device in ("auto", "cuda") and spec.most_workers <= torch.cuda.device_count()
    own_device = place.own_device and enough
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return factory_for(place.device, own_device=own_device, interface=interface, timeout_s=LONG_S)
