"""The pure parts of benchmarks/sources/combined.py: its rows, products, errors and target."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from benchmarks.sources.combined import SMALL, Kept, scaled, todo
from benchmarks.sources.combined_live import course
from benchmarks.sources.combined_rows import ALONE, Row, combined, multiplied, singles, table, target_of
from benchmarks.sources.combined_summary import at_scale
from benchmarks.sources.genetic_mnist import RATES
from benchmarks.sources.genetic_replay import Search, Table, Training

from elastune.core.errors import UserError
from elastune.core.journal.files import JournalWriter
from elastune.core.journal.records import TrialFinished, TrialStarted
from elastune.core.mesh import Mesh

ROWS = table(2, 2, 2)
SINGLE = {"data=2": 1.8, "tensor=2": 1.5, "genetic, 2 x data=1": 2.5}


def test_the_seven_rows_take_the_nodes_of_the_seed_s_regimes() -> None:
    assert [row.nodes for row in ROWS] == [1, 4, 2, 4, 4, 8, 8]
    assert [row.nodes for row in table(8, 4, 4)] == [1, 16, 8, 32, 32, 128, 128]
    assert table(16, 16, 8)[-1].nodes == 2048


def test_single_techniques_are_multiplied_and_what_is_not_known_is_not_made_up() -> None:
    told = [multiplied(row, SINGLE) for row in ROWS]
    assert told == pytest.approx([1, 1.8 * 1.5, 2.5, 2.5 * 1.8, 2.5 * 1.5, 2 * 1.8 * 1.5, 2.5 * 1.8 * 1.5])
    assert multiplied(ROWS[4], {"tensor=2": 1.5}) is None


def searched(row: Row, seed: int, seconds: float, runs: int, reached: bool = True) -> dict[str, Any]:
    return {
        "row": row.key, "seed": seed, "seconds": seconds, "runs": runs, "reached": reached, "training_s": 5.0,
        "cores_busy": 0.25,
    }  # fmt: skip


PLANNED = {
    row.key: {"runs": 10, "seconds": 120.0 / row.nodes, "interval_s": [1.0, 2.0], "training_s": 12.0} for row in ROWS
}


def test_what_is_measured_stands_beside_what_was_multiplied_and_predicted() -> None:
    both, random = ROWS[6], ROWS[0]
    runs = [searched(random, 0, 100.0, 10), searched(random, 1, 60.0, 6), searched(ROWS[2], 0, 50.0, 8)]
    runs += [searched(ROWS[2], 1, 30.0, 8), searched(both, 0, 12.0, 4), searched(both, 1, 20.0, 4)]
    told = {row["row"]: row for row in combined(ROWS, runs, SINGLE, PLANNED)}
    assert list(told) == ["random search", "genetic", "genetic + both (all)"]
    assert told["genetic"]["speed_up_measured"] == 2.0
    mine = told["genetic + both (all)"]
    assert mine["speed_up_measured"] == 160 / 32
    assert mine["speed_up_multiplied"] == pytest.approx(2 * 1.8 * 1.5)  # with what genetic alone was measured to bring
    assert mine["error_of_product"] == pytest.approx(5.4 / 5 - 1)
    assert mine["error_of_prediction"] == pytest.approx(8 / 5 - 1)
    assert mine["error_of_seconds"] == pytest.approx(15 / 16 - 1, abs=1e-4)
    assert mine["error_of_seconds_a_run"] == pytest.approx(1.5 / 4 - 1)
    assert mine["fewer_runs"] * mine["fewer_seconds_a_run"] == pytest.approx(5.0)
    assert (mine["batch"], mine["batch_of_the_seed"]) == (64, 128)


def test_a_search_that_fails_costs_those_that_do_not() -> None:
    runs = [searched(ROWS[0], 0, 100.0, 10), searched(ROWS[0], 1, 100.0, 10)]
    runs += [searched(ROWS[2], 0, 50.0, 10), searched(ROWS[2], 1, 50.0, 10, reached=False)]
    told = combined(ROWS, runs, {}, PLANNED)[1]
    assert (told["reached"], told["speed_up_measured"]) == (1, 1.0)
    nobody = [searched(ROWS[0], 0, 100.0, 10), searched(ROWS[2], 0, 50.0, 10, reached=False)]
    told = combined(ROWS, nobody, {}, PLANNED)[1]
    assert told["speed_up_measured"] is told["error_of_prediction"] is told["speed_up_multiplied"] is None


def test_single_trainings_are_compared_within_their_round() -> None:
    runs = [
        {"mesh": mesh, "round": at, "seconds": seconds * (1 + at), "step_s": seconds * (1 + at) / 10}
        for at, (mesh, seconds) in product(range(2), (("data=1", 10.0), ("data=2", 4.0)))
    ]
    base, two = singles(runs, {"data=1": 9.0, "data=2": 6.0})
    assert base["speed_up"] == {"median": 1.0, "least": 1.0, "most": 1.0}
    assert two["speed_up"] == {"median": 2.5, "least": 2.5, "most": 2.5}
    assert (two["predicted_speed_up"], two["error_of_seconds"]) == (1.5, 0.0)


def test_the_target_lies_in_the_widest_gap_near_the_share() -> None:
    told = [0.9, 0.89, 0.88, 0.7, 0.69, *[0.5] * 55]
    target, count = target_of(told, 0.05)
    assert (target, count) == (pytest.approx(0.79), 3)
    assert sum(each >= target for each in told) == count


def known() -> Table:
    """Of 48 configurations two reach .9."""
    genes = {"lr": (0, 1, 2, 3), "momentum": (0, 1, 2, 3), "gain": (0, 1, 2)}
    keys = list(product(*genes.values()))
    return Table(genes, {key: Training(a := 0.9 if sum(key) >= 7 else 0.1 * sum(key), a, 1.0) for key in keys})


def test_at_scale_trainings_are_replayed_and_their_seconds_are_the_planner_s() -> None:
    rows = (*table(4, 2, 2), Row("", False, 1, Mesh(data=2)), Row("", False, 1, Mesh(tensor=2)))
    modelled = {
        row.key: {"runs": 16, "seconds": 160.0 / row.nodes, "training_s": 12.0 / row.mesh.workers} for row in rows
    }
    told = at_scale(rows, modelled, known(), 0.85, Search(f"demes=2,population=4,{RATES}", True), 3)
    assert [row["row"] for row in told] == [row.name for row in ROWS]
    first, both, wide = told[0], told[1], told[5]
    assert first["speed_up_simulated"] == first["speed_up_multiplied"] == 1.0
    assert first["rounds_simulated"] == first["runs_simulated"]
    assert both["speed_up_simulated"] == both["speed_up_multiplied"] == pytest.approx(4.0)
    assert wide["speed_up_multiplied"] == 16.0
    assert wide["seconds"] == pytest.approx(wide["rounds_simulated"] * 3.0, rel=1e-3)


def test_a_cut_run_goes_on_with_what_is_left_and_with_no_other_settings(tmp_path: Path) -> None:
    out = tmp_path / "combined.json"
    kept = Kept.begun({"batch": 64, "live": (2, 2, 2)}, out)
    kept.trained.append({"mesh": str(ALONE), "round": 0})
    kept.searched.append({"row": ROWS[0].key, "seed": 1})
    kept.write({"combined": []})
    again = Kept.begun({"batch": 64, "live": (2, 2, 2)}, out)
    left = [(what.key if isinstance(what, Row) else str(what), seed) for what, seed in todo(SMALL, again, 2)]
    assert len(left) == 2 * (len(SMALL.meshes) + 7) - 2
    assert ("data=1", 0) not in left
    assert ("data=1", 1) in left
    assert (ROWS[0].key, 1) not in left
    with pytest.raises(UserError, match="own settings"):
        Kept.begun({"batch": 32, "live": (2, 2, 2)}, out)


def test_a_search_lasts_until_the_first_training_that_reaches_the_target(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    told = {"train_seconds": 4.0, "cpu_seconds": 1.0}
    with JournalWriter(path, wall=iter((10.0, 11.0, 14.0, 15.0, 18.0, 19.0)).__next__) as journal:
        for trial in (0, 1):
            journal.write(started(trial))
        journal.write(TrialFinished(0, "complete", values={"accuracy": 0.2}, metrics=told))
        journal.write(started(2))
        journal.write(TrialFinished(1, "complete", values={"accuracy": 0.9}, metrics=told))
        journal.write(TrialFinished(2, "complete", values={"accuracy": 0.95}, metrics=told))
    genes = Table({"lr": (0, 1, 2)}, {(0,): Training(0.2, 0.2, 1), (1,): Training(0.8, 0.8, 1)})
    found = course(path, genes, 0.85, 2)
    assert (found["seconds"], found["runs"], found["ended"], found["reached"]) == (8.0, 3, 2, True)
    assert (found["accuracy"], found["unlike"], found["training_s"]) == (0.9, 1, 5.5)
    assert not math.isnan(found["cores_busy"])


def started(trial: int) -> TrialStarted:
    return TrialStarted(trial, {"lr": trial}, {}, seed=0, params={"lr": trial})


def test_scaled_rows_have_their_single_techniques_beside_them() -> None:
    assert [row.key for row in scaled((8, 4, 4))][-2:] == ["random, 1 x data=4", "random, 1 x tensor=4"]
