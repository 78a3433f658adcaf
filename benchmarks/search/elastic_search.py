"""Does it pay to hand workers on to the trials that deserve them? Simulated; 64 GPUs.

Trials: lcbench's learning curves with step times that the authors of Pollux measured (``elastic_model.py``); a second
of lcbench stands for a minute on one GPU. Objectives: validation error, and training time on one GPU, so that GPUs
never change a trial's result. A study has 64 random configurations, one for each GPU, as the studies of RASDA and
RubberBand have a fixed number; early stopping by ``asha`` as elastune has it, the same for all unless it says "plain":
ranks alone, no forecasts.

- static: every trial has 1, 2, 4 or 8 GPUs, those freed go to the next trial. The best number in hindsight counts.
- double: RASDA's rule, survivors double at every rung; from 1, 2 or 4 GPUs, the best in hindsight counts.
- steepest, short_first: ``elastune.tuning.study.rebalancer``, as ``--allocation`` names it, which knows nothing of a
  trial but what its reports tell. Each trial has from 1 GPU to all of them: nothing is chosen in hindsight.
- without ...: short_first with one of its two parts as steepest has it; with batches: with ``by_batch``.

Figure of merit: seconds until fully trained trials cover .8, .9, .95 and .98 of the hypervolume that all 64 would, and
the GPU-hours used by then (of GPUs that trials held); "end": until the whole study is over. Ratios are paired by seed,
the best of a family is that with the smallest median of a case and level. steepest was chosen on seeds 0 to 7,
short_first on 500 and 501; the seeds here begin at 700, by whose first four ``by_batch`` was left out.

    python -m benchmarks.search.elastic_search                       # 3 instances x 2 models x 8 seeds, all arms
    python -m benchmarks.search.elastic_search --families double,steepest,short_first --seeds 4
    python -m benchmarks.search.elastic_search --gpus 4 --trials 12 --families steepest,short_first   # a small machine
    python -m benchmarks.search.elastic_search --smoke               # one of each, seconds; writes nothing

A run that is cut keeps its studies in ``--out``, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common.kept import Rows, ended
from benchmarks.search.elastic_loop import Rule, Sharer, Study, points
from benchmarks.search.elastic_model import Model, Scaling
from benchmarks.search.sampler import INSTANCES, OBJECTIVES, TEN, Surrogate, machine, space, yardstick

from elastune.core.errors import UserError
from elastune.core.run import Config
from elastune.tuning.search.front import hypervolume
from elastune.tuning.search.halving import Halving, SuccessiveHalving
from elastune.tuning.search.objective import Floats
from elastune.tuning.search.schedule import ToTheEnd, levels
from elastune.tuning.search.suggester import Suggester
from elastune.tuning.study.allocate import Rules
from elastune.tuning.study.rebalancer import ALLOCATIONS, AllocationChoice, Broker
from elastune.tuning.study.trial_progress import HeldTrials, TrialProgress

GPUS = 64
TRIALS = 64
MODELS = ("imagenet", "cifar10")
LEVELS = (0.8, 0.9, 0.95, 0.98)
END = "end"  # beside levels: when the whole study is over
FIRST_SEED = 700
SCALE = 60.0  # seconds that a second of lcbench stands for
START_S, PAUSE_S = 10.0, 1.0
ELASTUNE = Halving()
PLAIN = Halving(promote_margin=-100.0, prune_margin=100.0)  # neither ever hopeful nor ever hopeless: ranks decide
RUNGS = tuple(levels(6, ELASTUNE.eta, 52))  # where both begin: a ninth of the training
RULES = Rules(min_residence_s=20.0, horizon_s=3600.0)
RESULT = Path(__file__).parents[1] / "results" / "elastic_search.json"

CHOICE = ALLOCATIONS["short_first"]


MakeSharer = Callable[[int], tuple[Sharer, HeldTrials | None]]
"""So many GPUs -> who shares them out, and who is held back."""


@dataclass(frozen=True)
class Arm:
    """Who stops trials, who shares GPUs out, and who is held back."""

    halving: Halving
    sharer: MakeSharer


def rule(each: int, rungs: tuple[int, ...] = ()) -> MakeSharer:
    return lambda gpus: (Rule(gpus, min(each, gpus), rungs), None)


def ours(choice: AllocationChoice) -> MakeSharer:
    def make(gpus: int) -> tuple[Sharer, HeldTrials | None]:
        courses = choice.courses() if choice.from_journal else TrialProgress()
        rules = replace(RULES, least_gain=choice.least_gain)
        holding = HeldTrials(courses, choice.held, math.inf) if choice.held else None
        return Broker(gpus, rules, courses=courses), holding

    return make


ARMS: dict[str, Arm] = {
    **{f"static {n} plain": Arm(PLAIN, rule(n)) for n in (1, 2, 4, 8)},
    **{f"static {n}": Arm(ELASTUNE, rule(n)) for n in (1, 2, 4, 8)},
    **{f"double {n}": Arm(ELASTUNE, rule(n, RUNGS)) for n in (1, 2, 4)},
    **{name: Arm(ELASTUNE, ours(choice)) for name, choice in ALLOCATIONS.items()},
    "without holding": Arm(ELASTUNE, ours(replace(CHOICE, held=0.0))),
    "with batches": Arm(ELASTUNE, ours(replace(CHOICE, by_batch=True))),
    "without widening": Arm(ELASTUNE, ours(replace(CHOICE, least_gain=0.5))),
}
FAMILIES = {
    "static plain": tuple(name for name in ARMS if name.endswith("plain")),
    "static": tuple(f"static {n}" for n in (1, 2, 4, 8)),
    "double": tuple(f"double {n}" for n in (1, 2, 4)),
    **{name: (name,) for name in ARMS if name in ALLOCATIONS or name.startswith("with")},
}
"""What is compared: of each the arm that has the smallest median of seconds."""
OURS = tuple(ALLOCATIONS)
Case = dict[str, list[dict[str, Any]]]  # arm -> studies, by seed


def configurations(seed: int, trials: int) -> list[Config]:
    suggester = Suggester(space, OBJECTIVES, sampler="random", seed=seed)
    asked = [suggester.ask() for _ in range(trials)]
    return [dict(one.values) for one in asked if one is not None]


def one(model: Model, pool: Sequence[Config], arm: str, reference: Floats, gpus: int, stopping: str) -> dict[str, Any]:
    """Seconds and GPU-hours until each of ``LEVELS``, and to the study's end."""
    (sharer, holding), begun_s = ARMS[arm].sharer(gpus), time.process_time()
    schedule = SuccessiveHalving(OBJECTIVES, ARMS[arm].halving) if stopping == "asha" else ToTheEnd()
    study = Study(model, pool, schedule, sharer, gpus, holding)
    study.run()
    whole = hypervolume(np.array([model.curve(config)[-1] for config in pool]), reference)
    covered = [hypervolume(points(study.ends[:n]), reference) / whole for n in range(1, len(study.ends) + 1)]
    reached = {level: next((n for n, part in enumerate(covered) if part >= level), None) for level in LEVELS}
    return {
        "seconds": {str(k): math.inf if n is None else study.ends[n].at_s for k, n in reached.items()}
        | {END: study.now_s},
        "gpu_hours": {str(k): math.inf if n is None else study.ends[n].gpu_s / 3600 for k, n in reached.items()}
        | {END: study.gpu_s / 3600},
        "resizes": study.resizes,
        "held": study.held,
        "unended": study.unended,
        "cpu_s": round(time.process_time() - begun_s, 2),
    }


def spread(values: Sequence[float], digits: int = 2) -> dict[str, Any]:
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75], method="closest_observation")  # some may be infinite
    return {
        "median": round(float(middle), digits),
        "quartiles": [round(float(low), digits), round(float(high), digits)],
        "by_seed": [round(float(value), digits) for value in values],
    }


def best_of(case: Case, family: str, level: float | str) -> str:
    arms = [arm for arm in FAMILIES[family] if arm in case]
    return min(arms, key=lambda arm: statistics.median(one["seconds"][str(level)] for one in case[arm]))


def ratios(case: Case, family: str, mine: str, level: float | str) -> tuple[str, list[float], list[float]]:
    """The best arm of ``family``, and how many times the seconds and GPU-hours of ``mine`` it took, seed by seed."""
    best, key = best_of(case, family, level), str(level)
    pairs = list(zip(case[best], case[mine], strict=True))
    seconds = [ratio(other["seconds"][key], one["seconds"][key]) for other, one in pairs]
    return best, seconds, [ratio(other["gpu_hours"][key], one["gpu_hours"][key]) for other, one in pairs]


def ratio(other: float, mine: float) -> float:
    """Of two that never got there neither is ahead."""
    return 1.0 if other == mine else other / mine


def compared(cases: dict[str, Case]) -> dict[str, Any]:
    """Each of ours against the best of every other family: per case, and over all cases' studies, by level."""
    results: dict[str, Any] = {}
    for mine in (arm for arm in OURS if all(arm in case for case in cases.values())):
        others = [f for f in FAMILIES if f != mine and all(set(FAMILIES[f]) <= case.keys() for case in cases.values())]
        for family in others:
            for level in (*LEVELS, END):
                values = {name: ratios(case, family, mine, level) for name, case in cases.items()}
                results.setdefault(mine, {}).setdefault(family, {})[str(level)] = {
                    "times_its_seconds": spread([r for _, seconds, _ in values.values() for r in seconds]),
                    "times_its_gpu_hours": spread([r for _, _, hours in values.values() for r in hours]),
                    "best": {name: best for name, (best, _, _) in values.items()},
                    "by_case": {name: spread(seconds)["median"] for name, (_, seconds, _) in values.items()},
                }
    return results


def show(found: dict[str, Any], what: str) -> None:
    for mine, families in found.items():
        for family, levels_ in families.items():
            cells = []
            for level, cell in levels_.items():
                seconds, hours = cell["times_its_seconds"], cell["times_its_gpu_hours"]["median"]
                low, high = seconds["quartiles"]
                cells.append(f"{level}: {seconds['median']:.2f} ({low:.2f}-{high:.2f}), {hours:.2f} h")
            print(f"{what:18} {family:16} x {mine:12} {'   '.join(cells)}", flush=True)


def run(data: Path, options: argparse.Namespace) -> int:
    for needed in ("hpo/lcbench/model.onnx", "pollux_traces/imagenet/scalability.csv"):
        if not (data / needed).is_file():
            rule = "the lcbench surrogate and Pollux's traces must be there"
            raise UserError(rule, data / needed, "give --data DIR or set ELASTUNE_DATA")
    settings = {name: getattr(options, name) for name in ("gpus", "trials", "stopping", "scale", "start_s")}
    rows = Rows(None if options.smoke else options.out, settings)
    sizes = (2_000, 2) if options.smoke else (200_000, 60)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    arms = [arm for family in options.families for arm in FAMILIES[family]]
    cases: dict[str, Case] = {}
    for instance in options.instances:
        surrogate = Surrogate(data / "hpo" / "lcbench", instance)
        reference = np.array(yardstick(surrogate, instance, *sizes)["reference"])
        for name in options.models:
            scaling = Scaling(data / "pollux_traces", name)
            model = Model(surrogate, scaling, start_s=options.start_s, resize_pause_s=PAUSE_S, scale=options.scale)
            case = cases[f"{instance} {name}"] = {arm: [] for arm in arms}
            for seed in seeds:
                pool = configurations(seed, options.trials)
                for arm in arms:
                    simulate = partial(one, model, pool, arm, reference, options.gpus, options.stopping)
                    case[arm].append(rows.of(f"{instance} {name} {arm} {seed}", simulate))
            show(compared({"": case}), f"{instance} {name}")
    rows.told = {
        "measured": "simulated: curves of a surrogate, measured scaling; see the file's head",
        "seeds": list(seeds),
        "goal": {"static": 2.0, "double": 1.3},
        "times_ours": compared(cases),
        "machine": machine(),
    }
    rows.write()
    show(rows.told["times_ours"], "all cases")
    return 0


def names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """A list on the command line, of ``known`` names."""

    def read(text: str) -> tuple[str, ...]:
        results = tuple(name.strip() for name in text.split(","))
        if unknown := [name for name in results if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]}: known are {', '.join(known)}")
        return results

    return read


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("ELASTUNE_DATA", "data")))
    parser.add_argument("--smoke", action="store_true", help="a few seconds; writes nothing")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--gpus", type=int, default=GPUS)
    parser.add_argument("--trials", type=int, default=TRIALS, help="of a study")
    parser.add_argument("--stopping", default="asha", choices=("asha", "none"))
    parser.add_argument("--scale", type=float, default=SCALE, help="seconds that a second of lcbench stands for")
    parser.add_argument("--start-s", type=float, default=START_S, help="until a trial that begins, or goes on, trains")
    parser.add_argument("--instances", type=names(TEN), default=INSTANCES, metavar="ID,ID,...")
    parser.add_argument("--models", type=names(MODELS), default=MODELS, metavar="NAME,...")
    parser.add_argument("--families", type=names(tuple(FAMILIES)), default=tuple(FAMILIES), metavar="NAME,...")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.smoke:
        options.instances, options.models, options.seeds = INSTANCES[:1], MODELS[:1], 1
        options.families = ("double", *OURS)
    return ended(lambda: run(options.data, options))


if __name__ == "__main__":
    raise SystemExit(main())
