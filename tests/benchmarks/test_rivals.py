"""Who beats whom, by pairs of equal instance and seed; and Optuna's samplers behind the same questions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import optuna
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from rivals import RAW, make_search, paired

from elastune.journal.records import TrialFinished
from elastune.search.space.objective import parse_objectives

TWO = parse_objectives({"error": "min", "seconds": "min"})


def test_pairs_are_won_tied_and_lost() -> None:
    reached = {"a": {"ours": [0.9, 0.8], "theirs": [0.8, 0.805]}, "b": {"ours": [0.5], "theirs": [0.6], "other": [0.1]}}
    found = paired(reached, "ours")
    assert found["theirs"] == {
        "wins": 1,
        "ties": 1,
        "losses": 1,
        "median_gain": pytest.approx(-0.005),
        "least": pytest.approx(-0.1),
        "most": pytest.approx(0.1),
    }
    assert (found["other"]["wins"], found["other"]["ties"], found["other"]["losses"]) == (1, 0, 0)


@pytest.mark.parametrize("name", RAW)
def test_optunas_samplers_are_asked_as_they_come(name: str) -> None:
    def space(trial: Any) -> dict[str, Any]:
        return {"x": trial.suggest_float("x", 0, 1)}

    search = make_search(space, TWO, name, 3)
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=RAW[name](3))
    for number in range(12):
        asked, trial = search.ask(), study.ask()
        assert asked is not None
        assert (asked.number, asked.values) == (number, space(trial))
        values = {"error": asked.values["x"], "seconds": (asked.values["x"] - 1) ** 2}
        search.tell(number, TrialFinished(number, "complete", values=values))
        study.tell(trial, list(values.values()))
