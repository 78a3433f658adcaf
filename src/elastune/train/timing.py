"""How long training took, and how long a step."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from elastune.core.clock import Clock
from elastune.journal.records import WorkerSteps
from elastune.monitors.base import UNTOLD, WorkerTimes
from elastune.train.compiling import COMPILED

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
            return UNTOLD
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

    def means(self) -> list[float]:
        """Mean seconds of a step, and of it without waiting, warm-up left out; zeros of too few steps."""
        steps = self._kept
        if not steps:
            return [0.0, 0.0]
        return [statistics.fmean(s for s, _ in steps), statistics.fmean(max(0.0, s - w) for s, w in steps)]


def steps_of_workers(rows: Sequence[Sequence[float]]) -> list[WorkerSteps]:
    """From every worker's ``means``, by rank; those that took too few steps, and joined late, are left out."""
    slowest = max((busy_s for _, busy_s in rows), default=0.0)
    return [
        WorkerSteps(rank, step_s, busy_s, busy_s / slowest)
        for rank, (step_s, busy_s) in enumerate(rows)
        if step_s > 0 and slowest > 0
    ]
