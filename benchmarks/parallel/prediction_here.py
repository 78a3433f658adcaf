"""Predict the step and the memory of every mechanism on meshes of up to 8 workers, then measure each, on 4 hosts.

For each model the planner rehearses the program, measures short runs on one host that it chooses itself, at most 8 and
one of each further mechanism (``prediction_planned.py``), and predicts all rows; then every row is run once, in an
order drawn by a seed. None is left out: a row that does not run says why, and one that ``--minutes`` left no time for
is named. ``probed`` rows are among those runs, so that they test the fit alone; every row is measured anew.

- **Hosts** are network namespaces of this machine with 2 workers each, links shaped to 0.5 Gbit/s, which is declared to
  the planner (*emulated*). Workers of one host have loopback in common.
- **Compute is emulated**: workers' products and convolutions are paced to 0.05 GFLOP/s (MLP), 0.3 (CNN) and 0.1
  (transformer), so that 8 workers seldom wait for 2 cores; all else, sums and launches, is real. ``busy`` says which
  part of this machine's cores the workers took while they trained: where it nears 1 they did wait.
- **Memory** is the most that the fullest worker's process held. Of its prediction the part beside the program (Python,
  torch, data) is measured in the probes, on one worker and on two; ``part`` is the error of the rest alone.

A run that is cut keeps its rows in ``--out``, and the same command goes on from there.

    python -m benchmarks.parallel.prediction_here --out benchmarks/results/prediction_here.json  # 3 models, 30 minutes
    ... --minutes 25                # begins no row that is not predicted to end by then
    ... --models mlp --workers 2 --only data    # some rows
    python -m benchmarks.parallel.prediction_here --smoke
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from benchmarks.common.kept import begun, ended, write
from benchmarks.parallel.prediction_planned import Found, Planned, own_part, plan_of
from benchmarks.sources.combined_live import Hosts
from scipy.stats import kendalltau

from elastune.core.errors import UserError
from elastune.core.mesh import Mesh
from elastune.core.run import Program
from elastune.runtime.job.run import JobFailed
from elastune.train.machine import cores
from elastune.tuning.cluster_plan.probes import MeasuredPlan, TrainingPlan, with_measured

PROGRAM = Program(Path(__file__).parents[1] / "programs" / "predicted_train.py")
MODELS = ("mlp", "cnn", "transformer")
WORKERS, EACH, COUNT, GBIT, BATCH, MICRO = 8, 2, 4, 0.5, 32, 8
MOST_S, LEAST_STEPS, MOST_STEPS = 5.0, 8, 12  # of a row's training: seconds, if enough steps fit
BEGINS_S = 4.0  # what a training takes beside its steps, to see whether there is time for it
TWO = tuple(Mesh(**{axis: size}) for size in (2, 4, 8) for axis in ("data", "shard", "tensor", "pipeline"))
MESHES = (
    Mesh(),
    *TWO,
    *(Mesh(data=2, **{axis: 2}) for axis in ("shard", "tensor", "pipeline")),
    *(Mesh(shard=2, **{axis: 2}) for axis in ("tensor", "pipeline")),
    Mesh(tensor=2, pipeline=2),
    *(Mesh(data=4, **{axis: 2}) for axis in ("shard", "tensor", "pipeline")),
    *(Mesh(data=2, **{axis: 4}) for axis in ("tensor", "pipeline")),
    Mesh(shard=4, tensor=2),
    Mesh(data=2, tensor=2, pipeline=2),
)
ENGINES = ("fsdp2", "deepspeed", "fairscale")
LEARNT = ("zero", "sharded", *ENGINES)
GOALS = {"mean_error": 0.10, "tau": 0.9, "memory_error": 0.05}


def plans(workers: int) -> list[TrainingPlan]:
    """Every mesh of so many workers at most, under each mechanism of this package that it can have, and engines."""
    meshes = [mesh for mesh in MESHES if mesh.workers <= workers]
    results = [plan_of("", mesh, BATCH, MICRO) for mesh in meshes]
    results += [plan_of("sharded", mesh, BATCH, MICRO) for mesh in meshes if mesh.shard > 1 and mesh.pipeline == 1]
    alone = [mesh for mesh in meshes if mesh.shard == mesh.workers > 1]
    return results + [plan_of(name, mesh, BATCH, MICRO) for name in ENGINES for mesh in alone]


@dataclass
class Kept:
    """What is known so far, and where it is kept. ``facts``: by model; ``rows``: measured ones."""

    settings: Found
    out: Path | None
    facts: dict[str, Found] = field(default_factory=dict)
    rows: list[Found] = field(default_factory=list)

    @classmethod
    def begun(cls, settings: Found, out: Path | None) -> Kept:
        """What an earlier run with these settings has left in ``out``, if any."""
        kept = cls(settings, out)
        if result := begun(out, settings):
            kept.facts, kept.rows = result["facts"], result["rows"]
        return kept

    def left(self, model: str) -> list[str]:
        """Keys of predicted rows that were not measured yet."""
        done = {row["key"] for row in self.rows if row["model"] == model}
        return [key for key in self.facts[model]["predicted"] if key not in done]

    def write(self) -> None:
        """All of it, with what it comes to."""
        results = {
            "load_average": os.getloadavg(),
            "goals": GOALS,
            "whole": judge(self.rows),
            "by_model": {model: judge([row for row in self.rows if row["model"] == model]) for model in self.facts},
            "left": {model: self.left(model) for model in self.facts},
            "facts": self.facts,
            "rows": self.rows,
        }
        write(self.out, self.settings, results)


def key_of(plan: TrainingPlan) -> str:
    """Of its row."""
    return f"{plan.execution.mechanism} on {plan.mesh}"


def predict(model: str, wanted: Sequence[TrainingPlan], calibrate_s: float, learnt: Sequence[str]) -> Found:
    """What is said of every row of a model, before any is measured."""
    link_s = 8 / (GBIT * 1e9)
    planner = Planned(PROGRAM, {"model": model, "batch_size": BATCH}, EACH, link_s, calibrate_s)
    planner.learn_mechanisms(learnt, MICRO)
    print(f"{model}: probed {', '.join(planner.probed)}; two runs of one plan {planner.noise:.1%} apart, or less")
    return {
        "probed": planner.probed,
        "refused": planner.refused,
        "noise": planner.noise,
        "constants": planner.constants,
        "more_s": planner.more_s,
        "beside": planner.beside,
        "predicted": {key_of(plan): {**vars(planner.row(plan)), "mesh": str(plan.mesh)} for plan in wanted},
    }


def measure(model: str, kept: Kept, wanted: Sequence[TrainingPlan], hosts: Hosts, seed: int, until: float) -> None:
    """All rows that are left, as far as each is predicted to end by ``until``. Each is written as it comes."""
    facts, left = kept.facts[model], set(kept.left(model))
    for plan in random.Random(seed).sample(wanted, len(wanted)):
        key = key_of(plan)
        result = facts["predicted"][key]
        steps = min(MOST_STEPS, max(LEAST_STEPS, math.floor(MOST_S / result["step_s"])))
        if key not in left or time.monotonic() + BEGINS_S + steps * result["step_s"] > until:
            continue
        row = MeasuredPlan(**{**result, "mesh": plan.mesh, "step_interval_s": tuple(result["step_interval_s"])})
        held = facts["beside"]
        beside = held.get(own_part(plan), held["several" if plan.mesh.workers > 1 else "alone"])
        results = {"model": model, "key": key, "probed": _was_probed(plan, facts["probed"])}
        kept.rows.append(results | measured(hosts, model, plan, row, beside, steps))
        print(line(kept.rows[-1]), flush=True)
        kept.write()


def measured(hosts: Hosts, model: str, plan: TrainingPlan, row: MeasuredPlan, beside: float, steps: int) -> Found:
    """One row, run. ``busy``: of this machine's cores, what all workers took if each took what the first did."""
    config = {"model": model, "batch_size": BATCH, "steps": steps}
    began, busy = time.monotonic(), None
    try:
        ran = hosts.train(PROGRAM, config, plan.execution)
    except (UserError, JobFailed) as error:
        row = replace(row, failed=str(error) or repr(error))
    else:
        row, took = with_measured(row, ran, beside), ran.metrics
        busy = plan.mesh.workers * took["cpu_seconds"] / took["train_seconds"] / cores()
    whole = None
    if row.measured_memory_bytes is not None:
        whole = (row.memory_bytes + beside) / (row.measured_memory_bytes + beside) - 1
    return {
        **vars(row),
        "mesh": str(row.mesh),
        "workers": plan.mesh.workers,
        "steps": steps,
        "seconds": round(time.monotonic() - began, 2),
        "busy": busy,
        "step_error": row.step_error,
        "within": row.within,
        "memory_error": whole,
        "part_error": row.memory_error,
    }


def _was_probed(plan: TrainingPlan, probed: Found) -> bool:
    own = f"{plan.mesh} by {plan.micro}"
    return (own if own_part(plan) == "replicated" else f"{own_part(plan)} on {own}") in probed


def line(row: Found) -> str:
    """A row, as it is printed."""
    name = f"  {row['model']:11} {row['key']:42} {'probed' if row['probed'] else '':7}"
    if row["measured_step_s"] is None:
        return f"{name} predicted {row['step_s'] * 1e3:7.1f} ms; {row['failed']}"
    held = row["memory_error"]
    result = "not measured" if held is None else f"{held:+6.1%} (part {row['part_error']:+.0%})"
    return (
        f"{name} predicted {row['step_s'] * 1e3:7.1f} ms, measured {row['measured_step_s'] * 1e3:7.1f} ms "
        f"{row['step_error']:+7.1%} {'in' if row['within'] else 'outside':8} memory {result}, busy {row['busy']:.0%}"
    )


def judge(rows: Sequence[Found]) -> Found:
    """Of all rows that ran, and of those that were not probed. ``tau``: the mean over models."""
    ran = [row for row in rows if row["measured_step_s"] is not None]
    if not ran:
        return {"rows": len(rows), "ran": 0}
    new = [row for row in ran if not row["probed"]]
    taus = []
    for model in dict.fromkeys(row["model"] for row in ran):
        mine = [row for row in ran if row["model"] == model]
        if len(mine) >= 3:  # else there is no order to speak of
            taus.append(float(kendalltau([r["step_s"] for r in mine], [r["measured_step_s"] for r in mine]).statistic))

    def mean(name: str, of: Sequence[Found]) -> float | None:
        results = [abs(row[name]) for row in of if row[name] is not None]
        return float(np.mean(results)) if results else None

    return {
        "rows": len(rows),
        "ran": len(ran),
        "mean_error": mean("step_error", ran),
        "mean_error_not_probed": mean("step_error", new),
        "median_error": float(np.median([abs(row["step_error"]) for row in ran])),
        "worst_error": float(np.max([abs(row["step_error"]) for row in ran])),
        "cover": float(np.mean([row["within"] for row in ran])),
        "tau": float(np.mean(taus)) if taus else None,
        "memory_error": mean("memory_error", ran),
        "memory_part_error": mean("part_error", ran),
        "busy": float(np.median([row["busy"] for row in ran])),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="one row of one model")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--workers", type=int, default=WORKERS, help="of a mesh at most")
    parser.add_argument("--only", default="", help="rows with this in their names")
    parser.add_argument("--minutes", type=float, default=30.0, help="no row is begun that would not end by then")
    parser.add_argument("--calibrate", type=float, default=100.0, help="seconds of probes for each model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began, models, learnt, calibrate_s = time.monotonic(), options.models.split(","), LEARNT, options.calibrate
    wanted = [plan for plan in plans(options.workers) if options.only in key_of(plan)]
    if options.smoke:
        models, learnt, calibrate_s, options.out = ["mlp"], (), 0.0, None
        wanted = [plan_of("", Mesh(shard=4), BATCH, MICRO)]
    settings = {
        "emulated": f"compute paced, {COUNT} hosts of {EACH} workers, links of {GBIT:g} Gbit/s",
        "batch": BATCH,
        "micro": MICRO,
        "seed": options.seed,
    }
    until = began + 60 * options.minutes
    return ended(lambda: run(models, wanted, settings, until, calibrate_s, learnt, options.out))


def run(
    models: Sequence[str],
    wanted: Sequence[TrainingPlan],
    settings: Found,
    until: float,
    calibrate_s: float,
    learnt: Sequence[str],
    out: Path | None,
) -> int:
    """All of it, as far as there is time; the exit code."""
    kept = Kept.begun(settings, out)
    for model in models:
        if model not in kept.facts:
            kept.facts[model] = predict(model, wanted, calibrate_s, learnt)
            kept.write()
        if unknown := [key for key in map(key_of, wanted) if key not in kept.facts[model]["predicted"]]:
            raise UserError("all rows are predicted before any is measured", unknown[0], "use another --out")
        if not kept.left(model):
            continue
        with tempfile.TemporaryDirectory() as folder, Hosts(COUNT, f"{GBIT:g}gbit", Path(folder), EACH) as hosts:
            config = {"model": model, "batch_size": BATCH, "steps": 2}
            warm = plan_of("", Mesh(data=COUNT * EACH), BATCH, MICRO)
            hosts.train(PROGRAM, config, warm.execution)  # the first on a host takes longer
            measure(model, kept, wanted, hosts, settings["seed"], until)
    kept.write()
    whole = judge(kept.rows)
    print(json.dumps(whole, indent=1))
    return 0 if whole["ran"] else 1


if __name__ == "__main__":
    sys.exit(main())
