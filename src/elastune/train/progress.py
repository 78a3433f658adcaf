"""How far one worker's run has come: position, times, memory, planned steps, and the losses that it watches."""

from __future__ import annotations

import ctypes
import math
import statistics
import sys
import time
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
from elastune.train.data.sample_log import SampleSpans
from elastune.train.data.source import StepSource

WARM_UP_STEPS = 3  # at the beginning, left out of times
KEPT_STEPS = 2000
MEASURED_STEP = 3  # of a view: by then the optimizer's state is there, and all that is set up once
KINDS = ("parameters", "gradients", "optimizer", "copies")  # of a worker's state in memory
UNKNOWN = -1.0  # bytes
BY_PROGRAM: Final = "program"
"""Why training ended, where ``session.stop`` ended it."""
NO_CHANGES = SyncSchedule()
_TRAINING = ""  # the name of the training loss in ``Progress.losses``


@dataclass
class Progress:
    """How far a run has come: a part of its state, changed in place as training goes on.

    Attributes:
        times: How long training and its steps took.
        memory: How much memory a step needed.
        position: The place in training: epoch, offset in it, steps, samples.
        metrics: The newest value of every reported metric.
        evaluated_on: How many samples metrics were measured on, where the program reported it.
        stopped: Why training ended.
        stop_why: The reason that the program gave to ``session.stop``.
        loss: The mean loss of the newest step; None: not read.
        loss_wanted: The program reads ``session.loss``.
        best: The value of each metric whose best checkpoint is kept.
        batch_size: The global batch size that the run was changed to; None: as the program asks.
        micro_batch: The micro-batch that the run was changed to; None: as the execution settings have it.
        topology: The routes of sums that the run was changed to; None: as the execution settings have it.
        reports: How many reports were made since the last step.
        newest_steps: How many steps the newest round had.
        spans: Which samples the steps used.
        initial_weights: The records of ``session.start_from``, call by call.
        losses: The values that divergence is judged by: the training loss, under no name, and metrics that should go
            down.
    """

    name: ClassVar[str] = "progress"

    times: StepTimes
    memory: StepMemory = field(default_factory=lambda: StepMemory())
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
    initial_weights: list[StartedFrom] = field(default_factory=list)
    losses: dict[str, LossTrack] = field(default_factory=dict)

    @property
    def steps_of_epoch(self) -> int:
        """How many steps of the present epoch are completed."""
        first = self.position.step
        for epoch, _, _, _, first_step, *_ in reversed(self.spans):
            if epoch != self.position.epoch:
                break
            first = min(first, first_step - 1)
        return self.position.step - first

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
            "initial_weights": [asdict(start) for start in self.initial_weights],
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
        self.losses = {str(name): LossTrack.from_json(track) for name, track in state.get("losses", {}).items()}
        self.initial_weights = initial_weights_of(state)
        self.stop_why = str(state["stop_why"])
        if self.stop_why:
            self.stopped = BY_PROGRAM
        loss, self.loss_wanted = state["loss"]
        self.loss = None if loss is None else float(loss)
        self.best = {str(name): float(value) for name, value in state["best"].items()}
        self.times.go_on_from(float(state["seconds"]))


def position_of(state: Mapping[str, Any]) -> Position:
    """The position that ``asdict`` saved. Raises ``TypeError`` or ``ValueError`` for anything else."""
    return Position(**{str(name): int(number) for name, number in state.items()})


def initial_weights_of(state: Mapping[str, Any]) -> list[StartedFrom]:
    """The records of ``session.start_from`` in the state of a ``Progress``; none in states of older versions."""
    return [StartedFrom(**start) for start in state.get("initial_weights", [])]


def spans_of(state: Mapping[str, Any]) -> SampleSpans:
    """The samples that steps have used, from the state of a ``Progress``."""
    return [[int(number) for number in span] for span in state["spans"]]


class CompileTimes:
    """Seconds that this process has spent in ``torch.compile``, forward and backward, by torch's own callbacks.

    Attributes:
        seconds: All seconds since the process began to ``listen``.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._reported = 0.0
        self._since: float | None = None

    def unreported(self) -> float:
        """Seconds since the last call, in whatever session; a joiner's first passes, which do not count, are in it."""
        self.listen()
        before, self._reported = self._reported, self.seconds
        return self._reported - before

    def listen(self) -> None:
        """Count compilations from here on, if this process has a compiler."""
        if (callbacks := sys.modules.get("torch._dynamo.callback")) is not None:
            handler = callbacks.callback_handler
            if self._begins not in handler.start_callbacks:  # not yet, or torch._dynamo.reset has dropped it
                handler.register_start_callback(self._begins)
                handler.register_end_callback(self._ends)

    def _begins(self, _: object) -> None:
        self._since = time.monotonic()

    def _ends(self, _: object) -> None:
        if self._since is not None:
            self.seconds += time.monotonic() - self._since
            self._since = None


COMPILED = CompileTimes()
"""The times of this process, which has one compiler."""


class StepTimes:
    """Wall time of a run and of its newest steps. A step lasts from its first batch to the user's last line of it.

    A step in which this or another worker compiled a model does not predict later steps, and is left out.

    Attributes:
        seconds_before: Seconds of training before a resume.
        count: Steps of this session.
    """

    def __init__(self, clock: Clock) -> None:
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
        """Go on after ``seconds`` of training."""
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
        """The last line of a step ran, or of a round of ``steps``; a step of a round counts as an equal share of it.

        Args:
            data_s: Seconds in which samples were fetched.
            wait_s: Seconds in which this worker waited for others.
            steps: Steps of the round.

        Returns:
            The times that this worker adds to the next control vector.
        """
        step_s = self._clock.now() - self._step_started
        self.count += steps
        if COMPILED.seconds > self._compiled_before:
            self._steps.append(None)
            return UNKNOWN_TIMES
        self._steps.append((step_s / steps, wait_s / steps))
        return WorkerTimes(data_s, max(0.0, step_s - data_s - wait_s), wait_s)

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

    def averages(self) -> list[float]:
        """Mean seconds of a step, and of a step without waiting, warm-up left out; zeros of too few steps."""
        steps = self._kept
        if not steps:
            return [0.0, 0.0]
        return [statistics.fmean(s for s, _ in steps), statistics.fmean(max(0.0, s - w) for s, w in steps)]


def steps_of_workers(rows: Sequence[Sequence[float]]) -> list[WorkerSteps]:
    """The times of workers from their ``StepTimes.averages``, by rank; workers with too few steps are left out."""
    slowest = max((busy_s for _, busy_s in rows), default=0.0)
    return [
        WorkerSteps(rank, step_s, busy_s, busy_s / slowest)
        for rank, (step_s, busy_s) in enumerate(rows)
        if step_s > 0 and slowest > 0
    ]


class StepMemory:
    """How much memory a worker's state takes, by kind, and how much a step needs beside it.

    One step of each view is measured (``MEASURED_STEP``); the other steps cost nothing. On a CPU the process's resident
    memory is read (proc(5): ``VmRSS``, and its peak ``VmHWM``, which a 5 in ``clear_refs`` resets). Before that the C
    library gives freed memory back. On a GPU torch's allocator reports its numbers.
    """

    def __init__(self, device: torch.device | None = None, status: Path = Path("/proc/self")) -> None:
        self._device = device or torch.device("cpu")
        self._status = status
        self._view = self._steps = 0
        self._before = UNKNOWN
        self._peak = 0.0
        self._activations = UNKNOWN
        self._state: Mapping[str, int] = {}

    def begin_view(self, view: int) -> None:
        """The following steps are taken in ``view``."""
        if view != self._view:
            self._view, self._steps = view, 0

    def begin_step(self) -> None:
        """A step's first data are about to be fetched."""
        self._steps += 1
        if self._steps == MEASURED_STEP:
            self._before = self._reset_peak()

    @property
    def due(self) -> bool:
        """Whether the present step is measured."""
        return self._steps == MEASURED_STEP

    def reduced(self, state: Mapping[str, int]) -> None:
        """The step's gradients are here; ``state``: the bytes of each of ``KINDS``, see ``Replica.memory``."""
        self._state = dict(state)

    def end_step(self) -> None:
        """The step's last line ran."""
        if self.due and self._state and self._before != UNKNOWN:
            needed = self._peak_now() - self._before - self._state["gradients"]
            self._activations = max(0.0, needed)

    def row(self) -> list[float]:
        """The measured numbers, for workers to gather; ``memory_of_workers`` reads them."""
        state_bytes = [float(self._state.get(kind, UNKNOWN)) for kind in KINDS]
        return [*state_bytes, self._activations, max(self._peak, self._peak_now())]

    def _reset_peak(self) -> float:
        """The bytes that are in use; the peak is counted from here on."""
        self._peak = max(self._peak, self._peak_now())
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return float(torch.cuda.memory_allocated(self._device))
        with suppress(OSError, AttributeError):  # without it the C library keeps more, and the peak above that is less
            ctypes.CDLL(None).malloc_trim(0)
        try:
            (self._status / "clear_refs").write_text("5")
        except OSError:
            return UNKNOWN
        return self._status_bytes("VmRSS")

    def _peak_now(self) -> float:
        """The peak since the last reset."""
        if self._device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(self._device))
        return self._status_bytes("VmHWM")

    def _status_bytes(self, name: str) -> float:
        """A number of the process's status file, which has lines such as "VmRSS:    1234 kB"."""
        with suppress(OSError):
            for line in (self._status / "status").read_text().splitlines():
                if line.startswith(f"{name}:"):
                    return 1024.0 * int(line.split()[1])
        return UNKNOWN


def memory_of_workers(rows: Sequence[Sequence[float]]) -> list[WorkerMemory]:
    """The memory of workers from their ``StepMemory.row``, by rank; workers with too few steps are left out."""
    measured = []
    for rank, (*state_bytes, activations, peak) in enumerate(rows):
        if UNKNOWN not in state_bytes:
            by_kind = {kind: int(value) for kind, value in zip(KINDS, state_bytes, strict=True)}
            needed = None if activations == UNKNOWN else int(activations)
            measured.append(WorkerMemory(rank, **by_kind, activations=needed, peak=max(0, int(peak))))
    return measured


class PlannedSteps:
    """Reports to the journal how many steps a run will take, whenever that changes.

    Policies and allocators with a deadline read it. It also reports plans that ask for more steps than there are:
    rounds of learners that are longer than a pass, and changes of strategy scheduled after the last step.

    Args:
        send: Takes records for the journal.
        schedule: The run's changes of sync strategy.
    """

    def __init__(self, send: Callable[[Record], None], schedule: SyncSchedule = NO_CHANGES) -> None:
        self._send = send
        self._schedule = schedule
        self._unreached = NO_CHANGES
        self._reported: int | None = None
        self._shortened: RoundsShortened | None = None

    def report(self, source: StepSource, at: Position, size: int, epochs: int, sync: SyncPlan) -> None:
        """Report the steps of the run, if they have changed; see ``steps_planned`` for the arguments.

        Args:
            sync: The sync strategy from here on.

        Raises:
            UserError: Before the first step, where a round, now or by the schedule, would be longer than training.
        """
        steps = steps_planned(source, at, size, epochs)
        if steps is not None and steps != self._reported:
            self._reported = steps
            self._send(StepsPlanned(steps))
            self._report_unreached(steps)
        pass_steps = -(-source.length(0, size) // size)
        if at.step == 0 and steps is not None:
            for plan in (sync, *(later for begins, later in self._schedule.changes if begins < steps)):
                _refuse_longer(plan, steps, pass_steps)
        if not sync.in_rounds or not pass_steps or sync.every <= pass_steps:
            return
        shortened = RoundsShortened(str(sync), pass_steps)
        if shortened != self._shortened:
            self._shortened = shortened
            self._send(shortened)

    def over(self, steps: int) -> None:
        """The run has come to its own end after ``steps``."""
        self._report_unreached(steps)

    def _report_unreached(self, steps: int) -> None:
        late = self._schedule.beyond(steps)
        if late != self._unreached:
            self._unreached = late
            if late.changes:
                self._send(SyncChangesUnreached(str(late), steps))


def _refuse_longer(plan: SyncPlan, steps: int, pass_steps: int) -> None:
    if plan.in_rounds and plan.every > steps:
        fix = f"use every={pass_steps} or less: a round ends with a pass over the data, of {pass_steps} steps"
        raise UserError("a round must not be longer than training", f"{plan}, {steps} steps", fix)


def ignore(record: Record) -> None:
    """Drop ``record``: the ``send`` of a worker that warms up."""


def steps_planned(source: StepSource, at: Position, size: int, epochs: int) -> int | None:
    """The steps of a whole run; None where the number of samples or epochs is not known.

    Args:
        source: The data.
        at: The position that the run has reached.
        size: The global batch size from here on.
        epochs: The epochs of the whole run.
    """
    whole, to_use = source.length(0, size), source.length(at.offset, size)
    if not whole or epochs <= at.epoch:
        return None
    batches = -((at.offset - to_use) // size) + (epochs - at.epoch - 1) * -(-whole // size)
    return at.step + source.turns * batches - at.turn


class DivergenceWatch:
    """Ends a run whose loss has exploded, by the rule of ``core.divergence``.

    It follows the training loss and the metrics that ``rule`` names, in ``progress.losses``. All workers judge the same
    values, so they end in the same step.
    """

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

    def metrics(self, values: Mapping[str, float], step: int, *, again: bool = False) -> None:
        """Judge the ``values`` reported after ``step`` steps; ``again``: as a repeated report. Raises ``Diverged``."""
        followed, why = follow_reports(self._progress.losses, values, self._rule)
        if why:
            raise Diverged(f"{why} after step {step}")
        if not again:
            self._progress.losses = followed
