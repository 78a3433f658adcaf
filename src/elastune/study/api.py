"""From a user's functions to a run or a study: what ``import elastune`` offers beside the command line."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from elastune.cluster.base import Cluster
from elastune.cluster.static import from_environment
from elastune.core.divergence import FACTOR, Divergence, check_factor
from elastune.core.errors import UserError
from elastune.core.run import Adapt, Config, Means, Program, RunSpec
from elastune.job.output_dir import next_folder
from elastune.job.run import on_device, print_failure, run_here, run_job
from elastune.job.validate_adapt import check_adapt
from elastune.journal.records import RunFinished
from elastune.search.space.space import Space
from elastune.study.request import StudyRequest
from elastune.study.results.study import Study
from elastune.study.run import tune as run_study
from elastune.train.program.load import load_as_guest

Train = Callable[[Any], None]


def program_of(train: Train) -> Program:
    """Where workers find ``train``: its file and name. Raises ``UserError`` for a function that no file defines."""
    file = inspect.getsourcefile(train) if inspect.isfunction(train) else None
    name = getattr(train, "__qualname__", str(train))
    if file is None or not Path(file).is_file() or "." in name or name == "<lambda>":
        fix = "write it as a plain 'def' at the top level of a .py file"
        raise UserError("workers must be able to import the training function", name, fix)
    return Program(Path(file), name)


def run(
    train: Train,
    config: Config | None = None,
    *,
    workers: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    means: Means | None = None,
    epochs: int | None = None,
    policies: Sequence[str] = (),
    monitors: Sequence[str] = (),
    divergence: float | None = FACTOR,
    resume: bool = False,
    cluster: Cluster | None = None,
) -> RunFinished:
    """Run ``train(session)`` on ``workers`` local processes (or ``means.workers``) and return what it reached.

    ``policies`` and ``monitors`` are written as on the command line: ``policies=["gns:max_batch=2048"]``; classes of
    policies that the function's file defines go by their names. ``divergence``: the run fails once its training loss is
    so many times that of its start, see ``core.divergence``; None: once it is not finite.

    Under torchrun or srun this process is one of the workers they started, and ends here when its work is done. Call
    it below ``if __name__ == "__main__":``, since workers import the file. Raises ``UserError`` and ``JobFailed``.
    """
    program = program_of(train)
    place = from_environment(os.environ)
    base = means or Means()
    count = place.world if place is not None else base.workers if workers is None else workers
    spec = RunSpec(
        program=program,
        out=Path(out) if out is not None else next_folder(program.path, "run"),
        config=dict(config or {}),
        seed=seed,
        means=replace(base, workers=count, num_slots=max(base.num_slots, count)),
        epochs=epochs,
        resume=resume,
        adapt=Adapt(tuple(policies), tuple(monitors)),
        divergence=Divergence(check_factor(divergence)),
    )
    check_adapt(spec.adapt, load_as_guest(program), spec.means)
    if place is not None:
        if out is None:
            raise UserError("workers of a launcher need one folder", "no out", "give out=..., the same for all")
        code = run_here(spec, on_device(place, spec.means.device, os.environ), print_failure)
        sys.stdout.flush()
        os._exit(code)  # see comm.group.join
    return run_job(spec, cluster=cluster)


def tune(
    train: Train,
    space: Space,
    *,
    objectives: Mapping[str, str],
    workers: int = 1,
    trial_workers: tuple[int, int] | None = None,
    trials: int | None = None,
    budget_s: float | None = None,
    worker_hours: float | None = None,
    until: str | Sequence[str] = (),
    patience: int | None = None,
    target: str | None = None,
    stopping: str = "none",
    warm_start: Sequence[str | Path] = (),
    constraints: Sequence[str] = (),
    sampler: str = "auto",
    config: Config | None = None,
    seed: int = 0,
    divergence: float | None = FACTOR,
    out: str | Path | None = None,
    price_per_worker_hour: float = 1.0,
    resume: bool = False,
    cluster: Cluster | None = None,
) -> Study:
    """Search ``space`` for the best trade-offs among ``objectives``, on ``workers`` for all trials together.

    ``space(trial)`` is Optuna's define-by-run: it returns a dict of settings; the names workers, mode, mechanism,
    mesh, copies, virtual_tensor, schedule, zero_stage, offload, micro_batch and policy set system parameters, and a
    trial that cannot have them together is infeasible, with the reason, and not run. At least one of ``trials``,
    ``budget_s``, ``worker_hours`` and ``patience`` (trials, or generations of a genetic search, without a better one)
    bounds the search; it ends, too, once a trial has reached ``until``, such as "accuracy >= 0.98". With a ``target``,
    written alike, ``seconds_to_target`` may be an objective. ``stopping="asha"`` pauses trials that do not promise to
    be on the front; ``trial_workers=(1, 4)`` moves workers among the running trials, each within these bounds.
    ``warm_start``: folders of earlier studies; their best settings are tried first, and what they measured in the same
    context counts for the search. A trial whose loss is ``divergence`` times that of its start ends, infeasible; None:
    one whose loss is not finite.

        study = elastune.tune(train, space, objectives={"accuracy": "max", "seconds": "min"}, workers=8, trials=50)
        study.front()
        study.pick(accuracy=0.98).command
    """
    program = program_of(train)
    request = StudyRequest(
        program=program,
        out=Path(out) if out is not None else next_folder(program.path, "tune"),
        objectives=dict(objectives),
        constraints=tuple(constraints),
        sampler=sampler,
        trials=trials,
        budget_s=budget_s,
        worker_hours=worker_hours,
        until=(until,) if isinstance(until, str) else tuple(until),
        patience=patience,
        target=target,
        stopping=stopping,
        warm_start=tuple(Path(folder) for folder in warm_start),
        workers=workers,
        trial_workers=trial_workers,
        config=dict(config or {}),
        seed=seed,
        divergence=divergence,
        price_per_worker_hour=price_per_worker_hour,
        resume=resume,
    )
    return run_study(request, space=space, cluster=cluster)
