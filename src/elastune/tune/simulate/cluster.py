"""A simulated cluster: it calculates what its runs would do, in the order of time, on a virtual clock.

The study loop, samplers and the allocation of workers run on it unchanged, thousands of workers in seconds. A run is
a sequence of legs: steps of equal length, with changes of workers or failures between them.
A simulated run depends only on its settings, on when it began and on when it had to pause. The journal has all three,
so runs of an earlier controller are calculated again from their beginning to the end of the journal.
"""

from __future__ import annotations

import heapq
import math
import random
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, Protocol, TypeVar

from elastune.core.clock import VirtualClock
from elastune.core.cost import UNKNOWN
from elastune.core.divergence import follow_reports
from elastune.core.errors import UserError
from elastune.core.journal.records import (
    Adopted,
    Reason,
    Regrouped,
    Reported,
    Restarted,
    RunFailed,
    RunFinished,
    WorkerGone,
)
from elastune.core.mesh import Mesh
from elastune.core.run import Position, RunSpec, derive
from elastune.runtime.clusters.base import (
    NOBODY,
    Cluster,
    ElasticHandle,
    Event,
    Exited,
    Handle,
    Message,
    NoRoomError,
    SurvivingRun,
)
from elastune.tune.simulate.trial_model import Progress, RunSegment, TrialModel, digest_of, load_progress, save_progress

# [world] What all runs of a simulated cluster share: its clock and agenda, its workers, and who has news.


@dataclass(frozen=True)
class WorkerFailures:
    """Workers die: each after ``every_s`` seconds on average, independently (exponential). ``seed`` decides when."""

    every_s: float = math.inf
    seed: int = 0


class SimulatedRun(Protocol):
    """What the world asks of a run."""

    def wake(self, plan: int) -> None:
        """The moment of plan number ``plan`` has come."""
        ...

    def room(self) -> None:
        """Workers have become free."""
        ...


R = TypeVar("R", bound=SimulatedRun)


class SimulationEnvironment(Generic[R]):
    """Time and ``capacity`` workers for runs that go as ``model`` says."""

    def __init__(self, capacity: int, model: TrialModel, clock: VirtualClock, losses: WorkerFailures) -> None:
        self.capacity = capacity
        self.model = model
        self.clock = clock
        self.losses = losses
        self.news: dict[R, None] = {}  # runs that have events to poll
        self.runs: dict[R, None] = {}
        self._used = 0
        self._busy_s = 0.0
        self._busy_at = clock.now()
        self._due: list[tuple[float, int, int, R]] = []  # when, in which order, of which plan, whose
        self._order = 0
        self._waiting: dict[R, None] = {}

    @property
    def free(self) -> int:
        """Workers that no run has."""
        return self.capacity - self._used

    @property
    def busy_s(self) -> float:
        """Worker-seconds that runs have had until now, those of starting and of pauses included."""
        return self._busy_s + self._used * (self.clock.now() - self._busy_at)

    def go_on(self, until_s: float) -> None:
        """Move the clock to the next moment at which a run has news, at most to ``until_s``."""
        while not self.news and self._due and self._due[0][0] <= until_s:
            at = self._due[0][0]
            self.clock.advance_to(at)
            while self._due and self._due[0][0] <= at:
                _, _, plan, run = heapq.heappop(self._due)
                run.wake(plan)
        if not self.news and until_s < math.inf:
            self.clock.advance_to(until_s)

    def schedule(self, at: float, plan: int, run: R) -> None:
        """Wake ``run`` at time ``at``, unless its plans have changed by then."""
        self._order += 1
        heapq.heappush(self._due, (max(at, self.clock.now()), self._order, plan, run))

    def hold(self, more: int) -> None:
        """A run has ``more`` workers more (or fewer) from now on."""
        now = self.clock.now()
        self._busy_s += self._used * (now - self._busy_at)
        self._used, self._busy_at = self._used + more, now
        if more < 0:
            for run in list(self._waiting):
                run.room()

    def tell(self, run: R, has_news: bool) -> None:
        """Whether ``run`` has events to poll."""
        if has_news:
            self.news[run] = None
        else:
            self.news.pop(run, None)

    def want(self, run: R, more: bool) -> None:
        """Whether ``run`` waits for workers that are not free."""
        if more:
            self._waiting[run] = None
        else:
            self._waiting.pop(run, None)

    def count_from_now(self) -> None:
        """What workers did until now was somebody else's study to count."""
        self._busy_s, self._busy_at = 0.0, self.clock.now()

    def forget(self, run: R) -> None:
        """``run`` is over."""
        self._waiting.pop(run, None)
        self.runs.pop(run, None)


# [handle] A run of the simulated cluster: legs of steps of equal length, and what happens between them.

Stopped = Literal["complete", "max_steps", "until_epoch", "requested"]


class SimulatedHandle(ElasticHandle):
    """A run that is calculated from one event to the next.

    New workers take the model's ``start_s`` to start while training goes on; at the next step boundary they are in, and
    training stands still for ``resize_pause_s``. What it kept when it ended is in its folder, for ``resume`` and for a
    child's ``parent``. A lost worker's place is filled by a new one. The step that a loss
    interrupts is done again by those that are left; with the last worker all is lost since the last checkpoint.
    """

    def __init__(self, spec: RunSpec, world: SimulationEnvironment[SimulatedHandle]) -> None:
        self.spec = spec
        self._world = world
        self._model = world.model
        self._events: list[Event] = []
        self._over = False
        self._members = list(range(spec.execution.workers))
        self._numbers = spec.execution.workers  # given out so far
        self._wanted = self._target = spec.execution.workers  # what was asked for, and what there is room for
        self._ready_at = 0.0
        self._stop_at: float | None = None
        self._untold: Regrouped | None = None  # said once its pause has ended
        self._version = self._reports = self._losses = self._plan = 0
        self._planned = 0
        self._next: Callable[[], None] = self._tell
        self._why = ""

    # -- for the study -----------------------------------------------------------------------------------------------

    def poll(self) -> list[Event]:
        events, self._events = self._events, []
        self._world.tell(self, False)
        return events

    @property
    def alive(self) -> int:
        if self._over:
            return sum(isinstance(event, Exited) for event in self._events)
        return max(1, len(self._members))

    @property
    def pids(self) -> dict[int, int]:
        return {}

    @property
    def members(self) -> list[int]:
        return [] if self._over or self._world.clock.now() < self._begun_at else list(self._members)

    @property
    def step(self) -> int:
        leg = self._leg
        return self._kept.position.step if self._over else leg.start.step + leg.done(self._world.clock.now())

    def stop(self) -> None:
        if self._stop_at is None and not self._over:
            self._stop_at = self._world.clock.now()
            self._look_ahead()

    def kill(self) -> None:
        if not self._over:
            self._end(-signal.SIGKILL)

    def resize(self, workers: int, why: str = "") -> None:
        """As ``ElasticHandle``; what finds no room yet is done as soon as there is some."""
        if not self._over:
            low = min(self.spec.elastic.low, self.spec.execution.workers)
            self._wanted = min(max(workers, low), self.spec.most_workers)
            self._why = why or f"a resize to {self._wanted} workers"
            self.room()

    def reshape(self, mesh: Mesh, why: str = "") -> None:
        """A simulated run knows numbers of workers only."""
        self.resize(mesh.workers, why or f"a reshape to {mesh}")

    def kill_worker(self, worker: int) -> None:
        if worker in self._members and not self._over:
            self._guard(lambda: self._lose(worker))

    def come_back(self, events: list[Event]) -> None:
        """Its controller had died: tell another that it goes on, and these ``events`` that nobody has heard."""
        back = Adopted(sorted(self._members), self.step, 0.0)
        self._events = [Message(NOBODY, back), *events]
        self._world.tell(self, True)

    # -- for the world ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Take the workers and start; a model that raises is the run's failure."""
        self._world.hold(len(self._members))
        self._held = len(self._members)
        now = self._world.clock.now()
        self._begun_at = now + self._model.start_s
        self._digest = digest_of(self.spec.config, self.spec.seed)
        self._progress = self._kept = Progress()
        self._leg = RunSegment(self._begun_at, Position(), 1, 1, 0.0)
        self._begun_seconds = 0.0
        self._guard(self._prepare)

    def wake(self, plan: int) -> None:
        """The moment of plan number ``plan`` has come."""
        if plan == self._plan and not self._over:
            self._guard(self._next)

    def room(self) -> None:
        """Ask for what is still wanted, as far as there is room; give back what is not."""
        target = min(self._wanted, self._held + self._world.free)
        self._world.want(self, target < self._wanted)
        if target != self._target:
            if target > max(self._target, len(self._members)):
                self._ready_at = self._world.clock.now() + self._model.start_s
            elif target <= len(self._members):
                self._ready_at = self._world.clock.now()
            self._target = target
            self._hold()
            self._look_ahead()

    # -- what happens -------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        spec, model = self.spec, self._model
        self._planned = model.epochs(spec.config, spec.epochs)
        found = load_progress(spec.out, self._world.clock.now()) if spec.resume else None
        if found is None and spec.parent is not None:
            found = load_progress(spec.parent, self._world.clock.now())
            if found is None:
                raise UserError("a parent must have kept a checkpoint", spec.parent, "pause it first")
        if found is not None:
            self._progress = self._kept = found
        self._rng = random.Random(derive(self._world.losses.seed, "losses", spec.out.name, self._kept.position.step))
        self._begun_seconds = self._kept.seconds
        if not self._is_at_end(self._kept.position):
            self._set_off(self._kept.position, self._begun_at)

    def _guard(self, act: Callable[[], None]) -> None:
        """Do it, and let what the model raises be the run's failure."""
        try:
            act()
        except UserError as error:
            self._fail("user_error", str(error))
        except Exception as error:  # noqa: BLE001 - the model may be the user's: an exception is the run's result
            self._fail("exception", f"{type(error).__name__}: {error}")

    def _set_off(self, position: Position, at: float) -> None:
        """Take steps from ``position`` on, beginning ``at``."""
        config, model = self.spec.config, self._model
        batch, samples = model.batch(config), model.samples(config)
        seconds = model.epoch_s(config, len(self._members), position.epoch + 1)
        if batch < 1 or samples < 1 or not 0 <= seconds < math.inf:
            fix = "fix the model of the trials"
            raise UserError("an epoch has samples, steps and a time", f"{samples}, {batch} and {seconds} s", fix)
        whole = -(-samples // batch)
        if position.offset >= samples:  # a parent's epochs were longer
            position = Position(position.epoch, samples - 1, position.step, position.samples)
        self._leg = RunSegment(at, position, batch, samples, seconds / whole)
        self._loss_at = at + self._lifetime()
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Plan the next thing to happen. Of several at one moment the first in this list comes first."""
        leg, now = self._leg, self._world.clock.now()
        end = leg.steps
        if self.spec.max_steps is not None:
            end = min(end, max(0, self.spec.max_steps - leg.start.step))
        found: list[tuple[float, Callable[[], None]]] = [(leg.when(end), lambda: self._arrive(end))]
        if self._untold is not None:
            found.insert(0, (leg.since, self._tell))
        if self._stop_at is not None:
            stop = min(end, leg.boundary(self._stop_at))
            found.append((leg.when(stop), lambda: self._finish(leg.after(stop), "requested")))
        if self._target != len(self._members):
            change = min(end, leg.boundary(max(self._ready_at, now)))
            found.append((leg.when(change), lambda: self._regroup(change)))
        if self._loss_at < math.inf:
            found.append((self._loss_at, lambda: self._lose(self._rng.choice(self._members))))
        at, self._next = min(found, key=lambda planned: max(planned[0], now))
        self._plan += 1
        self._world.schedule(at, self._plan, self)

    def _tell(self) -> None:
        """Say how the workers changed, now that training goes on."""
        if self._untold is not None:
            self._emit(Message(self._members[0], self._untold))
            self._untold = None
        self._look_ahead()

    def _arrive(self, steps: int) -> None:
        """The end of an epoch, or of ``max_steps``."""
        position = self._leg.after(steps)
        self._losses = 0
        if position.offset == 0 and steps:
            metrics = self._model.metrics(self.spec.config, self.spec.seed, position.epoch)
            metrics = {name: float(value) for name, value in metrics.items()}
            seconds = self._seconds()
            known = {**self._progress.metrics, **metrics}
            self._progress = replace(self._progress, position=position, seconds=seconds, metrics=known)
            so_far = position.epoch, position.step, position.samples, seconds
            self._emit(Message(self._members[0], Reported(*so_far, metrics, self._reports, self._planned)))
            self._reports += 1
            losses, wrong = follow_reports(self._progress.losses, metrics, self.spec.divergence)
            self._progress = replace(self._progress, losses=losses)
            if wrong:
                self._fail("diverged", f"{wrong} after step {position.step}")
                return
        if self._is_at_end(position):
            return
        if position.offset == 0 and self.spec.checkpoint_every_steps != 0:
            self._keep(position)
        self._set_off(position, self._world.clock.now())

    def _is_at_end(self, position: Position) -> bool:
        """Finish where the run has come to its end, or as far as it was to go."""
        spec = self.spec
        stopped: Stopped | None = None
        if position.epoch >= self._planned:
            stopped = "complete"
        elif spec.max_steps is not None and position.step >= spec.max_steps:
            stopped = "max_steps"
        elif spec.until_epoch is not None and position.epoch >= spec.until_epoch:
            stopped = "until_epoch"
        if stopped is not None:
            self._finish(position, stopped)
        return stopped is not None

    def _regroup(self, steps: int) -> None:
        """A planned change of the workers at a step boundary."""
        position = self._leg.after(steps)
        leavers = self._members[self._target :]
        joiners = range(self._numbers, self._numbers + max(0, self._target - len(self._members)))
        self._numbers += len(joiners)
        self._members = [*self._members[: self._target], *joiners]
        for worker in leavers:
            self._emit(Message(worker, WorkerGone(worker, "left", self._why, 0)))
        self._world.tell(self, True)  # so that its worker-seconds are counted with the right workers
        self._pause(position, planned=True, discarded=0)
        self._hold()

    def _lose(self, worker: int) -> None:
        """A worker dies; with ``most_losses`` of them and no step in between, so does the run."""
        leg, now = self._leg, self._world.clock.now()
        done = leg.done(now)
        self._losses = self._losses + 1 if done == 0 else 1
        self._members.remove(worker)
        how = f"worker {worker} was ended by signal 9"
        self._emit(Message(worker, WorkerGone(worker, "lost", how, -signal.SIGKILL)))
        self._ready_at, self._why = now + self._model.start_s, f"the loss of worker {worker}"
        if self._losses >= self.spec.elastic.most_losses:
            self._fail("worker_lost", f"{self._losses} losses without a completed step; the last: {how}")
        elif self._members:
            self._pause(leg.after(done), planned=False, discarded=int(leg.when(done) < now))
        else:
            self._members = [self._numbers]
            self._numbers += 1
            self._begun_at = now + self._model.start_s
            self._progress, self._begun_seconds = self._kept, self._kept.seconds
            self._emit(Message(NOBODY, Restarted(self._kept.position.step)))
            self._set_off(self._kept.position, self._begun_at)

    def _pause(self, position: Position, *, planned: bool, discarded: int) -> None:
        """Go on from ``position`` in a new version of the membership, after a pause."""
        pause_s = self._model.resize_pause_s
        self._version += 1
        self._untold = Regrouped(self._version, list(self._members), planned, position.step, pause_s, discarded)
        self._set_off(position, max(self._world.clock.now(), self._leg.since) + pause_s)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _finish(self, position: Position, stopped: Stopped) -> None:
        self._progress = self._progress.trained(self._digest, position, self._seconds())
        if stopped in ("requested", "until_epoch") or self.spec.checkpoint_every_steps != 0:
            save_progress(self.spec.out, self._progress, self._world.clock.now())
        self._kept = self._progress
        self._emit(
            Message(
                self._members[0],
                RunFinished(
                    sha256=self._progress.sha256,
                    workers=len(self._members),
                    steps=position.step,
                    samples=position.samples,
                    epoch=position.epoch,
                    seconds=self._progress.seconds,
                    metrics=self._progress.metrics,
                    step_s=self._leg.step_s or None,
                    stopped=stopped,
                ),
            )
        )
        self._end(0)

    def _fail(self, reason: Reason, detail: str) -> None:
        rank = self._members[0] if self._members else 0
        self._emit(Message(rank, RunFailed(reason, detail, rank, 1)))
        self._end(1, detail)

    def _end(self, code: int, log: str = "") -> None:
        self._over = True
        self._world.forget(self)
        self._world.hold(-self._held)
        for worker in self._members:
            self._emit(Exited(worker, code, log))

    def _keep(self, position: Position) -> None:
        """A checkpoint at an epoch's end: for the run itself, not worth a file."""
        self._progress = self._kept = self._progress.trained(self._digest, position, self._seconds())

    def _seconds(self) -> float:
        """Training time so far, with that of earlier starts and with pauses, without the time of starting."""
        return self._begun_seconds + max(0.0, self._world.clock.now() - self._begun_at)

    def _hold(self) -> None:
        held = max(self._target, len(self._members))
        more, self._held = held - self._held, held
        if more:
            self._world.hold(more)

    def _lifetime(self) -> float:
        """Seconds until one of the workers is lost."""
        every_s = self._world.losses.every_s
        return self._rng.expovariate(len(self._members) / every_s) if every_s < math.inf else math.inf

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        self._world.tell(self, True)


# [rerun] Runs that go on though their controller died: calculated again from where they began, to where its journal ends.
#
# A simulated run depends on its settings, on when it began and on when it was asked to pause, all of which the journal
# tells; so nothing but the journal is needed to have every run, and every plan, as it was.


def replay_runs(left: Sequence[SurvivingRun], world: SimulationEnvironment[SimulatedHandle]) -> list[SimulatedHandle]:
    """The runs of ``left``, in the order in which they began, as they are now in ``world``, which has no others."""
    now, clock = world.clock.now(), world.clock
    runs = [SimulatedHandle(one.spec, world) for one in left]
    known: dict[SimulatedHandle, int] = {}
    todo: list[tuple[float, Callable[[], None]]] = []
    for run, one in zip(runs, left, strict=True):
        known[run] = sum(isinstance(record, Reported | Regrouped) for record in one.kept)
        todo.append((one.begun_at, run.begin))
        if one.stop_at is not None:
            todo.append((one.stop_at, run.stop))
    todo.sort(key=lambda planned: planned[0])
    world.clock = VirtualClock(now_s=todo[0][0] if todo else now)
    unheard: dict[SimulatedHandle, list[Event]] = {}
    heard: Counter[SimulatedHandle] = Counter()

    def listen(until: float) -> None:
        while True:
            world.go_on(until)
            if not world.news:
                return
            for run in list(world.news):
                for event in run.poll():
                    counts = isinstance(event, Message) and isinstance(event.record, Reported | Regrouped)
                    heard[run] += counts
                    if not counts or heard[run] > known[run]:
                        unheard.setdefault(run, []).append(event)

    for at, act in todo:
        listen(at)
        act()
    listen(now)
    world.clock = clock
    world.count_from_now()
    for run in [*unheard, *(run for run in runs if run not in unheard)]:
        run.come_back(unheard.get(run, []))
    return runs


# [cluster] A cluster that only calculates: what its runs would do, in the order in which it would happen, on a virtual clock.
#
# Study loops, samplers and the allocation of workers run on it unchanged, thousands of workers in seconds.


class SimulatedCluster(Cluster):
    """Room for ``capacity`` simulated workers, whose trials go as ``model`` says.

    ``clock`` is the time of all; ``wait`` moves it, and nobody else needs to.
    """

    patience_s = math.inf

    def __init__(
        self, capacity: int, model: TrialModel, clock: VirtualClock | None = None, losses: WorkerFailures | None = None
    ) -> None:
        if capacity < 1:
            raise UserError("a cluster needs room for at least one worker", capacity, "give a capacity of 1 or more")
        self.clock = clock or VirtualClock()
        self._world: SimulationEnvironment[SimulatedHandle] = SimulationEnvironment(
            capacity, model, self.clock, losses or WorkerFailures()
        )
        self._closed = False

    @property
    def capacity(self) -> int:
        return self._world.capacity

    @property
    def free(self) -> int:
        """Workers that could be started now."""
        return self._world.free

    @property
    def busy_s(self) -> float:
        """Worker-seconds that runs have had until now, those of starting and of pauses included."""
        return self._world.busy_s

    def held(self, handle: Handle) -> Mapping[str, int]:
        return {UNKNOWN: handle.alive}

    def start(self, spec: RunSpec) -> SimulatedHandle:
        if self._closed:
            raise RuntimeError("this cluster was closed")
        count = spec.execution.workers
        if not 1 <= count <= self.free:
            rule = f"workers must be from 1 to the {self.free} that are free of {self.capacity} simulated ones"
            raise NoRoomError(rule, count, "ask for fewer, or simulate a larger cluster")
        run = SimulatedHandle(spec, self._world)
        self._world.runs[run] = None
        run.begin()
        return run

    def adopt(self, left: Sequence[SurvivingRun]) -> list[Handle | None]:
        """All of them go on as if nothing had happened, unless their workers change: nobody kept how."""
        if self._world.losses.every_s < math.inf or any(one.spec.elastic.high is not None for one in left):
            return [None for _ in left]
        runs = replay_runs(left, self._world)
        self._world.runs |= dict.fromkeys(runs)
        return list(runs)

    def wait(self, timeout_s: float) -> None:
        """Go on to the next moment at which a run has news, at most ``timeout_s``.

        An endless wait returns at once where none will ever have any.
        """
        self._world.go_on(self.clock.now() + timeout_s)

    def news(self) -> list[Handle]:
        """The runs that have events to poll."""
        return list(self._world.news)

    def close(self) -> None:
        for run in list(self._world.runs):
            run.kill()
        self._closed = True
