"""Predict the published step of 1,440 layouts from 20 of them: error, order, regret of the pick, cover of intervals.

The data are 1,440 published iteration times of GPT-like models under Megatron on 1-8 A100 (tensor x data x pipeline),
from vTrain (Bang et al., "vTrain: A Simulation Framework for Evaluating Cost-Effective and Compute-Optimal Large
Language Model Training", MICRO 2024; VIA-Research/vTrain, data/ground_truth_single.csv, MIT licence), and all-reduce
times that the same project measured. They are read from ``$ELASTUNE_DATA/layout_times``; nothing is trained here.

The planner (``elastune.core.plan.step_time``) chooses the 20 rows by itself: no time of a row is looked at before it is
chosen. What is taken for an A100 beforehand stands in ``a100``: data-sheet figures, each known within a factor, and the
measured link. The form of the terms, and how far errors of it are alike, were chosen with the table in sight; what is
fitted to it is fitted to the 20 rows.

The source calls its times ground truth, but they are linear in the number of passes to the last bit, and a pass takes
the same to the last bit for every data-parallel width: they are composed of parts. Real steps scatter more.

    python -m benchmarks.parallel.layout_prediction [--probes 20] [--repeats 20] [--smoke] [--out FILE]
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common.result_file import write_result
from scipy.stats import kendalltau

from elastune.core.plan.step_model import StepModel, probe
from elastune.core.plan.step_time import Constant, Floats, StepSplits, StepWork, transformer

NOISE = 0.01  # of a measured iteration, relative: declared
VOCABULARY = 51_200  # GPT-2's, padded, as Megatron does
GOALS = {"mean_error": 0.05, "median_regret": 0.02, "cover": (0.75, 0.85)}
COLUMNS = (
    *("# GPUs", "global batch", "micro batch", "hidden size", "attention heads", "# layers", "sequence length"),
    *("tensor parallelism", "data parallelism", "pipeline parallelism", "iteration time (ms)"),
)


@dataclass(frozen=True)
class Table:
    """Measured rows. ``groups``: rows with the same model, GPUs and batch have the same number."""

    work: StepWork
    splits: StepSplits
    step_s: Floats
    groups: Floats

    def take(self, index: Any) -> Table:
        work, splits = self.work.take(index), self.splits.take(index)
        return Table(work, splits, self.step_s[index], self.groups[index])


def read(folder: Path) -> Table:
    with (folder / "megatron_a100_1_to_8.csv").open(encoding="utf-8-sig", newline="") as file:
        rows = np.array([[float(row[name]) for name in COLUMNS] for row in csv.DictReader(file)])
    gpus, batch, micro, hidden, heads, layers, length, tensor, data, pipeline, ms = rows.T
    kinds = np.stack([gpus, batch, hidden, layers], axis=1)
    groups = np.unique(kinds, axis=0, return_inverse=True)[1].reshape(-1)
    work = transformer(hidden, layers, heads, length, VOCABULARY)
    splits = StepSplits(batch, micro, data, np.ones_like(data), tensor, pipeline, gpus)
    return Table(work, splits, ms / 1e3, groups)


def link(folder: Path) -> tuple[float, float]:
    """Seconds of a hop and of a byte of a ring, by least relative error over the measured all-reduces."""
    terms, result = [], []
    for workers in (2, 4, 8):
        with (folder / f"allreduce_a100_{workers}.csv").open(encoding="utf-8-sig", newline="") as file:
            for row in list(csv.reader(file))[1:]:
                size, seconds = float(row[0]), float(row[3]) / 1e9
                hops = 2 * (workers - 1)
                terms.append([hops / seconds, hops / workers * size / seconds])
                result.append(1.0)
    hop_s, byte_s = np.linalg.lstsq(np.array(terms), np.array(result), rcond=None)[0]
    return max(float(hop_s), 1e-7), float(byte_s)


def a100(hop_s: float, byte_s: float) -> list[Constant]:
    """What is taken for the machine before a step of it is measured, in the order of ``CONSTANTS``."""
    return [
        Constant("flop_s", 1 / 200e12, 2.0),  # 312 TFLOP/s by the data sheet
        Constant("edge_flop_s", 1 / 100e12, 3.0),  # losses are often computed in single precision
        Constant("split_byte_s", 1 / 1.3e12, 2.0),  # 1.55-2.0 TB/s by the data sheet
        Constant("whole_byte_s", 20 / 1.3e12, 2.0),  # norms, dropouts, residuals: each reads and writes
        Constant("launch_s", 1e-3, 3.0),  # about 150 kernels at some 6 us
        Constant("tensor_begin_s", hop_s / 100, 1.5),  # nothing: what was measured back to back has it in its hops
        Constant("tensor_sum_s", hop_s, 4.0),  # measured back to back: within a step workers wait, too
        Constant("tensor_byte_s", byte_s, 1.5),
        Constant("send_s", 3e-5, 3.0),
        Constant("send_byte_s", byte_s, 3.0),
        Constant("gradient_hop_s", hop_s, 2.0),
        Constant("gradient_byte_s", byte_s, 2.0),
        Constant("across_hop_s", hop_s, 2.0),  # all rows are of one host: it tells nothing of them
        Constant("across_byte_s", byte_s, 2.0),
        Constant("update_byte_s", 15 / 1.3e12, 3.0),  # two moments and a master copy in single precision
        Constant("pass_s", 1e-3, 3.0),
        Constant("fixed_s", 1e-2, 3.0),
    ]


def judge(model: StepModel, table: Table, chosen: tuple[int, ...]) -> dict[str, Any]:
    """Of the rows that were not measured; picks are made among all rows of a group."""
    estimates = model.estimate(table.work, table.splits)
    rest = np.setdiff1d(np.arange(len(table.step_s)), chosen)
    errors = np.abs(estimates.step_s / table.step_s - 1)[rest]
    inside = ((estimates.low_s <= table.step_s) & (table.step_s <= estimates.high_s))[rest]
    regrets, orders = [], []
    for group in np.unique(table.groups):
        rows = np.flatnonzero(table.groups == group)
        if len(rows) > 1:
            pick = rows[np.argmin(estimates.step_s[rows])]
            regrets.append(float(table.step_s[pick] / table.step_s[rows].min() - 1))
            orders.append(float(kendalltau(estimates.step_s[rows], table.step_s[rows]).statistic))
    return {
        "mean_error": float(errors.mean()),
        "median_error": float(np.median(errors)),
        "p95_error": float(np.quantile(errors, 0.95)),
        "bias": float(np.mean((estimates.step_s / table.step_s - 1)[rest])),
        "median_regret": float(np.median(regrets)),
        "mean_regret": float(np.mean(regrets)),
        "best_picked": float(np.mean(np.array(regrets) == 0)),
        "groups": len(regrets),
        "cover": float(inside.mean()),
        "half_width": float(np.median(np.log(estimates.high_s / estimates.step_s)[rest])),
        "tau": float(kendalltau(estimates.step_s, table.step_s).statistic),
        "tau_in_groups": float(np.nanmean(orders)),
    }


def repeated(prior: list[Constant], table: Table, probes: int, repeats: int) -> list[dict[str, Any]]:
    """The same, each time with another random half of the rows to choose probes from: how far chance reaches."""
    results = []
    for seed in range(repeats):
        half = np.sort(np.random.default_rng(seed).permutation(len(table.step_s))[: len(table.step_s) // 2])
        offered = table.take(half)
        model, chosen = probe(
            prior, offered.work, offered.splits, probes, lambda i, t=offered: float(t.step_s[i]), NOISE
        )
        results.append(judge(model, table, tuple(int(half[each]) for each in chosen)))
    return results


def spread(runs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Least, median and most of each figure."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for run in runs:
        for name, value in run.items():
            values[name].append(value)
    return {name: [min(each), float(np.median(each)), max(each)] for name, each in values.items()}


def shown(name: str, run: dict[str, Any]) -> None:
    print(
        f"{name:22} error mean {run['mean_error']:6.2%} p95 {run['p95_error']:6.2%} | "
        f"regret median {run['median_regret']:.2%} mean {run['mean_regret']:.2%}, best in {run['best_picked']:.0%} of "
        f"{run['groups']} | 80 % intervals cover {run['cover']:.1%} (x/ {np.exp(run['half_width']):.3f}) | "
        f"tau {run['tau']:.3f}, in groups {run['tau_in_groups']:.3f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probes", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="few probes and repeats, no goals")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = Path(os.environ.get("ELASTUNE_DATA", "data")) / "layout_times"
    if not folder.is_dir():
        print(f"no {folder}: set ELASTUNE_DATA to a folder with layout_times", file=sys.stderr)
        return 2
    probes, repeats = (6, 1) if options.smoke else (options.probes, options.repeats)
    table, prior = read(folder), a100(*link(folder))
    begun = time.perf_counter()
    model, chosen = probe(prior, table.work, table.splits, probes, lambda i: float(table.step_s[i]), NOISE)
    fitted_s = time.perf_counter() - begun
    whole = judge(model, table, chosen)
    shown(f"{probes} probes", whole)
    results: dict[str, Any] = {"probes": probes, "rows": len(table.step_s), "choosing_and_fitting_s": fitted_s}
    results |= {"whole": whole, "chosen": list(chosen), "constants": model.constants(), "widened": model.best.widened}
    results["discrepancy"] = vars(model.best.discrepancy)
    runs = repeated(prior, table, probes, repeats)
    results["repeats"] = spread(runs)
    for name, (low, middle, high) in results["repeats"].items():
        print(f"  {repeats} repeats: {name:15} {low:8.4f} {middle:8.4f} {high:8.4f}")
    many = table.take(np.arange(100_000) % len(table.step_s))
    begun = time.process_time()
    model.estimate(many.work, many.splits)
    results["cpu_seconds_for_100000"] = time.process_time() - begun
    print(f"  chosen and fitted in {fitted_s:.1f} s; 100,000 plans in {results['cpu_seconds_for_100000']:.2f} s of CPU")
    low, high = GOALS["cover"]
    met = {
        "mean_error": whole["mean_error"] <= GOALS["mean_error"],
        "median_regret": whole["median_regret"] <= GOALS["median_regret"],
        "cover": low <= whole["cover"] <= high,
    }
    results["goals_met"] = met
    print("  goals: " + ", ".join(f"{name} {'met' if good else 'MISSED'}" for name, good in met.items()))
    if options.out:
        how: dict[str, Any] = {}
        write_result(options.out, how | results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
