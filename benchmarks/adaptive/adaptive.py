"""Is it worth it to adapt the batch to the gradient noise scale while training? Against TUNED fixed batches.

A CNN of 21,286 parameters, SGD with momentum 0.9, on MNIST and Fashion-MNIST (50,000 images train, 10,000 validate).
Every method, a fixed batch or a policy, gets the same five trials of the first learning rate, one seed each; what its
trials find best on validation data is trained again on fresh seeds and judged on the untouched test set. Fixed batches
come with a constant and with a cosine-decayed learning rate, tuned apart.

Time is MODELLED, not measured: on one CPU large batches are not faster. ``adaptive_time.py`` says how a step of any
batch on 16 workers is computed from steps and reductions measured here (``--calibrate`` measures again; do that on a
quiet machine). Adaptive steps are taken to be 2 % longer.

    ELASTUNE_DATA=... python -m benchmarks.adaptive.adaptive --calibrate  # a minute; results/adaptive_calibration.json
    ELASTUNE_DATA=... python -m benchmarks.adaptive.adaptive              # results/adaptive.json and .png
    python -m benchmarks.adaptive.adaptive --smoke                        # a few trainings, writes nothing

Trainings are kept in ``--cache`` one by one: stopped, it goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.adaptive.adaptive_analysis import (
    StepSeconds,
    Verdict,
    at_most_workers,
    at_workers,
    row,
    sentence,
    table,
    verdict,
)
from benchmarks.adaptive.adaptive_figure import draw
from benchmarks.adaptive.adaptive_search import BATCHES, Chosen, Method, Size, fixed_methods, search
from benchmarks.adaptive.adaptive_time import calibrate, read
from benchmarks.common.result_file import write_result

from elastune.core.errors import UserError
from elastune.core.plan.data_parallel import DataParallelStep

RESULTS = Path(__file__).parents[1] / "results"
CALIBRATION = RESULTS / "adaptive_calibration.json"
DATA = ("fashion_mnist", "mnist")
WORKERS = 16
OTHER_WORKERS = (4, 64)
START = 64  # the batch that adaptive trainings begin with
GROWN = 2048  # the largest batch, where the learning rate is not decayed; where it is, the batch does not do that work
ADAPTIVE = (
    ("gns sqrt", "none", (f"gns:factor=1,max_batch={GROWN},lr=sqrt",)),
    ("gns linear", "none", (f"gns:factor=1,max_batch={GROWN},lr=linear",)),
    ("gns adascale", "none", (f"gns:factor=1,max_batch={GROWN},lr=adascale",)),
    ("gns none", "none", (f"gns:factor=1,max_batch={GROWN},lr=none",)),
    ("gns sqrt, cosine", "cosine", ("gns:factor=1,max_batch=512,lr=sqrt",)),
    ("gns 2 sqrt, cosine", "cosine", ("gns:factor=2,max_batch=512,lr=sqrt",)),
    ("gns 2 linear, cosine", "cosine", ("gns:factor=2,max_batch=512,lr=linear",)),
    ("gns 4 sqrt, cosine", "cosine", ("gns:factor=4,max_batch=512,lr=sqrt",)),
)
SMOKE = Size(epochs=3, seeds=2, batches=(32,), factors=(1.0,))


def adaptive_methods(data: str) -> list[Method]:
    """Each is tuned by itself, by as many trials as a fixed batch."""
    return [Method(name, data, START, decay, policies) for name, decay, policies in ADAPTIVE]


def models(model: DataParallelStep) -> dict[str, StepSeconds]:
    """What a step takes, by the machine that is imagined; the first is the one that is declared."""
    results: dict[str, StepSeconds] = {f"{WORKERS} workers": at_workers(model, WORKERS)}
    results[f"each step on its best number of workers up to {WORKERS}"] = at_most_workers(model, WORKERS)
    return {**results, **{f"{workers} workers": at_workers(model, workers) for workers in OTHER_WORKERS}}


def verdicts(chosen: Sequence[Chosen], step_s: StepSeconds) -> list[tuple[str, Verdict]]:
    """Every adaptive method against the fixed ones with a constant rate, and against all: (against what, verdict)."""
    fixed = [c for c in chosen if not c.method.adaptive]
    constant = [c for c in fixed if c.method.decay == "none"]
    results = []
    for mine in (c for c in chosen if c.method.adaptive):
        for against, group in (("constant rate", constant), ("constant rate or cosine decay", fixed)):
            judged = verdict(mine, group, step_s)
            if judged is not None:
                results.append((against, judged))
    return results


def tell(data: str, chosen: Sequence[Chosen], model: DataParallelStep) -> dict[str, Any]:
    """Print a data set's tables and verdicts; returns them as plain data."""
    results: dict[str, Any] = {}
    for name, step_s in models(model).items():
        rows = [result for c in chosen if (result := row(c, step_s)) is not None]
        judged = verdicts(chosen, step_s)
        results[name] = {
            "rows": [asdict(r) for r in rows],
            "verdicts": [{"against": against, **v.to_json()} for against, v in judged],
        }
        if name == f"{WORKERS} workers":
            print(table(rows, f"{data}; time is modelled for {name}, not measured (see the file's head)"), "\n")
            print("\n".join(f"- against fixed batches, {against}: {sentence(v)}" for against, v in judged), "\n")
        else:
            print(f"With {name}: ", end="")
            print("; ".join(f"{v.adaptive} {v.time_ratio:.2f} x {v.best_fixed}" for _, v in judged), "\n")
    return results


def course_data(chosen: Chosen) -> dict[str, Any]:
    """A method's trials and the course of each seed, for the results."""
    courses = [
        {
            "seed": course.setting.seed,
            "failed": course.failed,
            "looks": [[look.count, look.samples, look.validation, look.test] for look in course.looks],
            "changes": course.changes,
            "noise_scale": course.scales[:: max(1, len(course.scales) // 20)],
        }
        for course in chosen.courses
    ]
    return {"method": asdict(chosen.method), "lr": chosen.lr, "tried": chosen.tried, "courses": courses}


def smoke(processes: int) -> None:
    """Every part once, in a small size, on embedded digits."""
    data = "digits"
    with tempfile.TemporaryDirectory() as folder:
        model = DataParallelStep(**calibrate(1)["model"])
        name, decay, policies = ADAPTIVE[0]
        methods = [*fixed_methods(data, SMOKE.batches), Method(name, data, 32, decay, policies)]
        chosen = search(methods, SMOKE, Path(folder) / "cache.jsonl", processes)
        tell(data, chosen, model)
        draw(chosen, at_workers(model, WORKERS), "smoke", Path(folder) / "adaptive.png")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="under a minute; writes nothing")
    parser.add_argument("--calibrate", action="store_true", help="measure the time model's parts, and stop")
    parser.add_argument("--data", nargs="+", default=list(DATA), choices=DATA)
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES), help="fixed ones")
    parser.add_argument("--seeds", type=int, default=Size.seeds)
    parser.add_argument("--processes", type=int, default=2, help="0: report on what the cache holds, run nothing")
    parser.add_argument("--cache", type=Path, default=Path("build") / "adaptive.jsonl")
    parser.add_argument("--out", type=Path, default=RESULTS / "adaptive.json")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.smoke:
        smoke(options.processes)
        return 0
    if options.calibrate:
        write_result(CALIBRATION, calibrate(40))
        print(CALIBRATION.read_text())
        return 0
    model = read(CALIBRATION)
    size = Size(seeds=options.seeds, batches=tuple(options.batches))
    results: list[Chosen] = []
    values: dict[str, Any] = {}
    for data in options.data:
        methods = [*fixed_methods(data, size.batches), *adaptive_methods(data)]
        chosen = search(methods, size, options.cache, options.processes)
        if chosen:
            values[data] = tell(data, chosen, model)
        results += chosen
    if not results:
        raise UserError("there must be trainings to report on", f"none complete in {options.cache}", "run some first")
    draw(
        results, at_workers(model, WORKERS), f"Time is modelled for {WORKERS} workers", options.out.with_suffix(".png")
    )
    result = {
        "time": "modelled: adaptive_time.py; parts measured: adaptive_calibration.json",
        "model": asdict(model),
        "size": asdict(size),
        "results": values,
        "courses": [{"data": c.method.data, **course_data(c)} for c in results],
    }
    write_result(options.out, result, indent=None)
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except UserError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
