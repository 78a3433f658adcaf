"""Predict the step and the memory of every mechanism on every mesh of up to 4 workers here, then measure each.

For each model the planner rehearses the program, measures at most 8 short runs that it chooses itself
(``frontier.machine_probes``), and predicts; then every row is run once for 12 steps, in an order drawn by a seed. None
is left out: a row that does not run says why. ``probed`` rows are among the 8, so that they test the fit alone; every
row is measured anew. Workers' products and convolutions are paced to a declared speed (``paced.py``), so that more
workers than cores do not wait for one another's cores; all else, sums and launches, is real, on loopback.

    python benchmarks/prediction_here.py [--smoke] [--models mlp,cnn,transformer] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from elastune.core.mesh import Mesh
from elastune.core.run import Program
from elastune.frontier.held_memory import held_by
from elastune.frontier.machine_probes import MachineProbes, NodeLink, work_of
from elastune.frontier.measured_plans import MeasuredPlan, TrainingPlan, measure_plans
from elastune.job.machine import machine_context
from elastune.plan.cluster_plan import ProgramForecast
from elastune.plan.search_time import SearchModel
from elastune.train.rehearse_apart import rehearse_apart

PROGRAM = Program(Path(__file__).parent / "programs" / "predicted_train.py")
MODELS = ("mlp", "cnn", "transformer")
WORKERS, BATCH = 4, 32
MESHES = (
    *(Mesh(data=workers) for workers in (1, 2, 4)),
    *(Mesh(**{axis: workers}) for axis in ("shard", "tensor", "pipeline") for workers in (2, 4)),
    *(Mesh(data=2, **{axis: 2}) for axis in ("shard", "tensor", "pipeline")),
    *(Mesh(shard=2, **{axis: 2}) for axis in ("tensor", "pipeline")),
    Mesh(tensor=2, pipeline=2),
)
GOALS = {"mean_error": 0.10, "tau": 0.9, "memory_error": 0.05}


def plans() -> list[TrainingPlan]:
    """Every mesh under each mechanism of this package that it can have, and FSDP2; passes of 8 samples."""
    found = [TrainingPlan(mesh, BATCH, 8) for mesh in MESHES]
    found += [TrainingPlan(mesh, BATCH, 8, sharded=True) for mesh in MESHES if mesh.shard > 1 and mesh.pipeline == 1]
    found += [TrainingPlan(Mesh(shard=n), BATCH, 8, sharded=True, mechanism="fsdp2") for n in (2, 4)]
    return found


def rows_of(model: str, wanted: list[TrainingPlan], calibrate_s: float, seed: int) -> list[dict[str, Any]]:
    """Predicted, then measured."""
    config = {"model": model, "batch_size": BATCH}
    size = rehearse_apart(PROGRAM, config)
    probes = MachineProbes(PROGRAM, config, size, WORKERS, calibrate_s, wants_noise=False)
    known = probes.learn(NodeLink(8 / 10e9))
    held = held_by(size, probes.held[Mesh(), BATCH])
    search = SearchModel(1, size.steps, size.batch_size, 0.0)
    mixed = random.Random(seed).sample(wanted, len(wanted))
    measured = dict(
        zip(mixed, measure_plans(mixed, ProgramForecast(known, work_of(size), held, search), probes), strict=True)
    )
    print(
        f"{model}: probed {', '.join(f'{mesh} by {micro}' for mesh, micro in probes.measured)}; "
        f"two runs of one plan {probes.noise:.1%} apart, or less"
    )
    found = []
    for plan in wanted:
        row = measured[plan]
        probed = not plan.sharded and (plan.mesh, plan.micro) in probes.measured
        found.append({"model": model, "probed": probed, **told(row)})
        print(line(found[-1]), flush=True)
    return found


def told(row: MeasuredPlan) -> dict[str, Any]:
    more = {"step_error": row.step_error, "memory_error": row.memory_error, "within": row.within}
    return {**vars(row), "mesh": str(row.mesh), **more}


def line(row: dict[str, Any]) -> str:
    name = f"  {row['mechanism']:18} {row['mesh']:22} {'probed' if row['probed'] else '':7}"
    if row["measured_step_s"] is None:
        return f"{name} predicted {row['step_s'] * 1e3:7.1f} ms; {row['failed']}"
    memory = row["measured_memory_bytes"]
    held = "not measured" if memory is None else f"{memory / 2**20:6.1f} MiB {row['memory_error']:+7.1%}"
    return (
        f"{name} predicted {row['step_s'] * 1e3:7.1f} ms, measured {row['measured_step_s'] * 1e3:7.1f} ms "
        f"{row['step_error']:+7.1%} {'in' if row['within'] else 'outside':8} "
        f"memory {row['memory_bytes'] / 2**20:6.1f}, {held}"
    )


def judge(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all rows that ran, and of those that were not probed."""
    ran = [row for row in rows if row["measured_step_s"] is not None]
    new = [row for row in ran if not row["probed"]]
    held = [abs(row["memory_error"]) for row in ran if row["memory_error"] is not None]
    taus = []
    for model in dict.fromkeys(row["model"] for row in ran):
        mine = [row for row in ran if row["model"] == model]
        if len(mine) < 3:  # no order to speak of
            continue
        taus.append(float(kendalltau([r["step_s"] for r in mine], [r["measured_step_s"] for r in mine]).statistic))
    return {
        "rows": len(rows),
        "ran": len(ran),
        "mean_error": float(np.mean([abs(row["step_error"]) for row in ran])),
        "mean_error_not_probed": float(np.mean([abs(row["step_error"]) for row in new])) if new else None,
        "median_error": float(np.median([abs(row["step_error"]) for row in ran])),
        "worst_error": float(np.max([abs(row["step_error"]) for row in ran])),
        "cover": float(np.mean([row["within"] for row in ran])),
        "tau": float(np.mean(taus)) if taus else None,
        "memory_error": float(np.mean(held)) if held else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one row of one model")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--calibrate", type=float, default=40.0, help="seconds of probes for each model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    wanted, models, calibrate_s = plans(), options.models.split(","), options.calibrate
    if options.smoke:
        wanted, models, calibrate_s = [TrainingPlan(Mesh(shard=2), BATCH, 8)], ["transformer"], 0.0
    rows = [row for model in models for row in rows_of(model, wanted, calibrate_s, options.seed)]
    whole = judge(rows) if any(row["measured_step_s"] is not None for row in rows) else {"rows": len(rows), "ran": 0}
    print(json.dumps(whole, indent=1))
    if options.out is not None:
        kept = {
            "command": " ".join(sys.argv),
            "machine": machine_context(),
            "load_average": list(os.getloadavg()),
            "goals": GOALS,
            "whole": whole,
            "rows": rows,
        }
        options.out.write_text(json.dumps(kept, indent=1) + "\n")
    return 0 if whole["ran"] else 1


if __name__ == "__main__":
    sys.exit(main())
