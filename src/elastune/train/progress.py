"""How far one worker's run has come: position, times, memory, and how many steps are planned.

A controller with a deadline is told whenever the planned number of steps changes. Memory is measured: on a CPU it
is the process's resident memory (proc(5)), on a GPU the allocator's numbers.
"""

from __future__ import annotations

import ctypes
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import torch

from elastune.adapt.monitors.base import UNKNOWN_TIMES, WorkerTimes
from elastune.core.clock import Clock
from elastune.core.communication import Topology
from elastune.core.divergence import Divergence, LossTrack, follow, follow_reports
from elastune.core.errors import Diverged, UserError
from elastune.core.journal.records import (
    Record,
    RoundsShortened,
    StartedFrom,
    StepsPlanned,
    SyncChangesUnreached,
    WorkerMemory,
    WorkerSteps,
)
from elastune.core.run import Position
from elastune.core.sync_plan import SyncPlan, SyncSchedule
from elastune.train.compiling import COMPILED
from elastune.train.data.sample_log import SampleSpans
from elastune.train.data.source import StepSource

# [timing] How long training took, and how long a step.

WARM_UP_STEPS = 3
KEPT_STEPS = 2000


class StepTimes:
    """Wall time of a run and of its newest steps. A step lasts from its first batch to the user's last line of it.

    One in which this worker, or another one, compiled a model tells nothing of those to come, and is left out.
    """

    def __init__(self, clock: Clock) -> None:
        # count: of this session's steps.
        self.seconds_before = 0.0
        self._clock = clock
        self._started = clock.now()
        self._step_started = 0.0
        COMPILED.listen()
        self._compiled_before = COMPILED.seconds
        self.count = 0
        self._steps: deque[tuple[float, float] | None] = deque(maxlen=KEPT_STEPS)

    @property
    def seconds(self) -> float:
        """Seconds of training, with those before a resume."""
        return self.seconds_before + self._clock.now() - self._started

    def go_on_from(self, seconds: float) -> None:
        """Training took ``seconds`` up to now."""
        self.seconds_before, self._started = seconds, self._clock.now()

    @property
    def now(self) -> float:
        """The clock's time."""
        return self._clock.now()

    @property
    def step_s(self) -> float:
        """Seconds since the newest step began."""
        return self._clock.now() - self._step_started

    def begin_step(self) -> None:
        """A step's first data are about to be fetched."""
        self._step_started = self._clock.now()
        COMPILED.listen()
        self._compiled_before = COMPILED.seconds

    def end_step(self, data_s: float, wait_s: float, steps: int = 1) -> WorkerTimes:
        """The last line ran of a step, or of a round of ``steps``; ``data_s`` of it fetched samples, ``wait_s`` waited
        for others. Returns what this worker tells of it; a step of a round counts as its equal share.
        """
        taken_s = self._clock.now() - self._step_started
        self.count += steps
        if COMPILED.seconds > self._compiled_before:
            self._steps.append(None)
            return UNKNOWN_TIMES
        self._steps.append((taken_s / steps, wait_s / steps))
        return WorkerTimes(data_s, max(0.0, taken_s - data_s - wait_s), wait_s)

    def leave_out_newest(self) -> None:
        """Another worker compiled in the newest step, and this one waited for it."""
        if self._steps:
            self._steps[-1] = None

    @property
    def _kept(self) -> list[tuple[float, float]]:
        """Seconds of steps and of their waiting, warm-up left out."""
        return [step for step in list(self._steps)[WARM_UP_STEPS:] if step is not None]

    def medians(self) -> tuple[float | None, float | None]:
        """Median seconds of a step and of its waiting, warm-up left out; None of too few steps."""
        steps = self._kept
        if not steps:
            return None, None
        return statistics.median(s for s, _ in steps), statistics.median(w for _, w in steps)

    def execution(self) -> list[float]:
        """Mean seconds of a step, and of it without waiting, warm-up left out; zeros of too few steps."""
        steps = self._kept
        if not steps:
            return [0.0, 0.0]
        return [statistics.fmean(s for s, _ in steps), statistics.fmean(max(0.0, s - w) for s, w in steps)]


def steps_of_workers(rows: Sequence[Sequence[float]]) -> list[WorkerSteps]:
    """From every worker's ``execution``, by rank; those that took too few steps, and joined late, are left out."""
    slowest = max((busy_s for _, busy_s in rows), default=0.0)
    return [
        WorkerSteps(rank, step_s, busy_s, busy_s / slowest)
        for rank, (step_s, busy_s) in enumerate(rows)
        if step_s > 0 and slowest > 0
    ]


# [memory] What a worker's memory holds: of its state by kind, and the most that a step needed beside it. Measured.
#
# On a CPU the process's resident memory is looked at (proc(5): ``VmRSS``, and ``VmHWM``, its peak, which a 5 in
# ``clear_refs`` begins anew); what the C library has kept of freed memory is given back before. On a GPU it is the memory
# that torch's allocator has given out.

MEASURED_STEP = 3  # of a view: the optimizer's state is there, and whatever is set up once
KINDS = ("parameters", "gradients", "optimizer", "copies")
UNKNOWN = -1.0


class StepMemory:
    """Looks at one step of each view; nothing of it is done in the others."""

    def __init__(self, device: torch.device | None = None, status: Path = Path("/proc/self")) -> None:
        self._device = device or torch.device("cpu")
        self._status = status
        self._view = self._steps = 0
        self._before = UNKNOWN
        self._peak = 0.0
        self._activations = UNKNOWN
        self._state: Mapping[str, int] = {}

    def begin_view(self, view: int) -> None:
        """Steps are taken in ``view`` from here on."""
        if view != self._view:
            self._view, self._steps = view, 0

    def begin_step(self) -> None:
        """A step's first data are about to be fetched."""
        self._steps += 1
        if self._steps == MEASURED_STEP:
            self._before = self._begin_anew()

    @property
    def due(self) -> bool:
        """Whether the step that is under way is the one that is looked at."""
        return self._steps == MEASURED_STEP

    def reduced(self, state: Mapping[str, int]) -> None:
        """The step's gradients are here; ``state``: the bytes of each of ``KINDS`` here, see ``Replica.memory``."""
        self._state = dict(state)

    def end_step(self) -> None:
        """The step's last line ran."""
        if self.due and self._state and self._before != UNKNOWN:
            most = self._most() - self._before - self._state["gradients"]
            self._activations = max(0.0, most)

    def row(self) -> list[float]:
        """All that is known, as numbers to gather; ``memory_of_workers`` reads them."""
        known = [float(self._state.get(kind, UNKNOWN)) for kind in KINDS]
        return [*known, self._activations, max(self._peak, self._most())]

    def _begin_anew(self) -> float:
        """The bytes that are in use; their peak is counted from here."""
        self._peak = max(self._peak, self._most())
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return float(torch.cuda.memory_allocated(self._device))
        with suppress(OSError, AttributeError):  # a C library without it keeps more, and the peak above that is less
            ctypes.CDLL(None).malloc_trim(0)
        try:
            (self._status / "clear_refs").write_text("5")
        except OSError:
            return UNKNOWN
        return self._told("VmRSS")

    def _most(self) -> float:
        """The peak since it was begun anew."""
        if self._device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self._device))
        return self._told("VmHWM")

    def _told(self, name: str) -> float:
        """Bytes by name, of a file with lines such as "VmRSS:    1234 kB"."""
        with suppress(OSError):
            for line in (self._status / "status").read_text().splitlines():
                if line.startswith(f"{name}:"):
                    return 1024.0 * int(line.split()[1])
        return UNKNOWN


def memory_of_workers(rows: Sequence[Sequence[float]]) -> list[WorkerMemory]:
    """From every worker's ``row``, by rank; those that took too few steps are left out."""
    found = []
    for rank, (*known, activations, peak) in enumerate(rows):
        if UNKNOWN not in known:
            bytes_of = {kind: int(value) for kind, value in zip(KINDS, known, strict=True)}
            told = None if activations == UNKNOWN else int(activations)
            found.append(WorkerMemory(rank, **bytes_of, activations=told, peak=max(0, int(peak))))
    return found


# [progress] How far one worker's run has come.

BY_PROGRAM: Final = "program"
"""That ``session.stop`` ended training."""


@dataclass
class Progress:
    """Changed in place as training goes on; a part of a run's state.

    Attributes:
        times: How long training and its steps took.
        memory: What a step needed.
        position: Where the run is.
        metrics: The newest value of everything that was reported.
        evaluated_on: How many samples metrics were measured on, where the program told.
        stopped: Why training ended.
        stop_why: What the program gave to ``session.stop``.
        loss: The mean loss of the newest step; None: nobody has looked. ``loss_wanted``: the program looks at it.
        best: The value of each metric whose best checkpoint is kept.
        batch_size: What the run was changed to use instead of what the program asks for.
        micro_batch: What the run was changed to use instead of what its means ask for.
        topology: By which routes sums were changed to travel instead of those that its means ask for.
        reports: How many were made since the last step.
        newest_steps: How many steps the newest round had.
        spans: Which samples were used.
        begun: What ``session.start_from`` has taken, call by call.
        losses: What divergence is judged by: the training loss, under no name, and metrics that should go down.
    """

    name: ClassVar[str] = "progress"

    times: StepTimes
    memory: StepMemory = field(default_factory=StepMemory)
    position: Position = field(default_factory=Position)
    metrics: dict[str, float] = field(default_factory=dict)
    evaluated_on: dict[str, int] = field(default_factory=dict)
    stopped: str = "complete"
    stop_why: str = ""
    loss: float | None = None
    loss_wanted: bool = False
    best: dict[str, float] = field(default_factory=dict)
    batch_size: int | None = None
    micro_batch: int | None = None
    topology: str | None = None
    reports: int = 0
    newest_steps: int = 1
    spans: SampleSpans = field(default_factory=list)
    begun: list[StartedFrom] = field(default_factory=list)
    losses: dict[str, LossTrack] = field(default_factory=dict)

    def is_best(self, metric: str, direction: Literal["min", "max"]) -> bool:
        """Whether the newest value of ``metric`` is better than the value of the checkpoint that is kept, if any."""
        value, best = self.metrics[metric], self.best.get(metric)
        return best is None or (value > best if direction == "max" else value < best)

    def forget_best(self, metric: str, earlier: float | None) -> None:
        """The checkpoint of the newest best could not be kept: the ``earlier`` value, if there was one, is the best."""
        del self.best[metric]
        if earlier is not None:
            self.best[metric] = earlier

    def state_dict(self) -> dict[str, Any]:
        return {
            "position": asdict(self.position),
            "metrics": self.metrics,
            "evaluated_on": self.evaluated_on,
            "batch_size": self.batch_size,
            "micro_batch": self.micro_batch,
            "topology": self.topology,
            "reports": self.reports,
            "newest_steps": self.newest_steps,
            "spans": self.spans,
            "seconds": self.times.seconds,
            "stop_why": self.stop_why,
            "best": self.best,
            "begun": [asdict(told) for told in self.begun],
            "loss": [self.loss, self.loss_wanted],
            "losses": {name: track.to_json() for name, track in self.losses.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = position_of(state["position"])
        self.metrics = {str(name): float(value) for name, value in state["metrics"].items()}
        self.evaluated_on = {str(name): int(n) for name, n in state.get("evaluated_on", {}).items()}
        self.batch_size = None if state["batch_size"] is None else int(state["batch_size"])
        self.micro_batch = None if state["micro_batch"] is None else int(state["micro_batch"])
        self.topology = None if state.get("topology") is None else str(Topology.parse(str(state["topology"])))
        self.reports = int(state["reports"])
        self.newest_steps = int(state["newest_steps"])
        self.spans = spans_of(state)
        self.losses = {str(name): LossTrack.from_json(told) for name, told in state.get("losses", {}).items()}
        self.begun = begun_of(state)
        self.stop_why = str(state["stop_why"])
        if self.stop_why:
            self.stopped = BY_PROGRAM
        loss, self.loss_wanted = state["loss"]
        self.loss = None if loss is None else float(loss)
        self.best = {str(name): float(value) for name, value in state["best"].items()}
        self.times.go_on_from(float(state["seconds"]))


def position_of(state: Mapping[str, Any]) -> Position:
    """The position that was saved by ``asdict``. Raises ``TypeError`` or ``ValueError`` for anything else."""
    return Position(**{str(name): int(number) for name, number in state.items()})


def begun_of(state: Mapping[str, Any]) -> list[StartedFrom]:
    """What ``session.start_from`` had taken, from the state of a ``Progress``; nothing in those of older versions."""
    return [StartedFrom(**told) for told in state.get("begun", [])]


def spans_of(state: Mapping[str, Any]) -> SampleSpans:
    """The samples used, from the state of a ``Progress``."""
    return [[int(number) for number in piece] for piece in state["spans"]]


# [planned] How many steps a run is to take: told whenever that has changed, for controllers that have a deadline to meet.
#
# What asks for more steps than there are is told here, too: rounds of learners that are longer than a pass, and changes
# of strategy that the schedule has after the last step.

NO_CHANGES = SyncSchedule()


class PlannedSteps:
    """What was told of it last; ``send`` takes records for the journal. ``schedule``: the run's, of strategies."""

    def __init__(self, send: Callable[[Record], None], schedule: SyncSchedule = NO_CHANGES) -> None:
        self._send = send
        self._schedule = schedule
        self._unreached = NO_CHANGES
        self._told: int | None = None
        self._cut: RoundsShortened | None = None

    def tell(self, source: StepSource, at: Position, size: int, epochs: int, sync: SyncPlan) -> None:
        """Of the run that goes on so; see ``steps_planned``. ``sync``: how its workers agree from here on.

        Raises:
            UserError: Before the first step, where a round, now or by the schedule, would be longer than training.
        """
        steps = steps_planned(source, at, size, epochs)
        if steps is not None and steps != self._told:
            self._told = steps
            self._send(StepsPlanned(steps))
            self._tell_unreached(steps)
        a_pass = -(-source.length(0, size) // size)
        if at.step == 0 and steps is not None:
            for plan in (sync, *(later for begins, later in self._schedule.changes if begins < steps)):
                _refuse_longer(plan, steps, a_pass)
        if not sync.in_rounds or not a_pass or sync.every <= a_pass:
            return
        cut = RoundsShortened(str(sync), a_pass)
        if cut != self._cut:
            self._cut = cut
            self._send(cut)

    def over(self, steps: int) -> None:
        """The run has come to its own end after so many."""
        self._tell_unreached(steps)

    def _tell_unreached(self, steps: int) -> None:
        late = self._schedule.beyond(steps)
        if late != self._unreached:
            self._unreached = late
            if late.changes:
                self._send(SyncChangesUnreached(str(late), steps))


def _refuse_longer(plan: SyncPlan, steps: int, a_pass: int) -> None:
    if plan.in_rounds and plan.every > steps:
        fix = f"use every={a_pass} or less: a round ends with a pass over the data, of {a_pass} steps"
        raise UserError("a round must not be longer than training", f"{plan}, {steps} steps", fix)


def ignore(record: Record) -> None:
    """Of who has nothing to tell: a worker that warms up."""


def steps_planned(source: StepSource, at: Position, size: int, epochs: int) -> int | None:
    """Steps of a whole run that is ``at`` that position of ``source``, takes batches of ``size`` and has so many
    ``epochs``; None where nobody knows how many samples or epochs there are."""
    whole, to_use = source.length(0, size), source.length(at.offset, size)
    if not whole or epochs <= at.epoch:
        return None
    batches = -((at.offset - to_use) // size) + (epochs - at.epoch - 1) * -(-whole // size)
    return at.step + source.turns * batches - at.turn


# [divergence] Ends a run whose loss has exploded, by the rule of ``core.divergence``: alike on every worker, in the same step.

_TRAINING = ""  # the name of the training loss among those that are followed


class DivergenceWatch:
    """Follows the training loss and the metrics that ``rule`` names; what it remembers is in ``progress``."""

    def __init__(self, rule: Divergence, progress: Progress) -> None:
        self._rule = rule
        self._progress = progress

    def loss(self, value: float, step: int, turn: int = 0) -> None:
        """Judge the mean loss of the global batch of ``step``, counted from 1, by those of the same ``turn``.

        Raises ``Diverged``.
        """
        if not math.isfinite(value):
            raise Diverged(f"loss is {value} at step {step}")
        losses, name = self._progress.losses, f"turn {turn}" if turn else _TRAINING
        losses[name], why = follow(losses.get(name, LossTrack()), value, self._rule.factor)
        if why:
            raise Diverged(f"loss is {value:.4g} at step {step}, {why}")

    def metrics(self, execution: Mapping[str, float], step: int, *, again: bool = False) -> None:
        """Judge what was reported after ``step`` steps, or (``again``) is repeated. Raises ``Diverged``."""
        followed, wrong = follow_reports(self._progress.losses, execution, self._rule)
        if wrong:
            raise Diverged(f"{wrong} after step {step}")
        if not again:
            self._progress.losses = followed
