"""The pure part of benchmarks/strategies.py: what becomes of rows that earlier commands have left."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from kept import Rows
from strategies import accuracies, merged, plan_of
from strategies_task import CNN
from strategies_trial import TUNING_SEED, Course, key_of


def row(strategy: str, learners: int = 8, **more: Any) -> dict[str, Any]:
    return {"task": "cnn", "strategy": strategy, "learners": learners, "test": 0.8, **more}


def test_rows_that_a_command_does_not_complete_stay() -> None:
    kept = [row("allreduce", 1), row("local"), row("local", 16)]
    found = merged(kept, [row("local", test=0.7), row("gossip")], {"command": "later"})
    new = {"test": 0.7, "command": "later"}
    assert found == [kept[0], row("local") | new, kept[2], row("gossip", command="later")]
    assert merged(kept, [], {"command": "later"}) == kept


def test_a_gap_is_to_the_baseline_that_was_kept() -> None:
    plan = plan_of("parameter_server", 8, CNN.every)
    assert plan.in_rounds
    trainings = Rows(None)
    for seed, test in ((TUNING_SEED, 0.5), (1, 0.70), (2, 0.81), (3, 0.80)):
        for lr in CNN.lrs:
            course = Course(repr(CNN), str(plan), lr, seed, ((25, 0.6), (400, 0.78)), test, "", 1.0)
            trainings.cells[key_of(CNN, plan, lr, seed)] = asdict(course)
    kept = row("allreduce", 1, by_seed=[0.8, 0.8, 0.8], test_ci=0.01, target=0.75, lost=0)
    (found,) = accuracies(trainings, ((CNN, 8, ("parameter_server",)),), [kept])
    assert round(found["gap"][0], 6) == -0.03
    assert (found["equal"], found["steps_to_target"]) == (False, [400, 400, 400])
    assert accuracies(trainings, ((CNN, 8, ("parameter_server",)),)) == [], "without a baseline there is no row"


def test_where_time_is_up_a_row_is_not_complete() -> None:
    """The trainings that were done stay, and the row comes with the others."""
    trainings = Rows(None, limit_s=-1.0)
    plan = plan_of("local", 8, CNN.every)
    done = Course(repr(CNN), str(plan), CNN.lrs[0], TUNING_SEED, ((25, 0.6), (400, 0.78)), 0.8, "", 1.0)
    trainings.cells[key_of(CNN, plan, CNN.lrs[0], TUNING_SEED)] = asdict(done)
    assert accuracies(trainings, ((CNN, 8, ("local",)),)) == []
    assert len(trainings.cells) == 1
