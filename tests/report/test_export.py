"""Trials as CSV and JSON: nothing lost, nothing that a spreadsheet would run."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import pytest
from tests.support.studies import Telling, stopping_study

from elastune.core.formatting import FORMULA, printable
from elastune.report.export import to_csv, to_json
from elastune.tuning.study.results import Study


def study(journal: Telling) -> Study:
    return Study.of(Path("out"), journal.entries)


def read_csv(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_csv_holds_every_trial_with_every_figure_in_full() -> None:
    study_result = study(stopping_study(20))
    rows = read_csv(to_csv(study_result))
    assert [int(row["number"]) for row in rows] == [trial.number for trial in study_result.trials]
    assert {row["state"] for row in rows} == {"complete", "paused", "infeasible"}
    for row, trial in zip(rows, study_result.trials, strict=True):
        assert float(row["params.lr"]) == trial.params["lr"], "every digit"
        assert row["params.momentum"] == ("" if "momentum" not in trial.params else repr(trial.params["momentum"]))
        assert {name: float(row[f"values.{name}"]) for name in trial.values} == trial.values
        assert int(row["epochs"]) == trial.epochs
        assert float(row["worker_seconds"]) == trial.worker_seconds
        assert row["reason"] == trial.reason
        assert row["started_at"].endswith("+00:00")
    header = to_csv(study_result).splitlines()[0].split(",")
    assert header[:3] == ["number", "state", "phase"]
    assert header[-1] == "reason"


@pytest.mark.parametrize(
    "text",
    ['say "no", twice', "two\nlines\r\nand more", "tab\tand ; and ,", "ünïcödé ∞ \u2028", "", " ", "'quoted'", "null"],
)
def test_csv_survives_odd_texts(text: str) -> None:
    journal = Telling().start(0, lr=0.1, note=text).wait(1).fail(0, text)
    (row,) = read_csv(to_csv(study(journal)))
    assert row["config.note"] == row["reason"] == printable(text)


def test_csv_shows_what_a_terminal_would_obey() -> None:
    journal = Telling().start(0, **{"\x1b[31mlr\u202e": 0.1}).wait(1).fail(0, "\x1b]0;title\x07")
    text = to_csv(study(journal))
    (row,) = read_csv(text)
    assert row["params.\\x1b[31mlr\\u202e"] == "0.1"
    assert row["reason"] == "\\x1b]0;title\\x07"
    assert all(c.isprintable() or c in "\r\n" for c in text)


@pytest.mark.parametrize("start", FORMULA)
def test_a_spreadsheet_runs_nothing(start: str) -> None:
    text = f"{start}HYPERLINK(\"http://x\",A1)|cmd!'A0'"
    journal = Telling().start(0, lr=0.1, note=text).wait(1).fail(0, text)
    (row,) = read_csv(to_csv(study(journal)))
    assert row["reason"].removeprefix("'") == row["config.note"].removeprefix("'") == printable(text)
    assert not row["reason"].startswith(FORMULA)
    assert not row["config.note"].startswith(FORMULA)


def test_negative_numbers_are_no_formulas_and_lists_are_json() -> None:
    journal = Telling().start(0, lr=-0.5, betas=[0.9, 0.99], flag=True).wait(1).complete(0, -math.inf, 1.0)
    (row,) = read_csv(to_csv(study(journal)))
    assert (row["params.lr"], row["config.betas"], row["config.flag"]) == ("-0.5", "[0.9, 0.99]", "true")
    assert row["values.accuracy"] == "-inf"


def test_json_gives_back_what_went_in() -> None:
    study_result = study(stopping_study(20))
    data = json.loads(to_json(study_result))
    assert data["objectives"] == {"accuracy": "max", "seconds": "min"}
    for row, trial in zip(data["trials"], study_result.trials, strict=True):
        for name in ("number", "state", "seed", "parent", "epochs", "seconds", "worker_seconds", "reason"):
            assert row[name] == getattr(trial, name)
        for group in ("params", "config", "execution", "values", "metrics"):
            assert row[group] == getattr(trial, group)


def test_json_is_strict() -> None:
    journal = Telling().start(0, lr=0.1).wait(1).complete(0, math.nan, 1.0)
    data = json.loads(to_json(study(journal)), parse_constant=lambda text: pytest.fail(text))
    assert data["trials"][0]["values"] == {"accuracy": None, "seconds": 1.0}


def test_a_study_without_trials_has_a_header() -> None:
    assert read_csv(to_csv(study(Telling()))) == []
    assert json.loads(to_json(study(Telling())))["trials"] == []
