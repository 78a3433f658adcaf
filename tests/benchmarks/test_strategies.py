"""The pure part of benchmarks/adaptive/strategies.py: what becomes of rows that earlier commands have left."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.adaptive.strategies import accuracies, merged, plan_of
from benchmarks.adaptive.strategies_summary import goals, times_to_target
from benchmarks.adaptive.strategies_task import CNN
from benchmarks.adaptive.strategies_trial import TUNING_SEED, Course, key_of
from benchmarks.common.kept import Rows


def row(strategy: str, learners: int = 8, **more: Any) -> dict[str, Any]:
    return {"task": "cnn", "strategy": strategy, "learners": learners, "test": 0.8, **more}


def test_rows_that_a_command_does_not_complete_stay() -> None:
    kept = [row("allreduce", 1), row("local"), row("local", 16)]
    found = merged(kept, [row("local", test=0.7), row("gossip")], {"command": "later"})
    new = {"test": 0.7, "command": "later"}
    assert found == [kept[0], row("local") | new, kept[2], row("gossip", command="later")]
    assert merged(kept, [], {"command": "later"}) == kept


def test_a_gap_is_to_the_baseline_that_was_kept() -> None:
    plan = plan_of("parameter_server", 8, CNN)
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
    plan = plan_of("local", 8, CNN)
    done = Course(repr(CNN), str(plan), CNN.lrs[0], TUNING_SEED, ((25, 0.6), (400, 0.78)), 0.8, "", 1.0)
    trainings.cells[key_of(CNN, plan, CNN.lrs[0], TUNING_SEED)] = asdict(done)
    assert accuracies(trainings, ((CNN, 8, ("local",)),)) == []
    assert len(trainings.cells) == 1


def test_a_time_is_beside_all_reduce_of_the_same_section() -> None:
    """With as many learners, on the same links; and of a longer training's strategy on the shorter one's links."""
    own = plan_of("diloco_rounded", 16, CNN)
    rows = [
        row("allreduce", 1, sync="allreduce", steps_to_target=[100, 200, 300], equal=True, gap=[0.0, 0.0]),
        row("diloco_rounded", 16, sync=str(own), steps_to_target=[300, 500, 400], equal=True, gap=[-0.01, 0.02]),
        row("local", 8, sync="local", steps_to_target=[300, None, 400], equal=False, gap=[-0.03, 0.01]),
    ]
    pace = {"task": "cnn", "link": "50mbit"}
    eight = [{**pace, "sync": "allreduce", "step_ms": 200.0, "learners": 8, "fewer_bytes": 1.0}]
    sixteen = [
        {**pace, "sync": "allreduce", "step_ms": 250.0, "learners": 16, "fewer_bytes": 1.0},
        {**pace, "sync": str(own), "step_ms": 20.0, "learners": 16, "fewer_bytes": 26.0},
    ]
    told = {"accuracy": {"rows": rows}, "links": {"a": {"rows": eight}, "b": {"rows": sixteen}}}
    told["times"] = times_to_target(told)
    found = {(each["strategy"], each["learners"]): (each["seconds"], each["shorter"]) for each in told["times"]}
    assert found == {
        ("allreduce", 8): (40.0, 1.0), ("allreduce", 16): (50.0, 1.0), ("diloco_rounded", 16): (8.0, 6.25),
    }  # fmt: skip
    assert goals(told, ("diloco_rounded", "local")) == [
        f"cnn, {own}: 26.0 x fewer bytes, equal in accuracy (-1.00 ± 2.00): met",
        "cnn, local, 8 learners: not every seed reaches the target: time MISSED",
        "cnn, diloco_rounded, 16 learners at 50mbit: 6.25 x shorter to the target: met",
    ]
