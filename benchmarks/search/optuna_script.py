"""What do three lines of ``elastune.optuna`` bring to a script of Optuna with two objectives?

The script is ``study.optimize`` on lcbench's surrogate: data, space, best-known front and reference point are those of
``sampler.py``. Each trial reports validation error and training time after each of 52 epochs. One trial runs at a time.

Budget: full trainings' worth of epochs, whoever trained them. Figure of merit: the hypervolume of the configurations
that were trained in FULL by the time that so much was spent, over that of the best-known front. Seeds are paired.
Beside ``elastune-pruned`` (``Sampler`` and ``Pruner``) run ``elastune`` (no pruning), and Optuna's ``nsga2`` and
``tpe`` as they come. Optuna itself prunes no trial of several objectives.

    python -m benchmarks.search.optuna_script           # 4 instances x 10 seeds x 4 variants; continues after a stop
    python -m benchmarks.search.optuna_script --table   # what the result holds, as Markdown; measures nothing
    python -m benchmarks.search.optuna_script --smoke   # some seconds; writes nothing
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from benchmarks.common.kept import Cells, Rows, ended
from benchmarks.common.verdicts import goes_to, judged, markdown, reached_at
from benchmarks.search.fidelity_loop import Outcome
from benchmarks.search.sampler import EPOCHS, INSTANCES, OBJECTIVES, PARAMETERS, TEN, Surrogate, machine, space
from benchmarks.search.sampler import yardstick as measured_by
from optuna.samplers import BaseSampler, NSGAIISampler, TPESampler

import elastune.optuna
from elastune.core.errors import UserError
from elastune.tuning.search.history import quiet

OURS = "elastune-pruned"
SAMPLERS: dict[str, Callable[[int], BaseSampler]] = {
    OURS: elastune.optuna.Sampler,
    "elastune": elastune.optuna.Sampler,
    "nsga2": lambda seed: NSGAIISampler(seed=seed),
    "tpe": lambda seed: TPESampler(seed=seed),
}
FOUR = (*INSTANCES, TEN[3])
COUNTS = (25, 50)
RESULT = Path(__file__).parents[1] / "results" / "optuna_script.json"


@dataclass(frozen=True)
class Cell:
    """One study."""

    instance: str
    sampler: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.instance} {self.sampler} {self.seed}"


@dataclass
class Script:
    """The user's script, which counts epochs, and the CPU seconds of proposals and of early stopping."""

    surrogate: Surrogate
    pruner: elastune.optuna.Pruner | None
    epochs: int = 0
    proposal_s: list[float] = field(default_factory=list)
    pruning_s: float = 0.0
    outcome: Outcome = field(default_factory=Outcome)

    def objective(self, trial: optuna.Trial) -> tuple[float, float]:
        began = time.process_time()
        values = space(trial)
        self.proposal_s.append(time.process_time() - began)
        self.outcome.asked += 1
        rows = np.tile([float(values[p.name]) for p in PARAMETERS], (EPOCHS, 1))
        rows[:, 0] = np.arange(1, EPOCHS + 1)
        curve = self.surrogate(rows)
        for epoch, (error, seconds) in enumerate(curve):
            self.epochs += 1
            if self._stops(trial, (float(error), float(seconds)), epoch):
                raise optuna.TrialPruned
        self.outcome.points.append(curve[-1])
        self.outcome.spent.append(self.epochs / EPOCHS)
        return float(curve[-1][0]), float(curve[-1][1])

    def _stops(self, trial: optuna.Trial, values: tuple[float, float], epoch: int) -> bool:
        if self.pruner is None:
            return False
        began = time.process_time()
        self.pruner.report(trial, values, epoch)
        stops = self.pruner.should_prune(trial)
        self.pruning_s += time.process_time() - began
        return stops


@cache
def surrogate_of(folder: Path, instance: str) -> Surrogate:
    return Surrogate(folder, instance)


def measure(folder: Path, counts: tuple[int, ...], cell: Cell) -> dict[str, Any]:
    surrogate = surrogate_of(folder, cell.instance)
    stick = measured_by(surrogate, cell.instance)
    reference, whole = np.array(stick["reference"]), stick["hypervolume"]
    with quiet():
        study = optuna.create_study(directions=["minimize"] * 2, sampler=SAMPLERS[cell.sampler](cell.seed))
        study.set_metric_names([objective.name for objective in OBJECTIVES])
    pruner = elastune.optuna.Pruner(study, epochs=EPOCHS) if cell.sampler == OURS else None
    script = Script(surrogate, pruner)
    with quiet():
        study.optimize(script.objective, callbacks=[partial(_stop, script, max(counts))])
    outcome = script.outcome
    return {
        "hypervolume_at": {str(n): round(outcome.reached(n, reference, whole), 4) for n in counts},
        "started": outcome.asked,
        "finished": len(outcome.points),
        "proposal_cpu_s": _spread(script.proposal_s),
        "pruning_cpu_s_per_trial": round(script.pruning_s / outcome.asked, 4),
        "cpu_s": round(sum(script.proposal_s) + script.pruning_s, 1),
    }


def _stop(script: Script, trainings: int, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
    if script.epochs >= trainings * EPOCHS:
        study.stop()


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 4), "max": round(max(values), 4)}


def document(cells: Cells) -> dict[str, Any]:
    return {
        "measured": "normalised hypervolume of fully trained configurations (error x time) at equal epochs, see the "
        "file's head; simulated: the surrogate's learning curves; CPU seconds measured here",
        "machine": machine(),
        **{f"judged_at_{n}": judged(at, OURS) for n in COUNTS if (at := reached_at(cells, n))},
        "by_sampler": {name: rows for name in SAMPLERS if (rows := _costs(cells, name))},
    }


def _costs(cells: Cells, sampler: str) -> dict[str, float]:
    """Medians over the studies of a sampler."""
    rows = [row for key, row in cells.items() if key.split()[1] == sampler]
    if not rows:
        return {}
    numbers = {
        "studies": len(rows),
        "started": statistics.median(row["started"] for row in rows),
        "finished": statistics.median(row["finished"] for row in rows),
        "proposal_cpu_s": statistics.median(row["proposal_cpu_s"]["median"] for row in rows),
        "pruning_cpu_s_per_trial": statistics.median(row["pruning_cpu_s_per_trial"] for row in rows),
    }
    return {name: round(number, 4) for name, number in numbers.items()}


def run(folder: Path, options: argparse.Namespace) -> int:
    """Measure what the results lack, seed by seed."""
    rows = Rows(None if options.smoke else options.out)
    if options.table:
        print(markdown(document(rows.cells)["judged_at_50"]))
        return 0
    if not (folder / "model.onnx").is_file():
        raise UserError("the lcbench surrogate must be there", folder, "give --data DIR or set ELASTUNE_DATA")
    counts = (2, 4) if options.smoke else COUNTS
    wanted = [
        Cell(instance, sampler, seed)
        for seed in range(1 if options.smoke else options.seeds)
        for sampler in SAMPLERS
        for instance in (INSTANCES[:1] if options.smoke else FOUR)
    ]
    try:
        rows.complete(wanted, partial(measure, folder, counts), partial(goes_to, counts[-1]), options.processes)
    finally:
        rows.told = document(rows.cells)
        rows.write()
    if not options.smoke:
        print(markdown(rows.told["judged_at_50"]))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder that holds model.onnx and encoding.json")
    parser.add_argument("--smoke", action="store_true", help="some seconds; writes nothing")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=1, help="studies at once, each in a process")
    parser.add_argument("--table", action="store_true", help="print --out as Markdown; measures nothing")
    parser.add_argument("--out", type=Path, default=RESULT, help="studies that it already has are not run again")
    options = parser.parse_args()
    folder = options.data or Path(os.environ.get("ELASTUNE_DATA", "data")) / "hpo" / "lcbench"
    return ended(lambda: run(folder, options))


if __name__ == "__main__":
    raise SystemExit(main())
