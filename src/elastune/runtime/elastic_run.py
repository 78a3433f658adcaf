"""The controller's side of one elastic run: ``ElasticRun``, and ``AdoptedRun`` for a run whose controller died.

``ElasticRun`` reads the events of the run's coordinator and of the launcher. The pure functions of ``outcome`` decide
what became of each worker and of the run; ``ElasticRun`` executes the resulting actions. Every member reports what
concerns the whole run, and some members report it again after an adoption: ``RecordFilter`` passes each record once.
``DriverQueue`` holds the events that the driver has not read yet.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elastune.core.errors import UserError
from elastune.core.journal import logs
from elastune.core.journal.records import (
    Adopted,
    Checkpointed,
    Decided,
    LearnerLeftOut,
    MembershipEvent,
    NotMeasured,
    PolicyFailed,
    Record,
    Regrouped,
    Reported,
    Restarted,
    RoundsShortened,
    RunFailed,
    RunFinished,
    StepsPlanned,
    SyncChanged,
    SyncChangesUnreached,
    VerificationEnded,
    WorkerGone,
    WorkerWrong,
)
from elastune.core.journal.records import encode as encode_record
from elastune.core.mesh import Mesh
from elastune.core.run import Place, RunSpec
from elastune.elastic.coordinator.adoption import AdoptingCoordinator, awaited, known
from elastune.elastic.coordinator.controller_interface import (
    ForController,
    ListenOptions,
    RecordSent,
    Timeouts,
    WorkerBounds,
    WorkerDrained,
    WorkerLookups,
)
from elastune.elastic.coordinator.coordinator import Coordinator
from elastune.elastic.coordinator.liveness import ProcessStatus
from elastune.elastic.coordinator.machine import End, Membership, Start
from elastune.elastic.wire.contact import Contact, remove_contact, write_contact
from elastune.elastic.wire.messages import Corrupt, Progressed, ReshapeAsked, ResizeAsked, Welcome, WorkerSpec, encode
from elastune.parallel.mechanisms.capabilities import meshes_of
from elastune.runtime import outcome
from elastune.runtime.clusters.base import NOBODY, ElasticHandle, Event, Exited, Message
from elastune.runtime.launcher import (
    Bootstrap,
    Launcher,
    Needs,
    ProcessEnded,
    ProcessEvent,
    ProcessNoticed,
    ProcessStarted,
)
from elastune.runtime.outcome import NOT_STARTED, WITHOUT_CONTROLLER, EventContext, Kill, RunFacts, Transition
from elastune.train.program.source import EDITED, differences

START_LIMIT_S = 300.0  # to connect: the first workers of a host import torch, from a disk that may be slow
LOOK_AGAIN_S = 1.0  # between two checks whether an edit of the program was undone
DISCONNECTED = "it did not come back to the next controller"


class ElasticRun(ElasticHandle):
    """A run whose workers may change while it trains.

    The driver uses the methods of ``ElasticHandle``. The cluster calls ``begin`` once, passes the launcher's events to
    ``process_event``, and calls ``process_events`` often.

    Args:
        task: What all workers of the run have in common.
        launcher: Starts and ends the worker processes.
        host: The address on which the coordinator listens.
        silence_s: A worker ends itself if it hears nothing from its coordinator for so long.
        pump: Lets the cluster process its launcher's events, waiting for at most the given seconds.

    Attributes:
        closed: The run is over and its coordinator has ended: no more events will come.

    Raises:
        TypeError: The run's configuration holds a value that JSON cannot express.
        OSError: The coordinator cannot listen.
    """

    def __init__(
        self,
        task: WorkerSpec,
        launcher: Launcher,
        *,
        host: str = "127.0.0.1",
        silence_s: float = 30.0,
        pump: Callable[[float], None] = lambda timeout_s: None,
    ) -> None:
        self.spec = spec = task.spec
        self._log = logs.run_logger(__name__, str(spec.out))
        encode(Welcome(False, 0.0, spec=task))  # raises TypeError here, not in the coordinator's thread
        workers, elastic = spec.execution.workers, spec.elastic
        self.low, self.high = min(elastic.low, workers), spec.most_workers
        self._task = task
        self._pump = pump
        self._launcher = launcher
        self._processes = RunProcesses(launcher, Needs(spec.execution.device, spec.out / "logs", spec.spread))
        self._facts = RunFacts(workers)
        self._queue = DriverQueue()
        self.record_filter = RecordFilter()
        self._free = -1  # the free room last reported to the coordinator; -1: none reported yet
        self._edited_until: float | None = None  # the program's files differ; the time of the next check
        self._announced = self.closed = False
        self.coordinator = self._coordinate(
            WorkerBounds(self.low, self.high, elastic.most_losses, meshes_of(spec.execution)),
            Timeouts(elastic.heartbeat_s, silence_s, elastic.grace_s, elastic.collective_timeout_s),
            ListenOptions(host, token=launcher.new_token(), tls=launcher.tls),
            WorkerLookups(self._spec_of, self._processes.last_line, self._processes.vitals),
        )

    def _coordinate(
        self, bounds: WorkerBounds, timeouts: Timeouts, listen: ListenOptions, lookups: WorkerLookups
    ) -> Coordinator:
        return Coordinator(range(self.spec.execution.workers), bounds, timeouts, listen, lookups, str(self.spec.out))

    def _spec_of(self, worker: int) -> WorkerSpec:
        return replace(self._task, place=Place(worker, self.spec.execution.workers, worker))

    # -- for the driver -----------------------------------------------------------------------------------------------

    def poll(self) -> list[Event]:
        if self._queue.returned and self.spec.elastic.grace_s:  # the driver has journaled what the last poll returned
            self.coordinator.kept(self._queue.returned)
        self._pump(0.0)
        self.process_events()
        return self._queue.hand_out()

    @property
    def alive(self) -> int:
        return len(self._facts.running) + self._queue.ends or int(not self.over)

    @property
    def over(self) -> bool:
        """Whether the run starts no more workers, and passes the end of every worker to the driver."""
        return self._facts.over

    @property
    def pending(self) -> bool:
        """Whether ``poll`` has an event to return that came after the last call of ``woken``."""
        return self._queue.pending

    def woken(self) -> None:
        """Note that the driver has been woken. A driver that is done with this run may never poll again."""
        self._queue.woken()

    @property
    def pids(self) -> dict[int, int]:
        return dict(self._processes.pids)

    @property
    def members(self) -> list[int]:
        return self.coordinator.members

    @property
    def step(self) -> int:
        return self.coordinator.step

    def stop(self) -> None:
        self.coordinator.stop()

    def kill(self) -> None:
        self._facts = replace(self._facts, over=True)
        self._processes.end(self._facts.running)
        self._close_if_over()

    def resize(self, workers: int, why: str = "") -> None:
        self.coordinator.ask(ResizeAsked(workers, why))

    def reshape(self, mesh: Mesh, why: str = "") -> None:
        self.coordinator.ask(ReshapeAsked(str(mesh), why))

    def kill_worker(self, worker: int) -> None:
        self._processes.end([worker])

    def corrupt(self, worker: int, what: str, *, once: bool, seed: int) -> None:
        self.coordinator.corrupt(worker, Corrupt(what, once, seed))  # type: ignore[arg-type]

    # -- for the cluster ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the first workers and announce the run (``announce``). Raises ``OSError`` and ``UserError``."""
        first = range(self.spec.execution.workers)
        self._facts = self._facts.put_all(first, phase="running")
        self._start(first)
        self._announce()

    def _announce(self) -> None:
        announce(self.spec, self.coordinator)
        self._announced = True

    def abandon(self) -> None:
        """After ``begin`` has failed: end the workers that it started, and drop their events."""
        self.kill()
        self.close()
        self._queue.clear()

    def process_event(self, event: ProcessEvent) -> None:
        """Process an event of the launcher about one worker of this run."""
        worker = event.bootstrap.worker
        match event:
            case ProcessStarted() if self._facts.of(worker).end is not None:  # its host was lost, and has come back
                self._launcher.end([event.bootstrap], "it counts as lost")
            case ProcessStarted(pid=pid):
                self._log.info("worker %d runs as process %d", worker, pid)
                self._processes.pids[worker] = pid
            case ProcessNoticed(seconds=seconds, why=why):
                self._log.warning("worker %d will be taken away in %.0f s: %s", worker, seconds, why)
                self.coordinator.notice(worker, seconds, why)
            case ProcessEnded():
                self._processes.pids.pop(worker, None)
                self._process_ended(event)

    def take_record(self, record: Record) -> None:
        """Take ``record`` about files that a worker left on its host (``TransferredRuns``)."""
        self._queue.put_of_run([record])
        if isinstance(record, Checkpointed):
            self.coordinator.ask(Progressed(record.step))

    def room(self, free: int) -> int:
        """Offer the run the cluster's ``free`` room, in workers. Returns the room that it leaves to other runs."""
        leaving = sum(worker.preempted for worker in self.coordinator.membership.workers)  # others come in their place
        usable = 0 if self._edited else max(0, min(free, self.high - len(self._facts.running) + leaving))
        if usable != self._free and not self.over:
            self._free = usable
            self.coordinator.capacity(usable)
        return free if self.over or not free else max(0, free - self.coordinator.membership.missing)

    @property
    def _edited(self) -> bool:
        """Whether the program's files were edited: a worker started now would load another program than the members."""
        if self._edited_until is not None and time.monotonic() >= self._edited_until:
            edited = bool(differences(self.spec.source, self.spec.program))
            self._edited_until = time.monotonic() + LOOK_AGAIN_S if edited else None
        return self._edited_until is not None

    def process_events(self) -> None:
        """Process the coordinator's events and late starts, and execute the resulting actions."""
        if self.closed:
            return
        self._facts = self._facts.seen(self.coordinator.members)
        self._queue.put_of_run(self.coordinator.take_records())
        for event in self.coordinator.take():
            if isinstance(event, RecordSent):
                self._take(event)
            else:
                self._judge(event)
        for end in self._processes.late(self.coordinator.membership):
            self._processes.end([end.bootstrap.worker], end.why)
            self._process_ended(end)
        self._do(outcome.expire_explanations(self._facts, time.monotonic()))
        self._close_if_over()

    def close(self) -> None:
        """End the coordinator. Idempotent."""
        self._facts = replace(self._facts, over=True)
        self.closed = True
        if self._announced:
            remove_contact(self.spec.out)
        self.coordinator.close()

    def _close_if_over(self) -> None:
        if not self.closed and self.over and not self._facts.running:
            self._queue.put_of_run(self.coordinator.take_records())
            self.close()

    # -- decisions of ``outcome`` and their actions -------------------------------------------------------------------

    def _take(self, sent: RecordSent) -> None:
        """Queue a worker's record, unless another worker has sent the same record about the run."""
        if isinstance(sent.record, RunFinished | RunFailed):
            self._judge(sent)
            return
        self._queue.record_taken(sent.worker, sent.nth)  # never for an end: its worker repeats it until the run is over
        if self.record_filter.is_new(sent.record):
            self._queue.put(Message(sent.worker, sent.record))
            if isinstance(sent.record, WorkerWrong):
                self._processes.mark(sent.record.worker, spare=len(self._facts.running) > self.low)
                self._judge(End(sent.record.worker, sent.record.why, lost=True))

    def _judge(self, event: ForController) -> None:
        if isinstance(event, RecordSent) and isinstance(event.record, RunFailed) and EDITED in event.record.detail:
            self._edited_until = time.monotonic() + LOOK_AGAIN_S
            self.coordinator.capacity(0)  # before it asks for a replacement, which would load the edited program
            self._free = 0
        why_left = self.coordinator.why_left(event.worker) if isinstance(event, WorkerDrained) else ""
        context = EventContext(time.monotonic(), self.coordinator.members, why_left)
        self._do(outcome.transition(self._facts, event, context))

    def _do(self, decided: Transition) -> None:
        self._facts, actions = decided
        for action in actions:
            match action:
                case Message() | Exited():
                    self._queue.put(action)
                case Kill(workers, why):
                    self._processes.end(workers, why)
                case Start(workers):
                    self._start_more(workers)

    def _start(self, workers: Sequence[int]) -> None:
        address, token = self.coordinator.address, self.coordinator.token
        self._processes.start([Bootstrap(worker, address, token) for worker in workers])

    def _start_more(self, workers: Sequence[int]) -> None:
        self._free = -1  # the coordinator subtracts these starts from the reported room, so report it again
        for worker in workers:
            try:
                self._start([worker])
            except (OSError, UserError) as error:
                why = f"worker {worker} could not be started: {error}"
                self._process_ended(ProcessEnded(self._processes.known[worker], NOT_STARTED, why=why))

    def _process_ended(self, end: ProcessEnded) -> None:
        worker = end.bootstrap.worker
        if self._facts.of(worker).end is None:  # a launcher may report a failed start twice
            self._facts = self._facts.put(worker, end=end)
            self._log.info("the process of worker %d has ended: code %s %s", worker, end.code, end.why)
            self.coordinator.lost(worker, self._facts.of(worker).how)


class AdoptedRun(ElasticRun):
    """A run that has outlived its controller, held by the next controller.

    Its workers reconnect to ``contact``, and the launcher reports the processes that still live. Once enough workers
    are back, ``take_over`` continues the run with them.

    Args:
        task: As of ``ElasticRun``.
        launcher: As of ``ElasticRun``.
        contact: The address and token at which the workers look for their coordinator.
        kept: The records of this run in the journal, in order.
        options: The other options of ``ElasticRun``.
    """

    coordinator: AdoptingCoordinator

    def __init__(
        self, task: WorkerSpec, launcher: Launcher, contact: Contact, kept: Iterable[Record], **options: Any
    ) -> None:
        self._contact = contact
        self._kept = list(kept)
        self._again: dict[int, int] | None = None  # by worker: how many records it sent before it came back
        self._refused = False
        super().__init__(task, launcher, **options)
        self.record_filter = RecordFilter(self._kept)

    def _coordinate(
        self, bounds: WorkerBounds, timeouts: Timeouts, listen: ListenOptions, lookups: WorkerLookups
    ) -> AdoptingCoordinator:
        port = int(self._contact.address.rpartition(":")[2])
        listen = replace(listen, port=port, token=self._contact.token)
        return AdoptingCoordinator(bounds, timeouts, listen, lookups, str(self.spec.out))

    @property
    def _ended(self) -> set[int]:
        return {number for number, worker in self._facts.workers.items() if worker.end is not None}

    @property
    def _living(self) -> set[int]:
        return set(self._processes.known) - self._ended

    @property
    def moved(self) -> bool:
        """Whether the coordinator listens at another address than the one that the workers know."""
        return self.coordinator.address != self._contact.address

    @property
    def some_back(self) -> bool:
        """Whether a living worker has come back."""
        return bool(known(self._living, self.coordinator.back))

    @property
    def all_back(self) -> bool:
        """Whether all members that live have come back."""
        back = known(self._living, self.coordinator.back)
        return bool(back) and awaited(back) <= self._ended

    @property
    def all_ended(self) -> bool:
        """Whether the launcher has reported the end of every member that the journal last recorded."""
        views = [record.members for record in self._kept if isinstance(record, Regrouped)]
        members = set(views[-1] if views else range(self.spec.execution.workers))
        return not self._living and members <= self._ended

    def take_over(self, seconds: float) -> bool:
        """Continue the run with the workers that are back.

        Args:
            seconds: How long this controller has waited for the workers.

        Returns:
            False where these workers hold no state to continue from. Their processes are ended then, and so are those
            of workers that come later.
        """
        living = self._living
        lost = awaited(known(living, self.coordinator.back))
        back = self.coordinator.adopt(living, self._used() + 1)
        if back is None:
            self._refused = True
            self._facts = replace(self._facts, over=True)
            self._processes.end(sorted(living), "its run begins again")
            return False
        self._free = -1  # no coordinator state has used the room reported before
        self._again = {worker: returned.records for worker, returned in back.items()}
        self._do(outcome.take_over(self._facts, back, sorted(living - set(back)), DISCONNECTED))
        reported = {record.worker for record in self._kept if isinstance(record, WorkerGone)}
        reported |= {*self._processes.known, *self._ended}
        gone: list[Record] = [WorkerGone(worker, "lost", WITHOUT_CONTROLLER) for worker in sorted(lost - reported)]
        grace_s = self.spec.elastic.grace_s
        adopted = Adopted(sorted(back), self.coordinator.step, seconds, sorted(lost), grace_s)
        self._queue.put_first([*gone, adopted])
        self._announce()
        return True

    def process_event(self, event: ProcessEvent) -> None:
        if isinstance(event, ProcessStarted) and event.bootstrap.worker not in self._processes.known:
            self._processes.meet(event.bootstrap)
            if self._again is not None or self._refused:  # after ``take_over``
                self._launcher.end([event.bootstrap], DISCONNECTED)
        super().process_event(event)

    @property
    def pending(self) -> bool:
        return not self._refused and super().pending

    def kill(self) -> None:
        self._refused = False
        super().kill()

    def _close_if_over(self) -> None:
        if not self._refused:  # the coordinator stays, to send workers that come late away
            super()._close_if_over()

    def _used(self) -> int:
        """The highest number that a worker of this run has had."""
        numbers = [r.event.get("worker", 0) for r in self._kept if isinstance(r, MembershipEvent)]
        members = [worker for r in self._kept if isinstance(r, Regrouped) for worker in r.members]
        return max([*numbers, *members, *self._processes.known], default=0)

    def _take(self, sent: RecordSent) -> None:
        again = sent.nth if self._again is None else self._again.get(sent.worker, 0)
        if sent.nth <= again and self.record_filter.is_kept(sent.record):
            self._queue.record_taken(sent.worker, sent.nth)
        else:
            super()._take(sent)

    def _judge(self, event: ForController) -> None:
        super()._judge(event)
        if self._refused:  # no driver follows this run: the run that begins again has other workers
            self._queue.clear()


def announce(spec: RunSpec, coordinator: Coordinator) -> None:
    """Write the coordinator's address into the output folder, for other commands and the next controller.

    Raises:
        UserError: The output folder cannot be written.
    """
    try:
        spec.out.mkdir(parents=True, exist_ok=True)  # workers on other hosts have not made the folder yet
        write_contact(spec.out, coordinator.address, coordinator.token, spec.elastic.grace_s)
    except OSError as error:
        rule = "the output folder must be writable"
        raise UserError(rule, f"{spec.out}: {error.strerror}", "choose another folder") from error


class RunProcesses:
    """The worker processes of one run, by worker number.

    The coordinator's thread may call ``last_line`` and ``vitals``; all other methods belong to the controller's thread.

    Args:
        launcher: Starts and ends the processes.
        needs: What the launcher must give each worker of this run.

    Attributes:
        pids: Worker -> process id, of the processes that the launcher has reported as running.
    """

    def __init__(self, launcher: Launcher, needs: Needs) -> None:
        self._launcher = launcher
        self._needs = needs
        self._bootstraps: dict[int, Bootstrap] = {}
        self._starting = Starting(launcher)
        self.pids: dict[int, int] = {}

    @property
    def known(self) -> Mapping[int, Bootstrap]:
        """All workers that the run ever had, by number, whether or not they still run."""
        return self._bootstraps

    def start(self, workers: Sequence[Bootstrap]) -> None:
        """Start ``workers``. Raises ``OSError`` and ``UserError``, as ``Launcher.start`` does."""
        self._bootstraps |= {worker.worker: worker for worker in workers}
        self._starting.begin(workers, time.monotonic())
        self._launcher.start(workers, self._needs)

    def meet(self, worker: Bootstrap) -> None:
        """Add a worker that an earlier controller has started."""
        self._bootstraps[worker.worker] = worker

    def end(self, workers: Collection[int], why: str = "") -> None:
        """Kill the processes of ``workers``. A number that is not in ``known`` has no process, and is ignored."""
        self._launcher.end([self._bootstraps[worker] for worker in workers if worker in self._bootstraps], why)

    def mark(self, worker: int, *, spare: bool) -> None:
        """Use the place of ``worker`` no more. Without ``spare`` workers the run could not go on: it is used again."""
        if spare and worker in self._bootstraps:
            self._launcher.mark(self._bootstraps[worker])

    def late(self, state: Membership) -> list[ProcessEnded]:
        """Return an end, once, for each worker that has not connected within ``START_LIMIT_S``."""
        return self._starting.late(state, time.monotonic())

    def last_line(self, worker: int) -> str:
        """The last line that ``worker`` printed; "" where it is unknown."""
        bootstrap = self._bootstraps.get(worker)
        return "" if bootstrap is None else self._launcher.last_line(bootstrap)

    def vitals(self, worker: int) -> ProcessStatus | None:
        """The operating system's view of ``worker``'s process; None where it is unknown."""
        bootstrap = self._bootstraps.get(worker)
        return None if bootstrap is None else self._launcher.vitals(bootstrap)


class Starting:
    """Start deadlines: a launcher may report that a worker runs although its process never connects."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._until: dict[Bootstrap, float] = {}

    def begin(self, workers: Iterable[Bootstrap], now: float) -> None:
        """Give each of ``workers``, started ``now``, ``START_LIMIT_S`` to connect."""
        self._until.update(dict.fromkeys(workers, now + START_LIMIT_S))

    def late(self, state: Membership, now: float) -> list[ProcessEnded]:
        """Return an end, once, for each worker whose deadline has passed and that has not connected."""
        for worker in list(self._until):
            member = state.find(worker.worker)
            if member is None or member.phase != "starting":
                del self._until[worker]
        late = [worker for worker, until in self._until.items() if now >= until]
        for worker in late:
            del self._until[worker]
        return [ProcessEnded(worker, None, why=self._explain(worker)) for worker in late]

    def _explain(self, worker: Bootstrap) -> str:
        host_name = self._launcher.host(worker)
        host = f"host {host_name}" if host_name else "this machine"
        return f"{host} says that worker {worker.worker} runs, but it has not come within {START_LIMIT_S:g} s"


class DriverQueue:
    """The events that a run's driver has not read yet: the run puts them in, ``ElasticRun.poll`` hands them out.

    Attributes:
        returned: By worker, how many of its records ``hand_out`` has returned. The driver has journaled these records
            when it polls again, so the coordinator may then confirm them to the workers.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._woken = 0
        self._taken: dict[int, int] = {}
        self.returned: Mapping[int, int] = {}

    def put(self, *events: Event) -> None:
        """Append ``events``."""
        self._events.extend(events)

    def put_of_run(self, records: Iterable[Record]) -> None:
        """Append ``records`` that the run itself, not a worker, has made."""
        self._events.extend(Message(NOBODY, record) for record in records)

    def put_first(self, records: Iterable[Record]) -> None:
        """Put ``records`` of the run itself before all other events, in reverse order."""
        self._events.extendleft(Message(NOBODY, record) for record in records)

    def record_taken(self, worker: int, nth: int) -> None:
        """Note that ``worker``'s ``nth`` record is in the queue, or is a repetition that the driver does not need."""
        self._taken[worker] = nth

    def hand_out(self) -> list[Event]:
        """Return all events in order, and empty the queue."""
        events = list(self._events)
        self._events.clear()
        self._woken = 0
        self.returned, self._taken = self._taken, {}
        return events

    def clear(self) -> None:
        """Drop all events."""
        self._events.clear()

    @property
    def ends(self) -> int:
        """The number of ``Exited`` events in the queue."""
        return sum(isinstance(event, Exited) for event in self._events)

    @property
    def pending(self) -> bool:
        """Whether an event has come since the last call of ``woken``."""
        return len(self._events) > self._woken

    def woken(self) -> None:
        """Note that the driver has been woken for all events that are in the queue now."""
        self._woken = len(self._events)


class RecordFilter:
    """Passes each record of a run once, however many workers send it.

    Args:
        kept: The records of this run that an earlier controller has written to the journal.

    Attributes:
        planned_steps: The planned steps of the whole run, as last reported; None before the first report.
    """

    def __init__(self, kept: Iterable[Record] = ()) -> None:
        self._reported: set[tuple[int, int, int]] = set()
        self._decided: set[tuple[int, str, str]] = set()  # step; policy or other subject; outcome, hook or other detail
        self._lines: set[bytes] = set()
        self.planned_steps: int | None = None
        for record in kept:
            self.is_new(record)
            self._lines.add(encode_record(record))
            if isinstance(record, Restarted):  # a worker sends it without the costs, which a coordinator adds
                self._lines.add(encode_record(Restarted(record.step)))

    def is_kept(self, record: Record) -> bool:
        """Whether an earlier controller has journaled ``record`` already."""
        return encode_record(record) in self._lines

    def is_new(self, record: Record) -> bool:
        """Whether ``record`` comes for the first time. Remembers it."""
        match record:
            case Reported(epoch=epoch, step=step, nth=nth):
                return _first(self._reported, (epoch, step, nth))
            case Decided(policy=policy, step=step, outcome=decision):
                return _first(self._decided, (step, policy, decision))
            case PolicyFailed(policy=policy, step=step, hook=hook):
                return _first(self._decided, (step, policy, hook))
            case SyncChanged(step=step, sync=sync):
                return _first(self._decided, (step, "", sync))
            case RoundsShortened(sync=sync, steps=steps):
                return _first(self._decided, (0, f"a pass of {steps}", sync))
            case SyncChangesUnreached(changes=changes, steps=steps):
                return _first(self._decided, (0, f"after {steps} steps", changes))
            case LearnerLeftOut(last_step=step, learner=learner, version=version):
                return _first(self._decided, (step, f"without learner {learner}", str(version)))
            case WorkerWrong(worker=worker, step=step):
                return _first(self._decided, (step, f"worker {worker}", "wrong"))
            case VerificationEnded():
                return _first(self._decided, (0, "", "verification has ended"))
            case NotMeasured(monitor=monitor):
                return _first(self._decided, (0, monitor, ""))
            case StepsPlanned(steps=steps):
                before, self.planned_steps = self.planned_steps, steps
                return steps != before
            case Restarted(step=step):  # the run will decide again what it had decided after this step
                self._decided = {key for key in self._decided if key[0] <= step}
        return True


def _first(seen: set[Any], key: tuple[Any, ...]) -> bool:
    """Add ``key`` to ``seen``. Returns whether it is new."""
    new = key not in seen
    seen.add(key)
    return new
