"""Live: the same study on four local workers, with fixed workers a trial and with workers that flow among trials.

Trials of the digits in ``exact`` mode: four learning rates, 2, 4 or 12 passes, twelve in all; studies of all of them,
and of five, drawn by the seed, which leave workers idle in their second half. A worker takes a declared time for each
sample (``programs/paced_train.py``), so that four workers are four times as fast as one on two cores, too: how much
less time a study takes is measured under that declaration; pauses and weights are simply measured. All trials run to
their end, so each study must find the same weights for each configuration (SHA-256). Workers flow by either allocation
of ``elastune.tuning.study.rebalancer``; in studies of twelve ``short_first`` holds some trials of 12 passes back, which
write a checkpoint, wait and go on.

    python -m benchmarks.elastic.elastic_live           # 20 minutes; writes benchmarks/results/elastic_live.json
    python -m benchmarks.elastic.elastic_live --smoke   # three trials, three studies, writes nothing

A run that is cut keeps its studies in ``--out``, and the same command goes on from there. Times need a machine that
does nothing else, weights do not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.kept import Rows, ended

from elastune.core.journal.files import read
from elastune.core.journal.records import (
    StudyFinished,
    TrialFinished,
    TrialPaused,
    TrialReallocated,
    TrialRegrouped,
    TrialStarted,
)
from elastune.core.run import ExecutionSettings, Program
from elastune.runtime.clusters.local import LocalCluster
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune

PROGRAM = Program(Path(__file__).parents[1] / "programs" / "paced_train.py")
RESULT = Path(__file__).parents[1] / "results" / "elastic_live.json"
WORKERS = 4
FIXED, SHARED, SHORT_FIRST = "1 worker a trial", "steepest, 1 to 4 a trial", "short_first, 1 to 4 a trial"
VARIANTS: dict[str, tuple[int, str]] = {
    FIXED: (1, ""),
    "2 workers a trial": (2, ""),
    "4 workers a trial": (4, ""),
    SHARED: (1, "steepest"),
    SHORT_FIRST: (1, "short_first"),
}
"""What is compared: workers that a trial has, or begins with, and the allocation that shares them out."""


def study(cluster: LocalCluster, out: Path, variant: str, seed: int, sample_s: float, trials: int) -> dict[str, Any]:
    """One study: its wall time, worker-seconds, pauses, and the weights of each configuration."""
    workers, allocation = VARIANTS[variant]
    request = StudyRequest(
        PROGRAM,
        out,
        objectives={"accuracy": "max"},
        sampler="grid",
        trials=trials,
        workers=WORKERS,
        trial_workers=(1, WORKERS) if allocation else None,
        allocation=allocation or StudyRequest.allocation,
        execution=ExecutionSettings(workers=workers, mode="exact", num_slots=WORKERS),
        config={"sample_s": sample_s},
        seed=seed,
    )
    tune(request, cluster=cluster)
    records = [entry.record for entry in read(out / "journal.jsonl")]
    begun = {r.trial: json.dumps(r.config, sort_keys=True) for r in records if isinstance(r, TrialStarted)}
    ended = [r for r in records if isinstance(r, TrialFinished) and r.run is not None]
    if len(ended) != trials:
        raise RuntimeError(f"{variant}: {len(ended)} of {trials} trials were trained to their end")
    (end,) = [r for r in records if isinstance(r, StudyFinished)]
    pauses = [r.change.pause_s for r in records if isinstance(r, TrialRegrouped) and r.change.planned]
    return {
        "load_average": round(os.getloadavg()[0], 1),
        "seconds": end.seconds,
        "worker_seconds": sum(r.worker_seconds or 0.0 for r in ended),
        "resizes": sum(isinstance(r, TrialReallocated) for r in records),
        "held": sum(isinstance(r, TrialPaused) and r.held for r in records),
        "pauses_s": pauses,
        "weights": {begun[r.trial]: r.run.sha256 for r in ended if r.run is not None},
    }


def run(
    rounds: int, sample_s: float, trials: int, rows: Rows, variants: Sequence[str] = tuple(VARIANTS)
) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {variant: [] for variant in variants}
    weights: dict[str, str] = {}
    different = 0
    with tempfile.TemporaryDirectory(prefix="live-") as folder, LocalCluster(WORKERS) as cluster:
        study(cluster, Path(folder) / "warm", FIXED, 0, 0.0, 1)  # the first one starts the fork server
        for number in range(rounds):
            for variant in variants:
                out = Path(folder) / f"{number}-{list(VARIANTS).index(variant)}"
                key = f"{trials} trials, {variant}, round {number}"
                one = rows.of(key, partial(study, cluster, out, variant, number, sample_s, trials))
                for config, sha256 in one["weights"].items():
                    different += weights.setdefault(f"{number} {config}", sha256) != sha256
                found[variant].append(one)
                shown = f"{one['seconds']:6.1f} s, {one['resizes']} resizes, {one['held']} held back"
                print(f"{variant:28} {shown}", flush=True)
    return {
        "different_weights": different,
        "trainings": len(weights),
        "trials_run": sum(len(one["weights"]) for studies in found.values() for one in studies),
        "variants": {v: told(found[v]) for v in variants},
    }


def told(studies: list[dict[str, Any]]) -> dict[str, Any]:
    pauses = [pause for one in studies for pause in one["pauses_s"]]
    row: dict[str, Any] = {
        "median_seconds": round(statistics.median(one["seconds"] for one in studies), 1),
        "seconds": [round(one["seconds"], 1) for one in studies],
        "median_worker_seconds": round(statistics.median(one["worker_seconds"] for one in studies), 1),
        "resizes": [one["resizes"] for one in studies],
        "held": [one["held"] for one in studies],
        "load_average": [one["load_average"] for one in studies],
    }
    if pauses:
        row["median_pause_ms"] = round(1e3 * statistics.median(pauses), 1)
        row["longest_pause_ms"] = round(1e3 * max(pauses), 1)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="three short trials; writes nothing")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trials", type=int, nargs="+", default=[12, 5], help="of a study; twelve there are")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS, metavar="NAME")
    parser.add_argument("--sample-s", type=float, default=0.002, help="declared seconds for a sample on a worker")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    return ended(lambda: run_all(options))


def run_all(options: argparse.Namespace) -> int:
    """The exit code: of studies of each size."""
    rows = Rows(None if options.smoke else options.out, {"sample_s": options.sample_s})
    if options.smoke:
        rows.told = {"studies_of_3": run(1, 0.0005, 3, rows, (FIXED, SHARED, SHORT_FIRST))}
    else:
        rows.told = {
            f"studies_of_{trials}": run(options.rounds, options.sample_s, trials, rows, options.variants)
            for trials in options.trials
        }
    print(json.dumps(rows.told, indent=2))
    rows.write()
    return int(any(studies["different_weights"] for studies in rows.told.values()))


if __name__ == "__main__":
    raise SystemExit(main())
