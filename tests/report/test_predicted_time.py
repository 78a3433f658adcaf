"""Predicted beside measured steps: by a plan's constants, for runs, trials and a frontier's own model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastune.core.errors import UserError
from elastune.core.journal.records import (
    Entry,
    PlanMade,
    RunFinished,
    RunStarted,
    TimesFitted,
    TrialFinished,
    TrialStarted,
)
from elastune.core.mesh import Mesh
from elastune.core.plan.step_time import CONSTANTS
from elastune.core.run import ExecutionSettings
from elastune.report.overviews import gather_run
from elastune.report.predicted_time import fitted_prediction, run_prediction, study_prediction

SIZE = {"batch_size": 16, "layers": 4, "flops": 1e6, "kept_bytes": 0.0, "gradient_bytes": 1e3}
COST = {**dict.fromkeys(CONSTANTS, 1e-12), "flop_s": 1e-9, "gradient_hop_s": 5e-3}
MADE = PlanMade("train.py", {"workers_per_node": 4}, {"size": SIZE}, COST)
TWO = ExecutionSettings(mode="fast", mesh=Mesh(data=2), micro_batch=8)


def ended(step_s: float | None, workers: int = 1) -> RunFinished:
    return RunFinished("0" * 64, workers, 12, 192, 3.0, {}, step_s=step_s)


def started(trial: int, execution: ExecutionSettings, **config: Any) -> Entry:
    told = {**execution.to_json(), "policy": "none", "sync": "allreduce"}  # as studies write them
    return Entry(0.0, TrialStarted(trial, config, told, 0))


def finished(trial: int, step_s: float | None) -> Entry:
    return Entry(1.0, TrialFinished(trial, "complete", run=ended(step_s)))


def test_a_run_s_step_beside_its_prediction() -> None:
    begun = RunStarted(program="train.py", config={}, seed=0, execution=ExecutionSettings(mode="fast").to_json())
    run = gather_run([Entry(0.0, begun), Entry(1.0, ended(0.02))])
    assert run is not None
    (line,) = run_prediction(MADE, run)
    assert line.startswith("replicated, data=1, fast, batch 16: a step was measured at 20 ms")
    assert line.endswith("says 16 ms (modelled): error -20.0%.")
    with pytest.raises(UserError, match="of the program that ran"):
        run_prediction(replace(MADE, program="other.py"), run)


def test_trials_that_ran_alike_are_one_line() -> None:
    entries = [
        *(
            started(0, TWO),
            finished(0, 0.018),
            started(1, TWO),
            finished(1, 0.024),
            started(2, TWO),
            finished(2, 0.036),
        ),
        *(started(3, ExecutionSettings(), batch_size=32), finished(3, 0.016), started(4, TWO), finished(4, None)),
    ]
    alike, other = study_prediction(MADE, {"path": "train.py"}, entries)
    assert "data=2, fast, batch 16: a step was measured at 24 ms (median of 3 trials)" in alike
    assert "says 18 ms (modelled): error -25.0%" in alike
    assert "exact, batch 32" in other
    assert "slots take longer" in other
    assert study_prediction(MADE, "train.py", []) == ("No trial has a step time yet.",)


def test_whole_trainings_stand_beside_their_predictions_where_the_plan_knows_what_they_take_beside_steps() -> None:
    """12 steps, and a second: 1.192 s on one worker, 1.216 s on two."""
    entries = []
    for trial, (execution, seconds) in enumerate(
        [(TWO, 1.0), (TWO, 1.6), (TWO, 1.52), (ExecutionSettings(mode="fast"), 2.384)]
    ):
        took = replace(finished(trial, 0.02).record, seconds=seconds)  # type: ignore[type-var]
        entries += [started(trial, execution), Entry(1.0, took)]
    known = replace(MADE, answer={**MADE.answer, "search": {"beside_s": 1.0}})
    two, one, whole = study_prediction(known, "train.py", entries)
    assert (
        "A training took 1.52 s from its start to its end, the plan's model says 1.22 s (modelled): error -20.0%" in two
    )
    assert "error -50.0%." in one
    assert whole.startswith("All 4 trainings that the model speaks of, one after another: 6.5")
    assert "4.84 s (modelled): error -25.6%" in whole
    assert len(study_prediction(MADE, "train.py", entries)) == 2, "a plan that does not know says no more"


def test_a_frontier_s_own_model_is_told_with_its_errors() -> None:
    times = TimesFitted(0.01, 1e-4, 1e-4, 1e-9, 4000, [1, 2], errors={"batch 64 on 2 workers": 1.25})
    assert fitted_prediction(times) == ("batch 64 on 2 workers: predicted 1.25 x the measured time.",)
    assert fitted_prediction(None) == ()
