"""What is a study's second-best trial worth? Best single, ensembles and soups of one search of fixed budget.

For each seed two searches of as many trials: one from initial values of each trial's own, one in which all trials begin
with the weights of one short training (only those have a common ancestor, and may be averaged). All rows of a search
are chosen by its selection set, and told by a test set that no choice has seen. Accuracy in % (Fashion-MNIST), or the
share of variance explained, in % (diabetes).

Decided before any figure was seen:

- The goals for ensembles speak of the search with own beginnings, that for soups of the one with one beginning; gains
  are over the best single trial of the same search and seed, "best" by the selection set, as a user would pick it.
- Fashion-MNIST: 4,000 images train, 2,000 select, all 10,000 of its test set judge: one seed's gain is then known to
  about 0.2 points. Each seed draws other images to train and to select.
- Diabetes has 442 rows: 222 train, 110 select, 110 judge. There one seed's gain is known to some points only, so "in
  every seed" is expected to fail by noise alone, and ten seeds are run, whose mean is what can be believed.
- Answer times are CPU time of one thread, and ratios are taken within a seed: other load on the machine shows least.

Where Fashion-MNIST is not on this machine the digits stand in for it; the rows are then called digits, and the file
says so. At the end the same members are trained as one study by one worker and by several, in turns.

    python -m benchmarks.user.ensembles            # 5 and 10 seeds of 16 trials; writes results/ensembles.json
    python -m benchmarks.user.ensembles --smoke    # 1 seed of 3 trials each, the fewest that are bagged; writes nothing
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benchmarks.common.result_file import write_result
from benchmarks.programs.ensembles_train import build, splits
from benchmarks.user.ensembles_summary import BEST, ONE, OWN, Row, goals, line, summary
from torch import nn

import elastune
from elastune.core.run import ExecutionSettings, Program, RunSpec, StartFrom
from elastune.recipes import datasets
from elastune.runtime.clusters.local import WARM, LocalCluster
from elastune.runtime.job.run import run_job
from elastune.tuning.reuse.composed_models import model_of
from elastune.tuning.reuse.ensemble import METHODS, Ensemble, parameters_of
from elastune.tuning.reuse.kept_models import Candidate, library
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune

HERE = Path(__file__).parents[1]
RESULT = HERE / "results" / "ensembles.json"
PROGRAM = HERE / "programs" / "ensembles_train.py"
MEANS = ExecutionSettings(mode="fast", num_slots=1)
WORKERS = 2
PRELOAD = (*WARM, "sklearn.datasets")  # imported once, and not by each trial
OBJECTIVES = {"diabetes": "r2"}


@dataclass(frozen=True)
class Size:
    """Of one task."""

    seeds: int
    trials: int
    epochs: int
    train: int
    selection: int

    def config(self, task: str, part: int) -> dict[str, Any]:
        """What all trials of a search have in common."""
        sizes = {"train": self.train, "selection": self.selection, "epochs": self.epochs}
        return {"task": task, "part": part, **sizes}


@dataclass(frozen=True)
class Turns:
    """The same ``members`` by other numbers of workers, ``rounds`` times; ``sample_s``: declared, 0: as it is."""

    workers: tuple[int, ...]
    members: int
    rounds: int
    epochs: int
    sample_s: float = 0.0


@dataclass(frozen=True)
class Sizes:
    """``timed_s``: for how long answers are timed at least."""

    images: Size
    diabetes: Size
    turns: tuple[Turns, ...]
    timed_s: float


FULL = Sizes(
    Size(5, 16, 4, 4000, 2000),
    Size(10, 16, 20, 222, 110),
    (Turns((1, 2), 8, 3, 2), Turns((1, 2, 4, 8), 8, 3, 4, sample_s=0.001)),
    timed_s=0.5,
)
SMOKE = Sizes(Size(1, 3, 1, 100, 50), Size(1, 3, 1, 222, 110), (Turns((2,), 2, 1, 1, sample_s=0.001),), timed_s=0.0)


def tested(model: nn.Module, data: Any) -> float:
    """Accuracy or explained variance on ``data``, in %."""
    x, y = data.tensors
    with torch.no_grad():
        said = torch.cat([model(part) for part in x.split(1000)])
    if y.is_floating_point():
        return 100 * float(1 - ((said - y) ** 2).sum() / ((y - y.mean(0)) ** 2).sum())
    return 100 * float((said.argmax(1) == y).double().mean())


def timed(model: nn.Module, data: Any, least_s: float) -> tuple[float, float]:
    """The same, and the CPU seconds of one thread for all of ``data``, over at least ``least_s``."""
    times, began = 0, time.process_time()
    while not times or time.process_time() - began < least_s:
        result = tested(model, data)
        times += 1
    return result, (time.process_time() - began) / times


def searched(
    size: Size, config: dict[str, Any], seed: int, cluster: LocalCluster, at: Path, begins: Path | None
) -> dict[str, Any]:
    """One search: its worker-seconds, and how much its trials overlapped."""
    study = tune(
        StudyRequest(
            Program(PROGRAM),
            at,
            sampler="tpe",
            trials=size.trials,
            workers=WORKERS,
            execution=MEANS,
            config=config,
            seed=seed,
            keep="all",
            start_from=None if begins is None else StartFrom(begins),
        ),
        cluster=cluster,
    )
    trained = [trial.worker_seconds for trial in study.complete]
    load = round(os.getloadavg()[0], 1)
    return {"worker_seconds": sum(trained), "seconds": study.seconds, "trials": len(trained), "load": load}


@dataclass(frozen=True)
class Bench:
    """What rows of one search are measured with. ``begun_s``: worker-seconds of what all trials began with."""

    search: str
    data: Any
    known: dict[int, Candidate]
    single: int
    begun_s: float
    folder: Path
    timed_s: float

    def row(self, name: str, trials: tuple[int, ...], model: nn.Module, parameters: int) -> Row:
        best = parameters_of(self.known[self.single])
        spent = self.begun_s + sum(self.known[trial].worker_seconds for trial in trials)
        test, time_s = timed(model, self.data.test, self.timed_s)
        return Row(self.search, name, test, len(trials), spent, parameters / best, time_s)

    def of(self, found: Ensemble) -> Row:
        """An ensemble as users have it: read from its file."""
        assert found.test is not None
        model = elastune.load_ensemble(elastune.save_ensemble(found, self.folder / f"{found.method}.st"), build)
        sizes = sum(member.parameters for member in found.members)
        row = self.row(f"{found.method} ensemble", tuple(m.trial for m in found.members), model, sizes)
        assert abs(row.test - 100 * found.test.ensemble) < 0.05, (row, found.test)  # the file says what was promised
        return row


def rows_of(search: str, study: Path, config: dict[str, Any], begun_s: float, timed_s: float) -> list[Row]:
    """Each way to use the search in ``study``, of which all choices are made by its selection set."""
    objective = OBJECTIVES.get(config["task"], "accuracy")
    results = [elastune.ensemble(study, method=method, objective=objective, seed=config["part"]) for method in METHODS]
    known = {one.trial: one for one in library(study).candidates}
    bench = Bench(search, splits(config), known, results[0].single, begun_s, study, timed_s)
    best = known[bench.single]
    model = model_of(best, build).eval()
    rows = [bench.row(BEST, (best.trial,), model, parameters_of(best))]
    rows += [bench.of(one) for one in results]
    if search == OWN:
        return rows
    for how in ("uniform", "greedy"):
        soup = elastune.soup(study, build, lambda model: tested(model, bench.data.validation), how=how)
        size = parameters_of(known[soup.trials[0]])
        rows.append(bench.row(f"{how} soup", soup.trials, soup.model, size))
    return rows


def of_task(
    task: str, size: Size, timed_s: float, cluster: LocalCluster, folder: Path, tell: Callable[[str], None]
) -> dict[str, Any]:
    """All seeds of a task."""
    per_seed: list[list[Row]] = []
    costs: list[dict[str, Any]] = []
    for seed in range(size.seeds):
        at, config = folder / task / str(seed), size.config(task, seed)
        parent = run_job(RunSpec(Program(PROGRAM), at / "parent", config, execution=MEANS), cluster=cluster)
        rows: list[Row] = []
        for search, begins in ((OWN, None), (ONE, at / "parent")):
            beforehand = 0.0 if begins is None else parent.seconds
            study = at / search.replace(" ", "_")
            cost = searched(size, config, seed, cluster, study, begins)
            costs.append({"search": search, "seed": seed, **cost, "parent_seconds": beforehand})
            rows += rows_of(search, study, config, beforehand, timed_s)
        per_seed.append(rows)
        tell(f"{task}, seed {seed}: " + ", ".join(f"{row.name} {row.test:.2f}" for row in rows))
    result = summary(per_seed)
    return {"size": vars(size), "rows": result, "goals": goals(result, size.seeds), "searches": costs}


def in_turns(task: str, turns: Turns, size: Size, folder: Path) -> dict[str, Any]:
    """The same members as one study, by one worker and by several, in turns: seconds, and how much faster."""
    seconds: dict[int, list[float]] = {workers: [] for workers in turns.workers}
    load = os.getloadavg()[0]
    config = {**size.config(task, 0), "epochs": turns.epochs, "sample_s": turns.sample_s}
    for number in range(turns.rounds):
        for workers in turns.workers:
            out = folder / f"{turns.sample_s}-{number}-{workers}"
            with LocalCluster(workers, preload=PRELOAD) as cluster:
                warm = {**config, "train": 64, "epochs": 1}  # what is imported once is not counted
                run_job(RunSpec(Program(PROGRAM), folder / f"{out.name}-warm", warm, execution=MEANS), cluster=cluster)
                request = StudyRequest(
                    Program(PROGRAM), out, sampler="random", trials=turns.members, workers=workers, execution=MEANS
                )
                began = time.perf_counter()
                study = tune(replace(request, config=config, seed=1, keep="all"), cluster=cluster)
                seconds[workers].append(time.perf_counter() - began)
            assert len(study.complete) == turns.members
    alone = seconds[turns.workers[0]]
    return {
        "computing": "emulated" if turns.sample_s else "real",
        "sample_s": turns.sample_s,
        "members": turns.members,
        "seconds": {str(workers): round(median(took), 2) for workers, took in seconds.items()},
        "times_faster": {
            str(workers): [round(one / other, 2) for one, other in zip(alone, took, strict=True)]
            for workers, took in seconds.items()
        },
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one seed of three trials; writes nothing")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)  # answers are timed by what one thread takes
    sizes = SMOKE if options.smoke else FULL
    images = "digits" if options.smoke or datasets.find("fashion_mnist") is None else "fashion"
    if not options.smoke and images == "digits":
        print("no Fashion-MNIST on this machine: digits instead, and nothing here is of Fashion-MNIST")
    results: dict[str, Any] = {}
    tell = partial(print, flush=True)
    with tempfile.TemporaryDirectory(prefix="ensembles-") as name:
        with LocalCluster(WORKERS, preload=PRELOAD) as cluster:
            for task, size in ((images, sizes.images), ("diabetes", sizes.diabetes)):
                results[task] = of_task(task, size, sizes.timed_s, cluster, Path(name), tell)
        turns = [in_turns("digits" if one.sample_s else images, one, sizes.images, Path(name)) for one in sizes.turns]
    for task, result in results.items():
        for row in result["rows"]:
            print(line(task, row, result["size"]["seeds"]))
        for goal in result["goals"]:
            print(f"{task}: {goal['goal']}: {goal['verdict']} ({goal['measured']})")
    for one in turns:
        print(f"{one['members']} members, {one['computing']} computing: seconds by workers {one['seconds']}")
    if not options.smoke:
        fallen = images == "digits"
        result = {"digits_instead_of_fashion_mnist": fallen, "results": results, "members_in_turns": turns}
        write_result(options.out, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
