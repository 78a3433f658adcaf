"""What the prices of hosts are to a study: its meter goes on where the controller before it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from elastune.core.clock import Clock
from elastune.core.cost import ONE_PRICE, UNTOLD, Prices
from elastune.core.errors import UserError
from elastune.job.meter import MoneyMeter
from elastune.journal.entry import Entry
from elastune.journal.trials import fold
from elastune.study.request import SearchRequest

Request = TypeVar("Request", bound=SearchRequest)


def priced(request: Request, prices: Prices | None, clock: Clock) -> Request:
    """``request`` at ``prices``, where there are any, which know hosts that do not tell their kind.

    Raises ``UserError``.
    """
    if prices is None:
        return request
    if request.price_per_worker_hour != SearchRequest.price_per_worker_hour:
        raise UserError(ONE_PRICE, "both a price and a file of prices", "leave one of them out")
    first = prices.since(clock.wall()).at(UNTOLD, 0.0)
    if not first > 0:
        rule = "the first price of a study's workers must be above 0"
        raise UserError(rule, f"{first:g}", "leave --prices out where nothing is paid")
    return replace(request, prices=prices, price_per_worker_hour=first)


def meter_of(prices: Prices | None, before: Sequence[Entry], clock: Clock) -> MoneyMeter | None:
    """What counts the costs of trials; None without prices.

    Args:
        prices: Seconds in them count from the study's first beginning, dates are dates.
        before: The journal so far. What a trial was paid for after its last record in there is not known.
        clock: That of the pool.
    """
    if prices is None:
        return None
    begun_s = before[0].at if before else clock.wall()
    meter = MoneyMeter(prices, clock.wall() - clock.now() - (0.0 if prices.absolute else begun_s))
    meter.costs.update({life.number: life.cost for life in fold(before).trials.values() if life.cost is not None})
    return meter
