"""What is a study's second-best trial worth? Best single, ensembles and soups of one search of fixed budget.

For each seed two searches of as many trials: one from initial values of each trial's own, one in which all trials begin
with the weights of one short training (only those have a common ancestor, and may be averaged). All rows of a search
are chosen by its selection set, and told by a test set that no choice has seen. Accuracy in % (Fashion-MNIST), or the
share of variance explained, in % (diabetes).

    python benchmarks/ensembles.py            # 5 seeds of 16 trials, two tasks; writes results/ensembles.json
    python benchmarks/ensembles.py --smoke    # 1 seed of 3 trials each, the fewest that are bagged; writes nothing
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from programs.ensembles_train import build, splits
from torch import nn

import elastune
from elastune.cluster.local import WARM, LocalCluster
from elastune.core.run import Means, Program, RunSpec
from elastune.core.start_from import StartFrom
from elastune.job.machine import machine_context
from elastune.job.run import run_job
from elastune.plan.intervals import mean_ci
from elastune.recipes import datasets
from elastune.reuse.candidates import library
from elastune.reuse.ensemble import METHODS, parameters_of
from elastune.study.request import StudyRequest
from elastune.study.run import tune

HERE = Path(__file__).parent
RESULT = HERE / "results" / "ensembles.json"
PROGRAM = HERE / "programs" / "ensembles_train.py"
MEANS = Means(mode="fast", num_slots=1)
WORKERS = 2
PRELOAD = (*WARM, "sklearn.datasets")  # imported once, and not by each trial
OBJECTIVES = {"diabetes": "r2"}


@dataclass(frozen=True)
class Row:
    """One way to use a search. ``test``: in %; ``inference``: over that of the best single trial, in parameters."""

    search: str
    name: str
    test: float
    inference: float
    members: int


@dataclass(frozen=True)
class Size:
    seeds: int
    trials: int
    epochs: int
    train: int
    selection: int


FULL = Size(5, 16, 4, 4000, 2000)
SMOKE = Size(1, 3, 1, 100, 50)


def tested(model: nn.Module, data: Any) -> float:
    """Accuracy or explained variance on ``data``, in %."""
    x, y = data.tensors
    with torch.no_grad():
        said = torch.cat([model(part) for part in x.split(1000)])
    if y.is_floating_point():
        return 100 * float(1 - ((said - y) ** 2).sum() / ((y - y.mean(0)) ** 2).sum())
    return 100 * float((said.argmax(1) == y).double().mean())


def searched(task: str, seed: int, size: Size, cluster: LocalCluster, at: Path, begins: Path | None) -> dict[str, Any]:
    """One search: the folder of its study, its worker-seconds, and how much its trials overlapped."""
    config = {"task": task, "part": seed, "train": size.train, "selection": size.selection, "epochs": size.epochs}
    study = tune(
        StudyRequest(
            Program(PROGRAM),
            at,
            sampler="tpe",
            trials=size.trials,
            workers=WORKERS,
            means=MEANS,
            config=config,
            seed=seed,
            keep="all",
            start_from=None if begins is None else StartFrom(begins),
        ),
        cluster=cluster,
    )
    trained = [trial.worker_seconds for trial in study.complete]
    return {"study": at, "worker_seconds": sum(trained), "seconds": study.seconds, "trials": len(trained)}


def rows_of(task: str, search: str, study: Path, part: int, size: Size) -> list[Row]:
    """Each way to use the search in ``study``, of which all choices are made by its selection set."""
    objective = OBJECTIVES.get(task, "accuracy")
    found = [elastune.ensemble(study, method=method, objective=objective, seed=part) for method in METHODS]
    assert all(one.test is not None for one in found)
    rows = [Row(search, "best single", 100 * found[0].test.best_single, 1.0, 1)]
    for one in found:
        rows.append(Row(search, f"{one.method} ensemble", 100 * one.test.ensemble, one.inference, len(one.members)))
    if search == "own beginnings":
        return rows
    known = {one.trial: one for one in library(study).candidates}
    config = {"task": task, "part": part, "train": size.train, "selection": size.selection}
    data = splits(config)
    best = parameters_of(known[found[0].single])

    for how in ("uniform", "greedy"):
        soup = elastune.soup(study, build, lambda model: tested(model, data.validation), how=how)
        inference = parameters_of(known[soup.trials[0]]) / best
        rows.append(Row(search, f"{how} soup", tested(soup.model, data.test), inference, len(soup.trials)))
    return rows


def of_task(task: str, size: Size, cluster: LocalCluster, folder: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """All seeds of a task."""
    per_seed: list[list[Row]] = []
    costs: list[dict[str, Any]] = []
    for seed in range(size.seeds):
        at = folder / task / str(seed)
        config = {"task": task, "part": seed, "train": size.train, "selection": size.selection, "epochs": size.epochs}
        parent = run_job(RunSpec(Program(PROGRAM), at / "parent", config, means=MEANS), cluster=cluster)
        rows: list[Row] = []
        for search, begins in (("own beginnings", None), ("one beginning", at / "parent")):
            cost = searched(task, seed, size, cluster, at / search.replace(" ", "_"), begins)
            study = cost.pop("study")
            beforehand = 0.0 if begins is None else parent.seconds
            costs.append({"search": search, "seed": seed, **cost, "parent_seconds": beforehand})
            rows += rows_of(task, search, study, seed, size)
        per_seed.append(rows)
        tell(f"{task}, seed {seed}: " + ", ".join(f"{row.name} {row.test:.2f}" for row in rows))
    return {"rows": summary(per_seed), "searches": costs}


def summary(per_seed: list[list[Row]]) -> list[dict[str, Any]]:
    """Over seeds: means, and the gain over the best single trial of the same search, paired by seed, with its CI."""
    told = []
    for at, first in enumerate(per_seed[0]):
        column = [rows[at] for rows in per_seed]
        single = [next(r for r in rows if r.search == first.search) for rows in per_seed]
        gains = [row.test - best.test for row, best in zip(column, single, strict=True)]
        mean, half = mean_ci(gains)
        told.append(
            {
                "search": first.search,
                "name": first.name,
                "test_percent": round(sum(row.test for row in column) / len(column), 3),
                "gain_points": round(mean, 3),
                "gain_ci95_half": None if half is None else round(half, 3),
                "gains": [round(gain, 3) for gain in gains],
                "seeds_no_worse": sum(gain >= 0 for gain in gains),
                "inference": round(sum(row.inference for row in column) / len(column), 2),
                "members": round(sum(row.members for row in column) / len(column), 1),
            }
        )
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one seed of three trials; writes nothing")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    size = SMOKE if options.smoke else FULL
    images = "digits" if options.smoke or datasets.find("fashion_mnist") is None else "fashion"
    if not options.smoke and images == "digits":
        print("no Fashion-MNIST on this machine: digits instead")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="ensembles-") as name, LocalCluster(WORKERS, preload=PRELOAD) as cluster:
        for task in (images, "diabetes"):
            found[task] = of_task(task, size, cluster, Path(name), lambda text: print(text, flush=True))
    for task, told in found.items():
        for row in told["rows"]:
            half = "" if row["gain_ci95_half"] is None else f" ± {row['gain_ci95_half']:.2f}"
            gain = f"{row['gain_points']:+.2f}{half}, no worse in {row['seeds_no_worse']} of {size.seeds} seeds"
            cost = f"inference {row['inference']:.1f}x, {row['members']:.1f} members"
            print(f"{task:9} {row['search']:15} {row['name']:18} {row['test_percent']:6.2f} % ({gain}; {cost})")
    if not options.smoke:
        whole = {"command": "OMP_NUM_THREADS=1 python benchmarks/ensembles.py", "machine": machine_context()}
        options.out.write_text(json.dumps({**whole, "size": vars(size), "results": found}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
