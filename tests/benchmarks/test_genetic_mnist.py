"""The pure parts of benchmarks/sources/genetic_mnist.py: searches replayed out of a table, and their figures."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from benchmarks.sources.genetic_mnist import FULL, RATES, REPLAYED, SMALL, cell, earlier, written
from benchmarks.sources.genetic_replay import Effort, Found, Search, Table, Training, chance, effort, replay, speed_up

GENES = {"kernel1": (0, 1, 2, 3), "kernel2": (0, 1, 2, 3), "filters1": (0, 1, 2, 3)}
BREEDING = f"demes=2,population=4,{RATES}"


def table(best: float = 0.99) -> Table:
    """The more 3s, the better: from .90 without any to ``best`` with three; 1 s each, and 1 s more for each 3."""
    steps = (0.90, 0.93, 0.96, best)
    trainings = {}
    for key in itertools.product(*GENES.values()):
        threes = sum(level == 3 for level in key)
        trainings[key] = Training(steps[threes], steps[threes] - 0.01, 1.0 + threes)
    return Table(GENES, trainings)


def test_on_one_node_time_is_the_sum_of_what_was_trained() -> None:
    for search in (Search(BREEDING, True), Search(BREEDING, False), Search("")):
        replayed = replay(table(), search, 1, seed=0, threshold=0.98)
        assert replayed.reached
        assert replayed.accuracy == 0.99
        assert replayed.test == pytest.approx(0.98)
        assert replayed.runs <= replayed.seconds <= 4 * replayed.runs


def test_random_tries_no_configuration_twice_and_all_if_it_must() -> None:
    replayed = replay(table(), Search(""), 3, seed=1, threshold=1.0)
    assert not replayed.reached
    assert replayed.runs == 64
    assert replayed.generations == 0


def test_the_same_search_is_replayed_alike_and_another_seed_is_another_search() -> None:
    results = [replay(table(), Search(BREEDING), 4, seed, 0.98, 10) for seed in (0, 0, 1)]
    assert results[0] == results[1] != results[2]


def test_a_synchronous_search_begins_no_training_before_its_generation_has_ended() -> None:
    equal = Table(GENES, {key: Training(0.5, 0.5, 1.0) for key in table().keys})
    synchronous = replay(equal, Search(BREEDING, True), 6, seed=0, threshold=1.0, patience=2)
    # generations of 8 on 6 nodes: two rounds each; the first training is the best, so two generations more end it
    assert synchronous.generations == 3
    assert synchronous.runs == 3 * 8
    assert synchronous.seconds == 3 * 2
    asynchronous = replay(equal, Search(BREEDING, False), 6, seed=0, threshold=1.0, patience=2)
    assert asynchronous.seconds == math.ceil(3 * 8 / 6)


def test_synchronous_decisions_do_not_depend_on_the_number_of_nodes() -> None:
    results = {nodes: replay(table(), Search(BREEDING, True), nodes, 3, 0.98, 10) for nodes in (1, 2, 8)}
    assert len({each.generations for each in results.values()}) == 1
    assert results[1].seconds > results[2].seconds > results[8].seconds


def test_a_search_that_gives_up_is_paid_for_by_those_that_succeed() -> None:
    won = Found(True, 20, 3, 100.0, 0.99, 0.98)
    lost = Found(False, 50, 12, 300.0, 0.97, 0.99)
    paid = effort([won, won, lost])
    assert (paid.reached, paid.searches, paid.runs, paid.seconds) == (2, 3, 45.0, 250.0)
    assert (paid.generations, paid.accuracy, paid.test, paid.worst_test) == (3.0, 0.99, 0.98, 0.98)
    assert paid.runs_ci == pytest.approx(4.303 * math.sqrt(300) / math.sqrt(3), rel=1e-3)  # of 20, 20, 50
    assert effort([lost]).seconds == math.inf
    assert effort([lost]).reached == 0


def test_speed_up_is_fewer_runs_times_fewer_seconds_a_run() -> None:
    random = Effort(
        10, 10, runs=60.0, runs_ci=1.0, generations=0.0, seconds=360.0, accuracy=0.99, test=0.98, worst_test=0.97
    )
    bred = Effort(
        10, 10, runs=30.0, runs_ci=1.0, generations=2.0, seconds=45.0, accuracy=0.99, test=0.98, worst_test=0.97
    )
    gain = speed_up(bred, random)
    assert gain.fewer_runs == 2.0
    assert gain.fewer_seconds == 4.0  # 6 s a run against 1.5 s of the clock
    assert gain.total == 360 / 45
    shown = cell(bred, random, bred)
    assert (shown["speed_up"], shown["speed_up_over_random_on_as_many"], shown["label"]) == (8.0, 1.0, REPLAYED)


def test_the_interval_of_a_rare_success_is_wilsons() -> None:
    result = chance([0.99] + [0.9] * 99, 0.986)
    assert (result.reached, result.tried, result.share) == (1, 100, 0.01)
    assert result.low == pytest.approx(0.00177, abs=1e-5)
    assert result.high == pytest.approx(0.05449, abs=1e-5)
    assert result.expected_runs == 50.5
    none = chance([0.9] * 28, 0.986)
    assert (none.low, none.expected_runs) == (0.0, math.inf)
    assert none.high == pytest.approx(0.1206, abs=1e-4)


def test_random_runs_are_as_many_as_the_share_promises() -> None:
    results = [replay(table(), Search(""), 1, seed, threshold=0.98).runs for seed in range(15)]
    assert sum(results) / 15 == pytest.approx(65 / 2, abs=10)  # one of 64 reaches it: uniform on 1..64, deviation 18.5


def test_spaces_have_the_sizes_that_are_told() -> None:
    sizes = [math.prod(len(levels) for levels in size.genes.values()) for size in (SMALL, FULL)]
    assert sizes == [180, 3645]
    assert all(key in FULL.genes for key in SMALL.genes)


def test_the_committed_table_is_read_again() -> None:
    kept, machine = earlier(Path(__file__).parents[2] / "benchmarks" / "results" / "genetic_mnist.json")
    assert sorted(kept.keys) == sorted(kept.trainings)
    assert len(kept.trainings) == 180
    assert machine["cores"] >= 1


def test_what_is_written_is_json_with_a_line_for_each_training() -> None:
    text = written({"a": math.inf, "b": [math.nan, 1.5], "trainings": {"columns": ["x"], "rows": [[1], [2]]}})
    data = json.loads(text)
    assert data == {"a": None, "b": [None, 1.5], "trainings": {"columns": ["x"], "rows": [[1], [2]]}}
    assert "    [2]" in text.splitlines()
