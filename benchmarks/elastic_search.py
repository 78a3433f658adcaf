"""Does it pay to hand workers on to the trials that deserve them? Simulated; 64 GPUs.

Trials: lcbench's learning curves with step times that the authors of Pollux measured (``elastic_model.py``); a second
of lcbench stands for a minute on one GPU. Objectives: validation error, and training time on one GPU, so that GPUs
never change a trial's result. A study has 64 random configurations, one for each GPU, as the studies of RASDA and
RubberBand have a fixed number; early stopping by ``asha`` as elastune has it, the same for all unless it says "plain":
ranks alone, no forecasts.

- static: every trial has 1, 2, 4 or 8 GPUs, those freed go to the next trial. The best number in hindsight counts.
- double: RASDA's rule, survivors double at every rung; from 1, 2 or 4 GPUs, the best counts.
- broker: ``elastune.study.allocation``, which knows nothing of a trial but what its reports tell. Each trial has
  from 1 GPU to all of them: nothing is chosen in hindsight.

Figure of merit: seconds until fully trained trials cover 0.95 of the hypervolume that all 64 would, and the GPU-hours
used by then (of GPUs that trials held). Ratios are paired by seed. The broker's settings were chosen on seeds 0 to 7;
the seeds here begin at 300.

    python benchmarks/elastic_search.py          # 3 instances x 2 models x 8 seeds
    python benchmarks/elastic_search.py --smoke  # one of each, seconds; writes nothing
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from elastic_loop import Rule, Sharer, Study, points
from elastic_model import Model, Scaling
from sampler import INSTANCES, OBJECTIVES, Surrogate, best_known, machine, space

from elastune.core.errors import UserError
from elastune.core.run import Config
from elastune.search.analysis.front import hypervolume
from elastune.search.samplers.suggest import Suggester
from elastune.search.space.objective import Floats
from elastune.search.stopping.halving import Halving, SuccessiveHalving
from elastune.search.stopping.rungs import levels
from elastune.study.allocation.allocate import Rules
from elastune.study.allocation.allocator import Broker

GPUS = 64
TRIALS = 64
MODELS = ("imagenet", "cifar10")
GOAL = 0.95
FIRST_SEED = 300
SCALE = 60.0  # seconds that a second of lcbench stands for
START_S, PAUSE_S = 10.0, 1.0
ELASTUNE = Halving()
PLAIN = Halving(promote_margin=-100.0, prune_margin=100.0)  # neither ever hopeful nor ever hopeless: ranks decide
RUNGS = tuple(levels(6, ELASTUNE.eta, 52))  # where both begin: a ninth of the training
RULES = Rules(min_residence_s=20.0, horizon_s=3600.0, least_gain=0.5)
RESULT = Path(__file__).parent / "results" / "elastic_search.json"

ARMS: dict[str, tuple[Halving, Callable[[], Sharer]]] = {
    **{f"static {n}, plain": (PLAIN, lambda n=n: Rule(GPUS, n)) for n in (1, 2, 4, 8)},
    **{f"static {n}": (ELASTUNE, lambda n=n: Rule(GPUS, n)) for n in (1, 2, 4, 8)},
    **{f"double {n}": (ELASTUNE, lambda n=n: Rule(GPUS, n, RUNGS)) for n in (1, 2, 4)},
    "broker": (ELASTUNE, lambda: Broker(GPUS, RULES)),
}
FAMILIES = {
    "static, plain": tuple(name for name in ARMS if name.endswith("plain")),
    "static": tuple(f"static {n}" for n in (1, 2, 4, 8)),
    "one GPU each": ("static 1",),
    "double": tuple(f"double {n}" for n in (1, 2, 4)),
    "broker": ("broker",),
}
"""What is compared: of each the arm that has the smallest median of seconds."""


def configurations(seed: int) -> list[Config]:
    suggester = Suggester(space, OBJECTIVES, sampler="random", seed=seed)
    asked = [suggester.ask() for _ in range(TRIALS)]
    return [dict(one.values) for one in asked if one is not None]


def one(model: Model, pool: Sequence[Config], arm: str, reference: Floats) -> dict[str, float]:
    """Seconds and GPU-hours until the goal, and to the study's end."""
    halving, sharer = ARMS[arm]
    study = Study(model, pool, SuccessiveHalving(OBJECTIVES, halving), sharer(), GPUS)
    study.run()
    goal = GOAL * hypervolume(np.array([model.curve(config)[-1] for config in pool]), reference)
    covered = (n for n in range(1, len(study.ends) + 1) if hypervolume(points(study.ends[:n]), reference) >= goal)
    reached = next(covered, None)
    return {
        "seconds": study.ends[reached - 1].at_s if reached else float("inf"),
        "gpu_hours": study.ends[reached - 1].gpu_s / 3600 if reached else float("inf"),
        "end_seconds": study.now_s,
        "end_gpu_hours": study.gpu_s / 3600,
        "resizes": study.resizes,
    }


def spread(values: Sequence[float], digits: int = 2) -> dict[str, Any]:
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return {
        "median": round(float(middle), digits),
        "quartiles": [round(float(low), digits), round(float(high), digits)],
        "by_seed": [round(float(value), digits) for value in values],
    }


def compared(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """The best arm of each family, and how much longer it took than the broker, seed by seed."""
    found: dict[str, Any] = {}

    def best_of(family: str) -> str:
        return min(FAMILIES[family], key=lambda arm: statistics.median(run["seconds"] for run in runs[arm]))

    for family in FAMILIES:
        best = best_of(family)
        pairs = list(zip(runs[best], runs[best_of("broker")], strict=True))
        found[family] = {
            "arm": best,
            "seconds": spread([run["seconds"] for run in runs[best]], 0),
            "gpu_hours": spread([run["gpu_hours"] for run in runs[best]], 1),
            "times_the_brokers_seconds": spread([run["seconds"] / ours["seconds"] for run, ours in pairs]),
            "times_the_brokers_gpu_hours": spread([run["gpu_hours"] / ours["gpu_hours"] for run, ours in pairs]),
        }
    return found


def by_arm(cases: dict[str, Any]) -> dict[str, Any]:
    """Times the broker's seconds of every arm that is used for all cases alike, chosen by nobody."""
    found: dict[str, list[float]] = {}
    for case in cases.values():
        for arm, runs in case["runs"].items():
            pairs = zip(runs, case["runs"]["broker"], strict=True)
            found.setdefault(arm, []).extend(run["seconds"] / ours["seconds"] for run, ours in pairs)
    return {arm: spread(ratios) for arm, ratios in found.items()}


def show(case: str, found: dict[str, Any]) -> None:
    for family, cell in found.items():
        seconds, hours = cell["seconds"]["median"], cell["gpu_hours"]["median"]
        times, more = cell["times_the_brokers_seconds"], cell["times_the_brokers_gpu_hours"]
        low, high = times["quartiles"]
        print(
            f"{case:18} {family:14} {cell['arm']:16} {seconds:9.0f} s {hours:8.1f} GPU-h   "
            f"{times['median']:5.2f} ({low:.2f}-{high:.2f}) x seconds, {more['median']:.2f} x GPU-hours of the broker",
            flush=True,
        )


def run(data: Path, options: argparse.Namespace) -> dict[str, Any]:
    instances, models, seeds, sizes = INSTANCES, MODELS, options.seeds, (200_000, 60)
    if options.smoke:
        instances, models, seeds, sizes = INSTANCES[:1], MODELS[:1], 1, (2_000, 2)
    cases: dict[str, Any] = {}
    ratios: dict[str, list[float]] = {family: [] for family in FAMILIES}
    for instance in instances:
        surrogate = Surrogate(data / "hpo" / "lcbench", instance)
        _, reference = best_known(surrogate, *sizes)
        for name in models:
            scaling = Scaling(data / "pollux_traces", name)
            model = Model(surrogate, scaling, start_s=START_S, resize_pause_s=PAUSE_S, scale=SCALE)
            runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
            for seed in range(FIRST_SEED, FIRST_SEED + seeds):
                pool = configurations(seed)
                for arm in ARMS:
                    runs[arm].append(one(model, pool, arm, reference))
            case = f"{instance} {name}"
            cases[case] = {"best": compared(runs), "runs": runs}
            for family, cell in cases[case]["best"].items():
                ratios[family] += cell["times_the_brokers_seconds"]["by_seed"]
            show(case, cases[case]["best"])
    return {
        "command": "OMP_NUM_THREADS=1 python benchmarks/elastic_search.py",
        "measured": "simulated: curves of a surrogate, measured scaling; see the file's head",
        "gpus": GPUS,
        "trials": TRIALS,
        "seeds": seeds,
        "goal": {"static": 2.0, "double": 1.3},
        "all_cases_times_the_brokers_seconds": {family: spread(found) for family, found in ratios.items()},
        "all_cases_by_arm_times_the_brokers_seconds": by_arm(cases),
        "machine": machine(),
        "cases": cases,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("ELASTUNE_DATA", "data")))
    parser.add_argument("--smoke", action="store_true", help="a few seconds; writes nothing")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    try:
        for needed in ("hpo/lcbench/model.onnx", "pollux_traces/imagenet/scalability.csv"):
            if not (options.data / needed).is_file():
                rule = "the lcbench surrogate and Pollux's traces must be there"
                raise UserError(rule, options.data / needed, "give --data DIR or set ELASTUNE_DATA")
        found = run(options.data, options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    for family, cell in found["all_cases_times_the_brokers_seconds"].items():
        low, high = cell["quartiles"]
        print(f"all cases: {family} took {cell['median']:.2f} ({low:.2f}-{high:.2f}) times the broker's seconds")
    if not options.smoke:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
