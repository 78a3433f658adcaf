"""Who beats whom, by pairs and by medians of instances; and results that a run which was cut goes on with."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from kept_cells import Cells, cells_in, complete, reached, rows
from verdicts import judged, markdown

REACHED = {
    "a": {"ours": {0: 0.9, 1: 0.8, 2: 0.1}, "theirs": {1: 0.7, 0: 0.8}},
    "b": {"ours": {0: 0.5}, "theirs": {0: 0.495}},
    "c": {"ours": {0: 0.5}, "theirs": {0: 0.505}, "other": {0: 0.1}},
}


def test_medians_of_instances_are_judged_over_the_seeds_that_both_have() -> None:
    found = judged(REACHED, "ours")
    told = found["against"]["theirs"]
    assert (told["wins"], told["ties"], told["losses"]) == (1, 2, 0)
    assert told["by_instance"]["a"] == {"seeds": 2, "ours": 0.85, "other": 0.75, "gain": 0.1, "paired": [0.1, 0.1, 0.1]}
    assert found["ahead_of_the_best_other"] == told["mean_gain"] == pytest.approx(0.0333, abs=1e-4)
    assert list(found["goals"].values()) == ["met", "met"]
    assert found["medians"] == {"a": 0.8, "b": 0.5, "c": 0.5}
    behind = judged({**REACHED, "d": {"ours": {0: 0.1}, "theirs": {0: 0.2}}}, "ours")
    assert list(behind["goals"].values()) == ["MISSED", "MISSED"]


def test_pairs_are_of_equal_seed_whatever_their_order() -> None:
    crossed = {"a": {"ours": {3: 0.9, 1: 0.5}, "theirs": {1: 0.6, 3: 0.8}}, "b": {"ours": {1: 0.7}, "theirs": {2: 0.1}}}
    pairs = judged(crossed, "ours")["against"]["theirs"]["pairs"]
    assert pairs == {"wins": 1, "ties": 0, "losses": 1, "gain": [-0.1, 0.0, 0.1]}


def test_a_verdict_is_told_as_a_table() -> None:
    assert markdown(judged(REACHED, "ours")).splitlines() == [
        "| instance | ours | other | gain of pairs | theirs | gain of pairs |",
        "|---|---|---|---|---|---|",
        "| a | 0.800 |  |  | 0.750 | +0.100 [+0.100, +0.100] |",
        "| b | 0.500 |  |  | 0.495 | +0.005 [+0.005, +0.005] |",
        "| c | 0.500 | 0.100 | +0.400 [+0.400, +0.400] | 0.505 | -0.005 [-0.005, -0.005] |",
        "| seeds |  | 1 |  | 1 to 2 |  |",
        "| mean gain of medians |  | +0.400 |  | +0.033 |  |",
        "| won / tied / lost: medians, pairs |  | 1 / 0 / 0 | 1 / 0 / 0 | 1 / 2 / 0 | 2 / 2 / 0 |",
        "",
        "- never behind by more than 0.01 in the median of an instance: met",
        "- ahead of the best other by 0.03 in the mean over instances: met",
    ]


def test_a_run_that_was_cut_goes_on_with_the_rows_of_its_results(tmp_path: Path) -> None:
    path, asked = tmp_path / "new" / "out.json", []
    wanted = [SimpleNamespace(key=f"a by me {seed}") for seed in range(3)]

    def measure(study: Any, cut_at: int | None, budgets: tuple[int, ...]) -> dict[str, Any]:
        seed = int(study.key[-1])
        if seed == cut_at:
            raise KeyboardInterrupt
        asked.append(seed)
        return {"hypervolume_at": {str(n): n / 100 + seed for n in budgets}}

    def document(cells: Cells) -> dict[str, Any]:
        return {"cells": cells}

    with pytest.raises(KeyboardInterrupt):
        complete(path, wanted, 50, lambda one: measure(one, 2, (50,)), document)
    assert list(cells_in(path)) == ["a by me 0", "a by me 1"]
    found = complete(path, wanted, 50, lambda one: measure(one, None, (50,)), document)
    assert asked == [0, 1, 2]
    assert reached(found, 50) == {"a": {"by me": {0: 0.5, 1: 1.5, 2: 2.5}}}
    assert json.loads(path.read_text()) == {"cells": found}
    complete(path, wanted[:1], 100, lambda one: measure(one, None, (50, 100)), document)
    assert asked == [0, 1, 2, 0]  # its row stopped before 100
    assert reached(cells_in(path), 100) == {"a": {"by me": {0: 1.0}}}


def test_several_processes_find_what_one_finds() -> None:
    studies = [SimpleNamespace(key=f"a me {seed}", hypervolume_at={"50": 0.1 * seed}) for seed in range(3)]
    assert sorted(rows(studies, vars, 2)) == list(rows(studies, vars, 1))
