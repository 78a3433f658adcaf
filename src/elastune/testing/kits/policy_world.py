"""A simulated world for policies: steps take the time that a formula gives, and workers join when they are warm."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from elastune.adapt.monitors.base import Reading, WorkerTimes
from elastune.adapt.monitors.performance import Performance
from elastune.adapt.policies.run import Limits
from elastune.core.decisions import Decision, Signal
from elastune.testing.kits.policy import PolicyDriver

StepTime = Callable[[int, int], tuple[float, float]]
"""(workers, global batch) -> seconds of a step, and how many of them are computing."""


@dataclass
class PolicyWorld:
    """A simulated run of one policy.

    A decision takes effect after the next step. The policy's state goes through JSON again and again. Times reach the
    policy through the performance monitor, as in a run.

    Attributes:
        variance, square: tr(Sigma) of one sample's gradient, and |G|^2.
        jitter: The relative standard deviation of times and noise. About every 40th step also pauses.
        free: The most workers that there are.
        warm_steps: Steps until a new worker has joined.
    """

    step_time: StepTime
    limits: Limits
    workers: int
    batch: int
    lr: float = 0.1
    variance: float = 100.0
    square: float = 1.0
    jitter: float = 0.0
    free: int = 1 << 20
    warm_steps: int = 30
    seed: int = 0
    step: int = 0
    seconds: float = 0.0
    stopped: bool = False
    decisions: list[tuple[int, Decision]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batch_at_start, self.target, self._coming = self.batch, self.workers, 0
        self._random = random.Random(self.seed)
        self._pending = Decision()
        self._monitor = Performance()
        self._measured = self._monitor.init()
        self._times: tuple[int, WorkerTimes] = (0, WorkerTimes())  # of the last step, and how many workers made it

    def lose(self, count: int = 1) -> None:
        """Let ``count`` workers die; others are started for them, as far as there are any."""
        self.workers -= count

    def train(self, policy: PolicyDriver, steps: int) -> None:
        """Take ``steps`` steps, or fewer if the policy stops."""
        for _ in range(steps):
            if self.stopped:
                return
            signals = self._make_step()
            decision = policy.decide(
                signals=signals,
                limits=self.limits,
                step=self.step,
                seconds=self.seconds,
                workers=self.workers,
                batch_size=self.batch,
                lr=self.lr,
                batch_at_start=self.batch_at_start,
            )
            if not decision.empty:
                self.decisions.append((self.step, decision))
            self._apply(self._pending)
            self._pending = decision
            if self.step % 7 == 0:
                policy.travel_to(policy)

    def _make_step(self) -> dict[str, Signal]:
        """One more step, and what is measured in it: the times of the step before, as they ride in the reduction."""
        self.step += 1
        before, times = self._times
        step_times = (times,) * self.workers if before == self.workers else ()
        reading = Reading(self.step, self.batch, self.workers, 1.0, times=step_times)
        self._measured = self._monitor.update(self._measured, reading)
        whole_s, compute_s = (self._shaken(s) for s in self.step_time(self.workers, self.batch))
        wait_s = max(whole_s - compute_s, 0.0) + (20 * whole_s if self._random.random() < 1 / 40 else 0.0)
        self._times = self.workers, WorkerTimes(0.0, compute_s, wait_s)
        self.seconds += compute_s + wait_s
        noise = {"gradient_variance": self.variance, "gradient_square": self.square}
        return {
            **{name: Signal(self._shaken(value)) for name, value in noise.items()},
            **self._monitor.signals(self._measured),
        }

    def _shaken(self, value: float) -> float:
        return value * max(1 + self._random.gauss(0, self.jitter), 0.1)

    def _apply(self, decision: Decision) -> None:
        self.batch = decision.batch_size or self.batch
        self.lr *= decision.lr_factor or 1.0
        self.target = decision.workers or self.target
        self.stopped = decision.stop
        wanted = min(self.target, self.free)
        if wanted <= self.workers:
            self.workers, self._coming = min(self.workers, self.target), 0
            return
        self._coming += 1
        if self._coming >= self.warm_steps:
            self.workers, self._coming = wanted, 0
