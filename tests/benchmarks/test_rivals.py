"""Optuna's samplers behind what benchmarks ask of a search."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
from benchmarks.search.rivals import RAW, make_search

from elastune.core.journal.records import TrialFinished
from elastune.tuning.search.objective import parse_objectives

TWO = parse_objectives({"error": "min", "seconds": "min"})


@pytest.mark.parametrize("name", RAW)
def test_optunas_samplers_are_asked_as_they_come(name: str) -> None:
    def space(trial: Any) -> dict[str, Any]:
        return {"x": trial.suggest_float("x", 0, 1)}

    search = make_search(space, TWO, name, 3)
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=RAW[name](3))
    for number in range(11):  # Optuna draws the first ten at random
        asked, trial = search.ask(), study.ask()
        assert asked is not None
        assert (asked.number, asked.values) == (number, space(trial))
        values = {"error": asked.values["x"], "seconds": (asked.values["x"] - 1) ** 2}
        search.tell(number, TrialFinished(number, "complete", values=values))
        study.tell(trial, list(values.values()))
