"""Who beats whom, by pairs of equal instance and seed; and Optuna's samplers behind the same questions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import optuna
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from kept_rows import OutOfTime, Rows
from rivals import RAW, judged, make_search, paired

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


def test_medians_of_instances_are_judged_over_the_seeds_that_both_have() -> None:
    reached = {
        "a": {"ours": [0.9, 0.8, 0.1], "theirs": [0.8, 0.7]},
        "b": {"ours": [0.5], "theirs": [0.495]},
        "c": {"ours": [0.5], "theirs": [0.505], "other": [0.1]},
    }
    found = judged(reached, "ours")
    told = found["against"]["theirs"]
    assert (told["wins"], told["ties"], told["losses"]) == (1, 2, 0)
    assert told["by_instance"]["a"] == {"seeds": 2, "ours": 0.85, "other": 0.75, "gain": 0.1, "paired": [0.1, 0.1, 0.1]}
    assert found["ahead_of_the_best_other"] == told["mean_gain"] == pytest.approx(0.0333, abs=1e-4)
    assert list(found["goals"].values()) == ["met", "met"]
    reached["d"] = {"ours": [0.1], "theirs": [0.2]}
    assert list(judged(reached, "ours")["goals"].values()) == ["MISSED", "MISSED"]


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
    for number in range(12):
        asked, trial = search.ask(), study.ask()
        assert asked is not None
        assert (asked.number, asked.values) == (number, space(trial))
        values = {"error": asked.values["x"], "seconds": (asked.values["x"] - 1) ** 2}
        search.tell(number, TrialFinished(number, "complete", values=values))
        study.tell(trial, list(values.values()))
