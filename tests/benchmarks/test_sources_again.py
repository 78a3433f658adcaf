"""``make sources``: what is measured again, in which order, and where an interrupted run goes on."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from benchmarks.parallel.splits import not_faster
from benchmarks.sources import again
from benchmarks.sources.again import LAST_BEGIN_S, OUT, PARTS, beside, hours, left, measure, missing, run, words
from benchmarks.sources.page import DOCUMENTS, read

SECTIONS = [section for document in DOCUMENTS for section in document.sections]


def test_every_result_of_the_page_is_measured_again() -> None:
    assert {part.result for part in PARTS} == {section.result for section in SECTIONS if section.result}
    assert len(PARTS) == len({part.result for part in PARTS})
    for part in PARTS:
        assert all(part.module in section.command for section in SECTIONS if section.result == part.result)
        assert OUT in part.full.split()
        assert (OUT in part.small.split()) == part.small_writes


def test_the_small_size_is_planned_within_its_time() -> None:
    assert sum(part.small_s for part in PARTS) <= LAST_BEGIN_S


def test_the_full_size_says_its_hours() -> None:
    assert hours(PARTS[:2]).startswith(f"about {PARTS[0].full_h + PARTS[1].full_h:.1f} hours")


def test_a_path_with_spaces_is_one_word(tmp_path: Path) -> None:
    command = words(PARTS[0], False, tmp_path / "a b.json")
    assert command[:2] == ["-m", PARTS[0].module]
    assert command[-1] == str(tmp_path / "a b.json")


def test_a_part_without_its_data_says_so(tmp_path: Path) -> None:
    (part,) = (part for part in PARTS if part.result == "spot")
    assert missing(part, None) == missing(part, str(tmp_path)) == "no spot_traces in ELASTUNE_DATA"
    (tmp_path / "spot_traces").mkdir()
    assert missing(part, str(tmp_path)) == ""


def test_figures_stand_beside_the_committed_ones() -> None:
    section = next(section for section in SECTIONS if section.result == "splits")
    committed = read()
    measured = copy.deepcopy(committed["splits"])
    measured["rows"] = [row for row in measured["rows"] if row["link"] == "1gbit"]
    measured["rows"][1] |= {"speedup": 0.39, "lowest": 0.38, "highest": 0.4}
    lines = list(beside(section, committed, {"splits": measured}))
    assert lines[1] == (
        "  model split over 4, 1gbit: 1.64 [1.64 to 1.65] of 3 agrees | again 0.39 [0.38 to 0.40] of 3 differs"
    )
    assert lines[-1].endswith("| again no such row")


def test_an_interrupted_run_goes_on_and_an_ended_one_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[str] = []

    def ran(command: Sequence[str], limit_s: float | None) -> str:
        assert limit_s is None
        began.append(command[1])
        if len(began) == 3:
            raise KeyboardInterrupt
        return "ok"

    monkeypatch.setattr(again, "run", ran)
    monkeypatch.setattr(again, "missing", lambda part, data: "")
    stale = tmp_path / "overlap.json"
    stale.write_text("{}")
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path, full=True)
    assert not stale.exists(), "no figure of an earlier run is shown as a new one"
    assert json.loads((tmp_path / "unfinished.json").read_text()) == [part.result for part in PARTS[:2]]
    assert left(PARTS, ["splits"]) == list(PARTS[1:])
    assert measure(tmp_path, full=True) == []
    assert began == [part.module for part in (*PARTS[:3], *PARTS[2:])]
    assert measure(tmp_path, full=True) == []
    assert len(began) == 1 + 2 * len(PARTS), "an ended run begins anew"


def test_what_fails_is_named_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = {PARTS[1].module: "exit code 1"}
    monkeypatch.setattr(again, "run", lambda command, limit_s: codes.get(command[1], "ok"))
    monkeypatch.setattr(again, "missing", lambda part, data: "")
    assert measure(tmp_path, full=False) == [PARTS[1].result]
    assert PARTS[1].result not in json.loads((tmp_path / "unfinished.json").read_text())


def test_a_part_ends_with_its_time() -> None:
    assert run(["-c", ""], 60) == "ok"
    assert run(["-c", "import sys; sys.exit(3)"], 60) == "exit code 3"
    assert run(["-c", "import time; time.sleep(60)"], 0.2) == "ended, its time was over"


def test_a_split_that_is_slower_than_one_worker_fails() -> None:
    rows = [
        {"link": "1gbit", "case": "baseline", "workers": 1, "speedup": 1.0},
        {"link": "1gbit", "case": "split", "workers": 4, "speedup": 0.39},
        {"link": "1gbit", "case": "data", "workers": 4, "speedup": 1.27},
        {"link": "200mbit", "case": "data", "workers": 4, "speedup": 0.9},
    ]
    assert not_faster(rows) == ["1gbit split: 4 workers are 0.39 times as fast as one"]
    assert not_faster(rows[2:]) == []
