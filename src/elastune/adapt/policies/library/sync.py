"""Choose the sync strategy by the number of workers, or by what the network costs.

Mai et al., "KungFu: Making Training in Distributed Machine Learning Adaptive" (OSDI 2020), section 6.2, switch from
synchronous SGD to model averaging where a cluster grows large. What a step's exchange costs beside its computing
decides how many local steps pay for one exchange (Wang and Joshi, "Adaptive Communication Strategies to Achieve the
Best Error-Runtime Trade-off in Local-Update SGD", MLSys 2019).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from elastune.adapt.policies.base import Hook, Policy
from elastune.core.options import Range, check
from elastune.core.sync_plan import Moments, Send, SyncPlan

if TYPE_CHECKING:
    from elastune.adapt.policies.base import Run

Apart = Literal["local", "diloco", "averaging", "gossip", "pair_averaging"]
USUAL_LEARNERS = 8


@dataclass(frozen=True)
class SyncBySize(Policy):
    """``sync_by_size``: all-reduce up to ``above`` workers; with more, ``strategy`` with ``learners`` and ``every``.

    It goes back to all-reduce as soon as there are no more than ``above`` workers. Switching changes the result, and
    so, under this policy, does the number of workers. Each change is journaled with its cause.

    Args:
        above: The most workers under all-reduce.
        strategy: The strategy with more workers.
        learners: Number of learners; None: as ``fitting_learners`` chooses.
        every: Global batches of a round.
        moments: What becomes of the optimizer's state where a round ends (docs/sync.md).
        send: What numbers are rounded to there; for "local" and "diloco".
        mix, pull, outer_lr, outer_momentum: Settings of a strategy that has them; None: its default.
    """

    hooks: ClassVar[tuple[Hook, ...]] = ("before_step",)
    monitors: ClassVar[tuple[str, ...]] = ()

    above: Annotated[int, Range(1)] = 4
    strategy: Apart = "averaging"
    learners: Annotated[int | None, Range(1)] = None
    every: Annotated[int, Range(1)] = 16
    moments: Moments = "mean"
    send: Send = "whole"
    mix: Annotated[int | None, Range(1)] = None
    pull: Annotated[float | None, Range(0, 1)] = None
    outer_lr: Annotated[float | None, Range(0)] = None
    outer_momentum: Annotated[float | None, Range(0, 1, open_high=True)] = None

    def __post_init__(self) -> None:
        check("sync_by_size", self)
        self._apart(None, 1)  # whether the strategy has these settings

    def decide(self, hook: Hook, state: dict[str, Any], run: Run) -> dict[str, Any]:
        """Choose by the present number of workers."""
        apart = self._apart(run.limits.num_slots, run.limits.high)
        run.set_sync(str(apart if run.size() > self.above else SyncPlan()))
        return state

    def strategies(self, num_slots: int, most_workers: int) -> Sequence[str]:
        """Return the one strategy of a run with more than ``above`` workers."""
        return (str(self._apart(num_slots, most_workers)),) if most_workers > self.above else ()

    def _apart(self, num_slots: int | None, most_workers: int) -> SyncPlan:
        learners = self.learners or fitting_learners(num_slots, most_workers)
        return _plan(self, learners, self.every, ("mix", "pull", "outer_lr", "outer_momentum"))


MEET_ONCE = ("local", "diloco")
"""Strategies that exchange at the end of a round alone. The others do so within it, too, whatever its length."""
SETTLED_ROUNDS = 3
"""Rounds after which the medians of times are those of these rounds."""
SURELY_STEPS = 3
"""Steps in a row in which all-reduce must look too expensive, because a changing median still has older times in it."""
MOST_OVER = 4.0
"""The most that a round exchanges, over an all-reduce step: each parameter and three numbers of its state."""
LEAST_OVER: dict[Send, float] = {"whole": 1.0, "bf16": 0.5, "int8": 0.25, "int4": 0.125}
"""The least: the parameters alone."""
SURELY = 0.8
"""The part of the allowed time that an all-reduce step's exchange may take before the policy goes back to it. At the
limit itself, noise would switch the strategy again and again."""


@dataclass(frozen=True)
class _InUse:
    """The strategy in use, and the step at which it began.

    Attributes:
        dear: The number of steps in a row in which all-reduce was too expensive.
        step_exchange_s: The seconds of an all-reduce step's exchange, when the policy left all-reduce.
        over: How many times as long a round takes to exchange, measured in the first rounds after that; 0: not known
            yet.
    """

    sync: str = "allreduce"
    since: int = 0
    dear: int = 0
    step_exchange_s: float = 0.0
    over: float = 0.0

    def compared(self, round_exchange_s: float, least: float) -> _InUse:
        """Return how many times as long as a step's exchange a round's takes; ``least`` while that is not known."""
        if self.over or not (self.step_exchange_s > 0 and round_exchange_s > 0):
            return self
        return replace(self, over=min(max(round_exchange_s / self.step_exchange_s, least), MOST_OVER))


@dataclass(frozen=True)
class SyncByLink(Policy):
    """``sync_by_link``: learners take local steps where exchanges take more than ``share`` of all-reduce steps.

    The number of local steps is as small (a power of two, at most ``most``) as brings that share down to ``share``.
    With learners apart the exchanges of rounds measure the network. Rounds of ``local`` and ``diloco`` grow where their
    exchange takes more than ``share``, because the optimizer's state goes with the parameters. They shrink where a
    quarter of their length is enough. A round's exchange takes a fixed multiple of an all-reduce step's, which the
    first rounds measure. Once such a step would clearly be cheap enough, the policy goes back to all-reduce.

    Where the noise scale is known to be below ``noise`` times a learner's batch, learners would pull apart: the policy
    then stays with (or goes back to) all-reduce. With learners apart no noise scale is measured. So the policy looks
    again after ``again`` steps: it then trains synchronously until it knows.

    Args:
        share: The part of a step's time that exchanges may take.
        strategy: The strategy with local steps.
        learners: Number of learners; None: as ``fitting_learners`` chooses.
        most: The most local steps.
        noise: The least noise scale, in batches of a learner.
        looks: Steps under all-reduce to measure before it chooses. All-reduce must be too expensive in the last three.
        again: Steps until it looks again.
        moments: What becomes of the optimizer's state where a round ends (docs/sync.md).
        send: What numbers are rounded to there; for "local" and "diloco".
        pull, outer_lr, outer_momentum: Settings of a strategy that has them; None: its default. What mixes within a
            round does so after every step, since a round may have two.
    """

    hooks: ClassVar[tuple[Hook, ...]] = ("before_step",)
    monitors: ClassVar[tuple[str, ...]] = ("performance", "noise_scale")

    share: Annotated[float, Range(0, 1, open_low=True, open_high=True)] = 0.3
    strategy: Apart = "local"
    learners: Annotated[int | None, Range(1)] = None
    most: Annotated[int, Range(1)] = 64
    noise: Annotated[float, Range(0)] = 1.0
    looks: Annotated[int, Range(1)] = 10
    again: Annotated[int, Range(1)] = 500
    moments: Moments = "mean"
    send: Send = "whole"
    pull: Annotated[float | None, Range(0, 1)] = None
    outer_lr: Annotated[float | None, Range(0)] = None
    outer_momentum: Annotated[float | None, Range(0, 1, open_high=True)] = None

    def __post_init__(self) -> None:
        check("sync_by_link", self)
        self._apart(USUAL_LEARNERS, 2)  # whether the strategy has these settings

    def init(self) -> _InUse:
        """Return what a run begins with, before anything is known of it."""
        return _InUse()

    def decide(self, hook: Hook, state: _InUse, run: Run) -> _InUse:
        """Choose by what exchanges take now."""
        if state.sync != run.sync():  # a change that was asked for in a round comes with its end
            state = replace(state, sync=run.sync(), since=run.step, dear=0)
        plan = SyncPlan.parse(state.sync)
        return self._in_rounds(state, run, plan) if plan.in_rounds else self._together(state, run)

    def _together(self, state: _InUse, run: Run) -> _InUse:
        """Under all-reduce: decide whether it is too expensive."""
        exchange_s, busy_s = _times(run)
        every = local_steps_for(exchange_s, busy_s, self.share, self.most)
        state = replace(state, dear=state.dear + 1 if every > 1 else 0)
        learners = self.learners or fitting_learners(run.limits.num_slots, run.limits.high)
        noisy = not run.signal("noise_scale") < self.noise * run.batch_size() / learners
        if state.dear < SURELY_STEPS or run.step - state.since < self.looks or not noisy:
            return state
        run.set_sync(str(self._apart(learners, every)))
        return replace(state, step_exchange_s=exchange_s, over=0.0)

    def _in_rounds(self, state: _InUse, run: Run, plan: SyncPlan) -> _InUse:
        """In rounds: decide whether all-reduce is good enough now, or rounds are too short or far too long."""
        steps = run.step - state.since
        if steps >= self.again:
            run.set_sync("allreduce")
            return state
        if steps < SETTLED_ROUNDS * plan.every:
            return state
        exchange_s, busy_s = _times(run)
        state = state.compared(exchange_s, LEAST_OVER[plan.send])
        wanted = local_steps_for(exchange_s, busy_s, self.share, self.most)
        if state.over and local_steps_for(exchange_s / state.over / SURELY, busy_s, self.share, self.most) == 1:
            run.set_sync("allreduce")
        elif plan.strategy in MEET_ONCE and (wanted > plan.every or 2 <= wanted <= plan.every // 4):
            run.set_sync(str(replace(plan, every=wanted)))
        return state

    def strategies(self, num_slots: int, most_workers: int) -> Sequence[str]:
        """Return the strategy with the shortest rounds that it may choose.

        Which one it does choose is known only when it has measured.
        """
        learners = self.learners or fitting_learners(num_slots, most_workers)
        return (str(self._apart(learners, 2)),) if self.most > 1 else ()

    def _apart(self, learners: int, every: int) -> SyncPlan:
        return _plan(self, learners, every, ("pull", "outer_lr", "outer_momentum"))


def _plan(policy: SyncBySize | SyncByLink, learners: int, every: int, settings: Sequence[str]) -> SyncPlan:
    """The plan that ``policy`` requests. Raises ``UserError`` for one of its ``settings`` that its strategy lacks."""
    values = {name: value for name in settings if (value := getattr(policy, name)) is not None}
    return SyncPlan(policy.strategy, learners, every, policy.moments, policy.send, **values)


def _times(run: Run) -> tuple[float, float]:
    """Seconds of the exchange of a step (or round), and of the computation of each of its batches; NaN: not measured
    yet.

    The number of these batches is measured with them, because the end of an epoch cuts rounds short.
    """
    batches = run.signal("throughput") * run.signal("step_s") / run.batch_size()
    busy_s = run.signal("compute_s") + run.signal("data_s")
    return run.signal("reduce_s"), busy_s / batches if batches > 0 else math.nan


def fitting_learners(num_slots: int | None, most_workers: int) -> int:
    """Return how many learners fit a run's slots and workers.

    That is 8, or else the fewest that divide the slots and are at least one a worker. Slots and the most workers belong
    to how the run was begun, so the number is the same throughout.
    """
    if num_slots is None:
        return max(USUAL_LEARNERS, most_workers)
    if num_slots % USUAL_LEARNERS == 0 and most_workers <= USUAL_LEARNERS:
        return USUAL_LEARNERS
    return next((n for n in range(most_workers, num_slots) if num_slots % n == 0), num_slots)


def local_steps_for(exchange_s: float, busy_s: float, share: float, most: int) -> int:
    """Return the fewest local steps of which one exchange takes at most ``share`` of the time; 0: not known.

    The result is a power of two, at most ``most``; where more would be needed, the largest of these. e / (e + k b) <=
    share holds from k = e (1 - share) / (share b) on.
    """
    if not (exchange_s > 0 and busy_s > 0):  # NaN before the first measurement
        return 0
    least = exchange_s * (1 - share) / (share * busy_s)
    return 1 << min(most.bit_length() - 1, math.ceil(math.log2(least))) if least > 1 else 1
