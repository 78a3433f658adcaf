"""What a training would cost on spot and on-demand workers, as the command line asks and tells it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastune.cli import options, parse
from elastune.core.errors import UserError
from elastune.core.run import Config

if TYPE_CHECKING:
    from elastune.cli.results import Result
    from elastune.policies.library.spot import SpotRules
    from elastune.simulate.forecast import CostForecast
    from elastune.simulate.market import Market, MarketJob, Overheads
    from elastune.simulate.run import Sourced

HOW = "see docs/spot.md"


@dataclass(frozen=True)
class MarketOptions:
    """A market, and what a training on it may take."""

    availability: Annotated[
        Path | None,
        typer.Option(
            help="CSV file of how many spot workers there are at what time (time,workers). One training is then "
            "simulated on them, in place of a study. Needs --prices and --deadline."
        ),
    ] = None
    prices: options.Prices = None
    deadline: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="With --availability: time in which the training must be done, such as 20h."),
    ] = None
    spend: Annotated[
        float | None,
        typer.Option(help="With --availability: most dollars that the training may cost. [default: no limit]"),
    ] = None
    patience_: Annotated[
        float,
        typer.Option(
            "--spot-patience",
            help="With --availability: how far the training may fall behind uniform progress before it takes on-demand "
            "workers, from 0 (not at all) to 1 (as far as --workers can make up).",
        ),
    ] = 0.5
    recovery: Annotated[
        str,
        typer.Option(
            metavar="JOIN:LOSS",
            help="With --availability, for the rows that restart from a checkpoint: how long a join and a loss of a "
            "worker stop all workers.",
        ),
    ] = "20s:74s"

    def read(self, workers: int) -> AskedMarket:
        """What is on offer, and the bounds of a training on at most so many ``workers``. Raises ``UserError``."""
        from elastune.cluster.trace_files import read_availability, read_prices
        from elastune.policies.library.spot import SpotRules
        from elastune.simulate.forecast import check_reach
        from elastune.simulate.market import Market

        if self.availability is None or self.prices is None or self.deadline is None:
            raise UserError("--availability, --prices and --deadline belong together", "not all are given", HOW)
        offer = read_availability(self.availability)
        prices = read_prices(self.prices).since(offer.begin_s if offer.absolute else None)
        market, deadline_s = Market(offer.from_zero(), prices), parse.duration(self.deadline, "--deadline")
        rules = SpotRules(deadline_s, workers, math.inf if self.spend is None else self.spend, self.patience_)
        check_reach(market, rules)
        return AskedMarket(market, rules, _recovery(self.recovery))


@dataclass(frozen=True)
class AskedMarket:
    """A market as it was asked for: read, and checked before anything else is looked at."""

    market: Market
    rules: SpotRules
    recovery: Overheads

    def forecast(self, job: MarketJob, overheads: Overheads, source: str) -> Result:
        """What the training would cost, and when it would be done."""
        from elastune.simulate.forecast import forecasts

        found = forecasts(job, self.market, self.rules, overheads, self.recovery)
        return _result(found, job, self.rules.deadline_s, self.rules.most, source)


def job_of(model: Sourced, config: Config, epochs: int | None, most: int) -> MarketJob:
    """The training of ``config`` as work, and how much faster so many workers do it."""
    from elastune.simulate.market import MarketJob

    planned = model.epochs(config, epochs)
    seconds = {n: sum(model.epoch_s(config, n, epoch) for epoch in range(1, planned + 1)) for n in range(1, most + 1)}
    if not all(0 < each < math.inf for each in seconds.values()):
        raise UserError("a training takes some time on any number of workers", f"{min(seconds.values()):g} s", HOW)
    speeds = [0.0, *(seconds[1] / each for each in seconds.values())]
    return MarketJob(seconds[1], lambda n: speeds[n])


def _recovery(text: str) -> Overheads:
    from elastune.simulate.market import Overheads

    join, colon, loss = text.partition(":")
    if not colon:
        raise UserError("--recovery must be JOIN:LOSS", text, "such as 20s:74s")
    return Overheads(join_s=parse.duration(join, "--recovery"), loss_s=parse.duration(loss, "--recovery"))


def _result(found: tuple[CostForecast, ...], job: MarketJob, deadline_s: float, workers: int, source: str) -> Result:
    from elastune.cli.results import Result
    from elastune.core.text import count, duration, number
    from elastune.report.tables.tables import Table

    best = found[-1].cost
    rows = [
        {
            "name": each.name,
            "cost": each.cost,
            "over_optimum": each.cost / best - 1 if each.cost is not None and best else None,
            "in_time": each.in_time(deadline_s),
            "goodput": each.replay.goodput if each.replay else None,
            **({} if each.replay is None else asdict(each.replay)),
        }
        for each in found
    ]
    cells = tuple(
        (
            each.name,
            "–" if each.cost is None else f"${each.cost:,.2f}",
            _done(each),
            "yes" if each.in_time(deadline_s) else "no",
            "–" if each.replay is None else f"{100 * each.replay.goodput:.1f} %",
            "–" if each.replay is None else duration(each.replay.on_demand_s),
        )
        for each in found
    )
    header = ("simulated", "cost", "done after", "in time", "goodput", "on-demand worker time")
    table = Table(
        f"{count(workers, 'worker')}, deadline {duration(deadline_s)}", header, cells, frozenset({1, 2, 4, 5})
    )
    line = f"{number(job.work_s / 3600)} worker-hours of work on one worker; {source}"
    data = {"kind": "forecast", "work_s": job.work_s, "deadline_s": deadline_s, "workers": workers, "source": source}
    return Result({**data, "ways": rows}, (table,), (line,))


def _done(each: CostForecast) -> str:
    from elastune.core.text import duration

    if each.replay is None:
        return "–"
    return duration(each.replay.done_s) if each.replay.done_s is not None else f"{100 * each.replay.done:.0f} % done"
