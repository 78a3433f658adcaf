"""A world for policies with a known truth: steps take the time a formula says, workers come when they are warm."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from elastune.core.signals import Decision, Signal, Snapshot
from elastune.policies.base import Policy
from elastune.policies.run import Collectives, Limits, Run

StepTime = Callable[[int, int], tuple[float, float]]
"""(workers, global batch) -> seconds of a step, and how many of them are computing."""


@dataclass
class World:
    """A run of one policy. What it decides counts after the next step; its state goes through JSON again and again.

    ``variance`` and ``square``: tr(Sigma) of one sample's gradient and |G|^2. ``jitter``: relative standard deviation
    of step times; about every 40th step pauses besides. ``free``: workers there are at most, ``warm_steps`` until one
    has come.
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

    def lose(self, count: int = 1) -> None:
        """So many workers die; others are started for them, as far as there are any."""
        self.workers -= count

    def train(self, policy: Policy, steps: int) -> None:
        """Take so many steps, or fewer if the policy stops."""
        for _ in range(steps):
            if self.stopped:
                return
            whole_s, compute_s = self.step_time(self.workers, self.batch)
            pause_s = 20 * whole_s if self._random.random() < 1 / 40 else 0.0
            self.step += 1
            self.seconds += whole_s * max(1 + self._random.gauss(0, self.jitter), 0.1) + pause_s
            decision = self.hook(policy, whole_s, compute_s)
            if not decision.empty:
                self.decisions.append((self.step, decision))
            self._apply(self._pending)
            self._pending = decision
            if self.step % 7 == 0:
                policy.load(json.loads(json.dumps(policy.state())))

    def hook(self, policy: Policy, whole_s: float, compute_s: float) -> Decision:
        """What the policy asks for after a step that took so long."""
        measured = {
            "gradient_variance": self.variance,
            "gradient_square": self.square,
            "noise_scale": self.variance / self.square,
            "step_s": whole_s,
            "data_s": 0.0,
            "compute_s": compute_s,
            "wait_s": whole_s - compute_s,
        }
        signals = {name: Signal(value * (1 + self._random.gauss(0, self.jitter))) for name, value in measured.items()}
        snapshot = Snapshot(
            step=self.step,
            epoch=0,
            samples=0,
            seconds=self.seconds,
            workers=self.workers,
            batch_size=self.batch,
            lr=self.lr,
            signals=signals,
            lr_at_start=0.1,
            batch_at_start=self.batch_at_start,
        )
        run = Run(snapshot, self.limits, 0, cast(Collectives, object()))
        policy.after_step(run)
        return run.decision

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
