"""Does stopping trials early, under two objectives, find more of the front for the same training?

Data, space, best-known front and reference point: as ``sampler.py``. The surrogate takes the epoch as an input, so
learning curves come from it, and so does time: 8 workers train asynchronously on a virtual clock that is the
surrogate's training time. Objectives: validation error and training time after 52 epochs.

Budget: full trainings' worth of epochs, whoever trained them. Figure of merit: the hypervolume of the configurations
that were trained in FULL by the time that so much was spent, over that of the best-known front. Seeds are paired.

    python benchmarks/multi_fidelity.py             # 3 instances x 10 seeds x 6 variants: hours; goes on where it was
    python benchmarks/multi_fidelity.py --instances ten --stopping none asha --most 50 --seeds 5 --out FILE
    python benchmarks/multi_fidelity.py --smoke     # some seconds, writes nothing
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fidelity_loop import WORKERS, Study
from rivals import RAW, judged, paired
from sampler import INSTANCES, OBJECTIVES, TEN, Floats, Surrogate, machine
from sampler import yardstick as measured_by

from elastune.core.errors import UserError
from elastune.journal.atomic import atomic_write
from elastune.search.stopping.registry import make_schedule

COUNTS = (25, 50, 100)
VARIANTS = (
    *((sampler, stopping) for stopping in ("none", "asha", "hyperband") for sampler in ("auto", "tpe")),
    *((sampler, "none") for sampler in RAW),  # Optuna's as they come; these it cannot stop under two objectives
    ("syne-tune", "moasha"),  # where it is installed
)
KNOWN_AT_50 = (0.891, 0.958, 0.654)  # Optuna's samplers with and without naive vector ASHA, the better of them
KNOWN_AT_100 = (0.925, 0.965, 0.724)
GOAL_AT_50 = (0.93, 0.97, 0.80)
RESULT = Path(__file__).parent / "results" / "multi_fidelity.json"


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
    if cell.sampler == "syne-tune":
        from rival_syne_tune import Moasha

        return Study(surrogate, "random", Moasha(cell.seed), cell.seed)
    return Study(surrogate, cell.sampler, make_schedule(cell.stopping, OBJECTIVES, cell.seed), cell.seed)


def measure(cell: Cell, yardstick: Yardstick, counts: tuple[int, ...]) -> dict[str, Any]:
    found = study(cell, yardstick.surrogate).run(max(counts))
    reached = {str(n): round(found.reached(n, yardstick.reference, yardstick.whole), 4) for n in counts}
    return {
        "hypervolume_at": reached,
        "started": found.asked,
        "finished": len(found.points),
        "cpu_s": round(found.cpu_s, 1),
    }


def summary(cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Over the seeds of each instance and variant. ``paired_gain``: over the same seed without stopping, the median."""
    found: dict[str, Any] = {}
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
            found[f"{instance} {sampler} {stopping}"] = entry
    return found


def by_variant(cells: dict[str, dict[str, Any]], count: str) -> dict[str, dict[str, list[float]]]:
    """For each instance and seed, what each variant reached: what ``paired`` compares."""
    found: dict[str, dict[str, list[float]]] = {}
    for key, row in cells.items():
        instance, sampler, stopping, seed = key.split()
        if count in row["hypervolume_at"]:
            found.setdefault(f"{instance} {seed}", {})[f"{sampler} {stopping}"] = [row["hypervolume_at"][count]]
    return found


def by_instance(cells: dict[str, dict[str, Any]], count: str) -> dict[str, dict[str, list[float]]]:
    """instance -> variant -> what it reached, by seed: what ``judged`` compares. Seeds were begun in their order."""
    found: dict[str, dict[str, list[float]]] = {}
    for key, row in sorted(cells.items(), key=lambda one: int(one[0].split()[-1])):
        instance, sampler, stopping, _ = key.split()
        if count in row["hypervolume_at"]:
            reached = found.setdefault(instance, {}).setdefault(f"{sampler} {stopping}", [])
            reached.append(row["hypervolume_at"][count])
    return found


def is_ahead(found: dict[str, Any]) -> str:
    """The goal: with early stopping ahead of none, in the median of every instance."""
    rows = found["against"].get("auto none", {"by_instance": {}})["by_instance"].values()
    return "not measured" if not rows else "met" if all(row["gain"] > 0 for row in rows) else "MISSED"


def document(cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    at_50 = judged(by_instance(cells, "50"), "auto asha")
    at_50["goals"] = {"ahead of no stopping in the median of every instance": is_ahead(at_50)}
    return {
        "command": " ".join(["OMP_NUM_THREADS=1 python benchmarks/multi_fidelity.py", *sys.argv[1:]]),
        "measured": "normalised hypervolume of fully trained configurations (error x time), see the file's head; "
        f"simulated: {WORKERS} asynchronous workers on a virtual clock, surrogate learning curves",
        "goal_at_50": dict(zip(INSTANCES, GOAL_AT_50, strict=True)),
        "known_best_of_others_at_50": dict(zip(INSTANCES, KNOWN_AT_50, strict=True)),
        "known_best_of_others_at_100": dict(zip(INSTANCES, KNOWN_AT_100, strict=True)),
        "machine": machine(),
        "paired_at_50": {"of": "auto asha"} | paired(by_variant(cells, "50"), "auto asha"),
        "judged_at_50": at_50,
        "summary": summary(cells),
        "cells": cells,
    }


def yardstick(folder: Path, instance: str) -> Yardstick:
    """Where ``sampler.py`` has left its reference point and hypervolume, the front is not searched for again."""
    surrogate = Surrogate(folder, instance)
    known = measured_by(surrogate, instance)
    return Yardstick(surrogate, np.array(known["reference"]), known["hypervolume"])


def smoke(folder: Path) -> None:
    instance = INSTANCES[0]
    for sampler, stopping in (("auto", "none"), ("auto", "asha"), ("tpe", "hyperband")):
        counts = (1, 3) if sampler == "auto" else (4, 8)
        found = measure(Cell(instance, sampler, stopping, 0), yardstick(folder, instance), counts)
        print(instance, sampler, stopping, found)


def measured(path: Path) -> dict[str, dict[str, Any]]:
    """The studies that the results tell of."""
    found: dict[str, dict[str, Any]] = json.loads(path.read_text())["cells"] if path.exists() else {}
    return found


def run(folder: Path, options: argparse.Namespace) -> None:
    """Measure what the results lack, seed by seed, and write them after every study."""
    cells = measured(options.out)
    wanted = [
        Cell(instance, sampler, stopping, seed)
        for seed in range(options.seeds)
        for sampler, stopping in VARIANTS
        for instance in (TEN if options.instances == ["ten"] else options.instances)
        if sampler in options.samplers and stopping in options.stopping
    ]
    counts = tuple(count for count in COUNTS if count <= options.most)
    told = {key: row["hypervolume_at"] for key, row in cells.items()}
    missing = [cell for cell in wanted if str(counts[-1]) not in told.get(cell.key, {})]
    sticks = {instance: yardstick(folder, instance) for instance in {cell.instance for cell in missing}}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for cell in missing:
        found = measure(cell, sticks[cell.instance], counts)
        cells = {**measured(options.out), cell.key: found}  # another process may measure other samplers
        print(cell.key, found, flush=True)
        atomic_write(options.out, (json.dumps(document(cells), indent=1) + "\n").encode())
    for name, entry in summary(cells).items():
        shown = ", ".join(f"{n}: {entry[f'at_{n}']['median']:.3f}" for n in COUNTS if f"at_{n}" in entry)
        print(f"{name}: {shown} ({entry['seeds']} seeds, {entry['started']:g} trials)")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder that holds model.onnx and encoding.json")
    parser.add_argument("--smoke", action="store_true", help="some seconds; writes nothing")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--most", type=int, default=100, choices=COUNTS, help="full trainings' worth of a study")
    parser.add_argument("--instances", nargs="+", default=list(INSTANCES), choices=[*TEN, "ten"], metavar="ID")
    parser.add_argument("--samplers", nargs="+", default=["auto", "tpe"])
    parser.add_argument("--stopping", nargs="+", default=["none", "asha", "hyperband", "moasha"])
    parser.add_argument("--out", type=Path, default=RESULT, help="studies that it already tells of are not run again")
    options = parser.parse_args()
    folder = options.data or Path(os.environ.get("ELASTUNE_DATA", "data")) / "hpo" / "lcbench"
    try:
        if not (folder / "model.onnx").is_file():
            raise UserError("the lcbench surrogate must be there", folder, "give --data DIR or set ELASTUNE_DATA")
        smoke(folder) if options.smoke else run(folder, options)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
