"""A run on spot and on-demand hosts: files of prices and availability, and the decisions of the policy ``spot``.

The controller decides how many workers run on each kind of host, because only the controller knows the hosts.
``SpotWatch`` measures the speed and the cost of a running job, and asks the policy repeatedly.
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
    """Read the prices in a file. Raises ``UserError``."""
    return parse_prices(_text(path), str(path))


def read_host_prices(path: Path, kind: str, *, any_kind: bool) -> Prices:
    """Read the prices of hosts in a file.

    Args:
        path: The file.
        kind: The kind of hosts that do not report their kind.
        any_kind: Whether hosts may report any kind, so that each kind needs a price.

    Raises:
        UserError: For a wrong file, or a kind without a price.
    """
    prices = read_prices(path).assuming(kind)
    for each in KINDS if any_kind else ():
        prices.at(each, 0.0)
    return prices


def prices_of(price: float | None, file: Path | None, kind: str, *, any_kind: bool) -> Prices | None:
    """Return the prices of a worker-hour; None without ``price`` and ``file``.

    Args:
        price: One price for all hosts.
        file: A file of prices.
        kind: As of ``read_host_prices``.
        any_kind: As of ``read_host_prices``.

    Raises:
        UserError: For both a price and a file, and as ``read_host_prices`` does.
    """
    if price is None:
        return None if file is None else read_host_prices(file, kind, any_kind=any_kind)
    if file is not None:
        raise UserError(ONE_PRICE, "both a price and a file of prices", "leave one of them out")
    return Prices.constant(check_price(price))


def read_availability(path: Path) -> Availability:
    """Read the availability of spot hosts in a file. Raises ``UserError``."""
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
    """The state of a run, for ``SpotWatch``.

    Attributes:
        rooms: The number of workers that the cluster has room for, by kind of host; all room is paid for.
        on_demand: The number of the run's workers on on-demand hosts.
        members: The number of workers that train.
        step: The number of completed steps.
        planned: The number of planned steps; None: unknown.
    """

    rooms: Mapping[str, int]
    on_demand: int
    members: int
    step: int
    planned: int | None


class SpotWatch:
    """Asks the policy ``spot`` repeatedly, for one run.

    It measures the time that one worker needs for a step, and takes the speeds of workers as additive.

    Args:
        rules: The rules of the policy.
        prices: The prices of hosts.
        clock: The clock.
    """

    def __init__(self, rules: SpotRules, prices: Prices, clock: Clock | None = None) -> None:
        self.rules = rules
        self.spent = 0.0
        self._prices = prices
        self._clock = clock or SystemClock()
        self._before: tuple[float, SpotState] | None = None
        self._start_s = self._member_s = 0.0
        self._first_step = 0

    def look(self, state: SpotState) -> SpotChoice | None:
        """Return how many workers of each kind the run should have; None before that is known.

        Raises:
            UserError: For a kind of host without a price.
        """
        now = self._clock.now()
        if self._before is None:
            self._start_s, self._first_step = now, state.step
        else:
            at, before = self._before
            self._member_s += before.members * (now - at)
            paid = [Paid(kind, n, self._time(at), self._time(now)) for kind, n in before.rooms.items()]
            self.spent += sum(map(self._prices.cost, paid))
        self._before = now, state
        made = state.step - self._first_step
        if made <= 0 or not self._member_s or state.planned is None:
            return None
        step_s = self._member_s / made
        progress = JobProgress(
            now_s=now - self._start_s,
            work_s=(state.planned - self._first_step) * step_s,
            done_s=made * step_s,
            offered=state.rooms.get(SPOT, 0),
            on_demand=state.on_demand,
            spot_price=self._prices.at(SPOT, self._time(now)),
            on_demand_price=self._prices.at(ON_DEMAND, self._time(now)),
            spent=self.spent,
        )
        return choose(progress, self.rules)

    def _time(self, now: float) -> float:
        """``now`` as the time of the prices."""
        return now - self._clock.now() + self._clock.wall() if self._prices.absolute else now - self._start_s
