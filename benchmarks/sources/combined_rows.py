"""The rows of ``combined.py``: single techniques and combined ones, multiplied, predicted and measured. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.programs.combined_train import BATCH

from elastune.core.mesh import Mesh

Found = dict[str, Any]
ALONE = Mesh()


@dataclass(frozen=True)
class Row:
    """A way to search: random or genetic, ``width`` trainings at once, each on ``mesh``."""

    name: str
    genetic: bool
    width: int
    mesh: Mesh

    @property
    def nodes(self) -> int:
        """All that it uses, one worker each."""
        return self.width * self.mesh.workers

    @property
    def key(self) -> str:
        """What it is known by in a result."""
        return f"{'genetic' if self.genetic else 'random'}, {self.width} x {self.mesh}"


def table(width: int, data: int, tensor: int) -> tuple[Row, ...]:
    """The seven rows of the seed's combined table at this size."""
    d, t, both = Mesh(data=data), Mesh(tensor=tensor), Mesh(data=data, tensor=tensor)
    return (
        Row("random search", False, 1, ALONE),
        Row("model + data parallel", False, 1, both),
        Row("genetic", True, width, ALONE),
        Row("genetic + data parallel", True, width, d),
        Row("genetic + model parallel", True, width, t),
        Row("random + both", False, width, both),
        Row("genetic + both (all)", True, width, both),
    )


def meshes(row: Row) -> list[Mesh]:
    """Its mesh taken apart: one for each technique of training in parallel."""
    whole = {"data": Mesh(data=row.mesh.data), "tensor": Mesh(tensor=row.mesh.tensor)}
    return [mesh for mesh in whole.values() if mesh != ALONE]


def batches(row: Row) -> Found:
    """Its global batch, here and as the seed multiplied it."""
    return {"batch": BATCH, "batch_of_the_seed": BATCH * row.mesh.data}


def multiplied(row: Row, single: Mapping[str, float]) -> float | None:
    """The seed's product of ``single`` techniques, which are known by a mesh or by a search's key; None where one is
    not. So many trainings of a random search at once count as so many times as fast."""
    searched = single.get(Row("", True, row.width, ALONE).key) if row.genetic else float(row.width)
    results = [searched, *(single.get(str(mesh)) for mesh in meshes(row))]
    return None if None in results else math.prod(each for each in results if each is not None)


def spread(values: Sequence[float]) -> Found:
    """The middle one, the least and the most."""
    return {
        "median": round(statistics.median(values), 4),
        "least": round(min(values), 4),
        "most": round(max(values), 4),
    }


def error(predicted: float | None, measured: float | None) -> float | None:
    """Of the prediction, relative to what was measured."""
    return None if predicted is None or not measured else round(predicted / measured - 1, 4)


def singles(runs: Iterable[Mapping[str, Any]], predicted: Mapping[str, float]) -> list[Found]:
    """One row for each mesh of single trainings: ``runs`` have "mesh", "round", "seconds" and "step_s"."""
    by_mesh: dict[str, dict[int, Mapping[str, Any]]] = {}
    for run in runs:
        by_mesh.setdefault(run["mesh"], {})[run["round"]] = run
    base, rows = by_mesh.get(str(ALONE), {}), []
    for mesh, rounds in by_mesh.items():
        both = [r for r in rounds if r in base]
        if not both:
            continue
        seconds = statistics.median(run["seconds"] for run in rounds.values())
        rows.append(
            {
                "mesh": mesh,
                "nodes": Mesh.parse(mesh).workers,
                "seconds": spread([run["seconds"] for run in rounds.values()]),
                "step_s": spread([run["step_s"] for run in rounds.values()]),
                "speed_up": spread([base[r]["seconds"] / rounds[r]["seconds"] for r in both]),
                "speed_up_of_steps": spread([base[r]["step_s"] / rounds[r]["step_s"] for r in both]),
                "predicted_seconds": round(predicted[mesh], 4),
                "predicted_speed_up": round(predicted[str(ALONE)] / predicted[mesh], 4),
                "error_of_seconds": error(predicted[mesh], seconds),
            }
        )
    return rows


def combined(
    rows: Sequence[Row],
    searches: Iterable[Mapping[str, Any]],
    trained: Mapping[str, float],
    planned: Mapping[str, Found],
) -> list[Found]:
    """One row for each of ``rows`` that was measured.

    Args:
        rows: The first is what all are compared with.
        searches: "row" (a key), "seed", "seconds", "runs", "reached", "training_s": one of each row and seed.
        trained: Speed-ups of single trainings, by mesh.
        planned: Predicted "runs" and "seconds", by row.
    """
    by_row: dict[str, dict[int, Mapping[str, Any]]] = {}
    for search in searches:
        by_row.setdefault(search["row"], {})[search["seed"]] = search
    base = by_row.get(rows[0].key, {})
    single = dict(trained)
    results: list[Found] = []
    for row in rows:
        mine = by_row.get(row.key, {})
        both = [seed for seed in mine if seed in base]
        if not both:
            continue
        measured, alone = _success(mine, both), _success(base, both)
        speed_up = alone / measured if measured and alone else None
        if row.mesh == ALONE and speed_up is not None:
            single[row.key] = speed_up
        results.append({"row": row.name, "runs": _runs(mine, both), "nodes": row.nodes, **batches(row)})
        results[-1] |= _judged(row, mine, both, base)
        results[-1] |= {
            "speed_up_multiplied": _rounded(multiplied(row, single)),
            **_predicted(planned, row, rows[0]),
            "speed_up_measured": _rounded(speed_up),
        }
        now = results[-1]
        now["error_of_product"] = error(now["speed_up_multiplied"], speed_up)
        now["error_of_prediction"] = error(now["speed_up_predicted"], speed_up)
        now["error_of_seconds"] = error(now["seconds_predicted"], measured)
        each = now["seconds_a_run"]
        now["error_of_seconds_a_run"] = error(now["seconds_predicted"] / now["runs_predicted"], each)
    return results


def _judged(row: Row, mine: Mapping[int, Mapping[str, Any]], seeds: Sequence[int], base: Mapping[int, Any]) -> Found:
    """What was measured of one row, beside its speed-up."""
    seconds, runs = _sum(mine, seeds, "seconds"), _sum(mine, seeds, "runs")
    fewer = _sum(base, seeds, "runs") / runs
    return {
        "key": row.key,
        "width": row.width,
        "mesh": str(row.mesh),
        "seeds": list(seeds),
        "reached": sum(bool(mine[seed]["reached"]) for seed in seeds),
        "seconds": spread([mine[seed]["seconds"] for seed in seeds]),
        "speed_up_by_seed": spread([base[seed]["seconds"] / mine[seed]["seconds"] for seed in seeds]),
        "seconds_a_run": round(seconds / runs, 4),
        "fewer_runs": round(fewer, 4),
        "fewer_seconds_a_run": round(_sum(base, seeds, "seconds") / seconds / fewer, 4),
        "training_s": round(statistics.median(mine[seed]["training_s"] for seed in seeds), 4),
        "cores_busy": round(statistics.median(mine[seed]["cores_busy"] for seed in seeds), 3),
    }


def _predicted(planned: Mapping[str, Found], row: Row, first: Row) -> Found:
    mine = planned[row.key]
    return {
        "runs_predicted": mine["runs"],
        "seconds_predicted": mine["seconds"],
        "interval_80": mine["interval_s"],
        "training_predicted_s": mine["training_s"],
        "speed_up_predicted": _rounded(planned[first.key]["seconds"] / mine["seconds"]),
    }


def _runs(mine: Mapping[int, Mapping[str, Any]], seeds: Sequence[int]) -> float:
    return round(_sum(mine, seeds, "runs") / len(seeds), 2)


def _sum(mine: Mapping[int, Mapping[str, Any]], seeds: Sequence[int], what: str) -> float:
    return float(sum(mine[seed][what] for seed in seeds))


def _success(mine: Mapping[int, Mapping[str, Any]], seeds: Sequence[int]) -> float | None:
    """Seconds of all searches over those that reached the target (Hansen et al., COCO, 2016, section 3)."""
    reached = sum(bool(mine[seed]["reached"]) for seed in seeds)
    return _sum(mine, seeds, "seconds") / reached if reached else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def target_of(accuracies: Sequence[float], share: float) -> tuple[float, int]:
    """An accuracy that about ``share`` of configurations reach, in the widest gap near there; and how many do.

    Rounding, which differs from mesh to mesh, moves nobody across a gap.
    """
    best = sorted(accuracies, reverse=True)
    wanted = max(1, round(share * len(best)))
    near = [k for k in range(max(1, wanted - wanted // 3), wanted + wanted // 3 + 1) if k < len(best)]
    count = max(near, key=lambda k: (best[k - 1] - best[k], -abs(k - wanted)))
    return (best[count - 1] + best[count]) / 2, count
