"""A cap on the cost of a run: workers x training time x price, as ``core.cost`` counts it.

Limits: it does not know when training will end, so it shrinks at a share of the cap, however much is left to do. It
does not count what is outside of training time: starting, replacements that warm up beside the workers that they
replace, storage. It does not follow a price that changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from elastune.adapt.policies.base import Hook, Policy
from elastune.core.cost import Cost
from elastune.core.errors import UserError

if TYPE_CHECKING:
    from elastune.adapt.policies.base import Run

STEPS_TO_STOP = 2  # a decision after a step takes effect after the next step
ASK_AGAIN_STEPS = 100


@dataclass(frozen=True)
class Caps:
    """The most that may be spent, in units of the price and in worker-hours; infinite for no cap."""

    money: float
    worker_hours: float
    price_per_worker_hour: float
    shrink_at: float

    def used(self, worker_seconds: float) -> float:
        """Return the part of the nearest cap that ``worker_seconds`` use up."""
        money = Cost(worker_seconds, self.price_per_worker_hour).total
        return max(money / self.money, Cost(worker_seconds).total / self.worker_hours)


@dataclass(frozen=True)
class Meter:
    """The costs so far.

    Attributes:
        worker_seconds: Worker-seconds until training time ``at_s``.
        newest: The worker-seconds of the newest step.
        at_s: Training time, in seconds.
        request_step: The step at which fewer workers were requested; -1 for never.
    """

    worker_seconds: float = 0.0
    newest: float = 0.0
    at_s: float = 0.0
    request_step: int = -1

    def after(self, workers: int, seconds: float) -> Meter:
        """Return the meter after a step of ``workers`` that ended at training time ``seconds``.

        A resumed run may count ``seconds`` from 0.
        """
        newest = workers * (seconds - self.at_s if seconds >= self.at_s else seconds)
        return replace(self, worker_seconds=self.worker_seconds + newest, newest=newest, at_s=seconds)


def judge(meter: Meter, caps: Caps) -> Literal["go", "shrink", "stop"]:
    """Return what the caps allow: to go on, to shrink, or to stop before a step that would pass a cap."""
    if caps.used(meter.worker_seconds + STEPS_TO_STOP * meter.newest) > 1:
        return "stop"
    return "shrink" if caps.used(meter.worker_seconds) >= caps.shrink_at else "go"


@dataclass(frozen=True)
class CostCap(Policy):
    """``cost``: end a run, with a checkpoint, before it costs more than ``cap`` or takes more than ``worker_hours``.

    Args:
        cap: The most it may cost, in the unit of ``price_per_worker_hour``; 0 for no cap. A cap or ``worker_hours`` is
            needed.
        price_per_worker_hour: What one worker-hour costs.
        worker_hours: The most worker-hours; 0 for no cap.
        shrink_at: From this part of the nearer cap on, training goes on with the fewest workers allowed. That is
            slower and, as far as scaling was imperfect, cheaper a sample. 1 never shrinks.
    """

    monitors: ClassVar[tuple[str, ...]] = ()
    hooks: ClassVar[tuple[Hook, ...]] = ("after_step",)

    cap: float = 0.0
    price_per_worker_hour: float = 0.0
    worker_hours: float = 0.0
    shrink_at: float = 0.8

    def __post_init__(self) -> None:
        cap, price, hours = self.cap, self.price_per_worker_hour, self.worker_hours
        for name, value in (("cap", cap), ("price", price), ("number of worker-hours", hours)):
            if not 0 <= value < math.inf:
                raise UserError(f"a {name} is a finite number that is not negative", value, "give 0 or more")
        if not cap and not hours:
            raise UserError("a cost cap needs something to cap", "none", "give cap with its price, or worker_hours")
        if bool(cap) != bool(price):
            fix = "give cap and price_per_worker_hour, both above 0"
            raise UserError("a cap on money needs a price", f"cap {cap}, price {price}", fix)
        if not 0 < self.shrink_at <= 1:
            raise UserError("shrink_at is a part of the cap", self.shrink_at, "give a number above 0, at most 1")

    @property
    def caps(self) -> Caps:
        """What may be spent."""
        price = self.price_per_worker_hour
        return Caps(self.cap or math.inf, self.worker_hours or math.inf, price, self.shrink_at)

    def init(self) -> Meter:
        return Meter()

    def decide(self, hook: Hook, state: Meter, run: Run) -> Meter:
        """Count the step; shrink or stop where it is time."""
        meter = state.after(run.size(), run.seconds)
        verdict = judge(meter, self.caps)
        if verdict == "stop":
            run.stop()
        elif verdict == "shrink" and run.size() > run.limits.low and _may_ask(meter, run.step):
            run.resize(run.limits.low)
            return replace(meter, request_step=run.step)
        return meter


def _may_ask(meter: Meter, step: int) -> bool:
    return meter.request_step < 0 or step - meter.request_step >= ASK_AGAIN_STEPS
