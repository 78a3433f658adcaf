"""The public tables: what a search of them is given, and that the tables kept for judging are never opened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from benchmarks.common.verdicts import judged, ranks, reached_at
from benchmarks.search.neutral import AHEAD, ALL, COUNTS, TABLES, Study, Table, cpu_hours, error

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "neutral.json"
KEPT = ("protein_structure", "cifar100")


def small() -> Table:
    points = np.arange(12.0).reshape(2, 3, 2)
    return Table({"kind": ["a", "b"], "size": [8, 16, 32]}, points, np.array([11.0, 12.0]), 132.0)


def test_a_text_is_a_choice_and_a_number_is_a_place_in_an_order() -> None:
    asked: dict[str, Any] = small().space(optuna.trial.FixedTrial({"kind": "b", "size": 2}))
    assert asked == {"kind": "b", "size": 2}
    assert small().point(asked).tolist() == [10.0, 11.0]
    with pytest.raises(ValueError, match="not in"):
        small().space(optuna.trial.FixedTrial({"kind": "c", "size": 2}))


def test_hypervolumes_are_shares_of_the_whole_front() -> None:
    assert small().reached(np.array([[0.0, 0.0]])) == 1.0
    assert small().reached(np.array([[5.5, 0.0], [12.0, 0.0]])) == 0.5


def test_an_error_is_a_loss_or_what_an_accuracy_lacks() -> None:
    assert error({"val_loss": [0.25, 0.75]}) == 0.5
    assert error({"val_acc": [0.75]}) == 0.25
    assert error({"val_acc": [75.0], "latency": [0.1]}) == 0.25


def test_tables_kept_for_judging_are_not_among_those_measured() -> None:
    assert not set(KEPT) & set(ALL)
    assert set(TABLES) <= set(ALL)
    assert not any(key.split()[0] in KEPT for key in json.loads(RESULT.read_text())["cells"])


def test_hours_are_told_for_what_is_missing() -> None:
    assert cpu_hours([], 50) == 0
    studies = [Study("car", "optuna-gp", 0)]
    assert cpu_hours(studies, 25) < cpu_hours(studies, 50) < cpu_hours(studies, 100) / 2


def test_the_committed_verdicts_are_what_their_rows_say() -> None:
    data = json.loads(RESULT.read_text())
    for count in COUNTS:
        if reached := reached_at(data["cells"], count):
            assert data[f"judged_at_{count}"] == {**judged(reached, "auto", AHEAD), "ranks": ranks(reached)}
