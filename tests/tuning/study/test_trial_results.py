"""A run's outcome as a trial's result."""

from __future__ import annotations

from typing import Any, cast

import pytest

from elastune.core.journal.folds import TrialSummary
from elastune.core.journal.records import RunFinished, TrialFinished, TrialStarted
from elastune.runtime.job.pool import JobEvent
from elastune.tuning.search.objective import parse_objectives
from elastune.tuning.study.trial_results import Pricing, judge

HOUR = 3600.0


def judged(objective: str, metrics: dict[str, float]) -> TrialFinished:
    """Of two workers who trained for an hour, at 3.0 an hour each."""
    outcome = RunFinished("sha", 2, 10, 320, HOUR, metrics)
    ended = JobEvent(0, cast(Any, None), outcome, HOUR, 2 * HOUR)
    life = TrialSummary(TrialStarted(0, {}, {}, seed=0), 0.0, 0.0, 0.0, 0.0, workers=2)
    return judge(life, ended, Pricing(parse_objectives({objective: "min"}), price_per_worker_hour=3.0))


@pytest.mark.parametrize(
    ("objective", "value"), [("seconds", HOUR), ("cost", 6.0), ("time", 12.0), ("latency_s", 0.25), ("error", 0.1)]
)
def test_seconds_and_cost_are_measured_and_every_other_time_is_what_the_program_says(
    objective: str, value: float
) -> None:
    result = judged(objective, {"time": 12.0, "latency_s": 0.25, "error": 0.1})
    assert (result.state, result.values) == ("complete", {objective: value})


@pytest.mark.parametrize("objective", ["time", "latency_s"])
def test_a_time_that_the_program_does_not_report_is_missed(objective: str) -> None:
    result = judged(objective, {"error": 0.1})
    assert (result.state, result.reason) == (
        "infeasible",
        f"reports no {objective} (it reports cost, error, seconds)",
    )
