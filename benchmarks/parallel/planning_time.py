"""How long does ``elastune plan`` judge a cluster, once the program has been measured? CPU seconds, and how many plans.

A made-up program of 16 layers and the axes, batches and passes that ``elastune plan`` itself looks at: trainings at
once x data x shard x tensor x pipeline, five batches, four sizes of a pass, bounded memory; with what twice the workers
bring.
55,440 workers have the most divisors of any number that is allowed. The goal is 2 s for 2,048 nodes.

    python -m benchmarks.parallel.planning_time [--repeats 5] [--smoke] [--out FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common.result_file import write_result

from elastune.core.plan.cluster_plan import (
    Allowed,
    Nodes,
    PlanBounds,
    ProgramForecast,
    SearchModel,
    best_plans,
    divisions,
    doublings,
)
from elastune.core.plan.memory import HeldAlone
from elastune.core.plan.step_model import fit_machine
from elastune.core.plan.step_time import CONSTANTS, Constant, StepWork, seconds

GOAL_S = 2.0
CLUSTERS = (Nodes(2048, 1), Nodes(2048, 8), Nodes(55_440, 1))
GIB = 2.0**30
BASE, LAYERS, PROBES = 64, 16, 8
WORK = StepWork(*(np.array(each) for each in (LAYERS, 1e9, 1e6, 1e6, 1e8, 0.0, 0.0)))
HELD = HeldAlone(2 * GIB, 2 * GIB, 4 * GIB, 0.01 * GIB, 0.01 * GIB)
ALLOWED = Allowed(tuple(BASE * 2**i for i in range(5)), (8, 16, 32, BASE), 128, tensor=8, pipeline=LAYERS)
SEARCH = SearchModel(128, 1000.0, BASE, 4.0 * BASE, 0.01)


def forecast() -> ProgramForecast:
    """Fitted to as many probes as the planner makes at most."""
    prior = [Constant(name, 1e-10, 4.0) for name in CONSTANTS]
    few = divisions(Nodes(1, 8), ALLOWED).splits
    few = few.take(np.linspace(0, len(few) - 1, PROBES).astype(np.intp))
    step_s = seconds(np.full(len(CONSTANTS), 2e-10), WORK, few)
    return ProgramForecast(fit_machine(prior, WORK, few, step_s, 0.05), WORK, HELD, SEARCH)


def measure(known: ProgramForecast, cluster: Nodes, repeats: int) -> dict[str, Any]:
    """CPU seconds of this process for one whole answer."""
    took = []
    for _ in range(repeats):
        begun = time.process_time()
        best = best_plans(known, cluster, ALLOWED, PlanBounds(memory_bytes=6 * GIB), 5)[0]
        doublings(known, best, cluster, ALLOWED)
        took.append(time.process_time() - begun)
    row = {
        "nodes": cluster.count,
        "workers_each": cluster.workers_each,
        "plans": len(divisions(cluster, ALLOWED).width),
    }
    return {**row, "cpu_s": round(statistics.median(took), 3), "most_cpu_s": round(max(took), 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="once each; writes nothing")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    known = forecast()
    rows = [measure(known, cluster, 1 if options.smoke else options.repeats) for cluster in CLUSTERS]
    for row in rows:
        print(row)
    results = {
        "measured": "CPU seconds of one answer, the program being measured already; see the file's head",
        "goal_s": GOAL_S,
        "met": all(row["most_cpu_s"] <= GOAL_S for row in rows),
        "rows": rows,
    }
    if options.out and not options.smoke:
        write_result(options.out, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
