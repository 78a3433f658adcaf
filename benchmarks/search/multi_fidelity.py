"""Does stopping trials early, under two objectives, find more of the front for the same training?

Data, space, best-known front and reference point: as ``sampler.py``. The surrogate takes the epoch as an input, so
learning curves come from it, and so does time: 8 workers train asynchronously on a virtual clock that is the
surrogate's training time. Objectives: validation error and training time after 52 epochs.

Budget: full trainings' worth of epochs, whoever trained them. Figure of merit: the hypervolume of the configurations
that were trained in FULL by the time that so much was spent, over that of the best-known front. Seeds are paired.

    python -m benchmarks.search.multi_fidelity    # 3 instances x 10 seeds x 6 variants: hours; continues after a stop
    python -m benchmarks.search.multi_fidelity --instances ten --samplers auto --stopping none asha --most 50 --out FILE
    python -m benchmarks.search.multi_fidelity --out FILE --table  # what it holds at 50, as Markdown; measures nothing
    python -m benchmarks.search.multi_fidelity --smoke  # some seconds, writes nothing
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common.kept import Cells, Rows, ended
from benchmarks.common.verdicts import goes_to, judged, markdown, reached_at
from benchmarks.search.fidelity_loop import WORKERS, Study
from benchmarks.search.rivals import RAW
from benchmarks.search.sampler import INSTANCES, OBJECTIVES, TEN, Floats, Surrogate, machine
from benchmarks.search.sampler import yardstick as measured_by

from elastune.core.errors import UserError
from elastune.tuning.search.registry import make_schedule

COUNTS = (25, 50, 100)
VARIANTS = (
    *((sampler, stopping) for stopping in ("none", "asha", "hyperband") for sampler in ("auto", "tpe")),
    *((sampler, "none") for sampler in RAW),  # Optuna's as they come; these it cannot stop under two objectives
    *((name, "moasha") for name in ("syne-tune", "neps")),  # where they are installed
)
KNOWN_AT_50 = (0.891, 0.958, 0.654)  # Optuna's samplers with and without naive vector ASHA, the better of them
KNOWN_AT_100 = (0.925, 0.965, 0.724)
GOAL_AT_50 = (0.93, 0.97, 0.80)
RESULT = Path(__file__).parents[1] / "results" / "multi_fidelity.json"


@dataclass(frozen=True)
class Cell:
    """One study: what is measured once, and kept in the results under its key."""

    instance: str
    sampler: str
    stopping: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.instance} {self.sampler} {self.stopping} {self.seed}"


@dataclass(frozen=True)
class Yardstick:
    """An instance's surrogate, its reference point, and the hypervolume of its best-known front."""

    surrogate: Surrogate
    reference: Floats
    whole: float


def study(cell: Cell, surrogate: Surrogate) -> Study:
    if cell.sampler == "neps":
        from benchmarks.search.rival_neps import NepsStudy

        return NepsStudy(surrogate, cell.seed)
    if cell.sampler == "syne-tune":
        from benchmarks.search.rival_syne_tune import Moasha

        return Study(surrogate, "random", Moasha(cell.seed), cell.seed)
    return Study(surrogate, cell.sampler, make_schedule(cell.stopping, OBJECTIVES, cell.seed), cell.seed)


def measure(folder: Path, counts: tuple[int, ...], cell: Cell) -> dict[str, Any]:
    stick = yardstick(folder, cell.instance)
    study_result = study(cell, stick.surrogate).run(max(counts))
    return {
        "hypervolume_at": {str(n): round(study_result.reached(n, stick.reference, stick.whole), 4) for n in counts},
        "started": study_result.asked,
        "finished": len(study_result.points),
        "cpu_s": round(study_result.cpu_s, 1),
    }


def summary(cells: Cells) -> dict[str, Any]:
    """Over the seeds of each instance and variant. ``paired_gain``: over the same seed without stopping, the median."""
    results: dict[str, Any] = {}
    for instance in TEN:
        for sampler, stopping in VARIANTS:
            rows = {
                key.split()[3]: row for key, row in cells.items() if key.startswith(f"{instance} {sampler} {stopping} ")
            }
            if not rows:
                continue
            entry: dict[str, Any] = {"seeds": len(rows)}
            for count in map(str, COUNTS):
                at = {s: row["hypervolume_at"][count] for s, row in rows.items() if count in row["hypervolume_at"]}
                if not at:
                    continue
                plain = {
                    seed: cells.get(f"{instance} {sampler} none {seed}", {}).get("hypervolume_at", {}) for seed in at
                }
                gains = [at[seed] - row[count] for seed, row in plain.items() if count in row]
                entry[f"at_{count}"] = {
                    "seeds": len(at),
                    "median": round(statistics.median(at.values()), 4),
                    "min": min(at.values()),
                    "max": max(at.values()),
                    "paired_gain": round(statistics.median(gains), 4) if gains else None,
                }
            entry["started"] = statistics.median(row["started"] for row in rows.values())
            results[f"{instance} {sampler} {stopping}"] = entry
    return results


def is_ahead(found: dict[str, Any]) -> str:
    """The goal: with early stopping ahead of none, in the median of every instance."""
    rows = found["against"].get("auto none", {"by_instance": {}})["by_instance"].values()
    return "not measured" if not rows else "met" if all(row["gain"] > 0 for row in rows) else "MISSED"


def document(cells: Cells) -> dict[str, Any]:
    at_50 = judged(reached_at(cells, 50), "auto asha")
    at_50["goals"] = {"ahead of no stopping in the median of every instance": is_ahead(at_50)}
    return {
        "measured": "normalised hypervolume of fully trained configurations (error x time), see the file's head; "
        f"simulated: {WORKERS} asynchronous workers on a virtual clock, surrogate learning curves",
        "goal_at_50": dict(zip(INSTANCES, GOAL_AT_50, strict=True)),
        "known_best_of_others_at_50": dict(zip(INSTANCES, KNOWN_AT_50, strict=True)),
        "known_best_of_others_at_100": dict(zip(INSTANCES, KNOWN_AT_100, strict=True)),
        "machine": machine(),
        "judged_at_50": at_50,
        "summary": summary(cells),
    }


@cache
def yardstick(folder: Path, instance: str) -> Yardstick:
    """Where ``sampler.py`` has left its reference point and hypervolume, the front is not searched for again."""
    surrogate = Surrogate(folder, instance)
    known = measured_by(surrogate, instance)
    return Yardstick(surrogate, np.array(known["reference"]), known["hypervolume"])


def smoke(folder: Path) -> int:
    instance = INSTANCES[0]
    for sampler, stopping in (("auto", "none"), ("auto", "asha"), ("tpe", "hyperband")):
        counts = (1, 3) if sampler == "auto" else (4, 8)
        result = measure(folder, counts, Cell(instance, sampler, stopping, 0))
        print(instance, sampler, stopping, result)
    return 0


def run(folder: Path, options: argparse.Namespace) -> int:
    """Measure what the results lack, seed by seed."""
    rows = Rows(options.out)
    if options.table:
        print(markdown(document(rows.cells)["judged_at_50"]))
        return 0
    if not (folder / "model.onnx").is_file():
        raise UserError("the lcbench surrogate must be there", folder, "give --data DIR or set ELASTUNE_DATA")
    if options.smoke:
        return smoke(folder)
    wanted = [
        Cell(instance, sampler, stopping, seed)
        for seed in range(options.seeds)
        for sampler, stopping in VARIANTS
        for instance in (TEN if options.instances == ["ten"] else options.instances)
        if sampler in options.samplers and stopping in options.stopping
    ]
    counts = tuple(count for count in COUNTS if count <= options.most)
    try:
        rows.complete(wanted, partial(measure, folder, counts), partial(goes_to, counts[-1]), options.processes)
    finally:
        rows.told = document(rows.cells)
        rows.write()
    for name, entry in rows.told["summary"].items():
        shown = ", ".join(f"{n}: {entry[f'at_{n}']['median']:.3f}" for n in COUNTS if f"at_{n}" in entry)
        print(f"{name}: {shown} ({entry['seeds']} seeds, {entry['started']:g} trials)")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder that holds model.onnx and encoding.json")
    parser.add_argument("--smoke", action="store_true", help="some seconds; writes nothing")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--most", type=int, default=100, choices=COUNTS, help="full trainings' worth of a study")
    parser.add_argument("--instances", nargs="+", default=list(INSTANCES), choices=[*TEN, "ten"], metavar="ID")
    parser.add_argument("--samplers", nargs="+", default=["auto", "tpe"])
    parser.add_argument("--stopping", nargs="+", default=["none", "asha", "hyperband", "moasha"])
    parser.add_argument("--processes", type=int, default=1, help="studies at once, each in a process")
    parser.add_argument("--table", action="store_true", help="print --out as Markdown; measures nothing")
    parser.add_argument("--out", type=Path, default=RESULT, help="studies that it already has are not run again")
    options = parser.parse_args()
    folder = options.data or Path(os.environ.get("ELASTUNE_DATA", "data")) / "hpo" / "lcbench"
    return ended(lambda: run(folder, options))


if __name__ == "__main__":
    raise SystemExit(main())
