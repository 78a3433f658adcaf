"""``elastune simulate``: a study on workers that nobody has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastune.cli import parse
from elastune.cli.commands.search import tell_study
from elastune.cli.flatten import flatten
from elastune.cli.groups import Folders, Search, Training
from elastune.cli.market import AskedMarket, MarketOptions, job_of
from elastune.cli.output import OK, print_result
from elastune.cli.setup import use_data
from elastune.core.errors import UserError
from elastune.core.mesh import MOST_WORKERS
from elastune.core.run import DEFAULT_SLOTS, Means, Program

if TYPE_CHECKING:
    from elastune.cli.results import Result
    from elastune.simulate.market import Overheads
    from elastune.simulate.run import Simulation, Sourced

Start = Annotated[
    float, typer.Option(min=0.0, max=parse.LONGEST_S, help="Seconds from a worker's start to its first step.")
]
Pause = Annotated[
    float,
    typer.Option(min=0.0, max=parse.LONGEST_S, help="Seconds that a trial pauses when its workers change."),
]


@flatten
def simulate(
    file: Annotated[
        Path,
        typer.Argument(
            help="The program: a Python file with surrogate(config, workers). For a cost also the folder of a run."
        ),
    ],
    search: Search,
    training: Training,
    folders: Folders,
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
    ] = "linear",
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

    --json: the object of elastune tune, and simulated: {workers, seconds, real_seconds, used (part of the workers' time
    that trials had), source}.

    --json for the cost: {kind: "forecast", work_s, deadline_s, workers, source, ways: [{name, cost, over_optimum,
    in_time, goodput, done_s (null: not done), done, spot_s, on_demand_s, useful_s (all three worker-seconds), changes,
    losses}]}. The last way, the hindsight optimum, has a cost only.
    """
    from elastune.cli.progress import Progress, StudyTracker, told_before
    from elastune.simulate.market import Overheads
    from elastune.simulate.run import simulate as run_simulation
    from elastune.simulate.world import Losses

    if not 1 <= workers <= MOST_WORKERS:
        raise UserError(f"--workers must be from 1 to {MOST_WORKERS}", workers, "such as 2048")
    if market != MarketOptions():
        if search != Search():
            raise UserError("a market is for one training", "options of a search", "leave them out, or --availability")
        overheads = Overheads(start, pause, pause)
        found = _forecast(market.read(workers), file, training, folders, recorded, scaling, overheads)
        print_result(found, as_json=folders.json)
        return OK
    out = folders.choose(file, "simulate")
    program, means = folders.program(file), _means(search.bounds)
    request = search.request(program, out, workers, means, training, folders)
    model = _model(request.program, recorded, scaling, start, pause)
    losses = None if lose_every is None else Losses(parse.duration(lose_every, "--lose-every"), training.seed)
    with Progress(StudyTracker(request.trials, None, told_before(out, request.resume))) as progress:
        simulated = run_simulation(request, model, losses=losses, observe=progress.observe)
    return tell_study(out, folders.json, simulated=_data(simulated) if folders.json else _line(simulated))


def _forecast(
    market: AskedMarket,
    file: Path,
    training: Training,
    folders: Folders,
    recorded: Path | None,
    scaling: str,
    overheads: Overheads,
) -> Result:
    """Of the run in ``file``, where that is a folder; else of the training that a model tells of."""
    from elastune.search.space.overrides import override
    from elastune.simulate.recorded_run import job_of_run
    from elastune.train.program.load import load_as_guest

    most = market.rules.most
    if file.is_dir():
        if training != Training() or recorded is not None:
            fix = "leave them out, or name a program"
            raise UserError("a run is taken as it was", "settings of a program, or --recorded", fix)
        job, source = job_of_run(file, most, scaling)
        return market.forecast(job, overheads, source)
    use_data(folders.data)
    program = folders.program(file)
    model = _model(program, recorded, scaling, overheads.start_s, overheads.join_s)
    loaded = load_as_guest(program)
    config = override(loaded.config, training.config, loaded.space)
    job = job_of(model, config, training.epochs, most)
    return market.forecast(job, overheads, model.source)


def _means(bounds: tuple[int, int] | None) -> Means:
    low, high = bounds or (1, 1)
    return Means(workers=low, mode="fast", num_slots=max(DEFAULT_SLOTS, high))


def _model(program: Program, recorded: Path | None, scaling: str, start_s: float, pause_s: float) -> Sourced:
    """How trials go."""
    from elastune.simulate.recorded_model import RecordedModel
    from elastune.simulate.run import SurrogateModel
    from elastune.train.program.load import load_as_guest

    if recorded is not None:
        return RecordedModel(recorded, scaling, start_s=start_s, resize_pause_s=pause_s)
    surrogate = load_as_guest(program).surrogate
    if surrogate is None:
        fix = "define surrogate(config, workers), or replay a study with --recorded DIR"
        raise UserError("a simulation needs to know how trials go", f"{program.path} has no surrogate", fix)
    name = f"the surrogate of {program.path.name}"
    return SurrogateModel(surrogate, name, start_s=start_s, resize_pause_s=pause_s)


def _data(found: Simulation) -> dict[str, Any]:
    names = ("workers", "seconds", "real_seconds", "used", "source")
    return {name: getattr(found, name) for name in names}


def _line(found: Simulation) -> str:
    from elastune.core.text import duration, number

    of = f"{duration(found.seconds)} of {found.workers} workers in {duration(found.real_seconds)}"
    return f"{of}; trials had {number(100 * found.used, 3)} % of their time; {found.source}"
