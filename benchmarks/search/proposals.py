"""What does a proposal of the Gaussian process cost, by how many trials were told and how many run?

Histories: trials on the lcbench surrogates (data and space as in ``sampler.py``, two objectives), chosen by TPE, so
that their fronts look like those of a search. Measured: seconds of CPU for one proposal after 20, 50, 100 and 200
told trials, with none and with seven others running. ``first``: with its fits; ``next``: another one before anything
more is told, which shares them.

    OMP_NUM_THREADS=1 python -m benchmarks.search.proposals            # some minutes; writes results/proposals.json
    OMP_NUM_THREADS=1 python -m benchmarks.search.proposals --smoke    # some seconds; writes nothing
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common.result_file import write_result
from benchmarks.search.sampler import INSTANCES, OBJECTIVES, PARAMETERS, Surrogate, machine, space

from elastune.core.errors import UserError
from elastune.core.journal.records import TrialFinished
from elastune.tuning.search.gaussian import forget
from elastune.tuning.search.suggester import Suggester

TOLD, RUNNING = (20, 50, 100, 200), (0, 7)
RESULT = Path(__file__).parents[1] / "results" / "proposals.json"


def history(surrogate: Surrogate, expected_count: int, running: int, sampler: str, seed: int) -> Suggester:
    """A search of ``sampler`` that was told so many trials of TPE's, while others run."""
    source = Suggester(space, OBJECTIVES, sampler="tpe", seed=seed)
    search = Suggester(space, OBJECTIVES, sampler=sampler, seed=seed)
    for at in range(expected_count + running):
        suggestion = source.ask()
        assert suggestion is not None
        search.adopt(suggestion.params)
        if at < expected_count:
            point = surrogate(np.array([[suggestion.values[p.name] for p in PARAMETERS]]))[0]
            values = {o.name: float(v) for o, v in zip(OBJECTIVES, point, strict=True)}
            for each in (source, search):
                each.tell(at, TrialFinished(at, "complete", values=values))
    return search


def cost(search: Suggester) -> float:
    """Seconds of CPU of a proposal, which is then forgotten."""
    start = time.process_time()
    suggestion = search.ask()
    took = time.process_time() - start
    assert suggestion is not None
    search.drop(suggestion.number)
    return took


def told_of(seconds: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(seconds), 3), "max": round(max(seconds), 3), "of": len(seconds)}


def run(folder: Path, instances: tuple[str, ...], values: tuple[int, ...], seeds: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    cost(history(Surrogate(folder, instances[0]), 12, 0, "gp", 0))  # what is imported on first use
    for n in values:
        for running in RUNNING:
            firsts: list[float] = []
            nexts: list[float] = []
            for instance in instances:
                surrogate = Surrogate(folder, instance)
                for seed in range(seeds):
                    search = history(surrogate, n, running, "gp", seed)
                    forget()
                    firsts.append(cost(search))
                    nexts.append(cost(search))
            row = {"first": told_of(firsts), "next": told_of(nexts)}
            results[f"{n} told, {running} running"] = row
            print(f"{n} told, {running} running: {row}", flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder that holds model.onnx and encoding.json")
    parser.add_argument("--smoke", action="store_true", help="some seconds; writes nothing")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    folder = options.data or Path(os.environ.get("ELASTUNE_DATA", "data")) / "hpo" / "lcbench"
    try:
        if not (folder / "model.onnx").is_file():
            raise UserError("the lcbench surrogate must be there", folder, "give --data DIR or set ELASTUNE_DATA")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    if options.smoke:
        run(folder, INSTANCES[:1], TOLD[:1], 1)
        return 0
    results = {
        "measured": "seconds of CPU of a proposal of the Gaussian process, two objectives, seven parameters",
        "machine": machine(),
        "results": run(folder, INSTANCES, TOLD, options.seeds),
    }
    write_result(options.out, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
