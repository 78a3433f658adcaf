"""Time to a target: from a training's reports, and as an objective of a study."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import Reported, TrialFinished
from elastune.core.run import Program
from elastune.train.program.load import load
from elastune.tuning.search.constraint import TargetReached, parse_target, shortfall, time_to
from elastune.tuning.search.objective import parse_objectives
from elastune.tuning.simulate.run import SurrogateModel, simulate
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.results import Study
from elastune.tuning.study.validate import check

PROGRAM = """
config = {"lr": 0.5}
objectives = {"accuracy": "max"}

def space(trial):
    return {"lr": trial.suggest_float("lr", 0.0, 1.0)}

def surrogate(config, workers):
    # Learns by lr an epoch and ends at 1 - lr: fast ones never get far.
    return [(10.0, {"accuracy": min(config["lr"] * epoch, 1.0 - config["lr"])}) for epoch in range(1, 11)]
"""


def report(epoch: int, seconds: float, **metrics: float) -> Reported:
    return Reported(epoch, 10 * epoch, 100 * epoch, seconds, metrics, epochs=4)


REPORTS = [report(1, 5.0, accuracy=0.5, loss=1.0), report(2, 11.0, accuracy=0.9), report(3, 18.0, accuracy=0.8)]


@pytest.mark.parametrize(
    ("text", "expected", "short"),
    [
        ("accuracy >= 0.9", TargetReached(11.0, 5.0, 2), 0.0),
        ("accuracy >= 0.4", TargetReached(5.0, 0.0, 1), -0.5),
        ("accuracy >= 0.97", None, 0.07),
        ("accuracy >= 0.8 * loss", TargetReached(11.0, 5.0, 2), -0.1),
        ("accuracy * seconds > 14", TargetReached(18.0, 11.0, 3), -0.4),
        ("lr < accuracy", TargetReached(5.0, 0.0, 1), -0.8),
        ("beauty > 1", None, math.inf),
    ],
)
def test_the_first_report_that_reaches_it_counts(text: str, expected: TargetReached | None, short: float) -> None:
    target, settings = parse_target(text), {"lr": 0.1}
    assert time_to(target, REPORTS, settings) == expected
    assert shortfall(target, REPORTS, settings) == pytest.approx(short)


def request(folder: Path, **changes: Any) -> StudyRequest:
    (folder / "program.py").write_text(PROGRAM)
    asked = StudyRequest(
        Program(folder / "program.py"), folder / "out", objectives={"seconds_to_target": "min"}, trials=30
    )
    return replace(asked, **{"sampler": "random", "target": "accuracy >= 0.6", **changes})


def searched(asked: StudyRequest) -> Study:
    surrogate = load(asked.program).surrogate
    assert surrogate is not None
    return simulate(asked, SurrogateModel(surrogate)).study


def test_the_time_to_a_target_is_an_objective(tmp_path: Path) -> None:
    study = searched(request(tmp_path))
    for trial in study.trials:
        epochs = next((n for n in range(1, 11) if min(trial.config["lr"] * n, 1 - trial.config["lr"]) >= 0.6), None)
        if epochs is None:
            assert trial.state == "infeasible"
            assert trial.reason.startswith("never reached accuracy >= 0.6 (short by 0.")
        else:
            assert trial.values == {"seconds_to_target": pytest.approx(10.0 * epochs)}
            assert trial.seconds == pytest.approx(100.0), "it is trained to its end"
    assert {trial.state for trial in study.trials} == {"complete", "infeasible"}
    assert study.pick().trial.values["seconds_to_target"] == 20.0
    assert study.objectives[0].unit == "s"


def test_samplers_learn_by_how_much_a_trial_fell_short(tmp_path: Path) -> None:
    found = searched(request(tmp_path, sampler="tpe", trials=40))
    ended = [e.record for e in read(tmp_path / "out" / "journal.jsonl") if isinstance(e.record, TrialFinished)]
    assert {list(r.violations) == ["accuracy >= 0.6"] for r in ended} == {True}
    assert all((r.violations["accuracy >= 0.6"] > 0) == (r.state == "infeasible") for r in ended)
    late = [trial.state for trial in found.trials[20:]]
    assert late.count("complete") > found.trials[:20].__len__() * 0.5


def test_early_stopping_sees_what_is_not_there_yet_as_longer_than_now(tmp_path: Path) -> None:
    study = searched(request(tmp_path, stopping="asha:min_resource=1,eta=2", workers=4))
    assert {trial.state for trial in study.trials} >= {"complete", "paused"}
    assert study.pick().trial.values["seconds_to_target"] <= 30.0


def test_as_a_constraint_and_beside_other_objectives(tmp_path: Path) -> None:
    asked = request(tmp_path, objectives={"accuracy": "max"}, constraints=("seconds_to_target <= 30",))
    study = searched(asked)
    assert study.complete
    assert all(trial.metrics["seconds_to_target"] <= 30 for trial in study.complete)
    plain = searched(replace(asked, out=tmp_path / "plain", constraints=()))
    assert {trial.state for trial in plain.trials} == {"complete"}, "nothing is judged by it"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"target": None}, "seconds_to_target needs a target"),
        ({"target": "accuracy"}, "must be a comparison"),
        ({"target": "test_accuracy > 0.5"}, "no search sees held-out metrics"),
        ({"target": None, "constraints": ("seconds_to_target < 9",)}, "needs a target"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        check(request(tmp_path, simulated=True, **changes))


def test_a_study_goes_on_with_its_target(tmp_path: Path) -> None:
    asked = request(tmp_path, trials=3)
    searched(asked)
    with pytest.raises(UserError, match="resumes with the target it was begun with"):
        searched(replace(asked, target="accuracy >= 0.7", resume=True))


def test_its_unit_is_known() -> None:
    (objective,) = parse_objectives({"seconds_to_target": "min"})
    assert (objective.unit, objective.clock) == ("s", "duration")
