"""Goodput: choose batch and workers together, by samples a second times what a sample is worth at that batch.

Source: Qiao et al., "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning", OSDI 2021, for one
job: the efficiency of section 3.1 from the measured gradient noise, the step times of section 3.2 fitted while the job
runs, and section 4.1's exploring with optimistic priors: unseen settings count as free, and the policy tries at most
twice the workers and twice the batch seen so far. Beyond Pollux: a measured step time counts more than the fitted one.
So the policy tries a setting with a too optimistic fit only once.

Limits: it does not weigh workers against their price (it takes all that pay at all; bound them with ``max_workers``).
It knows neither nodes (all reductions are of one kind) nor micro-batches (the passes of a step are one compute time).
It cannot distinguish a slow host from a slow setting. It does not see that a larger batch with a poor learning rate
trains worse than the noise scale promises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from elastune.adapt.policies.base import Hook, Policy
from elastune.core.decisions import Snapshot
from elastune.core.errors import UserError
from elastune.core.plan.batch_size import Noise, check_rule, efficiency
from elastune.core.plan.data_parallel import Observation, fit_steps

if TYPE_CHECKING:
    from elastune.adapt.policies.base import Run

MOST_OBSERVED = 64  # settings whose newest times are kept
LEAST_EVERY = 5  # steps; the monitor needs some to measure the new setting's times
RETRY_LOOKS = 10  # looks after which missing workers are requested again
StepSeconds = Callable[[int, int], float]
"""(global batch, workers) -> seconds of a step."""


@dataclass(frozen=True)
class SearchBounds:
    """Bounds, both ends included.

    Attributes:
        low, high: Numbers of workers.
        smallest, largest: Batches, in samples.
    """

    low: int
    high: int
    smallest: int
    largest: int

    def settings(self) -> Iterator[tuple[int, int]]:
        """Yield (workers, batch), fewest and smallest first.

        Batches are ``smallest`` x 1, 1.5, 2, 3 ... and ``largest``.
        """
        doublings = range(max(self.largest // self.smallest, 1).bit_length())
        batches = {round(self.smallest * part * (1 << k)) for k in doublings for part in (1.0, 1.5)}
        batches = {batch for batch in batches if batch <= self.largest} | {self.largest}
        for workers in range(self.low, self.high + 1):
            yield from ((workers, batch) for batch in sorted(batches) if batch >= workers)


def step_time_model(observed: Sequence[Observation]) -> StepSeconds:
    """Return the seconds of steps: as measured where measured, and elsewhere by the model fitted to them."""
    model, measured = fit_steps(observed), {(o.batch, o.workers): o.step_s for o in observed}

    def step_s(batch: int, workers: int) -> float:
        seconds = measured.get((batch, workers))
        return model.step_s(batch, workers) if seconds is None else seconds

    return step_s


def better(
    now: tuple[int, int],
    observed: Sequence[Observation],
    step_s: StepSeconds,
    noise: Noise,
    base_batch: int,
    room: SearchBounds,
    gain: float,
) -> tuple[int, int]:
    """Return the (workers, batch) to go to from ``now``.

    Args:
        now: The present setting; one of ``observed``.
        observed: The measured settings.
        step_s: The step times learnt from them.
        noise: The gradient's noise; its variance is at ``base_batch``.
        base_batch: The batch of the run's beginning, in samples.
        room: The bounds of settings.
        gain: The part by which another goodput must exceed the present one.

    Returns:
        The setting; ``now`` where no goodput in ``room`` exceeds its own by the part ``gain``.
    """

    def goodput(setting: tuple[int, int]) -> float:
        workers, batch = setting
        return batch / step_s(batch, workers) * efficiency(noise, batch, base_batch)

    if max(map(goodput, room.settings())) <= (1 + gain) * goodput(now):
        return now
    # One stride towards it, which need not bring the whole gain.
    most_workers, largest = max(o.workers for o in observed), max(o.batch for o in observed)
    near = replace(
        room,
        high=max(min(room.high, 2 * most_workers), room.low),
        largest=max(min(room.largest, 2 * largest), room.smallest),
    )
    return max((now, *near.settings()), key=goodput)


@dataclass(frozen=True)
class GoodputState:
    """The measurements of the policy, newest last, and its last request.

    Attributes:
        setting: The present workers and batch.
        steps: Steps with this setting since the last look.
        observed: The newest measurement of each setting.
        last_request: The workers of the last request, and its step.
    """

    setting: tuple[int, int] = (0, 0)
    steps: int = 0
    observed: tuple[Observation, ...] = ()
    last_request: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Goodput(Policy):
    """``goodput``: change batch and workers to what promises the most useful samples a second.

    Workers take time to come; meanwhile the batch is the best one for the present workers.

    Args:
        max_batch: The largest batch, in samples; the smallest is the program's own.
        every: Look after so many steps with one setting.
        gain: Change for more than this part of goodput (0.05: 5 %).
        lr: The rule by which the learning rate follows the batch; Pollux uses AdaScale.
        fixed_workers: Leave the workers alone; else they change within the run's limits.
    """

    monitors: ClassVar[tuple[str, ...]] = ("noise_scale", "performance")
    hooks: ClassVar[tuple[Hook, ...]] = ("after_step",)

    max_batch: int = 4096
    every: int = 50
    gain: float = 0.05
    lr: str = "adascale"
    fixed_workers: bool = False

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise UserError("the largest batch holds at least one sample", self.max_batch, "give max_batch=4096, say")
        if self.every < LEAST_EVERY:
            raise UserError(f"goodput looks after {LEAST_EVERY} steps or more", self.every, "give every=50, say")
        if not 0 < self.gain < math.inf:
            raise UserError("a gain in goodput is a positive part of it", self.gain, "give gain=0.05, say, for 5 %")
        check_rule(self.lr)

    def init(self) -> GoodputState:
        return GoodputState()

    def decide(self, hook: Hook, state: GoodputState, run: Run) -> GoodputState:
        """Look around after ``every`` steps with one setting."""
        setting = (run.size(), run.batch_size())
        steps = state.steps + 1 if setting == state.setting else 0
        state = replace(state, setting=setting, steps=steps % self.every)
        if steps < self.every:
            return state
        seen, noise = observe(run.snapshot), gradient_noise(run.snapshot)
        if seen is None:
            return state
        others = (o for o in state.observed if (o.workers, o.batch) != setting)
        state = replace(state, observed=(*others, seen)[-MOST_OBSERVED:])
        return state if noise is None else self._move(state, noise, run)

    def _move(self, state: GoodputState, noise: Noise, run: Run) -> GoodputState:
        smallest = run.snapshot.batch_at_start or run.batch_size()
        longest = run.limits.longest_batch or self.max_batch
        low, high, size = run.limits.low, run.limits.high, run.size()
        room = SearchBounds(low, high, smallest, max(min(self.max_batch, longest), smallest))
        here, now = replace(room, low=size, high=size), (size, run.batch_size())
        times = step_time_model(state.observed)
        _, batch = better(now, state.observed, times, noise, smallest, here, self.gain)
        if batch != run.batch_size():
            run.set_batch_size(batch, lr=self.lr)
        if self.fixed_workers:
            return state
        workers, _ = better(now, state.observed, times, noise, smallest, room, self.gain)
        pending = workers == state.last_request[0] and run.step - state.last_request[1] < RETRY_LOOKS * self.every
        if workers == size or pending:
            return state
        run.resize(workers)
        return replace(state, last_request=(workers, run.step))


def observe(now: Snapshot) -> Observation | None:
    """Return what the performance monitor measured at the present setting; None before it has any."""
    parts = [now.signals.get(name) for name in ("step_s", "data_s", "compute_s")]
    step_s, data_s, compute_s = (math.nan if part is None else part.value for part in parts)
    busy_s = min(data_s + compute_s, step_s)
    if not (busy_s > 0 and step_s < math.inf):
        return None
    return Observation(now.workers, now.batch_size, step_s, busy_s)


def gradient_noise(now: Snapshot) -> Noise | None:
    """Return the gradient's noise at the batch that the run began with; None until it is measured."""
    parts = [now.signals.get(name) for name in ("gradient_variance", "gradient_square")]
    variance, square = (math.nan if part is None else part.value for part in parts)
    if not (0 <= variance < math.inf and math.isfinite(square)):
        return None
    return Noise(gradient_sqr=max(square, 0.0), variance=variance / (now.batch_at_start or now.batch_size))
