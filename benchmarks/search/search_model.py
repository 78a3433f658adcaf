"""What the planner takes for a search: the price of parallel proposals and uneven run times, early stopping's saving.

Simulated studies: elastune's own ``Suggester`` (TPE) and stopping rules on the lcbench surrogate of ``sampler.py``;
trainings take the surrogate's time on a virtual clock. Nothing is trained.

- **Crowding.** One objective, error after 52 epochs. A study that runs ``width`` trainings at once needs more of them
  than one that makes its proposals one after another, to where the latter's median best error is after 16 and 32
  trainings: ``1 + crowding (width - 1)`` times as many. Fitted by least squares over instances and widths, once where
  a finished training is replaced at once, once where a whole generation is waited for; intervals (80 %) are of drawn
  seeds. A level that 96 trainings did not reach counts as reached by the 96th, so that crowding is rather too small.
- **Blind.** Never more than random search needs to the same levels: the median over instances and levels.
- **Genetic.** Trainings that a genetic search in Cray's manner (demes that wait for their generations, genes drawn
  afresh) needs to where random search is in the median after 16 and 32 trainings, over those: median over instances
  and levels. One that has not come there by 96 trainings counts as if it had then.
- **Variation.** The coefficient of variation of run times: of those that studies had, and of random configurations of
  one batch size (128), as in a plan, where all trainings have one batch. Rounds by ``plan.search_time`` beside the mean
  makespan of 400 draws (gamma, list scheduling, or generations), cv .2 to .8, 4 to 64 at once.
- **Short first.** Whether a study gains where the first ten proposals, which rest on no result, are tried in the order
  of their lengths, which are taken to be known exactly, the most that an estimate could bring: seconds until the median
  best error of ten trainings, and of 24, over those in the order of the proposals; geometric means, 95 % intervals of
  drawn seeds.
- **Early stopping.** Two objectives, eight at once: full trainings' worth of epochs until ASHA has the hypervolume that
  40 full trainings have, over 40; by instance the median over seeds, and the median of all.

Parts that the results file already has are not run again.

    python -m benchmarks.search.search_model           # about 20 minutes of one core; writes results/search_model.json
    python -m benchmarks.search.search_model --smoke   # some seconds, writes nothing
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common.result_file import write_result
from benchmarks.search.fidelity_loop import Study as StoppingStudy
from benchmarks.search.multi_fidelity import yardstick
from benchmarks.search.sampler import (
    EPOCHS,
    INSTANCES,
    OBJECTIVES,
    PARAMETERS,
    Floats,
    Surrogate,
    decode,
    machine,
    space,
)

from elastune.core.errors import UserError
from elastune.core.journal.records import TrialFinished
from elastune.core.plan.cluster_plan import SearchModel
from elastune.tuning.search.front import hypervolume
from elastune.tuning.search.objective import parse_objectives
from elastune.tuning.search.registry import make_schedule
from elastune.tuning.search.suggester import Suggester

RUNS = (16, 32)  # of a search whose proposals follow one another
WIDTHS = (4, 16)
MOST = 96  # trainings of a study
STOPPED_AT = 40  # full trainings
FIRST = 10  # proposals of TPE that rest on no result
DRAWS = 400
RANDOM, RANDOMS = 600, 100  # configurations of a random search, and such searches
PARTS = (
    "asynchronous",
    "generations",
    "variation",
    "blind",
    "genetic",
    "variation_one_batch",
    "makespans",
    "asha",
    "short_first",
)
BRED = "genetic:demes=2,population=4,mutation=0.05,crossover=0.33,migration=5,tournament=4,step=0,steady=0"
ERROR = parse_objectives({"error": "min"})
RESULT = Path(__file__).parents[1] / "results" / "search_model.json"


def study(
    surrogate: Surrogate, width: int, generations: bool, seed: int, most: int, sampler: str = "tpe"
) -> tuple[Floats, Floats]:
    """Best errors after each completed training, and the seconds of each; ``width`` of them at once."""
    suggester = Suggester(space, ERROR, sampler=sampler, seed=seed)
    running: list[tuple[float, int, float, float]] = []  # when it ends, its number, its error and seconds
    errors, times, now = list[float](), list[float](), 0.0
    while len(errors) < most:
        while len(running) < width:
            suggestion = suggester.ask()
            assert suggestion is not None
            error, seconds = surrogate(np.array([[suggestion.values[p.name] for p in PARAMETERS]]))[0]
            heapq.heappush(running, (now + max(0.0, seconds), suggestion.number, error, seconds))
        for _ in range(len(running) if generations else 1):
            now, number, error, seconds = heapq.heappop(running)
            suggester.tell(number, TrialFinished(number, "complete", values={"error": float(error)}))
            errors.append(error)
            times.append(seconds)
    return np.minimum.accumulate(errors[:most]), np.array(times[:most])


def crowding(curves: dict[str, dict[int, Floats]]) -> float:
    """Least squares over instances, widths and runs. ``curves``: by instance and width, one row a seed."""
    wider, needed = list[float](), list[float]()
    for by_width in curves.values():
        alone = np.median(by_width[1], axis=0)
        for width, rows in by_width.items():
            if width == 1:
                continue
            for runs in RUNS:
                if runs > len(alone):
                    continue
                there = np.flatnonzero(np.median(rows, axis=0) <= alone[runs - 1])
                factor = (there[0] + 1 if len(there) else len(alone)) / runs  # at least that, where it is not reached
                wider.append(width - 1)
                needed.append(factor - 1)
    x, y = np.array(wider), np.array(needed)
    return float(max(0.0, x @ y / (x @ x)))


def fitted(curves: dict[str, dict[int, Floats]], rng: np.random.Generator, draws: int = 200) -> dict[str, Any]:
    """Crowding, with the interval of seeds drawn anew."""
    drawn = []
    for _ in range(draws):
        again = {
            instance: {width: rows[rng.integers(len(rows), size=len(rows))] for width, rows in by_width.items()}
            for instance, by_width in curves.items()
        }
        drawn.append(crowding(again))
    low, high = np.quantile(drawn, (0.1, 0.9))
    return {"crowding": round(crowding(curves), 4), "interval_80": [round(float(low), 4), round(float(high), 4)]}


def makespans(rng: np.random.Generator, draws: int) -> list[dict[str, Any]]:
    """Rounds by the formula beside simulated ones, in mean training times."""
    rows = []
    for cv in (0.2, 0.4, 0.8):
        for runs, width in ((128, 4), (128, 16), (128, 64), (32, 16), (256, 32)):
            for generations in (False, True):
                results = [_makespan(rng.gamma(1 / cv**2, cv**2, runs), width, generations) for _ in range(draws)]
                model = SearchModel(runs, 1.0, 1, 0.0, 0.0, variation=cv, generations=generations)
                value = float(model.rounds(np.array([float(width)]))[0])
                simulated = statistics.fmean(results)
                row = {"cv": cv, "runs": runs, "width": width, "generations": generations}
                row |= {"simulated": round(simulated, 3), "formula": round(value, 3)}
                rows.append({**row, "error": round(value / simulated - 1, 4)})
    return rows


def _makespan(times: Floats, width: int, generations: bool) -> float:
    if generations:
        return float(sum(times[at : at + width].max() for at in range(0, len(times), width)))
    free = [0.0] * width
    for each in times:
        heapq.heapreplace(free, free[0] + each)
    return max(free)


def stopping(folder: Path, instances: tuple[str, ...], seeds: int, full: int) -> dict[str, Any]:
    """Full trainings' worth that ASHA needs over ``full``, by instance."""
    results: dict[str, Any] = {}
    for instance in instances:
        stick, shares, started = yardstick(folder, instance), list[float](), list[float]()
        for seed in range(seeds):
            plain = StoppingStudy(stick.surrogate, "tpe", make_schedule("none", OBJECTIVES, seed), seed).run(full)
            level = hypervolume(np.array(plain.points).reshape(-1, 2), stick.reference)
            asha = StoppingStudy(stick.surrogate, "tpe", make_schedule("asha", OBJECTIVES, seed), seed).run(full)
            at = [
                spent
                for n, spent in enumerate(asha.spent, 1)
                if hypervolume(np.array(asha.points[:n]), stick.reference) >= level
            ]
            shares.append(min([*at, float(full)]) / full)  # one that does not come there counts as no saving
            started.append(asha.asked)
        results[instance] = {
            "share": round(statistics.median(shares), 3),
            "by_seed": [round(each, 3) for each in shares],
            "trials_started": statistics.median(started),
        }
        print(instance, results[instance], flush=True)
    return results


def blind(folder: Path, instances: tuple[str, ...], seeds: int, runs: tuple[int, ...]) -> dict[str, Any]:
    """Trainings that random search needs to where ``runs`` proposals of one after another come, over ``runs``."""
    rng, factors = np.random.default_rng(1), list[float]()
    for instance in instances:
        surrogate = Surrogate(folder, instance)
        alone = np.median([study(surrogate, 1, False, seed, max(runs))[0] for seed in range(seeds)], axis=0)
        random = blindly(surrogate, rng)
        for each in runs:
            there = np.flatnonzero(random <= alone[each - 1])
            factors.append(round((float(there[0]) + 1 if len(there) else RANDOM) / each, 2))
    return {"factor": statistics.median(factors), "all": factors}


def blindly(surrogate: Surrogate, rng: np.random.Generator) -> Floats:
    """The median best error of random searches after each training."""
    errors = np.stack([surrogate(decode(rng.random((RANDOM, len(PARAMETERS)))))[:, 0] for _ in range(RANDOMS)])
    return np.asarray(np.median(np.minimum.accumulate(errors, axis=1), axis=0))


def bred(folder: Path, instances: tuple[str, ...], seeds: int, runs: tuple[int, ...], most: int) -> dict[str, Any]:
    """Trainings of a genetic search to where random search comes in ``runs``, over ``runs``, in the median of seeds."""
    rng, factors = np.random.default_rng(3), dict[str, list[float]]()
    for instance in instances:
        surrogate = Surrogate(folder, instance)
        random = blindly(surrogate, rng)
        curves = [study(surrogate, 1, False, seed, most, BRED)[0] for seed in range(seeds)]
        for each in runs:
            there = [int((curve > random[each - 1]).sum()) + 1 for curve in curves]
            factors.setdefault(instance, []).append(round(statistics.median(min(one, most) for one in there) / each, 2))
    every = [factor for each in factors.values() for factor in each]
    return {"factor": round(statistics.median(every), 2), "sampler": BRED, **factors}


def one_batch(folder: Path, instances: tuple[str, ...]) -> dict[str, Any]:
    """The coefficient of variation of random trainings' seconds with one batch size."""
    rng, result = np.random.default_rng(2), dict[str, float]()
    for instance in instances:
        rows = decode(rng.random((RANDOM, len(PARAMETERS))))
        rows[:, [p.name for p in PARAMETERS].index("batch_size")] = 128
        seconds = Surrogate(folder, instance)(rows)[:, 1]
        result[instance] = round(float(seconds.std() / seconds.mean()), 3)
    return {"median": statistics.median(result.values()), **result}


def ordered(surrogate: Surrogate, width: int, seed: int, most: int, short_first: bool) -> list[tuple[float, float]]:
    """When each training ended, and its error; the first ``FIRST`` configurations are proposed at once."""
    suggester = Suggester(space, ERROR, sampler="tpe", seed=seed)

    def proposed() -> tuple[float, int, float]:
        suggestion = suggester.ask()
        assert suggestion is not None
        error, seconds = surrogate(np.array([[suggestion.values[p.name] for p in PARAMETERS]]))[0]
        return max(0.0, float(seconds)), suggestion.number, float(error)

    first = [proposed() for _ in range(FIRST)]
    waiting = sorted(first) if short_first else first
    running, ended, now = list[tuple[float, int, float]](), list[tuple[float, float]](), 0.0
    while len(ended) < most:
        while len(running) < width:
            seconds, number, error = waiting.pop(0) if waiting else proposed()
            heapq.heappush(running, (now + seconds, number, error))
        now, number, error = heapq.heappop(running)
        suggester.tell(number, TrialFinished(number, "complete", values={"error": error}))
        ended.append((now, error))
    return ended


def short_first(folder: Path, instances: tuple[str, ...], seeds: int, most: int) -> dict[str, Any]:
    """By how many run at once: time to two levels, short ones first over as proposed."""
    results: dict[str, Any] = {}
    for width in (2, 4, 8):
        ratios, rng = list[list[float]](), np.random.default_rng(4)
        for instance in instances:
            surrogate = Surrogate(folder, instance)
            pairs = [[ordered(surrogate, width, seed, most, how) for how in (False, True)] for seed in range(seeds)]
            levels = [statistics.median(min(e for _, e in plain[:n]) for plain, _ in pairs) for n in (FIRST, 24)]
            for plain, short in pairs:
                ratios.append([float(np.log(_until(short, level) / _until(plain, level))) for level in levels])
        logs = np.array(ratios)
        drawn = np.array([logs[rng.integers(len(logs), size=len(logs))].mean(axis=0) for _ in range(1000)])
        result = np.exp(np.vstack([logs.mean(axis=0), np.quantile(drawn, (0.025, 0.975), axis=0)])).round(3).T.tolist()
        results[str(width)] = {"to_first_ten": result[0], "to_24": result[1], "studies": len(logs)}
    return results


def _until(ended: list[tuple[float, float]], level: float) -> float:
    """Seconds until the level; until the end where it is not reached."""
    return next((at for at, error in ended if error <= level), ended[-1][0])


def crowded(folder: Path, instances: tuple[str, ...], seeds: int, most: int, widths: tuple[int, ...]) -> dict[str, Any]:
    """Crowding where whoever is done is replaced, and by generations; and how lengths of trainings varied."""
    curves: dict[bool, dict[str, dict[int, Floats]]] = {False: {}, True: {}}
    times = []
    for instance in instances:
        surrogate = Surrogate(folder, instance)
        for generations in (False, True):
            by_width = curves[generations][instance] = {}
            for width in (1, *widths):
                if generations and width == 1:
                    by_width[1] = curves[False][instance][1]  # one at a time is a generation of one
                    continue
                results = [study(surrogate, width, generations, seed, most) for seed in range(seeds)]
                by_width[width] = np.array([errors for errors, _ in results])
                times += [seconds for _, seconds in results]
                best = statistics.median(float(errors[-1]) for errors, _ in results)
                print(f"{instance}, {width} at once, generations {generations}: {best:.4f}", flush=True)
    rng = np.random.default_rng(0)
    spreads = [float(each.std() / each.mean()) for each in times]
    return {
        "asynchronous": fitted(curves[False], rng),
        "generations": fitted(curves[True], rng),
        "variation": {"median": round(statistics.median(spreads), 3), "most": round(max(spreads), 3)},
    }


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    instances, seeds, most, widths, draws, full = INSTANCES, options.seeds, MOST, WIDTHS, DRAWS, STOPPED_AT
    runs: tuple[int, ...] = RUNS
    if options.smoke:
        instances, seeds, most, widths, draws, full = INSTANCES[:1], 2, 24, (4,), 20, 4
        runs = RUNS[:1]
    known = json.loads(options.out.read_text()) if options.out.exists() and not options.smoke else {}
    results: dict[str, Any] = {
        "measured": "simulated studies on the lcbench surrogate, see the file's head; nothing was trained",
        "machine": machine(),
        "seeds": seeds,
        "epochs": EPOCHS,
        **{name: known[name] for name in PARTS if name in known},
    }
    if not set(PARTS[:3]) <= set(known):
        results |= crowded(folder, instances, seeds, most, widths)
    for name, part in (
        ("blind", lambda: blind(folder, instances, seeds, runs)),
        ("genetic", lambda: bred(folder, instances, 4 * seeds, runs, most)),
        ("variation_one_batch", lambda: one_batch(folder, instances)),
        ("makespans", lambda: makespans(np.random.default_rng(0), draws)),
        ("asha", lambda: stopping(folder, instances, seeds, full)),
        ("short_first", lambda: short_first(folder, instances, seeds, min(most, STOPPED_AT))),
    ):
        if name not in known:
            results[name] = part()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder that holds model.onnx and encoding.json")
    parser.add_argument("--smoke", action="store_true", help="some seconds; writes nothing")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    folder = options.data or Path(os.environ.get("ELASTUNE_DATA", "data")) / "hpo" / "lcbench"
    try:
        if not (folder / "model.onnx").is_file():
            raise UserError("the lcbench surrogate must be there", folder, "give --data DIR or set ELASTUNE_DATA")
        result = run(folder, options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps({name: result[name] for name in PARTS if name != "makespans"}, indent=1))
    if not options.smoke:
        write_result(options.out, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
