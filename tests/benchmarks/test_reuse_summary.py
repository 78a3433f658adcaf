"""What the benchmarks of ensembles and transfer say of their figures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.user.ensembles_summary import BEST, ONE, OWN, Row, goals, summary
from benchmarks.user.transfer_summary import compared, epochs_to, gained, multiplications, started
from torch import nn


def rows(greedy: float, soup: float) -> list[Row]:
    def row(search: str, name: str, test: float, answer_s: float = 1.0) -> Row:
        return Row(search, name, test, 1, 1.0, 1.0, answer_s)

    own = [row(OWN, BEST, 80.0), row(OWN, "greedy ensemble", 80.0 + greedy, 3.0)]
    return [*own, row(ONE, BEST, 81.0), row(ONE, "greedy soup", 81.0 + soup)]


def verdicts(*seeds: tuple[float, float]) -> list[str]:
    return [one["verdict"] for one in goals(summary([rows(*seed) for seed in seeds]), len(seeds))]


def test_goals_are_met_or_missed() -> None:
    assert verdicts((1.0, 0.4), (0.5, 0.5), (0.2, 0.6)) == ["met", "met", "met"]
    assert verdicts((1.0, 0.4), (1.0, 0.5), (-0.1, 0.6)) == ["MISSED", "met", "met"]
    assert verdicts((0.4, -1.0), (0.4, 2.0), (0.4, 0.1)) == ["met", "MISSED", "MISSED"]


def test_gains_are_over_the_single_of_the_same_search_and_seed() -> None:
    told = summary([rows(1.0, 0.5), rows(2.0, 0.5)])
    assert [one["gain_points"] for one in told] == [0.0, 1.5, 0.0, 0.5]
    assert (told[1]["gains"], told[1]["seeds_no_worse"], told[1]["inference_time"]) == ([1.0, 2.0], 2, 3.0)


def test_multiplications_are_counted_by_shapes() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 10))
    assert multiplications(net, torch.zeros(1, 1, 8, 8)) == 4 * 16 * 9 + 64 * 10
    assert multiplications(nn.Sequential(net, nn.Linear(10, 2)), torch.zeros(1, 1, 8, 8)) == 4 * 16 * 9 + 64 * 10 + 20


@pytest.mark.parametrize(
    ("values", "words"),
    [([1.0, 1.1, 0.9], "pays"), ([-1.0, -1.1], "does not pay"), ([3.0, -1.0], "no difference shown"), ([3.0], "one")],
)
def test_a_gain_is_told_with_what_its_interval_says(values: list[float], words: str) -> None:
    assert gained(values)["verdict"].startswith(words)


def test_a_target_that_is_not_reached_counts_as_one_epoch_more() -> None:
    assert (epochs_to([0.1, 0.5, 0.4], 0.5), epochs_to([0.1], 0.5)) == (2, None)
    seed: dict[str, Any] = {"cold_epochs": 3, "target_samples": 100, "source_passes": 150}
    seed |= {"cold": [0.1, 0.96, 1.0], "warm": [0.97], "cold_test": 0.5, "warm_test": 0.6}
    told = started([{**seed, "warm_epochs": 1}, {**seed, "warm_epochs": None}], 3)
    assert told["epochs_saved"]["each"] == [2, -1]
    assert told["epochs_saved_near_target"]["each"] == [1, 1]
    assert told["sample_passes_saved_with_the_source_counted"]["each"] == [50, -250]


def test_ways_are_held_against_the_flat_model_of_their_seed() -> None:
    flat = {"test": 0.8, "compute": 100.0, "inference": 10.0, "worker_seconds": 1.0}
    other = {"test": 0.79, "compute": 98.0, "inference": 30.0, "worker_seconds": 2.0}
    told = compared([{"flat": flat, "other": other}, {"flat": {**flat, "test": 0.7}, "other": other}])["other"]
    assert told["points_over_flat"]["each"] == [-1.0, 9.0]
    assert (told["compute_over_flat"], told["inference_over_flat"]) == (0.98, 3.0)
