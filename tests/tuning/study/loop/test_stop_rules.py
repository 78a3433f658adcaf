"""Studies that end by what they find: a target that is reached, nothing better for too long."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.folds import TrialTable
from elastune.core.journal.records import (
    Entry,
    Record,
    StudyFinished,
    StudyStarted,
    TrialFinished,
    TrialPaused,
    TrialResumed,
    TrialStarted,
)
from elastune.core.run import Program
from elastune.report.explain import explain
from elastune.runtime.clusters.local import LocalCluster
from elastune.tuning.search.constraint import parse_constraints
from elastune.tuning.search.objective import parse_objectives
from elastune.tuning.search.registry import generation_size
from elastune.tuning.simulate.run import SurrogateModel, simulate
from elastune.tuning.study.budget import StopRules
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.results import Study
from elastune.tuning.study.run import tune
from elastune.tuning.study.validate import check

PROGRAM = """
config = {"x": 0.5, "epochs": 1}
objectives = {"accuracy": "max"}

def space(trial):
    return {"x": trial.suggest_float("x", 0.0, 1.0)}

def surrogate(config, workers):
    return [(10.0, {"accuracy": 1.0 - abs(config["x"] - 0.3), "test_accuracy": 0.5})]
"""


def begun(number: int) -> Record:
    return TrialStarted(number, {"lr": 0.1}, {"workers": 1}, 0)


def ended(number: int, accuracy: float, seconds: float = 1.0) -> Record:
    values = {"accuracy": accuracy, "seconds": seconds}
    return TrialFinished(number, "complete", values, {**values, "test_accuracy": 1.0})


def failed(number: int) -> Record:
    return TrialFinished(number, "infeasible", reason="diverged")


def paused(number: int, cut_off: bool = False) -> Record:
    return TrialPaused(number, 1, 1.0, 1.0, cut_off=cut_off)


def told(
    records: Iterable[Record],
    patience: int | None = None,
    generation: int = 1,
    objectives: Sequence[str] = ("accuracy:max",),
    until: Sequence[str] = (),
) -> StopRules:
    rules = StopRules(parse_constraints(until), patience, generation, parse_objectives(objectives))
    table = TrialTable()
    for at, record in enumerate(records):
        table.observe(Entry(float(at), record))
        rules.observe(record, table.trials[record.trial])  # type: ignore[union-attr]
    return rules


def one_by_one(*accuracies: float) -> list[Record]:
    return [record for n, accuracy in enumerate(accuracies) for record in (begun(n), ended(n, accuracy))]


def test_patience_counts_trials_since_the_last_better_one() -> None:
    assert told(one_by_one(0.5, 0.6, 0.6, 0.5), patience=3).stale == ""
    assert told(one_by_one(0.5, 0.6, 0.6, 0.5, 0.4), patience=3).stale == "no better trial in 3 trials"
    assert told(one_by_one(0.5, 0.6, 0.6, 0.5, 0.7), patience=3).stale == ""
    assert told(one_by_one(*[0.5] * 100)).stale == ""
    assert told([begun(0), failed(0), begun(1), failed(1)], patience=2).stale, (
        "a study where all fails is not going well"
    )


def test_of_several_objectives_a_new_point_of_the_front_is_better() -> None:
    both = ("accuracy:max", "seconds:min")
    points = [(0.5, 2.0), (0.4, 1.0), (0.4, 1.5), (0.5, 2.0)]
    records = [r for n, point in enumerate(points) for r in (begun(n), ended(n, *point))]
    assert told(records, patience=2, objectives=both).stale == "no trial joined the front in 2 trials"
    assert told(records, patience=3, objectives=both).stale == ""


def test_generations_count_when_all_of_their_trials_are_over() -> None:
    first = [*map(begun, range(4)), ended(0, 0.5), ended(1, 0.6), ended(2, 0.4), ended(3, 0.3)]
    second = [*map(begun, range(4, 8)), ended(7, 0.5), ended(6, 0.6), ended(4, 0.4)]
    assert told([*first, *second], patience=1, generation=4).stale == ""
    assert told([*first, *second, ended(5, 0.3)], 1, 4).stale == "no better trial in 1 generations of 4 trials"
    assert told([*first, *second, ended(5, 0.7)], 1, 4).stale == ""
    assert (generation_size("genetic:demes=2,population=32"), generation_size("tpe")) == (64, 1)


def test_paused_trials_have_had_their_chance_and_may_still_be_better() -> None:
    records = [*one_by_one(0.5), begun(1), paused(1), begun(2), paused(2)]
    assert told(records, patience=2).stale
    late = [*records, TrialResumed(1, 1), ended(1, 0.9)]
    assert told(late, patience=2).stale == ""
    cut_off = [*one_by_one(0.5), begun(1), paused(1, cut_off=True), begun(2), paused(2, cut_off=True)]
    assert told(cut_off, patience=2).stale == ""


def test_until_is_met_by_one_trial_that_has_all() -> None:
    rules = ("accuracy >= 0.9", "seconds <= 5")
    apart = [begun(0), ended(0, 0.95, 9.0), begun(1), ended(1, 0.5, 1.0)]
    assert told(apart, until=rules).met == ""
    together = told([*apart, begun(2), ended(2, 0.92, 4.0)], until=rules)
    assert together.met == "trial 2 reached accuracy >= 0.9 and seconds <= 5 (accuracy 0.92, seconds 4)"
    with pytest.raises(UserError, match=r"--until may name settings and reported metrics \(got beauty\)"):
        told(apart, until=("beauty > 1",))


def request(folder: Path, **changes: Any) -> StudyRequest:
    (folder / "program.py").write_text(PROGRAM)
    return replace(
        StudyRequest(Program(folder / "program.py"), folder / "out", sampler="random", trials=500), **changes
    )


def searched(asked: StudyRequest) -> Study:
    from elastune.train.program.load import load

    surrogate = load(asked.program).surrogate
    assert surrogate is not None
    return simulate(asked, SurrogateModel(surrogate)).study


def test_a_study_ends_once_its_target_is_reached_and_says_so(tmp_path: Path) -> None:
    study = searched(request(tmp_path, until=("accuracy >= 0.98",)))
    assert 1 < len(study.trials) < 500
    last = study.trials[-1]
    assert last.values["accuracy"] >= 0.98 > max(trial.values["accuracy"] for trial in study.trials[:-1])
    assert study.ending == f"trial {last.number} reached accuracy >= 0.98 (accuracy {last.values['accuracy']:.6g})"
    assert f"The study ended: {study.ending}." in str(explain(study))
    first, *_ = (e.record for e in read(tmp_path / "out" / "journal.jsonl") if isinstance(e.record, StudyStarted))
    assert first.settings["until"] == ["accuracy >= 0.98"]


def test_patience_alone_bounds_a_genetic_search_by_generations(tmp_path: Path) -> None:
    asked = request(tmp_path, trials=None, patience=3, sampler="genetic:demes=2,population=3,steady=0,step=0.1")
    study = searched(asked)
    assert study.ending == "no better trial in 3 generations of 6 trials"
    best = max(range(len(study.trials)), key=lambda n: study.trials[n].values["accuracy"])
    assert len(study.trials) == 6 * (best // 6 + 1 + 3), "three whole generations after that of the best"


def test_a_resumed_study_keeps_its_rules_or_takes_others(tmp_path: Path) -> None:
    asked = request(tmp_path, until=("accuracy >= 0.9",), patience=50)
    count = len(searched(asked).trials)
    again = searched(replace(asked, resume=True, until=(), patience=None))
    assert len(again.trials) == count, "reached is reached"
    assert again.ending.endswith(f"(accuracy {again.trials[-1].values['accuracy']:.6g})")
    further = searched(replace(asked, resume=True, until=("accuracy >= 0.99",), patience=None))
    assert further.trials[-1].values["accuracy"] >= 0.99 or "in 50 trials" in further.ending
    rules = [e.record.settings for e in read(tmp_path / "out" / "journal.jsonl") if isinstance(e.record, StudyStarted)]
    assert [(list(r["until"]), r["patience"]) for r in rules] == [
        (["accuracy >= 0.9"], 50),
        (["accuracy >= 0.9"], 50),
        (["accuracy >= 0.99"], 50),
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"trials": None}, "a study needs a budget"),
        ({"trials": None, "until": ("accuracy > 1",)}, "a study needs a budget"),
        ({"until": ("accuracy",)}, "a constraint must be a comparison"),
        ({"until": ("test_accuracy > 0.9",)}, "no search sees held-out metrics"),
        ({"patience": 0}, "patience must be a whole number"),
    ],
)
def test_rules_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        check(request(tmp_path, simulated=True, **changes))


def test_what_runs_when_the_target_is_reached_is_paused_with_a_checkpoint(
    cluster: LocalCluster, tmp_path: Path, tiny: Program
) -> None:
    def space(trial: Any) -> dict[str, Any]:
        slow = trial.suggest_categorical("slow", [0.0, 0.5])
        return {"pause_s": slow, "epochs": 4 if slow else 1}

    asked = StudyRequest(tiny, tmp_path / "out", sampler="grid", trials=2, workers=2, until=("loss < 100",))
    study = tune(replace(asked, stopping="asha"), space=space, cluster=cluster)
    assert {(t.config["pause_s"], t.state, t.cut_off) for t in study.trials} == {
        (0.0, "complete", False),
        (0.5, "paused", True),
    }
    (end,) = [e.record for e in read(tmp_path / "out" / "journal.jsonl") if isinstance(e.record, StudyFinished)]
    assert "reached loss < 100" in end.reason
