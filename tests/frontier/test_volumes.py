"""The search's hypervolume is its own, at the naive rule's budget: it may be the smaller one."""

from __future__ import annotations

import math

import pytest

from elastune.core.mesh import Mesh
from elastune.frontier.trainings import Spent, Training
from elastune.frontier.volumes import volumes
from elastune.frontier.ways import StepKind
from elastune.testing.frontiers import FREE, cell, training

NAIVE = [training(0.9, seed, worker_seconds=2.0) for seed in range(3)]
ROWS = [cell(seconds=15.0, cost=15 / 3600 * 2.0), cell(workers=2, quality=0.8)]


def along_data(training: Training) -> StepKind:
    return StepKind(Mesh(data=training.slots))


def spent(quality: float | None, worker_seconds: float = 2.0, test: float | None = None) -> Spent:
    found = training(quality, phase="search", test=test, worker_seconds=worker_seconds)
    return Spent(worker_seconds, found)


def test_a_search_that_found_nothing_better_is_worth_less() -> None:
    """The naive rows were once among the tuned ones: then it could not be."""
    found = volumes(ROWS, NAIVE, [spent(0.5)], FREE, along_data)
    assert found.tuned < found.naive


def test_a_better_search_is_worth_more() -> None:
    found = volumes([cell(workers=2, quality=0.8, seconds=40.0)], NAIVE, [spent(0.95)], FREE, along_data)
    assert found.tuned > found.naive


def test_only_what_the_naive_budget_paid_for_counts() -> None:
    late = volumes(ROWS, NAIVE, [spent(0.5, 5.0), spent(0.99, 1.5)], FREE, along_data)
    early = volumes(ROWS, NAIVE, [spent(0.5, 5.0), spent(0.99, 1.0)], FREE, along_data)
    assert late.tuned < early.tuned
    assert "the first 1 of 2 trainings" in late.note
    assert "the naive rule's 3 trainings took 6 s" in late.note


def test_what_paused_was_paid_for_too() -> None:
    paused = [Spent(5.5, None), spent(0.99)]
    assert volumes(ROWS, NAIVE, paused, FREE, along_data).tuned == 0.0


def test_no_search_is_worth_nothing() -> None:
    for searched in ([], [spent(None)], [spent(0.99, 100.0)]):
        found = volumes(ROWS, NAIVE, searched, FREE, along_data)
        assert found.tuned == 0.0
        assert 0 < found.naive < 1
        assert math.isfinite(found.naive)


def test_it_is_chosen_by_validation_and_scored_on_held_out_data() -> None:
    lucky = volumes(ROWS, NAIVE, [spent(0.99, test=0.5)], FREE, along_data)
    honest = volumes(ROWS, NAIVE, [spent(0.5, test=0.5)], FREE, along_data)
    assert lucky.tuned == pytest.approx(honest.tuned)
