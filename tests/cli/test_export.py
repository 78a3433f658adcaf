"""After the search, on the command line: export, explain, and picks by target, weights and subset."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from optuna import load_study
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from tests.support.studies import Telling, stopping_study

from elastune.cli.results import PickOptions, result_of
from elastune.report.page import write_report
from elastune.tuning.study.results import FATES

Command = Callable[..., Any]


@pytest.fixture
def told(here: Path) -> Telling:
    """A study in ./out."""
    study = Telling()
    for number, (accuracy, seconds) in enumerate([(0.9, 10.0), (0.95, 30.0), (0.96, 90.0), (0.7, 50.0)]):
        study.start(number, lr=0.1 * (1 + number), optimizer="adam").wait(60).complete(number, accuracy, seconds)
    study.start(4, lr=0.5).wait(5).report(4, 1, 5.0, accuracy=0.99).pause(4, 1, 5.0, "rank 2 of 2").finish()
    study.write(here / "out")
    return study


def test_export_writes_what_optuna_opens(elastune: Command, told: Telling) -> None:
    result = elastune("export", "out", "--optuna", "study.log")
    assert (result.code, result.out.splitlines()) == (0, ["optuna  study.log (5 trials)"])
    study = load_study(study_name="elastune", storage=JournalStorage(JournalFileBackend("study.log")))
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 4 + ["PRUNED"]
    assert [trial.number for trial in study.best_trials] == [0, 1, 2]


def test_export_writes_both(elastune: Command, told: Telling) -> None:
    result = elastune("export", "out", "--csv", "a.csv", "--json", "a.json")
    assert result.code == 0
    assert result.out.splitlines() == ["csv     a.csv (5 trials)", "json    a.json (5 trials)"]
    with open("a.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows] == ["complete"] * 4 + ["paused"]
    assert json.loads(Path("a.json").read_text())["trials"][4]["values"] == {"accuracy": 0.99, "seconds": 5.0}


def test_a_child_is_trained_otherwise_and_the_page_trains_the_pick(here: Path) -> None:
    study = Telling().start(0, lr=0.1).wait(60).complete(0, 0.9, 10.0)
    study.start(1, parent=0, lr=0.2).wait(60).complete(1, 0.95, 5.0).finish()
    study.write(here / "out")
    caveat = "trial 1 went on from a checkpoint of trial 0; the command trains its settings from the beginning"
    lines = result_of(here / "out").lines
    (at,) = [place for place, line in enumerate(lines) if caveat in line]
    assert "--set lr=0.2" in lines[at - 1]
    page = write_report(here / "out").read_text()
    assert f"Trains the pick, trial 1, again ({caveat}):" in page
    assert "--set lr=0.2" in page


def test_what_cannot_be_exported_is_one_line(elastune: Command, told: Telling, here: Path) -> None:
    assert "an export needs a file" in elastune("export", "out").line
    assert "must not replace a file of the study" in elastune("export", "out", "--csv", "out/journal.jsonl").line
    assert "two exports need two files" in elastune("export", "out", "--csv", "a", "--optuna", "./a").line
    assert "a journal must exist" in elastune("export", "nothing", "--csv", "a.csv").line
    assert "No such file" in elastune("export", "out", "--csv", "no/such/a.csv").line
    (here / "run").mkdir()
    (here / "run" / "journal.jsonl").write_bytes(b"")
    assert "must begin with its settings" in elastune("explain", "run").line


def test_explain_speaks_and_gives_figures(elastune: Command, here: Path, told: Telling) -> None:
    output = elastune("explain", "out")
    assert output.code == 0
    assert "The front\n  No trial beats these 3 in everything" in output.out
    assert "trial 4: rank 2 of 2" in output.out
    assert "4 trials are too few" in output.out
    stopping_study(30).write(here / "more")
    result = elastune("explain", "more", "--json").json
    assert result["kind"] == "explanation"
    assert {"title", "lines"} == set(result["parts"][0])
    weighed = {each["objective"]: each for each in result["importance"]}
    assert weighed["accuracy"]["parameters"][0]["name"] == "lr"
    assert weighed["seconds"]["parameters"][0]["name"] == "workers"
    assert set(result["worker_time"]) == set(FATES)
    assert sum(result["worker_time"].values()) == pytest.approx(1.0)
    assert result["worker_time"]["front"] > 0


def test_a_pick_by_target_weights_or_neither_says_why(elastune: Command, told: Telling) -> None:
    def picked(**wish: Any) -> dict[str, Any]:
        result: dict[str, Any] = result_of(Path("out"), PickOptions(**wish)).data["pick"]
        return result

    neither = picked()
    assert (neither["trial"], neither["reason"]) == (2, "the best accuracy, and the fastest within 1% of it")
    assert neither["found_after_s"] == pytest.approx(180.0)
    target = picked(targets={"accuracy": 0.96})
    assert target["trial"] == 2
    assert target["reason"] == "reaches accuracy 0.96 with the best seconds (1.5 min)"
    weighed = picked(weights={"seconds": 9.0, "accuracy": 1.0})
    assert weighed["trial"] == 0
    assert weighed["reason"].startswith("the smallest weighted sum (seconds 9, accuracy 1;")
    both = elastune("report", "out", "--json", "--pick", "accuracy=0.95", "--weights", "seconds=1").json["pick"]
    assert both["trial"] == 1
    assert both["reason"].startswith("reaches accuracy 0.95 with the smallest weighted sum")
    output = elastune("report", "out", "--pick", "accuracy=0.9,seconds=20")
    assert "pick    trial 0 (reaches accuracy 0.9 and seconds 20 with" in output.out
    assert "found   after 1.0 min of search, all counted: 1 trial had ended" in output.out
    assert "=null" not in output.out, "what is not set is not named"
    assert "None" not in output.out


def test_a_subset_says_why_each(elastune: Command, told: Telling) -> None:
    result = elastune("report", "out", "--subset", "2", "--json").json["subset"]
    assert len(result) == 2
    assert result[0]["reason"].startswith("covers ")
    assert result[1]["reason"].startswith("adds ")
    assert [table.title for table in result_of(Path("out"), PickOptions(subset=2)).tables][1:] == [
        "A subset that stands for the front"
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--pick", "accuracy"], "--pick must be NAME=NUMBER"),
        (["--pick", "accuracy=high"], "--pick must be NAME=NUMBER"),
        (["--pick", "accuracy=nan"], "--pick must be NAME=NUMBER"),
        (["--pick", "accuracy=1,accuracy=2"], "may name an objective once"),
        (["--pick", "accuracy=0.999"], "a point must reach accuracy 0.999 (got at best 0.96)"),
        (["--pick", "beauty=1"], "known: accuracy, seconds"),
        (["--weights", "seconds=-1"], "weights must be >= 0"),
        (["--subset", "0"], "at least one point"),
    ],
)
def test_a_wrong_pick_is_one_line(elastune: Command, told: Telling, options: list[str], expected: str) -> None:
    assert expected in elastune("report", "out", *options).line


def test_only_a_study_is_picked_from(elastune: Command, finished_run: Path) -> None:
    assert "need a study" in elastune("report", finished_run, "--pick", "loss=1").line


def test_a_study_without_a_result_has_nothing_to_pick(elastune: Command, here: Path) -> None:
    Telling().start(0, lr=0.1).wait(1).fail(0, "diverged").write(here / "out")
    assert elastune("report", "out").code == 0
    assert "a front needs a trial that finished" in elastune("report", "out", "--pick", "accuracy=0.5").line
