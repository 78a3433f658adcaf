"""Studies on real workers: what fails is a result, what is wrong is one line, budgets hold."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import StudyFinished, TrialFinished, TrialStarted
from elastune.core.run import Program
from elastune.runtime.clusters.local import LocalCluster
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.results import Study
from elastune.tuning.study.run import tune
from elastune.tuning.study.validate import check


def request(tuned: Program, out: Path, **changes: Any) -> StudyRequest:
    asked = StudyRequest(
        tuned, out, objectives={"loss": "min", "seconds": "min"}, sampler="random", trials=6, workers=2
    )
    return replace(asked, **changes)


def odd_space(trial: Any) -> dict[str, Any]:
    acts = ["", "diverges", "raises", "memory", "killed", "leaves"]
    return {"act": trial.suggest_categorical("act", acts), "epochs": trial.suggest_int("epochs", 1, 2)}


def test_trials_that_fail_are_infeasible_with_their_reason(
    cluster: LocalCluster, tmp_path: Path, tiny: Program
) -> None:
    asked = request(tiny, tmp_path / "out", sampler="grid", trials=40, config={"misbehaving_rank": 0})
    study = tune(asked, space=odd_space, cluster=cluster)
    assert len(study.trials) == 12
    reasons = {(trial.config["act"], trial.state, trial.reason.partition(":")[0]) for trial in study.trials}
    assert reasons == {
        ("", "complete", ""),
        ("diverges", "infeasible", "diverged"),
        ("raises", "infeasible", "exception"),
        ("memory", "infeasible", "out_of_memory"),
        ("killed", "infeasible", "worker_lost"),
        ("leaves", "infeasible", "exception"),
    }
    assert {trial.config["act"] for trial in study.front()} == {""}
    assert cluster.free == cluster.capacity
    (end,) = [e.record for e in read(tmp_path / "out" / "journal.jsonl") if isinstance(e.record, StudyFinished)]
    assert end.reason == "the space is exhausted"
    left = sorted(int(path.name) for path in (tmp_path / "out" / "trials").iterdir())
    assert left == sorted(trial.number for trial in study.trials if trial.state == "infeasible"), "their logs"


def test_a_loss_that_explodes_but_stays_finite_is_infeasible_and_ends_early(
    cluster: LocalCluster, tmp_path: Path, tiny: Program
) -> None:
    def space(trial: Any) -> dict[str, Any]:
        return {"lr": trial.suggest_categorical("lr", [0.05, 1.2])}

    asked = request(tiny, tmp_path / "out", sampler="grid", trials=9, config={"epochs": 3})
    well, exploded = sorted(tune(asked, space=space, cluster=cluster).trials, key=lambda trial: trial.config["lr"])
    assert (well.state, exploded.state) == ("complete", "infeasible")
    assert re.match(
        r"diverged: loss is \S+ at step \d+, its median over 10 is .* times that at the start", exploded.reason
    )
    assert int(exploded.reason.split(" at step ")[1].split(",")[0]) < 15, "of 30 steps"
    assert [trial.config["lr"] for trial in Study.load(tmp_path / "out").front()] == [0.05]

    judged_off = tune(replace(asked, out=tmp_path / "off", divergence=None), space=space, cluster=cluster)
    assert {trial.state for trial in judged_off.trials} == {"complete"}
    assert max(trial.values["loss"] for trial in judged_off.trials) > 1e6


def test_divergence_is_found_in_the_same_step_on_any_number_of_workers(
    cluster: LocalCluster, tmp_path: Path, tiny: Program
) -> None:
    def space(trial: Any) -> dict[str, Any]:
        return {"lr": 1.2, "mode": "exact", "workers": trial.suggest_int("workers", 1, 2)}

    asked = request(tiny, tmp_path / "out", sampler="grid", trials=9, config={"epochs": 3})
    one, two = tune(asked, space=space, cluster=cluster).trials
    assert {one.state, two.state} == {"infeasible"}
    assert one.reason == two.reason
    assert "times that at the start" in one.reason


def test_two_run_at_a_time_and_the_front_is_right(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    study = tune(request(tiny, tmp_path / "out", trials=8, config={"pause_s": 0.002}), cluster=cluster)
    running = most = 0
    for entry in read(tmp_path / "out" / "journal.jsonl"):
        running += isinstance(entry.record, TrialStarted) - isinstance(entry.record, TrialFinished)
        most = max(most, running)
    assert most == 2

    values = [(trial.values["loss"], trial.values["seconds"]) for trial in study.complete]
    assert len(values) == 8
    best = {v for v in values if not any(o != v and o[0] <= v[0] and o[1] <= v[1] for o in values)}
    front = [(trial.values["loss"], trial.values["seconds"]) for trial in study.front()]
    assert set(front) == best
    assert front == sorted(front)
    for trial in study.complete:
        assert trial.values["seconds"] == trial.metrics["seconds"]
        assert trial.metrics["cost"] == pytest.approx(trial.metrics["seconds"] / 3600)
    assert Study.load(tmp_path / "out") == study

    target = front[len(front) // 2][0]
    picked = study.pick(loss=target)
    assert picked.trial.values["loss"] <= target
    assert picked.trial.values["seconds"] == min(s for loss, s in values if loss <= target)
    assert f"--set lr={picked.trial.config['lr']}" in picked.command
    assert study.pick(weights={"seconds": 1.0}).trial.values["seconds"] == min(s for _, s in values)
    assert study.pick().trial in study.front()
    subset = study.subset(2)
    assert len(subset) == min(2, len(front))
    assert all(trial in study.front() for trial in subset)
    with pytest.raises(UserError, match="a point must reach loss"):
        study.pick(loss=-1.0)


def test_system_parameters_are_searched(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    def space(trial: Any) -> dict[str, Any]:
        return {
            "workers": trial.suggest_int("workers", 1, 2),
            "mode": trial.suggest_categorical("mode", ["exact", "fast"]),
        }

    study = tune(request(tiny, tmp_path / "out", sampler="grid"), space=space, cluster=cluster)
    found = {(trial.execution["workers"], trial.execution["mode"]) for trial in study.complete}
    assert found == {(w, mode) for w in (1, 2) for mode in ("exact", "fast")}
    for trial in study.complete:
        assert trial.metrics["cost"] == pytest.approx(trial.execution["workers"] * trial.metrics["seconds"] / 3600)
        assert "workers" not in trial.config
    exact = [trial.metrics["loss"] for trial in study.complete if trial.execution["mode"] == "exact"]
    assert len(set(exact)) == 1, "in exact mode workers are no hyperparameter"


def test_more_workers_than_there_are_end_the_study(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    with pytest.raises(UserError, match="from 1 to the study's 2"):
        tune(
            request(tiny, tmp_path / "out"),
            space=lambda t: {"workers": t.suggest_int("workers", 3, 4)},
            cluster=cluster,
        )
    with pytest.raises(UserError, match="must fit into its cluster"):
        tune(request(tiny, tmp_path / "other", workers=9), cluster=cluster)
    assert cluster.free == cluster.capacity


def test_constraints_on_settings_and_on_metrics(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    asked = request(tiny, tmp_path / "out", trials=8, constraints=("lr <= 0.05", "loss <= epochs * 2"))
    study = tune(asked, cluster=cluster)
    assert len(study.trials) == 8
    for trial in study.trials:
        assert trial.config["lr"] <= 0.05
        assert (trial.state == "infeasible") == (trial.metrics["loss"] > 2 * trial.config["epochs"])
        assert ("loss <= epochs * 2" in trial.reason) == (trial.state == "infeasible")
    assert {trial.state for trial in study.trials} == {"complete", "infeasible"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"trials": None}, "needs a budget"),
    ({"trials": 0}, "trials must be at least 1"),
    ({"budget_s": 0.0}, "a budget must be positive"),
    ({"budget_s": float("nan")}, "a budget must be positive"),
    ({"workers": 0}, "workers must be at least 1"),
    ({"objectives": {"accuracy": "max"}}, "one that the program names"),
    ({"objectives": {"loss": "up"}}, "must be max or min"),
    ({"constraints": ("lr <= 0.001",)}, "must be satisfiable|must satisfy"),
    ({"constraints": ("lr <",)}, "must be a comparison"),
    ({"sampler": "oracle"}, "sampler"),
    ({"config": {"rl": 1}}, "known: act"),
    ({"program": Program(Path("absent.py"))}, "an existing Python file"),
]


@pytest.mark.parametrize(("wrong", "said"), REFUSED)
def test_what_is_wrong_is_said_before_anything_is_made(
    tmp_path: Path, tiny: Program, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        tune(request(tiny, tmp_path / "out", **wrong))
    assert not (tmp_path / "out").exists()


def test_an_objective_that_is_never_reported_ends_the_study(
    cluster: LocalCluster, tmp_path: Path, program: Any
) -> None:
    mine = program("def train(s): s.report(x=1)\ndef space(t): return {'a': t.suggest_int('a', 1, 9)}")
    for objective in ("y", "test_x"):
        with pytest.raises(UserError, match="a metric that the program reports"):
            tune(request(mine, tmp_path / objective, objectives={objective: "max"}), cluster=cluster)
    assert cluster.free == cluster.capacity


def test_a_trial_without_its_objective_is_infeasible_and_the_study_goes_on(
    cluster: LocalCluster, tmp_path: Path, program: Any
) -> None:
    mine = program(
        "def space(t): return {'a': t.suggest_int('a', 0, 1)}\n"
        "def train(s): s.report(x=1, y=2) if s.config['a'] else s.report(x=1)\n"
    )
    found = tune(request(mine, tmp_path / "out", objectives={"y": "max"}, trials=6), cluster=cluster)
    states = {trial.config["a"]: trial.state for trial in found.trials}
    assert states == {0: "infeasible", 1: "complete"}
    assert {trial.reason.partition(" (")[0] for trial in found.trials} == {"", "reports no y"}
    again = tune(request(mine, tmp_path / "out", objectives={"y": "max"}, trials=8, resume=True), cluster=cluster)
    assert len(again.trials) == 8


def test_a_program_without_hope_ends_the_study(cluster: LocalCluster, tmp_path: Path, program: Any) -> None:
    mine = program("def train(s): raise OSError('no data')\ndef space(t): return {'a': t.suggest_int('a', 1, 9)}")
    with pytest.raises(UserError, match=r"of the first 5 trials one must not raise \(got OSError: no data"):
        tune(request(mine, tmp_path / "out", objectives={"x": "max"}, trials=50), cluster=cluster)
    ended = [e.record for e in read(tmp_path / "out" / "journal.jsonl") if isinstance(e.record, TrialFinished)]
    assert len(ended) in (5, 6)
    assert cluster.free == cluster.capacity


def test_a_budget_of_time_holds(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    asked = request(tiny, tmp_path / "out", trials=None, budget_s=2.5, config={"pause_s": 0.01})
    study = tune(asked, cluster=cluster)  # which nothing else would end
    (end,) = (e.record for e in read(tmp_path / "out" / "journal.jsonl") if isinstance(e.record, StudyFinished))
    assert end.reason == "a budget of 2.5 s"
    assert end.seconds < 60.0
    assert study.complete
    again = tune(replace(asked, resume=True), cluster=cluster)
    assert len(again.trials) <= len(study.trials) + 2, "the budget was spent already"


def test_a_trial_that_hangs_is_ended(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    asked = request(tiny, tmp_path / "out", trials=2, trial_timeout_s=1.0, config={"pause_s": 30.0})
    study = tune(asked, cluster=cluster)
    assert [trial.reason for trial in study.trials] == ["timeout: still running after 1 s"] * 2


def test_another_study_is_not_mixed_in(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    out = tmp_path / "out"
    tune(request(tiny, out, trials=1), cluster=cluster)
    before = (out / "journal.jsonl").read_bytes()
    with pytest.raises(UserError, match="new or empty"):
        tune(request(tiny, out, trials=1), cluster=cluster)
    for change in ({"seed": 2}, {"constraints": ("lr <= 0.1",)}, {"config": {"pause_s": 0.0}}):
        with pytest.raises(UserError, match="a study resumes with"):
            tune(request(tiny, out, resume=True, **change), cluster=cluster)
    assert (out / "journal.jsonl").read_bytes() == before
    assert len(tune(request(tiny, out, resume=True, trials=3), cluster=cluster).trials) == 3


def test_what_is_searched_cannot_be_set(tmp_path: Path, tiny: Program) -> None:
    asked = request(tiny, tmp_path / "out", config={"pause_s": 0.0, "epochs": 2})
    with pytest.raises(UserError, match=r"a setting is either set or searched.*epochs=2.*leave out epochs"):
        tune(asked, space=odd_space)
    assert not (tmp_path / "out").exists()


def test_a_setting_that_is_a_tuple_is_not_taken_for_a_searched_one(tmp_path: Path, program: Any) -> None:
    text = """
        config = {"layers": (8, 8), "lr": 0.1}
        objectives = {"loss": "min"}
        def space(trial): return {"lr": trial.suggest_float("lr", 0, 1)}
        def train(session): session.report(loss=0.0)
    """
    asked = StudyRequest(program(dedent(text)), tmp_path / "out", trials=1, config={"layers": (4, 4)})
    assert check(asked).config["layers"] in ((4, 4), [4, 4])
