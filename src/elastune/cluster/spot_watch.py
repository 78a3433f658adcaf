"""A run on spot and on-demand hosts while it goes on: what the policy ``spot`` is told of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastune.core.clock import Clock, SystemClock
from elastune.core.cost import ON_DEMAND, SPOT, Paid, Prices
from elastune.policies.library.spot import JobStanding, SpotChoice, SpotRules, choose


@dataclass(frozen=True)
class Seen:
    """A run now. ``rooms``: workers that there is room for by kind of host, paid for whether used or not;
    ``on_demand``: workers that it has on on-demand hosts; ``members``: those that train; ``step``: completed steps, of
    ``planned`` in all (None: nobody knows)."""

    rooms: Mapping[str, int]
    on_demand: int
    members: int
    step: int
    planned: int | None


class SpotWatch:
    """Asks the policy again and again, for one run.

    What a step takes of one worker is measured while it goes on, as if workers' speeds added up.
    """

    def __init__(self, rules: SpotRules, prices: Prices, clock: Clock | None = None) -> None:
        self.rules = rules
        self.spent = 0.0
        self._prices = prices
        self._clock = clock or SystemClock()
        self._before: tuple[float, Seen] | None = None
        self._begun_s = self._member_s = 0.0
        self._first_step = 0

    def look(self, seen: Seen) -> SpotChoice | None:
        """How many workers of each kind to have; None before enough is known. Raises ``UserError`` for a kind of host
        without a price."""
        now = self._clock.now()
        if self._before is None:
            self._begun_s, self._first_step = now, seen.step
        else:
            at, before = self._before
            self._member_s += before.members * (now - at)
            paid = [Paid(kind, n, self._time(at), self._time(now)) for kind, n in before.rooms.items()]
            self.spent += sum(map(self._prices.cost, paid))
        self._before = now, seen
        made = seen.step - self._first_step
        if made <= 0 or not self._member_s or seen.planned is None:
            return None
        step_s = self._member_s / made
        standing = JobStanding(
            now_s=now - self._begun_s,
            work_s=(seen.planned - self._first_step) * step_s,
            done_s=made * step_s,
            offered=seen.rooms.get(SPOT, 0),
            on_demand=seen.on_demand,
            spot_price=self._prices.at(SPOT, self._time(now)),
            on_demand_price=self._prices.at(ON_DEMAND, self._time(now)),
            spent=self.spent,
        )
        return choose(standing, self.rules)

    def _time(self, now: float) -> float:
        """As the prices count it."""
        return now - self._clock.now() + self._clock.wall() if self._prices.absolute else now - self._begun_s
