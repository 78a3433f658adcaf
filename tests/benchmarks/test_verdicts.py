"""Who beats whom, by pairs and by medians of instances, and whether committed verdicts are what their rows say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.common.verdicts import goes_to, judged, markdown, ranks, reached_at

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
REACHED = {
    "a": {"ours": {0: 0.9, 1: 0.8, 2: 0.1}, "theirs": {1: 0.7, 0: 0.8}},
    "b": {"ours": {0: 0.5}, "theirs": {0: 0.495}},
    "c": {"ours": {0: 0.5}, "theirs": {0: 0.505}, "other": {0: 0.1}},
}


def test_medians_of_instances_are_judged_over_the_seeds_that_both_have() -> None:
    result = judged(REACHED, "ours")
    outcome = result["against"]["theirs"]
    assert (outcome["wins"], outcome["ties"], outcome["losses"]) == (1, 2, 0)
    assert outcome["by_instance"]["a"] == {
        "seeds": 2,
        "ours": 0.85,
        "other": 0.75,
        "gain": 0.1,
        "paired": [0.1, 0.1, 0.1],
    }
    assert result["ahead_of_the_best_other"] == outcome["mean_gain"] == pytest.approx(0.0333, abs=1e-4)
    assert list(result["goals"].values()) == ["met", "met"]
    assert result["medians"] == {"a": 0.8, "b": 0.5, "c": 0.5}
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


def test_ranks_are_means_over_instances_of_the_seeds_that_all_have() -> None:
    reached = {
        "a": {"one": {0: 0.9, 1: 0.8, 2: 0.0}, "two": {0: 0.8, 1: 0.9}, "three": {0: 0.7, 1: 0.7}},
        "b": {"one": {5: 0.9}, "two": {5: 0.5}, "three": {5: 0.5}},
        "c": {"one": {0: 0.5}, "two": {1: 0.5}, "three": {0: 0.1}},
    }
    assert ranks(reached) == {
        "one": {"mean": 1.25, "low": 1.0, "high": 1.5},
        "two": {"mean": 2.0, "low": 1.5, "high": 2.5},
        "three": {"mean": 2.75, "low": 2.5, "high": 3.0},
    }
    assert ranks({"c": reached["c"]}) == {}


def test_only_rows_that_go_so_far_are_compared() -> None:
    rows = {"a by me 0": {"50": 0.1}, "a by me 1": {"50": 0.2, "100": 0.3}, "b tpe 0": {"100": 0.4}}
    cells = {key: {"hypervolume_at": row} for key, row in rows.items()}
    assert reached_at(cells, 50) == {"a": {"by me": {0: 0.1, 1: 0.2}}}
    assert reached_at(cells, 100) == {"a": {"by me": {1: 0.3}}, "b": {"tpe": {0: 0.4}}}
    assert [goes_to(100, row) for row in cells.values()] == [False, True, True]


@pytest.mark.parametrize("name", ["sampler", "sampler_ten", "multi_fidelity", "multi_fidelity_ten"])
def test_committed_verdicts_are_what_their_rows_say(name: str) -> None:
    data = json.loads((RESULTS / f"{name}.json").read_text())
    result = judged(reached_at(data["cells"], 50), data["judged_at_50"]["of"])
    assert {**result, "goals": None} == {**data["judged_at_50"], "goals": None}  # multi_fidelity.py has one of its own
