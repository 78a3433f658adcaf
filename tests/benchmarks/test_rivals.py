"""Optuna's samplers behind what benchmarks ask of a search; and rows that a run which was cut has kept."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import optuna
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from kept_rows import OutOfTime, Rows
from rivals import RAW, make_search

from elastune.journal.records import TrialFinished
from elastune.search.space.objective import parse_objectives

TWO = parse_objectives({"error": "min", "seconds": "min"})


def test_a_run_that_was_cut_measures_no_study_again(tmp_path: Path) -> None:
    path, asked = tmp_path / "out.rows.jsonl", []

    def measure(number: int) -> dict[str, Any]:
        asked.append(number)
        return {"cpu_s": 1.5 * number}

    first = Rows(path, resume=False)
    for number in (1, 2):
        first.of({"seed": number}, lambda: measure(number))  # noqa: B023
    with path.open("a") as file:
        file.write('{"study": {"seed": 3}, "fou')  # cut while it was written
    again = Rows(path, resume=True)
    assert [again.of({"seed": n}, lambda: measure(n)) for n in (1, 2, 3)] == [{"cpu_s": 1.5 * n} for n in (1, 2, 3)]  # noqa: B023
    assert asked == [1, 2, 3]
    assert len(path.read_text().splitlines()) == 3
    with pytest.raises(OutOfTime, match="after 3"):
        Rows(path, resume=True, limit_s=-1.0).of({"seed": 4}, lambda: measure(4))
    Rows(path, resume=False)
    assert path.read_text() == ""


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
