"""Studies whose trials pause: they go on where they were, whoever or whatever had stopped them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastune.core.errors import UserError
from elastune.core.journal.files import read
from elastune.core.journal.records import (
    Record,
    StudyFinished,
    TrialFinished,
    TrialPaused,
    TrialReported,
    TrialResumed,
    TrialStarted,
)
from elastune.core.run import ExecutionSettings, Program
from elastune.runtime.clusters.local import LocalCluster
from elastune.tuning.study.request import StudyRequest
from elastune.tuning.study.run import tune


def space(trial: Any) -> dict[str, Any]:
    return {"lr": trial.suggest_categorical("lr", [0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2]), "epochs": 6}


def request(program: Program, out: Path, **changes: Any) -> StudyRequest:
    execution = ExecutionSettings(mode="exact", num_slots=2)
    asked = StudyRequest(
        program, out, objectives={"loss": "min"}, sampler="grid", trials=8, workers=2, execution=execution
    )
    return replace(asked, **changes)


def records(out: Path) -> list[Record]:
    return [entry.record for entry in read(out / "journal.jsonl")]


Results = dict[float, tuple[str, float]]


def results(out: Path) -> Results:
    """Learning rate -> weights and loss of the trials that ended."""
    found = records(out)
    rates = {r.trial: r.config["lr"] for r in found if isinstance(r, TrialStarted)}
    ended = [r for r in found if isinstance(r, TrialFinished) and r.run is not None]
    return {rates[r.trial]: (r.run.sha256, r.metrics["loss"]) for r in ended if r.run is not None}


@pytest.fixture(scope="module")
def to_the_end(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Of trials that nothing stopped."""
    out = tmp_path_factory.mktemp("whole") / "out"
    tiny = Program(Path(__file__).parents[3] / "programs" / "tiny.py")
    tune(request(tiny, out), space=space, cluster=cluster)
    found = results(out)
    assert len(found) == 8
    return found


def test_halving_spends_less_and_changes_no_result(
    cluster: LocalCluster, tmp_path: Path, tiny: Program, to_the_end: Results
) -> None:
    out = tmp_path / "out"
    study = tune(request(tiny, out, stopping="asha:eta=2,min_resource=1"), space=space, cluster=cluster)
    found = records(out)
    started = [r.trial for r in found if isinstance(r, TrialStarted)]
    paused = {r.trial for r in found if isinstance(r, TrialPaused)}
    resumed = {r.trial for r in found if isinstance(r, TrialResumed)}
    assert started == list(range(8))
    assert paused - resumed, "some stay paused"
    assert resumed, "others go on"
    ended = results(out)
    assert 1 <= len(ended) < 8
    assert ended.items() <= to_the_end.items()
    best = min((t for t in study.complete), key=lambda t: t.values["loss"])
    assert best.config["lr"] in (0.1, 0.2)
    trained = {r.trial: r.report.step for r in found if isinstance(r, TrialReported)}
    assert sum(trained.values()) < 8 * 60
    assert all(r.report.epochs == 6 for r in found if isinstance(r, TrialReported))
    kept = {int(path.name) for path in (out / "trials").iterdir()}
    assert kept == paused - {t.number for t in study.complete}, "what can go on keeps its checkpoint, and nothing else"
    assert cluster.free == cluster.capacity

    again = tune(request(tiny, out, stopping="asha:eta=2,min_resource=1", resume=True), space=space, cluster=cluster)
    assert again.complete == study.complete, "nothing was left to do"
    with pytest.raises(UserError, match="resumes with the stopping"):
        tune(request(tiny, out, stopping="hyperband", resume=True), space=space, cluster=cluster)


@pytest.mark.soak
def test_a_budget_of_worker_hours_pauses_what_runs(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    out = tmp_path / "out"
    asked = request(tiny, out, worker_hours=3.0 / 3600, trials=None, config={"pause_s": 0.05})
    tune(asked, space=space, cluster=cluster)
    (end,) = [r for r in records(out) if isinstance(r, StudyFinished)]
    assert "worker-hours" in end.reason
    assert 1.0 < end.seconds < 30.0
    paused = [r for r in records(out) if isinstance(r, TrialPaused)]
    assert paused
    assert all(r.cut_off and r.worker_seconds > 0 for r in paused)
    (damaged, *_) = (out / "trials" / f"{paused[0].trial:05d}" / "checkpoints").glob("step-*")
    (damaged / "state.json").write_text("{")
    tune(replace(asked, worker_hours=1.0, trials=2, resume=True), space=space, cluster=cluster)
    resumed = [r.trial for r in records(out) if isinstance(r, TrialResumed) and r.cut_off]
    assert sorted(resumed) == sorted({r.trial for r in paused})
    ended = [r for r in records(out) if isinstance(r, TrialFinished)]
    assert {r.trial for r in ended} == set(resumed)
    for r in ended:
        assert r.run is not None
        assert r.run.steps == 60
        assert r.seconds > r.run.seconds > 60 * 0.05


def test_trials_that_fail_while_others_pause(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    def odd(trial: Any) -> dict[str, Any]:
        return {**space(trial), "act": trial.suggest_categorical("act", ["", "diverges"]), "misbehaving_rank": 0}

    out = tmp_path / "out"
    study = tune(request(tiny, out, stopping="asha:eta=2,min_resource=1", trials=12), space=odd, cluster=cluster)
    failed = [t for t in study.trials if t.state == "infeasible"]
    assert failed
    assert all(t.reason.startswith("diverged") for t in failed)
    assert study.complete
    assert all(t.config["act"] == "" for t in study.complete)


def test_generations_and_pauses_do_not_go_together(tmp_path: Path, tiny: Program) -> None:
    asked = request(tiny, tmp_path / "out", sampler="genetic:steady=0,population=4", stopping="asha")
    with pytest.raises(UserError, match="a generation ends when all of its trials have"):
        tune(asked, space=space)
    assert not (tmp_path / "out").exists()


def test_every_report_of_a_paused_trial_is_that_of_one_that_never_paused(
    cluster: LocalCluster, tmp_path: Path, tiny: Program
) -> None:
    """A pause comes in the middle of an epoch; what a program adds up over it must not begin there."""

    def told(out: Path) -> dict[tuple[float, int], float]:
        rates = {r.trial: r.config["lr"] for r in records(out) if isinstance(r, TrialStarted)}
        found = [r for r in records(out) if isinstance(r, TrialReported)]
        return {(rates[r.trial], r.report.epoch): r.report.metrics["loss"] for r in found}

    slow = {"pause_s": 0.02}
    tune(request(tiny, tmp_path / "whole", config=slow, trials=6), space=space, cluster=cluster)
    halved = request(tiny, tmp_path / "halved", stopping="asha:eta=2,min_resource=1", config=slow, trials=6)
    tune(halved, space=space, cluster=cluster)
    assert any(isinstance(r, TrialResumed) for r in records(tmp_path / "halved"))
    assert told(tmp_path / "halved").items() <= told(tmp_path / "whole").items()


def test_a_shared_study_with_a_budget_begins_and_resumes(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    out = tmp_path / "out"
    asked = request(
        tiny,
        out,
        stopping="asha:eta=2,min_resource=1",
        trial_workers=(1, 2),
        trials=6,
        budget_s=120.0,
        worker_hours=1.0,
    )
    study = tune(asked, space=space, cluster=cluster)
    assert len(study.trials) == 6
    assert study.complete
    spent = replace(asked, resume=True, budget_s=0.5, trials=8)
    again = tune(spent, space=space, cluster=cluster)
    assert len(again.trials) == 6, "its budget was spent"


def test_objectives_reported_one_by_one_are_seen_together(cluster: LocalCluster, tmp_path: Path, program: Any) -> None:
    mine = program(
        "import torch\n"
        "from torch.utils.data import TensorDataset\n"
        "def space(trial): return {'lr': trial.suggest_float('lr', 0.001, 0.1)}\n"
        "def train(session):\n"
        "    model = torch.nn.Linear(1, 1)\n"
        "    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), session.config['lr']))\n"
        "    data = TensorDataset(torch.ones(8, 1))\n"
        "    for epoch in session.epochs(6):\n"
        "        for (x,) in session.batches(data, batch_size=8):\n"
        "            session.backward(model(x).square().mean())\n"
        "            optimizer.step()\n"
        "            optimizer.zero_grad()\n"
        "        session.report(error=session.config['lr'])\n"
        "        session.report(size=1.0)\n"
    )
    both = {"error": "min", "size": "min"}
    asked = request(mine, tmp_path / "out", objectives=both, sampler="random", stopping="asha:eta=2,min_resource=1")
    tune(asked, cluster=cluster)
    assert any(isinstance(r, TrialPaused) and not r.cut_off for r in records(tmp_path / "out"))


def test_a_full_disk_ends_the_study_and_costs_no_trial(cluster: LocalCluster, tmp_path: Path, tiny: Program) -> None:
    out = tmp_path / "out"
    asked = request(tiny, out, stopping="asha:eta=2,min_resource=1", trials=2)
    for number in range(2):  # files where the checkpoints' folders are to be
        (out / "trials" / f"{number:05d}").mkdir(parents=True)
        (out / "trials" / f"{number:05d}" / "checkpoints").touch()
    with pytest.raises(UserError, match="a checkpoint must be writable"):
        tune(asked, space=space, cluster=cluster)
    assert not [r for r in records(out) if isinstance(r, TrialFinished)]
    for number in range(2):
        (out / "trials" / f"{number:05d}" / "checkpoints").unlink()
    assert tune(replace(asked, resume=True), space=space, cluster=cluster).complete
    assert cluster.free == cluster.capacity


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"seed": -1}, "seed must be 0 or more"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"worker_hours": float("inf")}, "positive and finite"),
        ({"trial_workers": (1, 2.5)}, "two whole numbers"),
        ({"stopping": "asha:eta=1"}, "eta of asha must be"),
        ({"stopping": "sometimes"}, "one that is known"),
    ],
)
def test_wrong_requests(wrong: dict[str, Any], rule: str, tmp_path: Path, tiny: Program) -> None:
    with pytest.raises(UserError, match=rule):
        tune(request(tiny, tmp_path / "out", **wrong), space=space)
    assert not (tmp_path / "out").exists()
