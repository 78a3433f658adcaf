"""What ``combined.py`` simulates by replay, and how it prints its tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.sources.combined_rows import ALONE, Found, Row, batches, error, multiplied
from benchmarks.sources.genetic_replay import Effort, Search, Table, effort, replay

from elastune.core.run import Program

PROGRAM = Program(Path(__file__).parents[1] / "programs" / "combined_train.py")
PATIENCE = 10  # generations of a replayed genetic search without a better training


def at_scale(
    rows: Sequence[Row], modelled: Mapping[str, Found], known: Table, target: float, bred: Search, seeds: int
) -> list[Found]:
    """``rows`` by replay: trainings until the target are simulated, what one takes is ``modelled``, by row.

    Every training of a row takes as long as the others, so that a search is replayed once for all meshes. Rows without
    a name are single techniques, whose speed-ups are multiplied.
    """
    simulated: dict[tuple[bool, int], Effort] = {}
    seconds: dict[str, float] = {}
    for row in rows:
        kind = row.genetic, row.width
        if kind not in simulated:
            search, patience = (bred, PATIENCE) if row.genetic else (Search(""), None)
            result = [replay(known, search, row.width, seed, target, patience, PROGRAM) for seed in range(seeds)]
            simulated[kind] = effort(result)  # of trainings of a second each: its seconds are rounds
        seconds[row.key] = simulated[kind].seconds * modelled[row.key]["training_s"]
    base, single, outcome = seconds[rows[0].key], dict[str, float](), list[Found]()
    alone = modelled[rows[0].key]["training_s"]
    for row in rows:
        if row.genetic and row.mesh == ALONE:
            single[row.key] = base / seconds[row.key]
        elif not row.genetic and row.width == 1:
            single[str(row.mesh)] = alone / modelled[row.key]["training_s"]
    for row in (row for row in rows if row.name):
        result, speed_up = simulated[row.genetic, row.width], base / seconds[row.key]
        predicted = modelled[rows[0].key]["seconds"] / modelled[row.key]["seconds"]
        outcome.append(
            {
                "row": row.name,
                "key": row.key,
                "nodes": row.nodes,
                **batches(row),
                "reached": f"{result.reached} of {result.searches}",
                "runs_simulated": _rounded(result.runs),
                "rounds_simulated": _rounded(result.seconds),
                "runs_predicted": modelled[row.key]["runs"],
                "training_modelled_s": modelled[row.key]["training_s"],
                "seconds": _rounded(seconds[row.key]),
                "speed_up_multiplied": _rounded(multiplied(row, single)),
                "speed_up_predicted": _rounded(predicted),
                "speed_up_simulated": _rounded(speed_up),
                "error_of_product": error(multiplied(row, single), speed_up),
                "error_of_prediction": error(predicted, speed_up),
            }
        )
    return outcome


def say(result: Found, facts: Found) -> None:
    """All tables, for a person."""
    print(
        f"target {facts['target']:.2%}: {facts['reaching']} of {facts['configurations']} configurations reach it, "
        f"{facts['random_runs_expected']:.1f} random trainings expected"
    )
    for row in result["single_techniques"]:
        print(
            f"  one training, {row['mesh']:18} {row['nodes']:2} nodes: {row['seconds']['median']:7.2f} s "
            f"{row['speed_up']['median']:5.2f} x [{row['speed_up']['least']:.2f}-{row['speed_up']['most']:.2f}], "
            f"predicted {row['predicted_speed_up']:.2f} x, error of seconds {percent(row['error_of_seconds'])}"
        )
    print("row                        nodes  runs  reached  seconds  x multiplied  predicted  MEASURED  error  cores")
    for row in result["combined"]:
        print(
            f"{row['row']:26} {row['nodes']:5} {row['runs']:5.1f} {row['reached']}/{len(row['seeds'])} "
            f"{row['seconds']['median']:10.1f} {number(row['speed_up_multiplied']):>12} "
            f"{number(row['speed_up_predicted']):>10} {number(row['speed_up_measured']):>9} "
            f"{percent(row['error_of_prediction']):>7} {row['cores_busy']:.0%}; a run "
            f"{row['seconds_a_run']:.2f} s, error {percent(row['error_of_seconds_a_run'])}"
        )
    for name, rows in {"live size": result.get("replayed", []), **result.get("at_scale", {})}.items():
        print(f"{name}: simulated by replay, trainings' seconds modelled")
        for row in rows:
            print(
                f"  {row['row']:26} {row['nodes']:5} nodes, the seed's batch {row['batch_of_the_seed']:5}: "
                f"{number(row['runs_simulated']):>7} runs, {number(row['speed_up_multiplied']):>8} x multiplied, "
                f"{number(row['speed_up_predicted']):>8} predicted, {number(row['speed_up_simulated']):>8} simulated"
            )


def number(value: Any) -> str:
    return "-" if value is None else f"{value:.2f}"


def percent(value: Any) -> str:
    return "-" if value is None else f"{value:+.0%}"


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)
