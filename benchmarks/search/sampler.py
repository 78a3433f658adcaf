"""How much of the front does the default sampler cover after 50 and 100 evaluations?

Data: the lcbench surrogate of YAHPO Gym (Pfisterer et al. 2022): ``model.onnx`` and ``encoding.json`` under
``--data DIR`` or ``$ELASTUNE_DATA/hpo/lcbench``. Objectives: validation error (1 - val_accuracy / 100) and training
time, both at 52 epochs; 7 hyperparameters. elastune's samplers go through its own ``Suggester``; ``optuna-tpe`` and
``optuna-gp`` are Optuna's as they come (``rivals.py``). ``TEN`` instances can be asked for; three are the default.

Figure of merit: the hypervolume after n evaluations over that of the best-known front. Best-known front: 200,000
random configurations, refined by 60 rounds of 4,000 mutations of front members (fixed seed; 440,000 evaluations).
Reference point, per objective: the larger of 1.1 x the best-known front's worst value and the median of the random
configurations.

    python -m benchmarks.search.sampler                # 3 instances x 5 seeds, writes benchmarks/results/sampler.json
    python -m benchmarks.search.sampler --instances ten --samplers auto random optuna-tpe optuna-gp \\
        --evaluations 50 --out FILE
    python -m benchmarks.search.sampler --out FILE --table    # what it holds, as Markdown; measures nothing
    python -m benchmarks.search.sampler --smoke        # 1 instance, 1 seed, 15 evaluations, writes nothing

The first of ``--samplers`` is compared with the others. The results hold a row for each study and are written as each
ends: the same command goes on where it was cut. Their command and machine are those of the last rows.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import time
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from benchmarks.common.kept import Cells, Rows, ended
from benchmarks.common.verdicts import goes_to, judged, markdown, reached_at
from benchmarks.search.rivals import make_search
from numpy.typing import NDArray

from elastune.core.errors import UserError
from elastune.core.journal.files import atomic_write
from elastune.core.journal.records import TrialFinished
from elastune.train.machine import processor
from elastune.tuning.search.front import hypervolume, nondominated
from elastune.tuning.search.objective import parse_objectives

INSTANCES = ("167152", "167185", "189873")
TEN = (*INSTANCES, "126026", "146212", "167104", "167190", "168330", "168910", "189906")
SAMPLERS = ("auto", "random", "tpe", "nsga2")
COUNTS = (50, 100)
SMOKE_COUNTS = (10, 15)
EPOCHS = 52
OBJECTIVES = parse_objectives({"error": "min", "time": "min"})
KNOWN_AT_100 = {
    "source": "Optuna's samplers called directly, measured earlier on another 2-core machine; another best-known front",
    "random": (0.901, 0.934, 0.423),
    "tpe": (0.920, 0.964, 0.649),
    "gp": (0.958, 0.991, 0.914),
}
PACKAGES = ("elastune", "optuna", "torch", "scipy", "numpy", "onnxruntime")
PACKAGES += ("botorch", "syne-tune", "neural-pipeline-search")  # rivals, where they are installed
RESULT = Path(__file__).parents[1] / "results" / "sampler.json"
FRONTS = Path(__file__).parents[1] / "results" / "best_known_fronts.json"

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Parameter:
    """One input of the surrogate, in its order; ``low == high``: fixed."""

    name: str
    low: float
    high: float
    log: bool = False
    whole: bool = False


PARAMETERS = (
    Parameter("epoch", EPOCHS, EPOCHS),
    Parameter("batch_size", 16, 512, log=True, whole=True),
    Parameter("learning_rate", 1e-4, 1e-1, log=True),
    Parameter("momentum", 0.1, 0.99),
    Parameter("weight_decay", 1e-5, 1e-1),
    Parameter("num_layers", 1, 5, whole=True),
    Parameter("max_units", 64, 1024, log=True, whole=True),
    Parameter("max_dropout", 0.0, 1.0),
)


def space(trial: Any) -> dict[str, Any]:
    """The same parameters as a user would write them."""
    results: dict[str, Any] = {}
    for p in PARAMETERS:
        if p.low == p.high:
            results[p.name] = p.low
        elif p.whole:
            results[p.name] = trial.suggest_int(p.name, int(p.low), int(p.high), log=p.log)
        else:
            results[p.name] = trial.suggest_float(p.name, p.low, p.high, log=p.log)
    return results


class Surrogate:
    """One lcbench instance: rows of parameters (n, 8) in, (n, 2) error and seconds out."""

    def __init__(self, folder: Path, instance: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options)
        self._code = json.loads((folder / "encoding.json").read_text())["OpenML_task_id"][instance]

    def __call__(self, rows: Floats) -> Floats:
        results = []
        for block in np.array_split(rows, max(1, len(rows) // 2000)):
            codes = np.full((len(block), 1), self._code, dtype=np.int32)
            results.append(self._session.run(None, {"x_cat": codes, "x_cont": block.astype(np.float32)})[0])
        seconds, accuracy = np.concatenate(results)[:, :2].T.astype(float)
        return np.stack([1 - accuracy / 100, seconds], axis=1)


def decode(unit: Floats) -> Floats:
    """Rows of the unit cube (n, 8) as parameter values."""
    columns = []
    for p, u in zip(PARAMETERS, unit.T, strict=True):
        edge = 0.5 if p.whole else 0.0
        low, high = p.low - edge, p.high + edge
        value = np.exp(np.log(low) + u * (np.log(high) - np.log(low))) if p.log else low + u * (high - low)
        columns.append(np.clip(np.round(value) if p.whole else value, p.low, p.high))
    return np.stack(columns, axis=1)


def best_known(surrogate: Surrogate, pool: int, rounds: int, seed: int = 0) -> tuple[Floats, Floats]:
    """Best-known front (n, 2) and reference point (2,)."""
    rng = np.random.default_rng(seed)
    unit = rng.random((pool, len(PARAMETERS)))
    points = surrogate(decode(unit))
    median = np.median(points, axis=0)
    keep = nondominated(points)
    unit, points = unit[keep], points[keep]
    for _ in range(rounds):
        parents = unit[rng.integers(len(unit), size=4000)]
        change = rng.random(parents.shape) < 0.3
        scale = 10.0 ** rng.uniform(-3, -0.5, size=(len(parents), 1))
        children = np.clip(parents + change * scale * rng.standard_normal(parents.shape), 0, 1)
        unit = np.concatenate([unit, children])
        points = np.concatenate([points, surrogate(decode(children))])
        keep = nondominated(points)
        unit, points = unit[keep], points[keep]
    return points, np.maximum(1.1 * points.max(axis=0), median)


def yardstick(surrogate: Surrogate, instance: str, pool: int = 200_000, rounds: int = 60) -> dict[str, Any]:
    """What hypervolumes are measured by; that of an instance in ``FRONTS`` is not searched for again."""
    whole = (pool, rounds) == (200_000, 60)
    known: dict[str, Any] = json.loads(FRONTS.read_text()) if FRONTS.exists() else {}
    if whole and instance in known:
        return dict(known[instance])
    front, reference = best_known(surrogate, pool, rounds)
    shown = [round(float(value), 6) for value in reference]
    results = {"front_points": len(front), "reference": shown, "hypervolume": round(hypervolume(front, reference), 6)}
    if whole:
        known = json.loads(FRONTS.read_text()) if FRONTS.exists() else {}  # another process may search for others
        atomic_write(FRONTS, (json.dumps({**known, instance: results}, indent=2) + "\n").encode())
    return results


def search(surrogate: Surrogate, sampler: str, seed: int, evaluations: int) -> tuple[Floats, float]:
    """The points (n, 2) in the order they were tried, and the seconds of CPU that took."""
    suggester = make_search(space, OBJECTIVES, sampler, seed)
    points = []
    start = time.process_time()
    for _ in range(evaluations):
        suggestion = suggester.ask()
        assert suggestion is not None
        point = surrogate(np.array([[suggestion.values[p.name] for p in PARAMETERS]]))[0]
        values = {o.name: float(v) for o, v in zip(OBJECTIVES, point, strict=True)}
        suggester.tell(suggestion.number, TrialFinished(suggestion.number, "complete", values=values))
        points.append(point)
    return np.array(points), time.process_time() - start


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 4), "min": min(values), "max": max(values)}


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "versions": {name: result for name in PACKAGES if (result := version(name))},
    }


@dataclass(frozen=True)
class Study:
    instance: str
    sampler: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.instance} {self.sampler} {self.seed}"


@cache
def surrogate_of(folder: Path, instance: str) -> Surrogate:
    return Surrogate(folder, instance)


def measure(folder: Path, evaluations: int, sticks: dict[str, dict[str, Any]], study: Study) -> dict[str, Any]:
    points, took_s = search(surrogate_of(folder, study.instance), study.sampler, study.seed, evaluations)
    stick = sticks[study.instance]
    counts = [count for count in (*SMOKE_COUNTS, *COUNTS) if count <= evaluations]
    parts = {n: hypervolume(points[:n], np.array(stick["reference"])) / stick["hypervolume"] for n in counts}
    return {"hypervolume_at": {str(n): round(part, 4) for n, part in parts.items()}, "cpu_s": round(took_s, 2)}


def summary(cells: Cells) -> dict[str, Any]:
    """For each instance what hypervolumes are measured by, and for each sampler the spread over its seeds."""
    results: dict[str, Any] = {}
    sticks = json.loads(FRONTS.read_text())
    for instance, sampler in dict.fromkeys((key.split()[0], key.split()[1]) for key in cells):
        rows = [row for key, row in cells.items() if key.startswith(f"{instance} {sampler} ")]
        lines: dict[str, Any] = {"seeds": len(rows), "cpu_seconds": spread([row["cpu_s"] for row in rows])}
        for count in map(str, COUNTS):
            values = [row["hypervolume_at"][count] for row in rows if count in row["hypervolume_at"]]
            lines |= {f"hypervolume_at_{count}": spread(values)} if values else {}
        results.setdefault(instance, dict(sticks[instance]))[sampler] = lines
    return results


def document(ours: str, cells: Cells) -> dict[str, Any]:
    results = {
        "measured": "normalised hypervolume (error x time), see the file's head; every cell measured here",
        "known_at_100": {**KNOWN_AT_100, "instances": INSTANCES},
        "machine": machine(),
    }
    verdicts = {f"judged_at_{count}": judged(at, ours) for count in COUNTS if (at := reached_at(cells, count))}
    return results | verdicts | {"results": summary(cells)}


def tables(results: dict[str, Any]) -> str:
    """What a document of results judges, in Markdown."""
    return "\n".join(
        f"{name}:\n\n{markdown(result)}" for name, result in results.items() if name.startswith("judged_at_")
    )


def run(folder: Path, options: argparse.Namespace) -> int:
    """Seed by seed, so that what is cut has all instances."""
    rows = Rows(None if options.smoke else options.out)
    if options.table:
        print(tables(document(options.samplers[0], rows.cells)))
        return 0
    if not (folder / "model.onnx").is_file():
        raise UserError("the lcbench surrogate must be there", folder, "give --data DIR or set ELASTUNE_DATA")
    sizes = (20_000, 5) if options.smoke else (200_000, 60)
    sticks = {one: yardstick(surrogate_of(folder, one), one, *sizes) for one in options.instances}
    every = product(range(options.seeds), options.samplers, options.instances)
    wanted = [Study(instance, sampler, seed) for seed, sampler, instance in every]
    measured = partial(measure, folder, options.evaluations, sticks)
    try:
        rows.complete(wanted, measured, partial(goes_to, options.evaluations), options.processes)
    finally:
        rows.told = document(options.samplers[0], rows.cells)
        rows.write()
    print(tables(rows.told))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder that holds model.onnx and encoding.json")
    parser.add_argument("--smoke", action="store_true", help="a few seconds; writes nothing")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--instances", nargs="+", default=list(INSTANCES), choices=[*TEN, "ten"], metavar="ID")
    parser.add_argument("--evaluations", type=int, default=max(COUNTS), choices=COUNTS)
    parser.add_argument("--samplers", nargs="+", default=list(SAMPLERS))
    parser.add_argument("--processes", type=int, default=1, help="studies at once, each in a process")
    parser.add_argument("--table", action="store_true", help="print --out as Markdown, comparing the first sampler")
    parser.add_argument("--out", type=Path, default=RESULT, help="studies that it already has are not run again")
    options = parser.parse_args()
    options.instances = TEN if options.instances == ["ten"] else tuple(options.instances)
    if options.smoke:
        options.instances, options.seeds, options.evaluations = INSTANCES[:1], 1, max(SMOKE_COUNTS)
    folder = options.data or Path(os.environ.get("ELASTUNE_DATA", "data")) / "hpo" / "lcbench"
    return ended(lambda: run(folder, options))


if __name__ == "__main__":
    raise SystemExit(main())
