"""A simulated cluster: it calculates what its runs would do, in the order of time, on a virtual clock.

The study loop, samplers and the allocation of workers run on it unchanged, thousands of workers in seconds. A run is
a sequence of segments: steps of equal length, with changes of workers or failures between them.
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
from elastune.tuning.simulate.trial_model import (
    Progress,
    RunSegment,
    TrialModel,
    digest_of,
    load_progress,
    save_progress,
)

Stopped = Literal["complete", "max_steps", "until_epoch", "requested"]


class SimulatedCluster(Cluster):
    """A cluster of simulated workers, which study loop, samplers and allocation use like a real one.

    Args:
        capacity: How many workers it has.
        model: How fast trials run, and what they report.
        clock: The clock of the whole simulation; ``wait`` moves it.
        losses: Failures of workers; None: no failures.
    """

    patience_s = math.inf

    def __init__(
        self, capacity: int, model: TrialModel, clock: VirtualClock | None = None, losses: WorkerFailures | None = None
    ) -> None:
        if capacity < 1:
            raise UserError("a cluster needs room for at least one worker", capacity, "give a capacity of 1 or more")
        self.clock = clock or VirtualClock()
        self._environment: SimulationEnvironment[SimulatedHandle] = SimulationEnvironment(
            capacity, model, self.clock, losses or WorkerFailures()
        )
        self._closed = False

    @property
    def capacity(self) -> int:
        return self._environment.capacity

    @property
    def free(self) -> int:
        """How many workers could start now."""
        return self._environment.free

    @property
    def busy_s(self) -> float:
        """Worker-seconds that runs have held until now, including starts and pauses."""
        return self._environment.busy_s

    def held(self, handle: Handle) -> Mapping[str, int]:
        return {UNKNOWN: handle.alive}

    def start(self, spec: RunSpec) -> SimulatedHandle:
        if self._closed:
            raise RuntimeError("this cluster was closed")
        count = spec.execution.workers
        if not 1 <= count <= self.free:
            rule = f"workers must be from 1 to the {self.free} that are free of {self.capacity} simulated ones"
            raise NoRoomError(rule, count, "ask for fewer, or simulate a larger cluster")
        run = SimulatedHandle(spec, self._environment)
        self._environment.runs[run] = None
        run.begin()
        return run

    def adopt(self, left: Sequence[SurvivingRun]) -> list[Handle | None]:
        """Continue all runs as if the controller had not changed; none if workers change, which no journal records."""
        if self._environment.losses.every_s < math.inf or any(
            survivor.spec.elastic.high is not None for survivor in left
        ):
            return [None for _ in left]
        runs = replay_runs(left, self._environment)
        self._environment.runs |= dict.fromkeys(runs)
        return list(runs)

    def wait(self, timeout_s: float) -> None:
        """Move the clock to the next time at which a run has events, at most by ``timeout_s``.

        An endless wait returns at once if no run will ever have events.
        """
        self._environment.advance(self.clock.now() + timeout_s)

    def news(self) -> list[Handle]:
        """The runs that have events to poll."""
        return list(self._environment.with_events)

    def close(self) -> None:
        for run in list(self._environment.runs):
            run.kill()
        self._closed = True


# --- the environment of all runs ---


@dataclass(frozen=True)
class WorkerFailures:
    """Failures of simulated workers.

    Attributes:
        every_s: Mean lifetime of a worker (exponential, independent of the others).
        seed: Decides when workers fail.
    """

    every_s: float = math.inf
    seed: int = 0


class SimulatedRun(Protocol):
    """The calls of the environment to a run."""

    def wake(self, plan: int) -> None:
        """Do what plan number ``plan`` holds; its time has come."""
        ...

    def take_free_workers(self) -> None:
        """React to workers that have become free."""
        ...


R = TypeVar("R", bound=SimulatedRun)


class SimulationEnvironment(Generic[R]):
    """What all runs of a simulated cluster share: the clock with its agenda, the workers, and the runs with events."""

    def __init__(self, capacity: int, model: TrialModel, clock: VirtualClock, losses: WorkerFailures) -> None:
        self.capacity = capacity
        self.model = model
        self.clock = clock
        self.losses = losses
        self.with_events: dict[R, None] = {}  # runs that have events to poll
        self.runs: dict[R, None] = {}
        self._used = 0
        self._busy_s = 0.0
        self._busy_at = clock.now()
        self._due: list[tuple[float, int, int, R]] = []  # (time, order, number of the plan, run)
        self._order = 0
        self._waiting: dict[R, None] = {}

    @property
    def free(self) -> int:
        """How many workers no run holds."""
        return self.capacity - self._used

    @property
    def busy_s(self) -> float:
        """Worker-seconds that runs have held until now, including starts and pauses."""
        return self._busy_s + self._used * (self.clock.now() - self._busy_at)

    def advance(self, until_s: float) -> None:
        """Move the clock to the next time at which a run has events, at most to ``until_s``."""
        while not self.with_events and self._due and self._due[0][0] <= until_s:
            at = self._due[0][0]
            self.clock.advance_to(at)
            while self._due and self._due[0][0] <= at:
                _, _, plan, run = heapq.heappop(self._due)
                run.wake(plan)
        if not self.with_events and until_s < math.inf:
            self.clock.advance_to(until_s)

    def schedule(self, at: float, plan: int, run: R) -> None:
        """Wake ``run`` at time ``at``, unless its plan has changed by then."""
        self._order += 1
        heapq.heappush(self._due, (max(at, self.clock.now()), self._order, plan, run))

    def hold(self, more: int) -> None:
        """Count ``more`` further workers as held (fewer: negative) from now on."""
        now = self.clock.now()
        self._busy_s += self._used * (now - self._busy_at)
        self._used, self._busy_at = self._used + more, now
        if more < 0:
            for run in list(self._waiting):
                run.take_free_workers()

    def mark_events(self, run: R, has_events: bool) -> None:
        """Record whether ``run`` has events to poll."""
        if has_events:
            self.with_events[run] = None
        else:
            self.with_events.pop(run, None)

    def mark_waiting(self, run: R, waits: bool) -> None:
        """Record whether ``run`` waits for workers that are not free."""
        if waits:
            self._waiting[run] = None
        else:
            self._waiting.pop(run, None)

    def count_from_now(self) -> None:
        """Set ``busy_s`` to 0: an earlier controller has counted the time until now."""
        self._busy_s, self._busy_at = 0.0, self.clock.now()

    def forget(self, run: R) -> None:
        """Remove ``run``, which has ended."""
        self._waiting.pop(run, None)
        self.runs.pop(run, None)


# --- one run ---


class SimulatedHandle(ElasticHandle):
    """A run that is calculated from one event to the next.

    New workers take the model's ``start_s`` to start while training goes on. They join at the next step boundary, and
    training stands still for ``resize_pause_s``. The folder of a run that has ended holds its progress, for ``resume``
    and for a child's ``parent``. A new worker replaces each lost one. The other workers repeat the step that a loss
    interrupted. If the last worker is lost, all work since the last checkpoint is lost.
    """

    def __init__(self, spec: RunSpec, environment: SimulationEnvironment[SimulatedHandle]) -> None:
        self.spec = spec
        self._environment = environment
        self._model = environment.model
        self._events: list[Event] = []
        self._over = False
        self._members = list(range(spec.execution.workers))
        self._next_number = spec.execution.workers  # the number of the next new worker
        self._requested = self._target = spec.execution.workers  # requested workers, and those that have room
        self._ready_at = 0.0
        self._stop_at: float | None = None
        self._unsent_regrouped: Regrouped | None = None  # sent once its pause has ended
        self._version = self._reports = self._losses = self._plan = 0
        self._planned = 0
        self._next: Callable[[], None] = self._report_regrouped
        self._reason = ""

    # -- calls of the study loop --

    def poll(self) -> list[Event]:
        events, self._events = self._events, []
        self._environment.mark_events(self, False)
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
        return [] if self._over or self._environment.clock.now() < self._start_at else list(self._members)

    @property
    def step(self) -> int:
        segment = self._segment
        return (
            self._kept.position.step if self._over else segment.start.step + segment.done(self._environment.clock.now())
        )

    def stop(self) -> None:
        if self._stop_at is None and not self._over:
            self._stop_at = self._environment.clock.now()
            self._plan_next()

    def kill(self) -> None:
        if not self._over:
            self._end(-signal.SIGKILL)

    def resize(self, workers: int, why: str = "") -> None:
        """As in ``ElasticHandle``; workers that have no room yet join as soon as workers are free."""
        if not self._over:
            low = min(self.spec.elastic.low, self.spec.execution.workers)
            self._requested = min(max(workers, low), self.spec.most_workers)
            self._reason = why or f"a resize to {self._requested} workers"
            self.take_free_workers()

    def reshape(self, mesh: Mesh, why: str = "") -> None:
        """Resize: a simulated run knows only numbers of workers."""
        self.resize(mesh.workers, why or f"a reshape to {mesh}")

    def kill_worker(self, worker: int) -> None:
        if worker in self._members and not self._over:
            self._run_guarded(lambda: self._lose_worker(worker))

    def corrupt(self, worker: int, what: str, *, once: bool, seed: int) -> None:
        """Do nothing: a simulated run computes nothing."""

    def continue_adopted(self, events: list[Event]) -> None:
        """Report to a new controller that the run goes on, and the ``events`` that the old one did not record."""
        adopted = Adopted(sorted(self._members), self.step, 0.0)
        self._events = [Message(NOBODY, adopted), *events]
        self._environment.mark_events(self, True)

    # -- calls of the environment --

    def begin(self) -> None:
        """Take the workers and start. An exception of the model is a failure of the run."""
        self._environment.hold(len(self._members))
        self._held = len(self._members)
        now = self._environment.clock.now()
        self._start_at = now + self._model.start_s
        self._digest = digest_of(self.spec.config, self.spec.seed)
        self._progress = self._kept = Progress()
        self._segment = RunSegment(self._start_at, Position(), 1, 1, 0.0)
        self._start_seconds = 0.0
        self._run_guarded(self._prepare)

    def wake(self, plan: int) -> None:
        """Do what plan number ``plan`` holds; its time has come."""
        if plan == self._plan and not self._over:
            self._run_guarded(self._next)

    def take_free_workers(self) -> None:
        """Take requested workers as far as workers are free; give back surplus ones."""
        target = min(self._requested, self._held + self._environment.free)
        self._environment.mark_waiting(self, target < self._requested)
        if target != self._target:
            if target > max(self._target, len(self._members)):
                self._ready_at = self._environment.clock.now() + self._model.start_s
            elif target <= len(self._members):
                self._ready_at = self._environment.clock.now()
            self._target = target
            self._hold_workers()
            self._plan_next()

    # -- events of the run --

    def _prepare(self) -> None:
        spec, model = self.spec, self._model
        self._planned = model.epochs(spec.config, spec.epochs)
        progress = load_progress(spec.out, self._environment.clock.now()) if spec.resume else None
        if progress is None and spec.parent is not None:
            progress = load_progress(spec.parent, self._environment.clock.now())
            if progress is None:
                raise UserError("a parent must have kept a checkpoint", spec.parent, "pause it first")
        if progress is not None:
            self._progress = self._kept = progress
        self._rng = random.Random(
            derive(self._environment.losses.seed, "losses", spec.out.name, self._kept.position.step)
        )
        self._start_seconds = self._kept.seconds
        if not self._is_at_end(self._kept.position):
            self._begin_steps(self._kept.position, self._start_at)

    def _run_guarded(self, act: Callable[[], None]) -> None:
        """Call ``act``, and turn an exception of the model into a failure of the run."""
        try:
            act()
        except UserError as error:
            self._fail("user_error", str(error))
        except Exception as error:  # noqa: BLE001 - the model may be the user's, so an exception is a result of the run
            self._fail("exception", f"{type(error).__name__}: {error}")

    def _begin_steps(self, position: Position, at: float) -> None:
        """Begin a segment of steps at ``position`` and time ``at``."""
        config, model = self.spec.config, self._model
        batch, samples = model.batch(config), model.samples(config)
        seconds = model.epoch_s(config, len(self._members), position.epoch + 1)
        if batch < 1 or samples < 1 or not 0 <= seconds < math.inf:
            fix = "fix the model of the trials"
            raise UserError("an epoch has samples, steps and a time", f"{samples}, {batch} and {seconds} s", fix)
        steps = -(-samples // batch)
        if position.offset >= samples:  # a parent's epochs were longer
            position = Position(position.epoch, samples - 1, position.step, position.samples)
        self._segment = RunSegment(at, position, batch, samples, seconds / steps)
        self._loss_at = at + self._lifetime()
        self._plan_next()

    def _plan_next(self) -> None:
        """Plan the next event. Of several events at one time the first in the list comes first."""
        segment, now = self._segment, self._environment.clock.now()
        end = segment.steps
        if self.spec.max_steps is not None:
            end = min(end, max(0, self.spec.max_steps - segment.start.step))
        plans: list[tuple[float, Callable[[], None]]] = [(segment.when(end), lambda: self._reach_end(end))]
        if self._unsent_regrouped is not None:
            plans.insert(0, (segment.since, self._report_regrouped))
        if self._stop_at is not None:
            stop = min(end, segment.boundary(self._stop_at))
            plans.append((segment.when(stop), lambda: self._finish(segment.after(stop), "requested")))
        if self._target != len(self._members):
            change = min(end, segment.boundary(max(self._ready_at, now)))
            plans.append((segment.when(change), lambda: self._regroup(change)))
        if self._loss_at < math.inf:
            plans.append((self._loss_at, lambda: self._lose_worker(self._rng.choice(self._members))))
        at, self._next = min(plans, key=lambda plan: max(plan[0], now))
        self._plan += 1
        self._environment.schedule(at, self._plan, self)

    def _report_regrouped(self) -> None:
        """Report how the workers changed, now that training goes on."""
        if self._unsent_regrouped is not None:
            self._emit(Message(self._members[0], self._unsent_regrouped))
            self._unsent_regrouped = None
        self._plan_next()

    def _reach_end(self, steps: int) -> None:
        """Handle the end of an epoch, or of ``max_steps``."""
        position = self._segment.after(steps)
        self._losses = 0
        if position.offset == 0 and steps:
            metrics = self._model.metrics(self.spec.config, self.spec.seed, position.epoch)
            metrics = {name: float(value) for name, value in metrics.items()}
            seconds = self._seconds()
            all_metrics = {**self._progress.metrics, **metrics}
            self._progress = replace(self._progress, position=position, seconds=seconds, metrics=all_metrics)
            so_far = position.epoch, position.step, position.samples, seconds
            self._emit(Message(self._members[0], Reported(*so_far, metrics, self._reports, self._planned)))
            self._reports += 1
            losses, divergence = follow_reports(self._progress.losses, metrics, self.spec.divergence)
            self._progress = replace(self._progress, losses=losses)
            if divergence:
                self._fail("diverged", f"{divergence} after step {position.step}")
                return
        if self._is_at_end(position):
            return
        if position.offset == 0 and self.spec.checkpoint_every_steps != 0:
            self._keep_checkpoint(position)
        self._begin_steps(position, self._environment.clock.now())

    def _is_at_end(self, position: Position) -> bool:
        """Finish if the run has come to its end, or to its last requested epoch or step. Returns whether it has."""
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
        """Change the workers as planned, at a step boundary."""
        position = self._segment.after(steps)
        leavers = self._members[self._target :]
        joiners = range(self._next_number, self._next_number + max(0, self._target - len(self._members)))
        self._next_number += len(joiners)
        self._members = [*self._members[: self._target], *joiners]
        for worker in leavers:
            self._emit(Message(worker, WorkerGone(worker, "left", self._reason, 0)))
        self._environment.mark_events(self, True)  # so that the study counts its worker-seconds with the right workers
        self._pause(position, planned=True, discarded=0)
        self._hold_workers()

    def _lose_worker(self, worker: int) -> None:
        """Lose a worker. The run fails after ``most_losses`` losses without a completed step in between."""
        segment, now = self._segment, self._environment.clock.now()
        done = segment.done(now)
        self._losses = self._losses + 1 if done == 0 else 1
        self._members.remove(worker)
        cause = f"worker {worker} was ended by signal 9"
        self._emit(Message(worker, WorkerGone(worker, "lost", cause, -signal.SIGKILL)))
        self._ready_at, self._reason = now + self._model.start_s, f"the loss of worker {worker}"
        if self._losses >= self.spec.elastic.most_losses:
            self._fail("worker_lost", f"{self._losses} losses without a completed step; the last: {cause}")
        elif self._members:
            self._pause(segment.after(done), planned=False, discarded=int(segment.when(done) < now))
        else:
            self._members = [self._next_number]
            self._next_number += 1
            self._start_at = now + self._model.start_s
            self._progress, self._start_seconds = self._kept, self._kept.seconds
            step = self._kept.position.step
            repeated = max(0, segment.after(done).step - step)
            self._emit(Message(NOBODY, Restarted(step, repeated, self._model.start_s)))
            self._begin_steps(self._kept.position, self._start_at)

    def _pause(self, position: Position, *, planned: bool, discarded: int) -> None:
        """Go on from ``position`` in a new view, after a pause."""
        pause_s = self._model.resize_pause_s
        self._version += 1
        self._unsent_regrouped = Regrouped(
            self._version, list(self._members), planned, position.step, pause_s, discarded
        )
        self._begin_steps(position, max(self._environment.clock.now(), self._segment.since) + pause_s)

    # -- end and bookkeeping --

    def _finish(self, position: Position, stopped: Stopped) -> None:
        self._progress = self._progress.trained(self._digest, position, self._seconds())
        if stopped in ("requested", "until_epoch") or self.spec.checkpoint_every_steps != 0:
            save_progress(self.spec.out, self._progress, self._environment.clock.now())
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
                    step_s=self._segment.step_s or None,
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
        self._environment.forget(self)
        self._environment.hold(-self._held)
        for worker in self._members:
            self._emit(Exited(worker, code, log))

    def _keep_checkpoint(self, position: Position) -> None:
        """Keep a checkpoint in memory at the end of an epoch: only this run reads it."""
        self._progress = self._kept = self._progress.trained(self._digest, position, self._seconds())

    def _seconds(self) -> float:
        """Training seconds so far, including earlier starts of the run and pauses, without the time to start."""
        return self._start_seconds + max(0.0, self._environment.clock.now() - self._start_at)

    def _hold_workers(self) -> None:
        held = max(self._target, len(self._members))
        more, self._held = held - self._held, held
        if more:
            self._environment.hold(more)

    def _lifetime(self) -> float:
        """Draw the seconds until one of the workers is lost."""
        every_s = self._environment.losses.every_s
        return self._rng.expovariate(len(self._members) / every_s) if every_s < math.inf else math.inf

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        self._environment.mark_events(self, True)


# --- runs of an earlier controller ---


def replay_runs(
    left: Sequence[SurvivingRun], environment: SimulationEnvironment[SimulatedHandle]
) -> list[SimulatedHandle]:
    """Calculate the runs of an earlier controller again, from their beginnings to the end of its journal.

    A simulated run depends only on its settings, its beginning and its requests to pause. The journal holds all three.

    Args:
        left: The runs that the earlier controller left, in the order of their beginnings.
        environment: An environment without runs.
    """
    now, clock = environment.clock.now(), environment.clock
    runs = [SimulatedHandle(survivor.spec, environment) for survivor in left]
    recorded: dict[SimulatedHandle, int] = {}
    todo: list[tuple[float, Callable[[], None]]] = []
    for run, survivor in zip(runs, left, strict=True):
        recorded[run] = sum(isinstance(record, Reported | Regrouped) for record in survivor.kept)
        todo.append((survivor.last_start_at, run.begin))
        if survivor.stop_at is not None:
            todo.append((survivor.stop_at, run.stop))
    todo.sort(key=lambda planned: planned[0])
    environment.clock = VirtualClock(now_s=todo[0][0] if todo else now)
    unrecorded: dict[SimulatedHandle, list[Event]] = {}
    replayed: Counter[SimulatedHandle] = Counter()

    def listen(until: float) -> None:
        while True:
            environment.advance(until)
            if not environment.with_events:
                return
            for run in list(environment.with_events):
                for event in run.poll():
                    counts = isinstance(event, Message) and isinstance(event.record, Reported | Regrouped)
                    replayed[run] += counts
                    if not counts or replayed[run] > recorded[run]:
                        unrecorded.setdefault(run, []).append(event)

    for at, act in todo:
        listen(at)
        act()
    listen(now)
    environment.clock = clock
    environment.count_from_now()
    for run in [*unrecorded, *(run for run in runs if run not in unrecorded)]:
        run.continue_adopted(unrecorded.get(run, []))
    return runs
