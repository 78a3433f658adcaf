"""A run on spot and on-demand hosts: files of prices and availability, and when the policy ``spot`` is asked.

The controller decides how many workers run on each kind of host, because it alone knows the hosts. ``SpotWatch``
measures the speed and the cost of a running job and asks the policy again and again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elastune.adapt.policies.library.spot import JobProgress, SpotChoice, SpotRules, choose
from elastune.core.clock import Clock, SystemClock
from elastune.core.cost import KINDS, ON_DEMAND, ONE_PRICE, SPOT, Paid, Prices, check_price
from elastune.core.errors import UserError
from elastune.core.plan.prices import Availability, parse_availability, parse_prices

LARGEST_BYTES = 1 << 26


def read_prices(path: Path) -> Prices:
    """The prices in a file. Raises ``UserError``."""
    return parse_prices(_text(path), str(path))


def read_host_prices(path: Path, kind: str, *, any_kind: bool) -> Prices:
    """The prices in a file, for hosts of which those that do not tell their kind are of this ``kind``.

    ``any_kind``: hosts may tell any kind, so each needs a price. Raises ``UserError``.
    """
    prices = read_prices(path).assuming(kind)
    for each in KINDS if any_kind else ():
        prices.at(each, 0.0)
    return prices


def prices_of(price: float | None, file: Path | None, kind: str, *, any_kind: bool) -> Prices | None:
    """What a worker-hour costs: one ``price``, or the prices in a ``file`` (``kind``, ``any_kind``: see
    ``read_host_prices``); None where neither is given. Raises ``UserError``."""
    if price is None:
        return None if file is None else read_host_prices(file, kind, any_kind=any_kind)
    if file is not None:
        raise UserError(ONE_PRICE, "both a price and a file of prices", "leave one of them out")
    return Prices.constant(check_price(price))


def read_availability(path: Path) -> Availability:
    """The offer in a file. Raises ``UserError``."""
    return parse_availability(_text(path), str(path))


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_BYTES + 1)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("a trace must be a readable text file", f"{path}: {error}", "see docs/spot.md") from None
    if len(data) > LARGEST_BYTES:
        raise UserError("a trace is at most 64 MiB long", path, "thin it out")
    return text


@dataclass(frozen=True)
class SpotState:
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
        self._before: tuple[float, SpotState] | None = None
        self._start_s = self._member_s = 0.0
        self._first_step = 0

    def look(self, seen: SpotState) -> SpotChoice | None:
        """How many workers of each kind to have; None before enough is known. Raises ``UserError`` for a kind of host
        without a price."""
        now = self._clock.now()
        if self._before is None:
            self._start_s, self._first_step = now, seen.step
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
        standing = JobProgress(
            now_s=now - self._start_s,
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
        return now - self._clock.now() + self._clock.wall() if self._prices.absolute else now - self._start_s
