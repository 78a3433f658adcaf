"""A cap on what a run may cost: workers x training time x price, as ``core.cost`` counts it.

What it cannot do: know when training would end (so it shrinks at a share of the cap, whatever is left to do), count
what lies outside of training time (starting, replacements that warm up beside those they replace, storage), or follow
a price that changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from elastune.core.cost import Cost
from elastune.core.errors import UserError
from elastune.policies.base import Hook, Policy

if TYPE_CHECKING:
    from elastune.policies.run import Run

STEPS_TO_STOP = 2  # what is decided after a step counts after the next; decided then, only after the one that follows
ASK_AGAIN_STEPS = 100


@dataclass(frozen=True)
class Caps:
    """The most that may be spent, in units of the price and in worker-hours; infinite for no cap."""

    money: float
    worker_hours: float
    price_per_worker_hour: float
    shrink_at: float

    def used(self, worker_seconds: float) -> float:
        """The part of the nearest cap that ``worker_seconds`` use up."""
        money = Cost(worker_seconds, self.price_per_worker_hour).total
        return max(money / self.money, Cost(worker_seconds).total / self.worker_hours)


@dataclass(frozen=True)
class Meter:
    """Worker-seconds until training time ``at_s``, of which ``newest`` in the last step. ``asked``: the step at which
    fewer workers were asked for, -1 for never."""

    worker_seconds: float = 0.0
    newest: float = 0.0
    at_s: float = 0.0
    asked: int = -1

    def after(self, workers: int, seconds: float) -> Meter:
        """After a step of ``workers`` that ended at training time ``seconds``; a resumed run may count it from 0."""
        newest = workers * (seconds - self.at_s if seconds >= self.at_s else seconds)
        return replace(self, worker_seconds=self.worker_seconds + newest, newest=newest, at_s=seconds)


def judge(meter: Meter, caps: Caps) -> Literal["go", "shrink", "stop"]:
    """What the money left allows: stop rather than begin a step that would pass a cap."""
    if caps.used(meter.worker_seconds + STEPS_TO_STOP * meter.newest) > 1:
        return "stop"
    return "shrink" if caps.used(meter.worker_seconds) >= caps.shrink_at else "go"


@dataclass(frozen=True)
class CostCap(Policy):
    """End a run, with a checkpoint, before it costs more than ``cap`` or takes more than ``worker_hours``.

    ``cap`` is in the unit of ``price_per_worker_hour``; 0 means no cap, but one of both is needed. From ``shrink_at``
    of the nearer one on, training goes on with the fewest workers allowed, which is slower and, as far as scaling was
    imperfect, cheaper a sample; 1 never shrinks.
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
            return replace(meter, asked=run.step)
        return meter


def _may_ask(meter: Meter, step: int) -> bool:
    return meter.asked < 0 or step - meter.asked >= ASK_AGAIN_STEPS
