"""A run whose workers may change, as its controller holds it: the one place where losses are judged and records heard.

Its coordinator says what is to be done with processes; a launcher does it, and tells how they end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from elastune.cluster.announce import announce
from elastune.cluster.base import NOBODY, ElasticHandle, Event, Exited, Message, how_it_ended
from elastune.cluster.ends import NOT_STARTED, ended_itself
from elastune.cluster.launcher import (
    Bootstrap,
    Launcher,
    Needs,
    ProcessEnded,
    ProcessEvent,
    ProcessNoticed,
    ProcessStarted,
)
from elastune.cluster.said import Said
from elastune.cluster.starting import Starting
from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import Place
from elastune.elastic.coordinator.coordinator import Coordinator
from elastune.elastic.coordinator.for_controller import Buried, Parted, RecordSent
from elastune.elastic.coordinator.liveness import Vitals
from elastune.elastic.coordinator.standstill import Standstill
from elastune.elastic.protocol.client import remove_contact
from elastune.elastic.protocol.instructions import End, GiveUp, Start, StopRun
from elastune.elastic.protocol.messages import Progressed, ReshapeAsked, ResizeAsked, Welcome, encode
from elastune.elastic.protocol.worker_spec import WorkerSpec
from elastune.journal.records import Checkpointed, Record, RunFailed, RunFinished, WorkerGone
from elastune.mechanisms.abilities import meshes_of

EXPLAIN_S = 2.0  # how long the end of a process is awaited whose connection has closed without a word
UNKNOWN = 1  # the code of a process of which nobody knows how it ended


class ElasticRun(ElasticHandle):
    """A run on ``launcher``. ``task``: what its workers have in common; ``host``: where its coordinator listens;
    ``pump``: has the cluster look for news.

    ``over``: nothing is started any more; every worker that ends is the driver's concern. ``closed``: all is done with,
    and there is nothing more to be heard. Raises ``TypeError`` where the run's configuration holds what JSON cannot,
    ``OSError`` where the coordinator cannot listen.
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
        workers, elastic = spec.means.workers, spec.elastic
        self.low, self.high = min(elastic.low, workers), spec.most_workers
        self._task = task
        self._pump = pump
        self._launcher = launcher
        self._workers: dict[int, Bootstrap] = {}
        self._pids: dict[int, int] = {}
        self._events: deque[Event] = deque()
        self._ends: dict[int, ProcessEnded] = {}  # of processes that ended; perhaps not all they said is here yet
        self._returned: dict[int, int | None] = {}  # of connections that ended: the entry point's exit code
        self._speechless: dict[int, float] = {}  # their connection closed without a code: until when to wait for why
        self._finishes: list[tuple[int, RunFinished]] = []  # heard while somebody was speechless
        self._running = set(range(workers))
        self._doomed: dict[int, str] = {}  # ended for a reason that was not theirs
        self._lost: list[int] = []
        self._fatal: tuple[int, str] | None = None  # the worker whose loss was one too many, and what to say of it
        self._finished: set[int] = set()
        self.said, self._starting = Said(), Starting(launcher)
        self._taken: dict[int, int] = {}  # by worker: so many of its records were heard
        self._given: dict[int, int] = {}  # and handed out
        self._trained: set[int] = set()  # those that have been members
        self._last = Exited(NOBODY, 0, "")
        self.over = self._noticed = self._announced = self._failed = self.closed = False
        self._woken, self._free = 0, -1
        self.coordinator = self._coordinate(
            low=self.low,
            high=self.high,
            heartbeat_s=elastic.heartbeat_s,
            silence_s=silence_s,
            grace_s=elastic.grace_s,
            most_losses=elastic.most_losses,
            meshes=meshes_of(spec.means),
            collective_timeout_s=elastic.collective_timeout_s,
            host=host,
            token=launcher.new_token(),
            tls=launcher.tls,
            spec_of=self._spec_of,
            last_line=self._last_line,
            vitals_of=self._vitals_of,
        )

    def _coordinate(self, **options: Any) -> Coordinator:
        return Coordinator(range(self.spec.means.workers), **options)

    # -- for the driver -----------------------------------------------------------------------------------------------

    def poll(self) -> list[Event]:
        if self._given and self.spec.elastic.grace_s:  # who polls has kept what it was given before
            self.coordinator.kept(self._given)
        self._pump(0.0)
        self.heed()
        events = list(self._events)
        self._events.clear()
        self._woken = 0
        self._given, self._taken = self._taken, {}
        return events

    @property
    def alive(self) -> int:
        untold = sum(isinstance(event, Exited) for event in self._events)
        return len(self._running) + untold or int(not self.over)

    @property
    def pending(self) -> bool:
        """Whether ``poll`` has something to hand out that nobody was ``woken`` for."""
        return len(self._events) > self._woken

    def woken(self) -> None:
        """Whoever waits for news has heard that there are some. (One who is done with this run never asks for them.)"""
        self._woken = len(self._events)

    @property
    def pids(self) -> dict[int, int]:
        return dict(self._pids)

    @property
    def members(self) -> list[int]:
        return self.coordinator.members

    @property
    def step(self) -> int:
        return self.coordinator.step

    def stop(self) -> None:
        self.coordinator.stop()

    def kill(self) -> None:
        self.over = True
        self._end(sorted(self._running))
        self._close_if_over()

    def resize(self, workers: int, why: str = "") -> None:
        self.coordinator.ask(ResizeAsked(workers, why))

    def reshape(self, mesh: Mesh, why: str = "") -> None:
        self.coordinator.ask(ReshapeAsked(str(mesh), why))

    def kill_worker(self, worker: int) -> None:
        self._end([worker])

    # -- for the cluster ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the first workers, and let other commands find the run. Raises ``OSError`` and ``UserError``."""
        self._start(sorted(self._running))
        self._announce()

    def _announce(self) -> None:
        announce(self.spec, self.coordinator)
        self._announced = True

    def abandon(self) -> None:
        """After ``begin`` has failed: end what it started, and hear no more of it."""
        self.kill()
        self._running.clear()
        self._close_if_over()
        self._events.clear()

    def hear(self, event: ProcessEvent) -> None:
        """The launcher's news of one of this run's workers."""
        worker = event.bootstrap.worker
        match event:
            case ProcessStarted() if worker in self._ends:  # its host was given up, and is back
                self._launcher.end([event.bootstrap], "it counts as lost")
            case ProcessStarted(pid=pid):
                self._pids[worker] = pid
            case ProcessNoticed(seconds=seconds, why=why):
                self.coordinator.notice(worker, seconds, why)
            case ProcessEnded():
                self._pids.pop(worker, None)
                self._process_ended(worker, event)

    def tell(self, record: Record) -> None:
        """Hear ``record`` of what the workers have left on their hosts."""
        self._events.append(Message(NOBODY, record))
        if isinstance(record, Checkpointed):
            self.coordinator.ask(Progressed(record.step))

    def room(self, free: int) -> int:
        """Tell the coordinator how many workers could be started, of ``free`` in the cluster; what it leaves."""
        if (mine := max(0, min(free, self.high - len(self._running)))) != self._free and not self.over:
            self._free = mine
            self.coordinator.capacity(mine)
        return free if self.over or not free else max(0, free - self.coordinator.membership.missing)

    def heed(self) -> None:
        """Hear what the coordinator has, and do what it asks for."""
        if self.closed:
            return
        self._trained.update(self.coordinator.members)
        self._events.extend(Message(NOBODY, record) for record in self.coordinator.take_records())
        for told in self.coordinator.take():
            match told:
                case RecordSent(worker, record, nth):
                    self._take(worker, record, nth)
                case Parted(worker, code):
                    self._returned[worker] = code
                    if code is None and not self._is_late(worker) and worker not in self._doomed:
                        self._speechless[worker] = time.monotonic() + EXPLAIN_S
                    others = any(other not in self._returned for other in self._running)
                    if code is not None and worker not in self._doomed and (code != 0 or not others):
                        self.over = True  # before the loss that this is to the coordinator makes it ask for another
                case Start(workers=workers) if not (self.over or self._finished):
                    self._start_more(workers)
                case End(worker=worker, why=why, lost=lost):
                    self._lost += [worker] * lost
                    told_here = worker in self._ends and why == self._how(worker)  # it ended by itself
                    if worker not in self._returned and not told_here:
                        self._doomed[worker] = why
                    # Who has said its last words ends by itself, and how the speechless end tells why.
                    if self._returned.get(worker) is None and worker not in self._speechless:
                        self._end([worker], self._doomed.get(worker, ""))
                case Standstill(worker, reason, detail) if not self.over:
                    self._events.extend(self.judge(worker, RunFailed(reason, detail, worker)))
                case GiveUp(why=why) if not self.over:
                    self._events.extend(self._give_up(why))
                case StopRun():
                    self._noticed = True
                case Buried(worker):
                    self._speechless.pop(worker, None)
                    self._events.extend(self._ended(worker))
        self._wait_no_longer()
        self._close_if_over()

    def close(self) -> None:
        """End the coordinator. Idempotent."""
        self.over = self.closed = True
        if self._announced:
            remove_contact(self.spec.out)
        self.coordinator.close()

    def _wait_no_longer(self) -> None:
        """End the speechless whose time is up, once nobody is the run may have finished; and who has never come."""
        for end in self._starting.late(self.coordinator.membership, time.monotonic()):
            self._end([end.bootstrap.worker], end.why)
            self._process_ended(end.bootstrap.worker, end)
        for worker in [worker for worker, until in self._speechless.items() if until <= time.monotonic()]:
            del self._speechless[worker]
            self._end([worker], self._doomed.get(worker, ""))
        if self._finishes and not self._speechless:
            finishes, self._finishes = self._finishes, []
            for worker, record in finishes:
                self._events.extend(self.judge(worker, record))

    # -- processes ----------------------------------------------------------------------------------------------------

    def _spec_of(self, worker: int) -> WorkerSpec:
        return replace(self._task, place=Place(worker, self.spec.means.workers, worker))

    def _start(self, workers: Sequence[int]) -> None:
        address, token, spec = self.coordinator.address, self.coordinator.token, self.spec
        new = {worker: Bootstrap(worker, address, token) for worker in workers}
        self._workers |= new
        self._starting.begun(new.values(), time.monotonic())
        self._launcher.start(list(new.values()), Needs(spec.means.device, spec.out / "logs", spec.spread))

    def _start_more(self, workers: Sequence[int]) -> None:
        self._running.update(workers)
        self._free = -1  # the coordinator counts these off what it was told: whatever there is now, it is to hear it
        for worker in workers:
            try:
                self._start([worker])
            except (OSError, UserError) as error:
                why = f"worker {worker} could not be started: {error}"
                self._process_ended(worker, ProcessEnded(self._workers[worker], NOT_STARTED, why=why))

    def _process_ended(self, worker: int, end: ProcessEnded) -> None:
        if worker not in self._ends:  # a start that failed may be told twice
            self._ends[worker] = end
            self.coordinator.lost(worker, self._how(worker))

    def _end(self, workers: Sequence[int], why: str = "") -> None:
        self._launcher.end([self._workers[worker] for worker in workers if worker in self._workers], why)

    def _last_line(self, worker: int) -> str:
        return self._launcher.last_line(self._workers[worker]) if worker in self._workers else ""

    def _vitals_of(self, worker: int) -> Vitals | None:
        return self._launcher.vitals(self._workers[worker]) if worker in self._workers else None

    def _close_if_over(self) -> None:
        if not self.closed and self.over and not self._running:
            self._events.extend(Message(NOBODY, record) for record in self.coordinator.take_records())
            self.close()

    # -- judgement ----------------------------------------------------------------------------------------------------

    def _take(self, worker: int, record: Record, nth: int) -> None:
        """Hear ``record``, the ``nth`` of ``worker``."""
        if not isinstance(record, RunFinished | RunFailed):  # what the end was is told again until all is over
            self._taken[worker] = nth
        self._events.extend(self.judge(worker, record))

    def judge(self, worker: int, record: Record) -> list[Event]:
        """What ``worker`` said; nothing where another one has said the same: all members tell what concerns the run."""
        match record:
            case RunFailed() if worker in self._doomed:  # whatever it did on its way out
                return []
            case RunFailed() if self._joins(worker):  # this machine, not the program, may be to blame: others train
                self._doomed[worker] = f"it failed before it could join: {record.detail}"
                self._lost.append(worker)
                return []
            case RunFailed():  # the program's own failure is no reason to start replacements
                self.over = self._failed = True
            case RunFinished() if self._failed:  # of survivors that were about to be ended
                return []
            case RunFinished() if self._speechless:  # perhaps the program has ended one of its workers
                self._finishes.append((worker, record))
                return []
            case RunFinished():
                first = not self._finished
                self._finished.add(worker)
                if not first:
                    return []
                if self._noticed and record.stopped == "requested":
                    record = replace(record, stopped="notice")
            case _ if not self.said.is_new(record):
                return []
        return [Message(worker, record)]

    def _joins(self, worker: int) -> bool:
        """Whether ``worker`` came later than the run's first ones and does not train with the others yet."""
        members = self.coordinator.members
        return worker >= self.spec.means.workers and bool(members) and worker not in members

    def _is_late(self, worker: int) -> bool:
        """Whether ``worker`` came later than the run's first ones and has never trained with the others."""
        return worker >= self.spec.means.workers and worker not in self._trained

    def _how(self, worker: int) -> str:
        end = self._ends[worker]
        return end.why or f"worker {worker} {how_it_ended(end.code)}"

    def _ended(self, worker: int) -> list[Event]:
        """How a worker's end is to be told, now that all it ever said is known."""
        how, told, returned = self._how(worker), self._ends[worker], self._returned.get(worker)
        end = Exited(worker, UNKNOWN if told.code is None else told.code, told.log)
        self._running.discard(worker)
        self._last = end
        if self._fatal is not None and self._fatal[0] == worker:
            why = self._fatal[1]
            return [self._failure(why if how in why else f"{why}; {how}"), end]
        own_end = ended_itself(told) if returned is None and not self._is_late(worker) else ""
        if own_end and worker not in self._doomed and not self._finished:
            self.over = self._failed = True  # of the program's own will: it would do so again
            return [Message(worker, RunFailed("exception", own_end, worker, told.code, told.log)), end]
        concerns = self.over or (bool(self._finished) and worker not in self._doomed)
        self.over = self.over or (bool(self._finished) and not self._running)
        if concerns:
            return [end]
        if worker in self._doomed:
            how = f"{self._doomed[worker]} (exit code {end.code})"
        elif returned == 0 and self._running:  # ended well and before the others: that is how a worker leaves
            why = self.coordinator.why_left(worker) or "it left the run"
            return [Message(worker, WorkerGone(worker, "left", why, returned))]
        elif returned is not None:
            self.over = True
            return [end]
        left = worker in self._doomed and worker not in self._lost
        return [Message(worker, WorkerGone(worker, "left" if left else "lost", how, end.code, end.log))]

    def _give_up(self, why: str) -> list[Event]:
        """End the run. What the worker printed whose loss was one too many is known once its process has ended."""
        self.over = True
        if self._lost and self._lost[-1] in self._running:
            self._fatal = (self._lost[-1], why)
        self._end(sorted(self._running))
        if self._fatal is not None:
            return []
        told = "" if self._last.rank == NOBODY else f"; worker {self._last.rank} {how_it_ended(self._last.code)}"
        return [self._failure(why + told)]

    def _failure(self, why: str) -> Event:
        last = self._last
        return Message(last.rank, RunFailed("worker_lost", why, max(0, last.rank), last.code, last.log))
