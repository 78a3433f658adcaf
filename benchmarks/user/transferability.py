"""Which source to begin with: what LogME says of many, and what trainings that begin with each of them then reach.

The new task is five classes of Fashion-MNIST, drawn by the seed, by 1,000 images. Sources are trunks that were trained
by 5,000 images of the other five classes, or of MNIST, at rates from far too low to usual, for one epoch or three:
twelve, from nearly useless to good. ``elastune.rank_sources`` estimates them by the trunks' features of the new task's
training images; then a training of three epochs begins with each (all layers train on, a new head), and Kendall's tau
holds its validation accuracy against the estimate. Told beside: test accuracy of the source that ranks first, of the
best and the mean one in hindsight, and of a training that begins with none. Nothing was tuned.

    python -m benchmarks.user.transferability            # 5 seeds; writes results/transferability.json
    python -m benchmarks.user.transferability --smoke    # 1 seed on the digits, two sources; writes nothing
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from benchmarks.common.result_file import write_result
from benchmarks.programs.transfer_features import halves, new_task
from benchmarks.programs.transfer_train import LOADERS
from benchmarks.user.transfer import FRESH, MEANS, PROGRAM, Place
from benchmarks.user.transfer_summary import gained

import elastune
from elastune.core.run import StartFrom
from elastune.runtime.clusters.local import LocalCluster
from elastune.tuning.reuse.transfer import RankedSource
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune

HERE = Path(__file__).parents[1]
RESULT = HERE / "results" / "transferability.json"
FEATURES = HERE / "programs" / "transfer_features.py"


@dataclass(frozen=True)
class Size:
    """``sources``: data sets that they learn from. ``train``: images of a source, and of the new task."""

    target: str
    sources: tuple[str, ...]
    rates: tuple[float, ...]
    epochs: tuple[int, ...]
    train: tuple[int, int]
    selection: int
    target_epochs: int
    seeds: int


FULL = Size("fashion", ("fashion", "mnist"), (0.0001, 0.003, 0.05), (1, 3), (5000, 1000), 2000, 3, 5)
SMOKE = Size("digits", ("digits",), (0.0001, 0.05), (1,), (200, 100), 100, 1, 1)


def sources_of(seed: int, size: Size, place: Place) -> list[Path]:
    """A study for each data set, of each rate with each number of epochs."""
    studies = []
    for name in size.sources:
        own = {"data": name, "classes": halves(seed)[0] if name == size.target else [], "train": size.train[0]}
        out, trials = place.folder / f"from-{name}", len(size.rates) * len(size.epochs)
        request = StudyRequest(
            PROGRAM, out, sampler="grid", trials=trials, workers=2, execution=MEANS,
            config={**own, "seed": seed, "selection": size.selection}, keep="all",
        )  # fmt: skip

        def space(trial: Any) -> dict[str, Any]:
            rate = trial.suggest_categorical("lr", list(size.rates))
            return {"lr": rate, "epochs": trial.suggest_categorical("epochs", list(size.epochs))}

        tuned = tune(request, space=space, cluster=place.cluster)
        assert len(tuned.complete) == request.trials, f"{request.out}: a training has failed"
        studies.append(request.out)
    return studies


def one_seed(seed: int, size: Size, place: Place) -> dict[str, Any]:
    """Estimates of all sources, what was then reached with each, and without any."""
    studies, task = sources_of(seed, size, place), f"{size.target}_{size.train[1]}_{seed}"
    for study in studies:
        elastune.predict(study, [task], program=FEATURES)
    target = {**new_task(task), "selection": size.selection, "epochs": size.target_epochs}
    begun = []
    for at, source in enumerate(elastune.rank_sources(studies, task).sources):
        begins = StartFrom(Path(source.start_from), fresh=FRESH)
        begun.append(place.study(f"to-{at}", target, {"part": [0]}, begins)[0])
    ranking = elastune.rank_sources(studies, task, measured=begun)
    assert all(one.measured is not None for one in ranking.sources), "a training is not taken for its source's"
    tests = [elastune.Study.load(out).complete[0].metrics["test_accuracy"] for out in begun]  # in the order of ranks
    cold = elastune.Study.load(place.study("cold", target, {"part": [0]})[0]).complete[0].metrics["test_accuracy"]
    results = [told_of(source, test) for source, test in zip(ranking.sources, tests, strict=True)]
    return {"seed": seed, "tau": ranking.tau, "cold_test": cold, "sources": results}


def told_of(source: RankedSource, test: float) -> dict[str, Any]:
    """What is kept of one."""
    known = {"study": source.study.name, "trial": source.trial, "logme": round(source.score, 4)}
    return {**known, "validation": source.measured, "test": test}


def figures(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Over seeds: tau, and points of the source that ranks first over others."""
    first = [one["sources"][0]["test"] for one in seeds]
    columns = [[source["test"] for source in one["sources"]] for one in seeds]
    return {
        "kendall_tau": gained([one["tau"] or 0.0 for one in seeds]),  # None: all were alike
        "first_over_mean_points": gained([100 * (a - fmean(c)) for a, c in zip(first, columns, strict=True)]),
        "first_over_best_points": gained([100 * (a - max(c)) for a, c in zip(first, columns, strict=True)]),
        "first_over_cold_points": gained([100 * (a - one["cold_test"]) for a, one in zip(first, seeds, strict=True)]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one seed on the digits; writes nothing")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = SMOKE if options.smoke else FULL
    for data in {size.target, *size.sources}:
        LOADERS[data]()  # what is missing is told before anything is trained
    seeds: list[dict[str, Any]] = []
    loads = [round(os.getloadavg()[0], 1)]
    with tempfile.TemporaryDirectory(prefix="transferability-") as name, LocalCluster(2) as cluster:
        for seed in range(size.seeds):
            seeds.append(one_seed(seed, size, Place(cluster, Path(name) / str(seed))))
            loads.append(round(os.getloadavg()[0], 1))
            print(f"seed {seed}: tau {seeds[-1]['tau']}", flush=True)
            if not options.smoke:  # each time: who stops it here has what was measured so far
                whole = {"loads": loads, "size": vars(size), **figures(seeds), "seeds": seeds}
                write_result(options.out, whole)
    for name_of, value in figures(seeds).items():
        print(f"{name_of}: {value['mean']:+g} ± {value['ci95_half']} ({value['each']})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
