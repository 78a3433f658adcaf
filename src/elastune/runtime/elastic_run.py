"""A run whose workers may change, as its controller holds it, whether it has started the run or adopted it.

It reads the events of the run's coordinator and of the launcher, has ``outcome`` decide what became of workers and
run, and executes the resulting actions. Every member reports what concerns the whole run, and some report it again
after an adoption: ``RecordFilter`` passes each record once. ``DriverQueue`` holds what the driver has still to read.
``AdoptedRun`` is a run whose first controller has died.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elastune.core.errors import UserError
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
    WorkerGone,
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
from elastune.elastic.coordinator.machine import Membership, Start
from elastune.elastic.wire.contact import Contact, remove_contact, write_contact
from elastune.elastic.wire.messages import Progressed, ReshapeAsked, ResizeAsked, Welcome, WorkerSpec, encode
from elastune.parallel.mechanisms.capabilities import meshes_of
from elastune.runtime import outcome as judgement
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

# How other commands find a run that is going on, and the next controller its workers.


def announce(spec: RunSpec, coordinator: Coordinator) -> None:
    """Write into its folder where the coordinator of the run ``spec`` is. Raises ``UserError``."""
    try:
        spec.out.mkdir(parents=True, exist_ok=True)  # workers elsewhere may have made none yet
        write_contact(spec.out, coordinator.address, coordinator.token, spec.elastic.grace_s)
    except OSError as error:
        rule = "the output folder must be writable"
        raise UserError(rule, f"{spec.out}: {error.strerror}", "choose another folder") from error


# What a run has to tell its driver, and what that has been given.


class DriverQueue:
    """Filled by a run, emptied by its ``poll``.

    ``given``: by worker, so many of its records were handed out: who asks for more has kept them.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._woken = 0
        self._taken: dict[int, int] = {}
        self.given: Mapping[int, int] = {}

    def put(self, *events: Event) -> None:
        """Append ``events``."""
        self._events.extend(events)

    def put_of_run(self, records: Iterable[Record]) -> None:
        """Append ``records`` that no worker has sent."""
        self._events.extend(Message(NOBODY, record) for record in records)

    def put_first(self, records: Iterable[Record]) -> None:
        """Put ``records`` that no worker has sent before all others, the last one first."""
        self._events.extendleft(Message(NOBODY, record) for record in records)

    def record_taken(self, worker: int, nth: int) -> None:
        """``worker``'s ``nth`` record is here, or needs not be."""
        self._taken[worker] = nth

    def hand_out(self) -> list[Event]:
        """All that is here, in order."""
        events = list(self._events)
        self._events.clear()
        self._woken = 0
        self.given, self._taken = self._taken, {}
        return events

    def clear(self) -> None:
        """Nobody is to hear of what is here."""
        self._events.clear()

    @property
    def ends(self) -> int:
        """How many ends of workers are here."""
        return sum(isinstance(event, Exited) for event in self._events)

    @property
    def pending(self) -> bool:
        """Whether there is something here that nobody was ``woken`` for."""
        return len(self._events) > self._woken

    def woken(self) -> None:
        """Whoever waits for news has heard that there are some."""
        self._woken = len(self._events)


# Which records of a run are news: all members tell what concerns the run, and some tell it again after an adoption.


class RecordFilter:
    """What was said. ``kept``: records of this run that are in the journal, from a controller before this one.
    ``planned_steps``: of the whole run, as said last; None where nobody knows."""

    def __init__(self, kept: Iterable[Record] = ()) -> None:
        self._reported: set[tuple[int, int, int]] = set()
        self._decided: set[tuple[int, str, str]] = set()  # step, policy, and the hook of a failure
        self._lines: set[bytes] = set()
        self.planned_steps: int | None = None
        for record in kept:
            self.is_new(record)
            self._lines.add(encode_record(record))

    def is_kept(self, record: Record) -> bool:
        """Whether the controller before this one has kept ``record``, which is told again."""
        return encode_record(record) in self._lines

    def is_new(self, record: Record) -> bool:
        """Whether nobody has said ``record`` before."""
        match record:
            case Reported(epoch=epoch, step=step, nth=nth):
                return _first(self._reported, (epoch, step, nth))
            case Decided(policy=policy, step=step, outcome=outcome):
                return _first(self._decided, (step, policy, outcome))
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
            case NotMeasured(monitor=monitor):
                return _first(self._decided, (0, monitor, ""))
            case StepsPlanned(steps=steps):
                before, self.planned_steps = self.planned_steps, steps
                return steps != before
            case Restarted(step=step):  # what was decided after it will be decided again
                self._decided = {key for key in self._decided if key[0] <= step}
        return True


def _first(known: set[Any], key: tuple[Any, ...]) -> bool:
    """Add ``key``; whether it was not there."""
    new = key not in known
    known.add(key)
    return new


# Workers that were started and have not come: whoever starts processes may say that one runs where none does.

START_LIMIT_S = 300.0  # the first workers of a host import torch, from whatever disk it has


class Starting:
    """Those that ``launcher`` was told to start, and until when each has to be connected."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._until: dict[Bootstrap, float] = {}

    def begun(self, workers: Iterable[Bootstrap], now: float) -> None:
        """These were started ``now``."""
        self._until.update(dict.fromkeys(workers, now + START_LIMIT_S))

    def late(self, state: Membership, now: float) -> list[ProcessEnded]:
        """Those that should be connected ``now`` and are not, each once, as if they had ended."""
        for worker in list(self._until):
            found = state.find(worker.worker)
            if found is None or found.phase != "starting":
                del self._until[worker]
        late = [worker for worker, until in self._until.items() if now >= until]
        for worker in late:
            del self._until[worker]
        return [ProcessEnded(worker, None, why=self._told(worker)) for worker in late]

    def _told(self, worker: Bootstrap) -> str:
        host = self._launcher.host(worker)
        where = f"host {host}" if host else "this machine"
        return f"{where} says that worker {worker.worker} runs, but it has not come within {START_LIMIT_S:g} s"


# The processes of a run's workers, by number.


class RunProcesses:
    """Those that ``launcher`` was told to start, for what a run ``needs``, and those that it has said to run.

    ``pids``: worker -> process, of those that run. The coordinator's thread may ask for ``last_line`` and ``vitals``.
    """

    def __init__(self, launcher: Launcher, needs: Needs) -> None:
        self._launcher = launcher
        self._needs = needs
        self._known: dict[int, Bootstrap] = {}
        self._starting = Starting(launcher)
        self.pids: dict[int, int] = {}

    @property
    def known(self) -> Mapping[int, Bootstrap]:
        """All there ever were."""
        return self._known

    def start(self, workers: Sequence[Bootstrap]) -> None:
        """Start these. Raises ``OSError`` and ``UserError``, as ``Launcher.start``."""
        self._known |= {worker.worker: worker for worker in workers}
        self._starting.begun(workers, time.monotonic())
        self._launcher.start(workers, self._needs)

    def meet(self, worker: Bootstrap) -> None:
        """``worker`` was started for a controller before this one."""
        self._known[worker.worker] = worker

    def end(self, workers: Collection[int], why: str = "") -> None:
        """Kill these; who is not known has no process."""
        self._launcher.end([self._known[worker] for worker in workers if worker in self._known], why)

    def late(self, state: Membership) -> list[ProcessEnded]:
        """Those that should be connected by now and are not, each once, as if they had ended."""
        return self._starting.late(state, time.monotonic())

    def last_line(self, worker: int) -> str:
        """The last line that ``worker`` printed, where that is known."""
        return self._launcher.last_line(self._known[worker]) if worker in self._known else ""

    def vitals(self, worker: int) -> ProcessStatus | None:
        """What the system says of ``worker``'s process, where that is known."""
        return self._launcher.vitals(self._known[worker]) if worker in self._known else None


# A run whose workers may change, as its controller holds it: it hears its coordinator and its launcher, has
# ``judgement`` decide what became of workers and run, and does what follows.

LOOK_AGAIN_S = 1.0  # between looks whether an edit of the program was undone


class ElasticRun(ElasticHandle):
    """A run on ``launcher``. ``task``: what its workers have in common; ``host``: where its coordinator listens;
    ``pump``: has the cluster look for news.

    ``closed``: all is done with, and there is nothing more to be heard. Raises ``TypeError`` where the run's
    configuration holds what JSON cannot, ``OSError`` where the coordinator cannot listen.
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
        encode(Welcome(False, 0.0, spec=task))  # here: the coordinator's thread has nobody to raise it to
        workers, elastic = spec.execution.workers, spec.elastic
        self.low, self.high = min(elastic.low, workers), spec.most_workers
        self._task = task
        self._pump = pump
        self._launcher = launcher
        self._processes = RunProcesses(launcher, Needs(spec.execution.device, spec.out / "logs", spec.spread))
        self._facts = RunFacts(workers)
        self._queue = DriverQueue()
        self.record_filter = RecordFilter()
        self._free = -1  # as the coordinator was told last
        self._edited_until: float | None = None  # the program was, and is looked at again then
        self._announced = self.closed = False
        self.coordinator = self._coordinate(
            WorkerBounds(self.low, self.high, elastic.most_losses, meshes_of(spec.execution)),
            Timeouts(elastic.heartbeat_s, silence_s, elastic.grace_s, elastic.collective_timeout_s),
            ListenOptions(host, token=launcher.new_token(), tls=launcher.tls),
            WorkerLookups(self._spec_of, self._processes.last_line, self._processes.vitals),
        )

    def _coordinate(
        self, bounds: WorkerBounds, timeouts: Timeouts, entrance: ListenOptions, lookups: WorkerLookups
    ) -> Coordinator:
        return Coordinator(range(self.spec.execution.workers), bounds, timeouts, entrance, lookups)

    def _spec_of(self, worker: int) -> WorkerSpec:
        return replace(self._task, place=Place(worker, self.spec.execution.workers, worker))

    # -- for the driver -----------------------------------------------------------------------------------------------

    def poll(self) -> list[Event]:
        if self._queue.given and self.spec.elastic.grace_s:  # who polls has kept what it was given before
            self.coordinator.kept(self._queue.given)
        self._pump(0.0)
        self.process_events()
        return self._queue.hand_out()

    @property
    def alive(self) -> int:
        return len(self._facts.running) + self._queue.ends or int(not self.over)

    @property
    def over(self) -> bool:
        """Whether nothing is started any more, and every worker that ends is the driver's concern."""
        return self._facts.over

    @property
    def pending(self) -> bool:
        """Whether ``poll`` has something to hand out that nobody was ``woken`` for."""
        return self._queue.pending

    def woken(self) -> None:
        """Whoever waits for news has heard that there are some. (One who is done with this run never asks for them.)"""
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

    # -- for the cluster ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the first workers, and let other commands find the run. Raises ``OSError`` and ``UserError``."""
        first = range(self.spec.execution.workers)
        self._facts = self._facts.put_all(first, phase="running")
        self._start(first)
        self._announce()

    def _announce(self) -> None:
        announce(self.spec, self.coordinator)
        self._announced = True

    def abandon(self) -> None:
        """After ``begin`` has failed: end what it started, and hear no more of it."""
        self.kill()
        self.close()
        self._queue.clear()

    def hear(self, event: ProcessEvent) -> None:
        """The launcher's news of one of this run's workers."""
        worker = event.bootstrap.worker
        match event:
            case ProcessStarted() if self._facts.of(worker).end is not None:  # its host was given up, and is back
                self._launcher.end([event.bootstrap], "it counts as lost")
            case ProcessStarted(pid=pid):
                self._processes.pids[worker] = pid
            case ProcessNoticed(seconds=seconds, why=why):
                self.coordinator.notice(worker, seconds, why)
            case ProcessEnded():
                self._processes.pids.pop(worker, None)
                self._process_ended(event)

    def tell(self, record: Record) -> None:
        """Hear ``record`` of what the workers have left on their hosts."""
        self._queue.put_of_run([record])
        if isinstance(record, Checkpointed):
            self.coordinator.ask(Progressed(record.step))

    def room(self, free: int) -> int:
        """Tell the coordinator how many workers could be started, of ``free`` in the cluster; what it leaves."""
        mine = 0 if self._edited else max(0, min(free, self.high - len(self._facts.running)))
        if mine != self._free and not self.over:
            self._free = mine
            self.coordinator.capacity(mine)
        return free if self.over or not free else max(0, free - self.coordinator.membership.missing)

    @property
    def _edited(self) -> bool:
        """Whether a worker that was started now would load another program than the others have."""
        if self._edited_until is not None and time.monotonic() >= self._edited_until:
            edited = bool(differences(self.spec.source, self.spec.program))
            self._edited_until = time.monotonic() + LOOK_AGAIN_S if edited else None
        return self._edited_until is not None

    def process_events(self) -> None:
        """Hear what the coordinator has, and do what follows."""
        if self.closed:
            return
        self._facts = self._facts.seen(self.coordinator.members)
        self._queue.put_of_run(self.coordinator.take_records())
        for told in self.coordinator.take():
            if isinstance(told, RecordSent):
                self._take(told)
            else:
                self._judge(told)
        for end in self._processes.late(self.coordinator.membership):
            self._processes.end([end.bootstrap.worker], end.why)
            self._process_ended(end)
        self._do(judgement.expire_explanations(self._facts, time.monotonic()))
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

    # -- what follows -------------------------------------------------------------------------------------------------

    def _take(self, sent: RecordSent) -> None:
        """Hear a record of one worker. All members tell what concerns the run; one of them is enough."""
        if isinstance(sent.record, RunFinished | RunFailed):
            self._judge(sent)
            return
        self._queue.record_taken(sent.worker, sent.nth)  # what the end was is told again until all is over
        if self.record_filter.is_new(sent.record):
            self._queue.put(Message(sent.worker, sent.record))

    def _judge(self, news: ForController) -> None:
        if isinstance(news, RecordSent) and isinstance(news.record, RunFailed) and EDITED in news.record.detail:
            self._edited_until = time.monotonic() + LOOK_AGAIN_S
            self.coordinator.capacity(0)  # before it asks for another one, which would load the same
            self._free = 0
        why_left = self.coordinator.why_left(news.worker) if isinstance(news, WorkerDrained) else ""
        moment = EventContext(time.monotonic(), self.coordinator.members, why_left)
        self._do(judgement.step(self._facts, news, moment))

    def _do(self, judged: Transition) -> None:
        self._facts, acts = judged
        for act in acts:
            match act:
                case Message() | Exited():
                    self._queue.put(act)
                case Kill(workers, why):
                    self._processes.end(workers, why)
                case Start(workers):
                    self._start_more(workers)

    def _start(self, workers: Sequence[int]) -> None:
        address, token = self.coordinator.address, self.coordinator.token
        self._processes.start([Bootstrap(worker, address, token) for worker in workers])

    def _start_more(self, workers: Sequence[int]) -> None:
        self._free = -1  # the coordinator counts these off what it was told: whatever there is now, it is to hear it
        for worker in workers:
            try:
                self._start([worker])
            except (OSError, UserError) as error:
                why = f"worker {worker} could not be started: {error}"
                self._process_ended(ProcessEnded(self._processes.known[worker], NOT_STARTED, why=why))

    def _process_ended(self, end: ProcessEnded) -> None:
        worker = end.bootstrap.worker
        if self._facts.of(worker).end is None:  # a start that failed may be told twice
            self._facts = self._facts.put(worker, end=end)
            self.coordinator.lost(worker, self._facts.of(worker).how)


# A run that has outlived its controller, as the next one holds it.

DISCONNECTED = "it did not come back to the next controller"


class AdoptedRun(ElasticRun):
    """Workers come back to ``contact``, the launcher says which processes there are; ``take_over`` makes them a run.

    ``kept``: the records of this run that its controllers have kept, in order. ``options``: see ``ElasticRun``.
    """

    coordinator: AdoptingCoordinator

    def __init__(
        self, task: WorkerSpec, launcher: Launcher, contact: Contact, kept: Iterable[Record], **options: Any
    ) -> None:
        self._contact = contact
        self._kept = list(kept)
        self._again: dict[int, int] | None = None  # by worker: so many of its records were told before it came back
        self._refused = False
        super().__init__(task, launcher, **options)
        self.record_filter = RecordFilter(self._kept)

    def _coordinate(
        self, bounds: WorkerBounds, timeouts: Timeouts, entrance: ListenOptions, lookups: WorkerLookups
    ) -> AdoptingCoordinator:
        port = int(self._contact.address.rpartition(":")[2])
        entrance = replace(entrance, port=port, token=self._contact.token)
        return AdoptingCoordinator(bounds, timeouts, entrance, lookups)

    @property
    def _ended(self) -> set[int]:
        return {number for number, worker in self._facts.workers.items() if worker.end is not None}

    @property
    def _living(self) -> set[int]:
        return set(self._processes.known) - self._ended

    @property
    def moved(self) -> bool:
        """Whether its workers have known it at another address."""
        return self.coordinator.address != self._contact.address

    @property
    def some_back(self) -> bool:
        """Whether anybody has come back."""
        return bool(known(self._living, self.coordinator.back))

    @property
    def all_back(self) -> bool:
        """Whether all have that train together and live."""
        back = known(self._living, self.coordinator.back)
        return bool(back) and awaited(back) <= self._ended

    @property
    def all_ended(self) -> bool:
        """Whether their launcher has told the ends of all that the journal last knew to train together."""
        views = [record.members for record in self._kept if isinstance(record, Regrouped)]
        members = set(views[-1] if views else range(self.spec.execution.workers))
        return not self._living and members <= self._ended

    def take_over(self, seconds: float) -> bool:
        """Go on with those who are back, ``seconds`` after they were first looked for.

        False where they hold no state to go on with: all are sent away then, those too that come later.
        """
        living = self._living
        lost = awaited(known(living, self.coordinator.back))
        back = self.coordinator.adopt(living, self._used() + 1)
        if back is None:
            self._refused = True
            self._facts = replace(self._facts, over=True)
            self._processes.end(sorted(living), "its run begins again")
            return False
        self._free = -1  # what was told of it before was nobody's to hear
        self._again = {worker: returned.records for worker, returned in back.items()}
        self._do(judgement.take_over(self._facts, back, sorted(living - set(back)), DISCONNECTED))
        told = {record.worker for record in self._kept if isinstance(record, WorkerGone)}
        told |= {*self._processes.known, *self._ended}
        gone: list[Record] = [WorkerGone(worker, "lost", WITHOUT_CONTROLLER) for worker in sorted(lost - told)]
        grace_s = self.spec.elastic.grace_s
        adopted = Adopted(sorted(back), self.coordinator.step, seconds, sorted(lost), grace_s)
        self._queue.put_first([*gone, adopted])
        self._announce()
        return True

    def hear(self, event: ProcessEvent) -> None:
        if isinstance(event, ProcessStarted) and event.bootstrap.worker not in self._processes.known:
            self._processes.meet(event.bootstrap)
            if self._again is not None or self._refused:  # too late
                self._launcher.end([event.bootstrap], DISCONNECTED)
        super().hear(event)

    @property
    def pending(self) -> bool:
        return not self._refused and super().pending

    def kill(self) -> None:
        self._refused = False
        super().kill()

    def _close_if_over(self) -> None:
        if not self._refused:  # who comes late is to hear that it may end
            super()._close_if_over()

    def _used(self) -> int:
        """The highest number that a worker of this run ever had."""
        numbers = [r.event.get("worker", 0) for r in self._kept if isinstance(r, MembershipEvent)]
        members = [worker for r in self._kept if isinstance(r, Regrouped) for worker in r.members]
        return max([*numbers, *members, *self._processes.known], default=0)

    def _take(self, sent: RecordSent) -> None:
        again = sent.nth if self._again is None else self._again.get(sent.worker, 0)
        if sent.nth <= again and self.record_filter.is_kept(sent.record):
            self._queue.record_taken(sent.worker, sent.nth)
        else:
            super()._take(sent)

    def _judge(self, news: ForController) -> None:
        super()._judge(news)
        if self._refused:  # nobody has this run: what begins again has other workers
            self._queue.clear()
