"""The functions ``elastune.run`` and ``elastune.tune``: what the command line offers, for Python programs."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from elastune.core.errors import UserError
from elastune.core.fields import keywords_of
from elastune.core.journal.files import atomic_write, read
from elastune.core.journal.folds import RunMoney, money
from elastune.core.journal.records import RunFailed, RunFinished
from elastune.core.mesh_choice import settled
from elastune.core.run import Elastic, ExecutionSettings, Place, Program, RunSpec
from elastune.runtime.clusters.kind import CapacityRequest, opened
from elastune.runtime.clusters.registry import print_line
from elastune.runtime.job.output import JOURNAL, check_out, is_url, mirrored, next_folder
from elastune.runtime.job.preflight import examined_meanwhile, with_proof
from elastune.runtime.job.resumption import (
    accepted_changes,
    check_resumed,
    execution_at_start,
    may_adopt,
    with_recorded,
)
from elastune.runtime.job.run import JobFailed, Observe, check_free, on_device, print_failure, run_here, run_job
from elastune.runtime.job.validation import check_adapt, spot_watch
from elastune.runtime.logger import check_loggers, logging_to
from elastune.runtime.placement import from_environment
from elastune.runtime.settings import RunSettings, read_prices
from elastune.train.program.cells import is_of_cell, module_of_cells
from elastune.train.program.load import end_import, load_as_guest
from elastune.train.program.space import Space
from elastune.tuning.study.request import StudyRequest, study_request
from elastune.tuning.study.results import Study, html_of
from elastune.tuning.study.resume import journaled_slots
from elastune.tuning.study.run import tune as run_study
from elastune.tuning.study.settings import StudySettings

Train = Callable[[Any], None]


@dataclass(frozen=True, kw_only=True)
class RunResult(RunFinished):
    """The last record of a run, and what the run has cost.

    Attributes:
        money: The cost, in units of the prices; None without prices.
        out: The folder of the run.
    """

    money: RunMoney | None = None
    out: Path = Path()

    @classmethod
    def of(cls, finished: RunFinished, money: RunMoney | None, out: Path) -> RunResult:
        """Join the last record ``finished``, the cost ``money`` and the folder."""
        return cls(**{field.name: getattr(finished, field.name) for field in fields(finished)}, money=money, out=out)

    def _repr_html_(self) -> str | None:
        return html_of("of_run", self.out)


def program_of(train: object, *, cells: bool = False) -> Program:
    """Return the file and the name by which workers import ``train``.

    Its arguments are those of this process if the file is its script. The function does not return to a file that is
    imported for a training: see ``end_import``.

    Args:
        train: The training function.
        cells: It may be of a notebook: ``results_folder`` then makes its file.

    Raises:
        UserError: For a function that no file defines at its top level.
    """
    end_import()
    file = inspect.getsourcefile(train) if inspect.isfunction(train) else None
    name = getattr(train, "__qualname__", str(train))
    rule = "workers must be able to import the training function"
    if isinstance(train, (str, Path)):
        fix = f"'from {Path(train).stem} import train', and give that; the command line takes files"
        raise UserError(rule, f"the file {train}", fix)
    if "." in name or name == "<lambda>" or not inspect.isfunction(train):
        raise UserError(rule, name, "write it as a plain 'def' at the top level of a .py file")
    if cells and is_of_cell(train):
        return Program(Path(f"{name}.py"), name)
    if file is None or not Path(file).is_file():
        fix = f"write it to a file, such as train.py, and 'from train import {name}'"
        raise UserError(rule, f"{name}, which was typed at a prompt or in a notebook", fix)
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    is_script = main is not None and Path(main).resolve() == Path(file).resolve()
    return Program(Path(file), name, arguments=tuple(sys.argv[1:]) if is_script else ())


@keywords_of(RunSettings)
def run(train: Train, settings: RunSettings) -> RunResult:
    """Train once: run ``train(session)`` on several worker processes, and return the result.

    Call this function below ``if __name__ == "__main__":``, because every worker imports the file. Under torchrun or
    srun this process is one of the workers that they started, and trains inside this call. It returns on every rank,
    and releases the process groups. ``out`` must be one folder for all workers.

    Args:
        train: A plain function at the top level of a file.
        settings: How to train, and where. Each field of ``RunSettings`` is a keyword; ``config`` may also stand second.
            Names that end in ``_s`` are seconds.

    Returns:
        The last record of the run: its metrics, training time in seconds, and more. With a price, ``money`` is the cost
        of the run; without one it is None. Under torchrun or srun only rank 0 has the cost.

    Raises:
        UserError: For a wrong request, and for an unknown keyword.
        JobFailed: For a run that ended without a result.

    Example:
        >>> elastune.run(train, {"lr": 0.1}, workers=4).metrics
    """
    program, prices = (
        program_of(train, cells=True),
        read_prices(settings, settings.price_per_worker_hour, kinds_known=settings.kinds_known),
    )
    place, cluster = from_environment(os.environ), settings.place(settings.grace_s, print_line)
    loggers = check_loggers(settings.log)
    if place is not None and (settings.out is None or is_url(str(settings.out))):
        fix = "give out=..., the same for all"
        raise UserError("workers of a launcher need one folder", settings.out or "no out", fix)
    with results_folder(settings.out, train, program, "run", resume=settings.resume) as (folder, program):
        spec = with_proof(_spec(settings, program, folder, place), unchecked=settings.unchecked)
        adopts = may_adopt(spec)
        if not adopts:
            accepted_changes(spec)
        if longer := check_resumed(spec):
            print_line(f"the run is to be longer than it was begun for: {longer}")
        with nullcontext() if adopts or place is not None else examined_meanwhile(spec):
            loaded = load_as_guest(program, settings.seed)
            check_adapt(spec.adapt, loaded, spec)
            spot = spot_watch(spec, loaded)
        if place is not None:
            with logging_to(loggers if place.rank == 0 else (), folder, print_line):
                end = run_here(spec, on_device(place, spec.execution.device, os.environ), print_failure)
            if isinstance(end, RunFailed):
                raise JobFailed(end)
            priced = prices if place.rank == 0 else None
            return RunResult.of(end, None if priced is None else money(read(folder / JOURNAL), priced), folder)
        check_free(folder, settings.resume)
        fewest = spec.elastic.low if settings.changes else spec.execution.workers
        room = CapacityRequest(folder, fewest, spec.most_workers, grace_s=settings.grace_s, adopts=adopts, spot=spot)
        with (
            opened(cluster, room) as opened_cluster,
            logging_to(loggers, folder, print_line),
            below_cell("run", spec.epochs, spec.max_steps) as observe,
        ):
            finished = run_job(spec, cluster=opened_cluster, observe=observe)
        if finished.stopped == "requested":
            print_line(f'stopped on request; go on with resume=True, out="{folder}"')
        return RunResult.of(finished, None if prices is None else money(read(folder / JOURNAL), prices), folder)


def _spec(settings: RunSettings, program: Program, folder: Path, place: Place | None) -> RunSpec:
    """The run of ``settings``. What these leave open of the execution settings is decided as on the command line."""
    chosen = _chosen(settings.execution, ExecutionSettings())
    begin, elastic = settings.elastic(chosen["mesh"])
    workers = None if settings.workers is None else begin
    if place is not None:
        workers, elastic = place.world, Elastic(collective_timeout_s=settings.collective_timeout_s)
    execution = settled(chosen, workers, elastic.high, settings.learners)
    recorded = execution_at_start(folder) if settings.resume else None
    return settings.spec(program, folder, with_recorded(execution, recorded, chosen), elastic)


def _chosen(execution: ExecutionSettings | None, default: ExecutionSettings) -> dict[str, Any]:
    return (default if execution is None else execution).chosen


@keywords_of(StudySettings)
def tune(train: Train, space: Space, settings: StudySettings) -> Study:
    """Search ``space`` for the best trade-offs among several ``objectives``.

    ``space(trial)`` is a define-by-run function as in Optuna: it returns a dict of settings. Some names are reserved:

    - workers, mode, mechanism, mesh, copies, virtual_tensor, schedule, zero_stage, offload, compress, micro_batch and
      policy are execution settings;
    - sync (with learners, every, ...) and sync_schedule set the training strategy.

    A trial whose execution settings do not fit together is infeasible: it does not run, and the study records the
    reason. At least one of ``trials``, ``budget_s``, ``worker_hours`` and ``patience`` must bound the search, or the
    sampler "grid", which ends with its last configuration.

    Args:
        train: A plain function at the top level of a file, ``train(session)``.
        space: The search space.
        settings: What to search for, with which workers, and for how long. Each field of ``StudySettings`` is a
            keyword; names that end in ``_s`` are seconds. ``config`` replaces settings of the program's own config,
            and values of ``space`` replace both.

    Returns:
        The study: its trials, their front, and what to pick.

    Raises:
        UserError: For a wrong request, and for an unknown keyword.

    Example:
        >>> study = elastune.tune(train, space, objectives={"accuracy": "max", "seconds": "min"}, workers=8, trials=50)
        >>> study.front()
        >>> study.pick(accuracy=0.98).command
    """
    program = program_of(train, cells=True)
    cluster, loggers = settings.place(settings.grace_s, print_line), check_loggers(settings.log)
    with results_folder(settings.out, train, program, "tune", resume=settings.resume) as (folder, program):
        request = study_request(settings, program, folder, _trial_execution(settings, folder))
        with (
            logging_to(loggers, folder, print_line),
            below_cell("study", request.trials, request.budget_s) as observe,
        ):
            return run_study(request, space=space, cluster=cluster, observe=observe)


def _trial_execution(settings: StudySettings, folder: Path) -> ExecutionSettings:
    """The execution settings of a trial, with slots for the most workers that it may have, and for each learner."""
    chosen = _chosen(settings.execution, StudyRequest.execution)
    low, high = settings.trial_workers or (None, None)
    execution = settled(chosen, None if chosen["mesh"] is not None else low, high, settings.learners)
    slots = journaled_slots(folder) if settings.resume and "num_slots" not in chosen else None
    return replace(execution, num_slots=slots or execution.num_slots)


@contextmanager
def below_cell(kind: str, *bounds: float | None) -> Iterator[Observe | None]:
    """In a notebook, show progress below the cell, in place of what was shown before; elsewhere yield None.

    Args:
        kind: "run" or "study".
        bounds: What ends it: epochs and steps, or trials and seconds.
    """
    python = sys.modules.get("IPython")
    if python is None or getattr(python.get_ipython(), "kernel", None) is None:
        yield None
        return
    with import_module("elastune.cli.progress").below_cell(kind, *bounds) as observe:
        yield observe


@contextmanager
def results_folder(
    out: str | Path | None, train: Train, program: Program, command: str, *, resume: bool
) -> Iterator[tuple[Path, Program]]:
    """Yield the folder for results and the program. When the block ends, the results are in ``out``, also if that is a
    URL. The program of a function of a notebook is a module in that folder.

    Raises:
        UserError: For a folder that cannot be had, and for a notebook's function that workers could not import.
    """
    text = module_of_cells(train) if is_of_cell(train) else ""
    with _folder(out, program, command, resume=resume) as folder:
        if not text:
            yield folder, program
            return
        check_out(folder, resume)
        path = folder.absolute() / program.path
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(path, text.encode())
        try:
            yield folder, replace(program, path=path)
        except UserError:
            if not (folder / JOURNAL).exists():
                path.unlink(missing_ok=True)  # release_unused removes the folder
            raise


@contextmanager
def _folder(out: str | Path | None, program: Program, command: str, *, resume: bool) -> Iterator[Path]:
    if out is None:
        if resume:
            raise UserError("resume needs to know what to go on with", "no out", "give out=... of the earlier call")
        yield next_folder(program.path, command)
    else:
        with mirrored(str(out), resume, print_line) as folder:
            yield folder
