"""``elastune simulate``: a study on workers that nobody has, and what a training would cost on spot machines."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastune.cli.commands.search import print_study
from elastune.cli.groups import OutputOptions, flatten
from elastune.cli.output import OK, print_result, use_data
from elastune.core import notation
from elastune.core.errors import UserError
from elastune.core.mesh import MOST_WORKERS
from elastune.core.run import Config, ExecutionSettings, Program
from elastune.core.settings import OutSettings, PriceTableSettings, ResumeSettings, TrainingSettings
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.settings import StudySearchSettings

if TYPE_CHECKING:
    from elastune.adapt.policies.library.spot import SpotRules
    from elastune.cli.results import Result
    from elastune.tuning.simulate.market import CostForecast, Market, MarketJob, Overheads
    from elastune.tuning.simulate.run import DescribedTrialModel, Simulation


# --- the cost of a training on spot and on-demand workers ---

HOW = "see docs/spot.md"
LINEAR = "linear"  # scaling of recorded trials


@dataclass(frozen=True)
class MarketOptions(PriceTableSettings):
    """A market of spot and on-demand workers, and the deadline and bounds of a training on it."""

    availability: Annotated[
        Path | None,
        typer.Option(
            help="CSV file of how many spot workers there are at what time (time,workers). One training is then "
            "simulated on them, in place of a study. Needs --prices and --deadline."
        ),
    ] = None
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

    def read(self, workers: int) -> MarketRequest:
        """Read the market and the bounds of a training on at most ``workers`` workers. Raises ``UserError``."""
        from elastune.adapt.policies.library.spot import SpotRules
        from elastune.runtime.spot import read_availability, read_prices
        from elastune.tuning.simulate.market import Market, check_reach

        if self.availability is None or self.prices is None or self.deadline is None:
            raise UserError("--availability, --prices and --deadline belong together", "not all are given", HOW)
        offer = read_availability(self.availability)
        prices = read_prices(Path(self.prices)).since(offer.begin_s if offer.absolute else None)
        market, deadline_s = Market(offer.from_zero(), prices), notation.duration(self.deadline, "--deadline")
        rules = SpotRules(deadline_s, workers, math.inf if self.spend is None else self.spend, self.patience_)
        check_reach(market, rules)
        return MarketRequest(market, rules, _recovery(self.recovery))


@dataclass(frozen=True)
class MarketRequest:
    """A market after its options are read and checked, before the program is loaded."""

    market: Market
    rules: SpotRules
    recovery: Overheads

    def forecast(self, job: MarketJob, overheads: Overheads, source: str) -> Result:
        """Forecast the cost and the end of the training."""
        from elastune.tuning.simulate.market import forecasts

        costs = forecasts(job, self.market, self.rules, overheads, self.recovery)
        return _result(costs, job, self.rules.deadline_s, self.rules.most, source)


def job_of(model: DescribedTrialModel, config: Config, epochs: int | None, most: int) -> MarketJob:
    """The training of ``config`` as work, with its speed on each number of workers."""
    from elastune.tuning.simulate.market import MarketJob

    planned = model.epochs(config, epochs)
    seconds = {n: sum(model.epoch_s(config, n, epoch) for epoch in range(1, planned + 1)) for n in range(1, most + 1)}
    if not all(0 < duration_s < math.inf for duration_s in seconds.values()):
        raise UserError("a training takes some time on any number of workers", f"{min(seconds.values()):g} s", HOW)
    speeds = [0.0, *(seconds[1] / duration_s for duration_s in seconds.values())]
    return MarketJob(seconds[1], lambda n: speeds[n])


def _recovery(text: str) -> Overheads:
    from elastune.tuning.simulate.market import Overheads

    join, colon, loss = text.partition(":")
    if not colon:
        raise UserError("--recovery must be JOIN:LOSS", text, "such as 20s:74s")
    return Overheads(join_s=notation.duration(join, "--recovery"), loss_s=notation.duration(loss, "--recovery"))


def _result(costs: tuple[CostForecast, ...], job: MarketJob, deadline_s: float, workers: int, source: str) -> Result:
    from elastune.cli.results import Result
    from elastune.core.formatting import count, duration, number
    from elastune.report.tables import Table

    best = costs[-1].cost
    rows = [
        {
            "name": cost.name,
            "cost": cost.cost,
            "over_optimum": cost.cost / best - 1 if cost.cost is not None and best else None,
            "in_time": cost.in_time(deadline_s),
            "goodput": cost.replay.goodput if cost.replay else None,
            **({} if cost.replay is None else asdict(cost.replay)),
        }
        for cost in costs
    ]
    cells = tuple(
        (
            cost.name,
            "–" if cost.cost is None else f"${cost.cost:,.2f}",
            _done(cost),
            "yes" if cost.in_time(deadline_s) else "no",
            "–" if cost.replay is None else f"{100 * cost.replay.goodput:.1f} %",
            "–" if cost.replay is None else duration(cost.replay.on_demand_s),
        )
        for cost in costs
    )
    header = ("simulated", "cost", "done after", "in time", "goodput", "on-demand worker time")
    table = Table(
        f"{count(workers, 'worker')}, deadline {duration(deadline_s)}", header, cells, frozenset({1, 2, 4, 5})
    )
    line = f"{number(job.work_s / 3600)} worker-hours of work on one worker; {source}"
    data = {"kind": "forecast", "work_s": job.work_s, "deadline_s": deadline_s, "workers": workers, "source": source}
    return Result({**data, "ways": rows}, (table,), (line,))


def _done(cost: CostForecast) -> str:
    from elastune.core.formatting import duration

    if cost.replay is None:
        return "–"
    return duration(cost.replay.done_s) if cost.replay.done_s is not None else f"{100 * cost.replay.done:.0f} % done"


# --- elastune simulate ---

Start = Annotated[
    float, typer.Option(min=0.0, max=notation.LONGEST_S, help="Seconds from a worker's start to its first step.")
]
Pause = Annotated[
    float,
    typer.Option(min=0.0, max=notation.LONGEST_S, help="Seconds that a trial pauses when its workers change."),
]


@flatten
def simulate(
    file: Annotated[
        Path,
        typer.Argument(
            help="The program: a Python file with surrogate(config, workers). For a cost also the folder of a run."
        ),
    ],
    search: StudySearchSettings,
    training: TrainingSettings,
    going_on: ResumeSettings,
    results: OutSettings,
    output: OutputOptions,
    market: MarketOptions,
    workers: Annotated[int, typer.Option(help="Number of simulated workers, for all trials together.")] = 64,
    recorded: Annotated[
        Path | None, typer.Option(help="Output folder of a study whose trials answer in place of FILE's surrogate.")
    ] = None,
    scaling: Annotated[
        str,
        typer.Option(
            help="How recorded times change with the number of workers: linear, amdahl:0.05 (the part of the work "
            "that is not shared) or fitted (the model in a frontier's journal)."
        ),
    ] = LINEAR,
    start: Start = 0.0,
    pause: Pause = 0.0,
    lose_every: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Mean time after which each worker is lost, such as 10h. [default: none is lost]"
        ),
    ] = None,
) -> int:
    """Simulate a study, or the cost of one training.

    A study: elastune simulates the study that elastune tune would run, on thousands of workers, in seconds. FILE
    defines space(trial) and surrogate(config, workers), which returns (seconds, metrics) of each epoch. With
    --recorded, trials of an earlier study answer in place of surrogate: for each configuration the nearest one.

    The cost of one training: give --availability, --prices and --deadline. The table says what a training with FILE's
    config costs on spot and on-demand workers, and when it is done. Beside that stand on-demand workers alone, restarts
    from checkpoints, and the least that it could have cost. FILE may also be the output folder of a run that has ended:
    the measured time of its steps is used.
    """
    from elastune.cli.progress import Progress, StudyTracker, earlier_entries
    from elastune.tuning.simulate.cluster import WorkerFailures
    from elastune.tuning.simulate.market import Overheads
    from elastune.tuning.simulate.run import simulate as run_simulation

    if not 1 <= workers <= MOST_WORKERS:
        raise UserError(f"--workers must be from 1 to {MOST_WORKERS}", workers, "such as 2048")
    if market != MarketOptions():
        if search != StudySearchSettings():
            raise UserError("a market is for one training", "options of a search", "leave them out, or --availability")
        overheads = Overheads(start, pause, pause)
        costs = _forecast(market.read(workers), file, training, output, recorded, scaling, overheads)
        print_result(costs, as_json=output.json)
        return OK
    out = output.choose(results.out, file, "simulate", resume=going_on.resume)
    request = StudyRequest(
        output.program(file, (), out, resume=going_on.resume),
        out,
        workers=workers,
        execution=_execution_settings(search.trial_workers),
        **{name: value for group in (search, training, going_on) for name, value in vars(group).items()},
    )
    model = _model(request.program, recorded, scaling, start, pause)
    losses = (
        None if lose_every is None else WorkerFailures(notation.duration(lose_every, "--lose-every"), training.seed)
    )
    with Progress(StudyTracker(request.trials, None, earlier_entries(out, request.resume))) as progress:
        simulated = run_simulation(request, model, losses=losses, observe=progress.observe)
    return print_study(out, output.json, simulated=_data(simulated) if output.json else _line(simulated))


def _forecast(
    market: MarketRequest,
    file: Path,
    training: TrainingSettings,
    output: OutputOptions,
    recorded: Path | None,
    scaling: str,
    overheads: Overheads,
) -> Result:
    """Forecast the cost of the run in the folder ``file``, or of the training that a surrogate model describes."""
    from elastune.train.program.load import load_as_guest
    from elastune.train.program.overrides import override
    from elastune.tuning.simulate.market import job_of_run

    most = market.rules.most
    if file.is_dir():
        if training != TrainingSettings() or recorded is not None:
            fix = "leave them out, or name a program"
            raise UserError("a run is taken as it was", "settings of a program, or --recorded", fix)
        job, source = job_of_run(file, most, scaling)
        return market.forecast(job, overheads, source)
    use_data(output.data)
    program = Program(file)
    model = _model(program, recorded, scaling, overheads.start_s, overheads.join_s)
    loaded = load_as_guest(program)
    config = override(loaded.config, training.config, loaded.space)
    job = job_of(model, config, training.epochs, most)
    return market.forecast(job, overheads, model.source)


def _execution_settings(bounds: tuple[int, int] | None) -> ExecutionSettings:
    low, high = bounds or (1, 1)
    return ExecutionSettings(workers=low, mode="fast", num_slots=high)


def _model(
    program: Program, recorded: Path | None, scaling: str, start_s: float, pause_s: float
) -> DescribedTrialModel:
    """The model that the trials follow: a recorded study, or the surrogate of the program. Raises ``UserError``."""
    from elastune.train.program.load import load_as_guest
    from elastune.tuning.simulate.run import SurrogateModel
    from elastune.tuning.simulate.trial_model import RecordedModel

    if recorded is not None:
        return RecordedModel(recorded, scaling, start_s=start_s, resize_pause_s=pause_s)
    if scaling != LINEAR:
        raise UserError("--scaling is of recorded trials", scaling, "leave it out, or add --recorded DIR")
    surrogate = load_as_guest(program).surrogate
    if surrogate is None:
        fix = "define surrogate(config, workers), or replay a study with --recorded DIR"
        raise UserError("a simulation needs to know how trials go", f"{program.path} has no surrogate", fix)
    name = f"the surrogate of {program.path.name}"
    return SurrogateModel(surrogate, name, start_s=start_s, resize_pause_s=pause_s)


def _data(simulation: Simulation) -> dict[str, Any]:
    names = ("workers", "seconds", "real_seconds", "used", "source")
    return {name: getattr(simulation, name) for name in names}


def _line(simulation: Simulation) -> str:
    from elastune.core.formatting import duration, number

    of = f"{duration(simulation.seconds)} of {simulation.workers} workers in {duration(simulation.real_seconds)}"
    return f"{of}; trials had {number(100 * simulation.used, 3)} % of their time; {simulation.source}"
