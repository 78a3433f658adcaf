"""A run whose workers may change, as its controller holds it: it hears its coordinator and its launcher, has
``judgement`` decide what became of workers and run, and does what follows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from elastune.cluster import judgement
from elastune.cluster.announce import announce
from elastune.cluster.base import ElasticHandle, Event, Exited, Message
from elastune.cluster.ends import NOT_STARTED
from elastune.cluster.for_driver import DriverQueue
from elastune.cluster.judgement import Judged, Kill, Moment
from elastune.cluster.launcher import (
    Bootstrap,
    Launcher,
    Needs,
    ProcessEnded,
    ProcessEvent,
    ProcessNoticed,
    ProcessStarted,
)
from elastune.cluster.run_facts import RunFacts
from elastune.cluster.run_processes import RunProcesses
from elastune.cluster.said import Said
from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import Place
from elastune.elastic.coordinator.coordinator import Coordinator
from elastune.elastic.coordinator.for_controller import Buried, ForController, RecordSent
from elastune.elastic.coordinator.from_controller import CrewBounds, Entrance, Lookups, Timeouts
from elastune.elastic.protocol.client import remove_contact
from elastune.elastic.protocol.instructions import Start
from elastune.elastic.protocol.messages import Progressed, ReshapeAsked, ResizeAsked, Welcome, encode
from elastune.elastic.protocol.worker_spec import WorkerSpec
from elastune.journal.records import Checkpointed, Record, RunFailed, RunFinished
from elastune.mechanisms.abilities import meshes_of
from elastune.train.program.source import EDITED, differences

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
        workers, elastic = spec.means.workers, spec.elastic
        self.low, self.high = min(elastic.low, workers), spec.most_workers
        self._task = task
        self._pump = pump
        self._launcher = launcher
        self._processes = RunProcesses(launcher, Needs(spec.means.device, spec.out / "logs", spec.spread))
        self._facts = RunFacts(workers)
        self._queue = DriverQueue()
        self.said = Said()
        self._free = -1  # as the coordinator was told last
        self._edited_until: float | None = None  # the program was, and is looked at again then
        self._announced = self.closed = False
        self.coordinator = self._coordinate(
            CrewBounds(self.low, self.high, elastic.most_losses, meshes_of(spec.means)),
            Timeouts(elastic.heartbeat_s, silence_s, elastic.grace_s, elastic.collective_timeout_s),
            Entrance(host, token=launcher.new_token(), tls=launcher.tls),
            Lookups(self._spec_of, self._processes.last_line, self._processes.vitals),
        )

    def _coordinate(self, bounds: CrewBounds, timeouts: Timeouts, entrance: Entrance, lookups: Lookups) -> Coordinator:
        return Coordinator(range(self.spec.means.workers), bounds, timeouts, entrance, lookups)

    def _spec_of(self, worker: int) -> WorkerSpec:
        return replace(self._task, place=Place(worker, self.spec.means.workers, worker))

    # -- for the driver -----------------------------------------------------------------------------------------------

    def poll(self) -> list[Event]:
        if self._queue.given and self.spec.elastic.grace_s:  # who polls has kept what it was given before
            self.coordinator.kept(self._queue.given)
        self._pump(0.0)
        self.heed()
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
        first = range(self.spec.means.workers)
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

    def heed(self) -> None:
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
        self._do(judgement.wait_no_longer(self._facts, time.monotonic()))
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
        self._queue.took(sent.worker, sent.nth)  # what the end was is told again until all is over
        if self.said.is_new(sent.record):
            self._queue.put(Message(sent.worker, sent.record))

    def _judge(self, news: ForController) -> None:
        if isinstance(news, RecordSent) and isinstance(news.record, RunFailed) and EDITED in news.record.detail:
            self._edited_until = time.monotonic() + LOOK_AGAIN_S
            self.coordinator.capacity(0)  # before it asks for another one, which would load the same
            self._free = 0
        why_left = self.coordinator.why_left(news.worker) if isinstance(news, Buried) else ""
        moment = Moment(time.monotonic(), self.coordinator.members, why_left)
        self._do(judgement.step(self._facts, news, moment))

    def _do(self, judged: Judged) -> None:
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
