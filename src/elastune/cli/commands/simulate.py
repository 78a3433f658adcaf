"""``elastune simulate``: a study on workers that nobody has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastune.cli import options, parse
from elastune.cli.commands.search import tell_study
from elastune.cli.flatten import flatten
from elastune.cli.groups import Folders, Search, Training
from elastune.core.errors import UserError
from elastune.core.mesh import MOST_WORKERS
from elastune.core.run import DEFAULT_SLOTS, Means, Program

if TYPE_CHECKING:
    from elastune.simulate.run import Simulation, Sourced

Start = Annotated[
    float, typer.Option(min=0.0, max=parse.LONGEST_S, help="Seconds from a worker's start to its first step.")
]
Pause = Annotated[
    float,
    typer.Option(min=0.0, max=parse.LONGEST_S, help="Seconds that a trial stands still when its workers change."),
]


@flatten
def simulate(
    file: options.File,
    search: Search,
    training: Training,
    folders: Folders,
    workers: Annotated[int, typer.Option(help="Simulated workers, for all trials together.")] = 64,
    recorded: Annotated[
        Path | None, typer.Option(help="Folder of a study whose trials to replay, instead of FILE's surrogate.")
    ] = None,
    scaling: Annotated[
        str, typer.Option(help="Times of recorded trials on other workers: linear, amdahl:0.05 or fitted.")
    ] = "linear",
    start: Start = 0.0,
    pause: Pause = 0.0,
    lose_every: Annotated[
        str | None, typer.Option(metavar="TIME", help="Mean time to the loss of each worker. [default: none is lost]")
    ] = None,
) -> int:
    """Run the study that tune would run, on simulated workers: thousands of them, in seconds.

    FILE defines space(trial) and surrogate(config, workers), which returns (seconds, metrics) of each epoch; with
    --recorded, the trials of an earlier study answer instead, the nearest one each time.

    --json: the object of tune, and simulated: {workers, seconds, real_seconds, used (part of the workers' time that
    trials had), source}.
    """
    from elastune.cli.progress import Progress, StudyTracker, told_before
    from elastune.simulate.run import simulate as run_simulation
    from elastune.simulate.world import Losses

    if not 1 <= workers <= MOST_WORKERS:
        raise UserError(f"--workers must be from 1 to {MOST_WORKERS}", workers, "such as 2048")
    out = folders.choose(file, "simulate")
    request = search.request(file, out, workers, _means(search.bounds), training, resume=folders.resume)
    model = _model(request.program, recorded, scaling, start, pause)
    losses = None if lose_every is None else Losses(parse.duration(lose_every, "--lose-every"), training.seed)
    with Progress(StudyTracker(request.trials, None, told_before(out, request.resume))) as progress:
        found = run_simulation(request, model, losses=losses, observe=progress.observe)
    return tell_study(out, folders.json, simulated=_data(found) if folders.json else _line(found))


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
